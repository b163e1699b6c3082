"""Guards on one length as its range, as far as they can be told by trying the lengths.

A capture can carry hundreds of guards of which most always hold and one says "at most 64". Trying
every length up to `TRIED` finds the stretch in which a guard can hold; outside of it the graph is
never right, so the range shrinks to it. Within a range that was tried to its end, a guard that held
everywhere says nothing more and is dropped. Guards on longer ranges stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from graphc.ir.graph import Graph, Guard
from graphc.ir.types import Symbol

#: the longest length that is tried
TRIED = 4096


def narrow(graph: Graph) -> Graph:
    """The graph with ranges that say what guards on a single length say."""
    symbols = dict(graph.symbols)
    by_symbol: dict[sympy.Expr, list[Guard]] = {}
    for guard in graph.guards:
        free = guard.condition.free_symbols
        if len(free) == 1:
            by_symbol.setdefault(next(iter(free)), []).append(guard)
    dropped: set[Guard] = set()
    for name, info in graph.symbols.items():
        guards = by_symbol.get(info.expr, [])
        if guards and not info.data:
            symbols[name], always = _narrowed(info, guards)
            dropped |= always
    kept = tuple(guard for guard in graph.guards if guard not in dropped)
    return replace(graph, symbols=symbols, guards=kept)


def _narrowed(info: Symbol, guards: list[Guard]) -> tuple[Symbol, set[Guard]]:
    low, high = info.minimum, info.maximum
    last = min(high, TRIED)
    holds: dict[Guard, frozenset[int]] = {}
    for guard in guards:
        test = _compiled(guard.condition, info.expr)
        if test is None:
            continue
        held = frozenset(n for n in range(low, last + 1) if test(n))
        if not held:
            continue
        holds[guard] = held
    for held in holds.values():
        low = max(low, min(held))
        if max(held) < last:
            high = min(high, max(held))
    if low > high:
        return info, set()
    narrowed = replace(info, minimum=low, maximum=high)
    if high > TRIED:
        return narrowed, set()
    every = set(range(low, high + 1))
    return narrowed, {guard for guard, held in holds.items() if every <= held}


def _compiled(condition: sympy.Expr, symbol: sympy.Expr) -> Callable[[int], bool] | None:
    """The condition as a Python function of the length; None if it has no such form."""
    names: Mapping[str, Any] = {"math": math, "torch": torch, "max": max, "min": min}
    try:
        text = PythonPrinter().doprint(condition.xreplace({symbol: sympy.Symbol("n")}))
        function = eval(f"lambda n: bool({text})", dict(names))
    except Exception:  # a function of torch's that Python text cannot spell
        return None

    def test(number: int) -> bool:
        try:
            return bool(function(number))
        except ZeroDivisionError:  # the length itself is outside of what the model can do
            return False

    try:
        test(2)
    except Exception:  # it spells a name that is none of Python's
        return None
    return test
