"""Reads masks: the part that says how far from its query a key may lie, and what is left of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from graphc.ir.graph import Builder, Value
from graphc.ir.types import Dim, as_dim, same
from graphc.rewrite import Facts
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import addends
from passes.simplify.positions import Affine, Positions

aten = torch.ops.aten
#: an additive mask at least this low leaves no weight to what it masks
_LOW = {"float16": -6e4}
_LOW_ENOUGH = -1e30
#: additive masks below this may be more than a bias
_BIAS = 1e15
_CONJUNCTIONS = frozenset(("aten.bitwise_and", "aten.logical_and"))
_NEGATIONS = frozenset(("aten.logical_not", "aten.bitwise_not"))
_BIASED = frozenset(f"aten.{n}" for n in (
    "add", "sub", "mul", "neg", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze",
    "expand", "permute", "slice", "select", "clone", "_to_copy", "repeat", "index", "cat",
))  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Query i sees the keys i - back to i + ahead, as far as `rest` (what is left of the mask: all
    of it counts) lets it. `soft`: some hidden keys have a finite, very low score, so that a row
    without any other key would show them."""

    back: Dim | None = None
    ahead: Dim | None = None
    rest: tuple[Value, ...] = ()
    soft: bool = False

    def bounded(self) -> bool:
        return self.back is not None or self.ahead is not None

    def narrowed(self, value: Value, found: Affine | None) -> Window:
        """With one more condition that must hold: `value`, read as `found`."""
        if found is not None and all(same(s, 0) for s in found.steps):
            if sympy.sympify(found.constant).is_nonnegative:
                return self
            found = None
        if found is not None and len(found.steps) >= 2:
            *outer, row, column = found.steps
            if all(same(s, 0) for s in outer):
                if same(row, 1) and same(column, -1) and _less(found.constant, self.ahead):
                    return replace(self, ahead=found.constant)
                if same(row, -1) and same(column, 1) and _less(found.constant, self.back):
                    return replace(self, back=found.constant)
        return replace(self, rest=(*self.rest, value))

    def sees_a_key(self, queries: Dim, keys: Dim) -> bool:
        """Whether every query certainly has a key between the bounds."""
        ahead, back = self.ahead, self.back
        if ahead is None:
            return back is None or (_nonnegative(back) and _nonnegative(keys - queries))
        if not _nonnegative(ahead):
            return False
        if back is None:
            return True
        if _nonnegative(back) and _nonnegative(keys - queries):
            return True  # the key at its own position
        return _nonnegative(keys - queries - ahead) and _nonnegative(ahead + back)


def _nonnegative(x: Dim) -> bool:
    return bool(sympy.sympify(as_dim(x)).is_nonnegative)


def _less(a: Dim, b: Dim | None) -> bool:
    """Whether a bound takes the place of another."""
    return b is None or (isinstance(a, int) and isinstance(b, int) and a < b)


def read_mask(mask: Value, positions: Positions, facts: Facts) -> Window:
    """The mask of one attention; without bounds if it says nothing about distances."""
    if mask.type.dtype == "bool":
        return _read_bool(mask, positions, facts, Window())
    return _read_additive(mask, positions, facts, Window())


def read_condition(value: Value, keep: bool, positions: Positions, facts: Facts) -> Window:
    """A boolean that is `keep` where a score stays."""
    if keep:
        return _read_bool(value, positions, facts, Window())
    return Window().narrowed(value, _negated(positions.condition(value)))


def _negated(found: Affine | None) -> Affine | None:
    if found is None:
        return None
    return Affine(as_dim(-found.constant - 1), tuple(as_dim(-s) for s in found.steps))


def _read_bool(mask: Value, positions: Positions, facts: Facts, window: Window) -> Window:
    while packet_of(mask) in _NEGATIONS and packet_of(operand(mask)) in _NEGATIONS:
        mask = operand(operand(mask))
    tensor = facts.weight(mask)
    if tensor is not None:
        band = _band(tensor)
        if band is not None:
            return _within(window, band)
    found = positions.condition(mask)
    if found is None and packet_of(mask) in _CONJUNCTIONS:
        for part in mask.producer.args[:2]:  # type: ignore[union-attr]
            window = _read_bool(part, positions, facts, window)
        return window
    return window.narrowed(mask, found)


def _within(window: Window, band: tuple[int | None, int | None]) -> Window:
    back, ahead = band
    if back is not None and _less(back, window.back):
        window = replace(window, back=back)
    if ahead is not None and _less(ahead, window.ahead):
        window = replace(window, ahead=ahead)
    return window


