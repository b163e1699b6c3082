"""Further captures of a model whose first one does not hold for the whole range asked for.

A branch on the length (`if T > 4096: use the long table`), or a loop over chunks, makes one
capture right on one side only. The model is captured again just beyond the range proven so far,
and the plan holds a program for each side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from graphc.errors import GraphcError
from graphc.frontends.capture import Captured, capture
from graphc.frontends.guards import truth
from graphc.frontends.naming import Place, asked_dims
from graphc.ir.graph import Graph
from graphc.ir.types import UNBOUNDED

LIMIT = 3  # further captures: a loop unrolled over a long input would need thousands
_LONGEST = 8192  # example length of a further capture


def further_captures(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    first: Captured,
    *,
    keep: frozenset[str],
) -> list[Captured]:
    """Captures for lengths that `first` leaves out, at most LIMIT; [] if it holds for all, or if
    more than one length is restricted, or if the model does not trace there."""
    name = _restricted(first)
    if name is None:
        return []
    asked = asked_dims(module, args, dict(kwargs), dynamic_shapes)
    places = [place for place, a in asked.items() if a.name == name and not a.derived]
    known = [first]
    low, high = first.requested[name]
    for _ in range(LIMIT):
        length = _next_length(known, name, low, min(high, _LONGEST))
        if length is None:
            break
        example_args, example_kwargs = _resized(args, kwargs, places, length)
        try:
            made = capture(module, example_args, example_kwargs, dynamic_shapes, keep=keep)
        except GraphcError:
            break  # the first capture stands, and its notes say how far it holds
        if not _alike(first, made) or not _holds(made.graph, name, length):
            break
        known.append(made)
    return known[1:]


def _restricted(captured: Captured) -> str | None:
    """The one length whose proven range is narrower than asked for."""
    narrow = []
    for name, (low, high) in captured.requested.items():
        info = captured.graph.symbols.get(name)
        if info is None:
            return None  # the model is right for a single length only
        guarded = any(
            {str(s) for s in g.condition.free_symbols} == {name} for g in captured.graph.guards
        )
        if info.maximum < high or info.minimum > max(low, 2) or guarded:
            narrow.append(name)
    return narrow[0] if len(narrow) == 1 else None


def _holds(graph: Graph, name: str, length: int) -> bool:
    info = graph.symbols.get(name)
    if info is None or not info.minimum <= length <= info.maximum:
        return False
    for guard in graph.guards:
        if {str(s) for s in guard.condition.free_symbols} == {name}:
            if truth(guard.condition, {info.expr: sympy.Integer(length)}) != sympy.true:
                return False
    return True


def _next_length(known: Sequence[Captured], name: str, low: int, high: int) -> int | None:
    """The shortest length asked for that no capture holds for."""
    longest = max(
        (c.graph.symbols[name].maximum for c in known if name in c.graph.symbols), default=high
    )
    candidates = range(max(low, 2), min(high, 1024) + 1)
    for length in candidates:
        if not any(_holds(c.graph, name, length) for c in known):
            return length
    if longest < high:
        return longest + 1 if longest < UNBOUNDED else None
    return None


def _resized(
    args: Any, kwargs: Mapping[str, Any], places: Sequence[Place], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs at another length: repeated, then cut."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for leaf, dim in places:
        tensor = leaves[leaf]
        times = -(-length // max(tensor.shape[dim], 1))
        leaves[leaf] = torch.cat([tensor] * times, dim).narrow(dim, 0, length)
    made_args, made_kwargs = pytree.tree_unflatten(leaves, spec)
    return made_args, made_kwargs


def _alike(first: Captured, other: Captured) -> bool:
    """Whether two captures can be programs of one plan: the same boundary."""

    def boundary(captured: Captured) -> Any:
        graph = captured.graph
        return (
            [(v.name, v.type.dtype, len(v.type.shape)) for v in graph.inputs],
            [(v.name, v.type) for v in graph.states],
            [v.name for v in graph.input_updates],
            captured.arguments, captured.keywords, captured.results,
            set(graph.symbols) == set(first.graph.symbols),
        )  # fmt: skip

    return bool(boundary(first) == boundary(replace(other, notes=first.notes)))