def _read_additive(mask: Value, positions: Positions, facts: Facts, window: Window) -> Window:
    pair = addends(mask)
    if pair is not None and all(isinstance(part, Value) for part in pair):
        for part in pair:
            window = _read_additive(part, positions, facts, window)
        return window
    tensor = facts.weight(mask)
    if tensor is not None and tensor.dim() >= 2 and tensor.is_floating_point():
        low = tensor <= _LOW.get(mask.type.dtype, _LOW_ENOUGH)
        band = _band(~low) if bool((low | (tensor == 0)).all()) else None
        if band is None:
            return replace(window, rest=(*window.rest, mask))
        soft = window.soft or bool(tensor[low].isfinite().any())
        return replace(_within(window, band), soft=soft)
    filled = _filled(mask, positions, facts)
    if filled is None:
        return replace(window, rest=(*window.rest, mask))
    conditions, fill = filled
    whole = window
    for value, found in conditions:
        whole = whole.narrowed(value, found)
    if len(whole.rest) > len(window.rest):  # one addend goes or stays as a whole
        return replace(window, rest=(*window.rest, mask))
    return replace(whole, soft=whole.soft or fill != -math.inf)


def _filled(
    mask: Value, positions: Positions, facts: Facts
) -> tuple[list[tuple[Value, Affine | None]], float] | None:
    """The conditions under which an addend is 0, each with its reading, and its low value."""
    while packet_of(mask) in ("aten.expand", "aten.unsqueeze", "aten._to_copy"):
        mask = operand(mask)
    if rank(mask) < 2 or packet_of(mask) not in ("aten.where", "aten.masked_fill"):
        return None
    arguments: tuple[Any, ...] = mask.producer.args  # type: ignore[union-attr]
    if len(arguments) < 3:
        return None
    first, second, third = arguments[:3]
    if packet_of(mask) == "aten.masked_fill":
        condition, kept, fill, negate = second, first, third, True
    elif facts.number(second) == 0:
        condition, kept, fill, negate = first, second, third, False
    else:
        condition, kept, fill, negate = first, third, second, True
    low = facts.number(fill)
    if facts.number(kept) != 0 or low is None:
        return None
    if low > _LOW.get(mask.type.dtype, _LOW_ENOUGH):
        return None
    while packet_of(condition) in _NEGATIONS:
        condition, negate = operand(condition), not negate
    found = positions.condition(condition)
    if negate:
        return None if found is None else ([(condition, _negated(found))], low)
    if found is not None:
        return [(condition, found)], low
    return [(c, positions.condition(c)) for c in _conjuncts(condition)], low


def _conjuncts(value: Value) -> list[Value]:
    if packet_of(value) in _CONJUNCTIONS:
        parts = value.producer.args[:2]  # type: ignore[union-attr]
        return [c for part in parts for c in _conjuncts(part)]
    return [value]


def _band(tensor: torch.Tensor) -> tuple[int | None, int | None] | None:
    """(back, ahead) of a constant that keeps a band around a diagonal, the same everywhere; None
    for a bound that hides nothing."""
    if tensor.dim() < 2 or tensor.dtype != torch.bool or tensor.numel() == 0:
        return None
    planes = tensor.reshape(-1, *tensor.shape[-2:])
    plane = planes[0]
    if min(plane.shape) < 2 or not bool((planes == plane).all()) or bool(plane.all()):
        return None
    if not bool(plane.any()):
        return None
    gap = torch.arange(plane.shape[1]) - torch.arange(plane.shape[0])[:, None]
    back, ahead = int(-gap[plane].min()), int(gap[plane].max())
    if not bool((plane == ((gap >= -back) & (gap <= ahead))).all()):
        return None
    rows, columns = plane.shape
    return back if back < rows - 1 else None, ahead if ahead < columns - 1 else None


def is_bias(value: Value, positions: Positions, facts: Facts, depth: int = 12) -> bool:
    """Whether an addend is made of moderate constants and positions alone: it hides nothing."""
    tensor = facts.weight(value)
    if tensor is not None:
        return bool((tensor.abs() < _BIAS).all()) if tensor.numel() else True
    number = facts.number(value)
    if number is not None:
        return abs(number) < _BIAS
    if value.type.dtype != "bool" and positions.affine(value) is not None:
        return True
    if value.producer is None or depth == 0:
        return False
    if packet_of(value) not in _BIASED:
        return False
    parts = [a for a in value.producer.args if isinstance(a, Value)]
    parts += [a for group in value.producer.args if isinstance(group, tuple) for a in group
              if isinstance(a, Value)]  # fmt: skip
    return bool(parts) and all(is_bias(part, positions, facts, depth - 1) for part in parts)


def joined(builder: Builder, parts: tuple[Value, ...]) -> Value | None:
    """What is left of a mask as one tensor."""
    total: Value | None = None
    for part in map(builder.of, parts):
        if total is None:
            total = part
        elif part.type.dtype == "bool":
            total = builder.call1(aten.logical_and.default, total, part)
        else:
            total = builder.call1(aten.add.Tensor, total, part)
    return total
