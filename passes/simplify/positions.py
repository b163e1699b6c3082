"""Values that depend on position alone, read as affine functions of their indices.

arange(T)[None, :] + 3 is 3 + j; a comparison of two such values is a condition "c + i - j >= 0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphc.ir.graph import Node, Value
from graphc.ir.types import Dim, TensorType, as_dim, same
from graphc.rewrite import Facts
from graphc.rewrite.facts import is_cast, operand, packet_of, rank

_INTEGERS = frozenset(("int64", "int32", "int16", "int8", "uint8", "bool"))
_VIEWS = frozenset(f"aten.{n}" for n in (
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "clone", "alias", "detach",
    "contiguous",
))  # fmt: skip
#: elements of a constant that is read as positions at most
_MOST = 1 << 18
_COMPARISONS = frozenset(f"aten.{n}" for n in ("le", "lt", "ge", "gt"))
_NEGATIONS = frozenset(("aten.logical_not", "aten.bitwise_not"))
_CONJUNCTIONS = frozenset(("aten.bitwise_and", "aten.logical_and"))


@dataclass(frozen=True)
class Affine:
    """constant + sum of steps[d] * (index along d); steps are 0 where a dimension is 1."""

    constant: Dim
    steps: tuple[Dim, ...]

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """The sum (or difference), aligned at the last dimension."""
        count = max(len(self.steps), len(other.steps))
        pairs = zip(_padded(self.steps, count), _padded(other.steps, count), strict=True)
        return Affine(
            as_dim(self.constant + sign * other.constant),
            tuple(as_dim(a + sign * b) for a, b in pairs),
        )

    def moved(self, amount: int) -> Affine:
        return Affine(as_dim(self.constant + amount), self.steps)

    def uniform(self) -> bool:
        return all(same(s, 0) for s in self.steps)


def _padded(steps: Sequence[Dim], count: int) -> tuple[Dim, ...]:
    return (*([0] * (count - len(steps))), *steps)


class Positions:
    """Reads the values of one graph."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._affine: dict[Value, Affine | None] = {}
        self._condition: dict[Value, Affine | None] = {}

    def affine(self, item: Any) -> Affine | None:
        """An integer value as a function of its indices, or None."""
        if isinstance(item, (int, sympy.Expr)) and not isinstance(item, bool):
            return Affine(as_dim(item), ())
        if not isinstance(item, Value) or not isinstance(item.type, TensorType):
            return None
        if item not in self._affine:
            self._affine[item] = None
            found = self._read(item) if item.type.dtype in _INTEGERS else None
            self._affine[item] = None if found is None else _flat(found, item)
        return self._affine[item]

    def condition(self, value: Any) -> Affine | None:
        """A boolean value that is true where the affine is >= 0, or None."""
        if not isinstance(value, Value) or value.type.dtype != "bool":
            return None
        if value not in self._condition:
            found = self._read_condition(value)
            self._condition[value] = None if found is None else _flat(found, value)
        return self._condition[value]

    def truth(self, value: Any) -> bool | None:
        """Whether a boolean value is True everywhere, False everywhere, or None."""
        found = self.condition(value)
        if found is None:
            return None
        low, high = _bounds(found, value.type.shape)
        if sympy.sympify(low).is_nonnegative:
            return True
        return False if sympy.sympify(high).is_negative else None

    def _read(self, value: Value) -> Affine | None:
        if value.type.dtype == "bool":
            truth = self.truth(value)
            return None if truth is None else Affine(int(truth), ())
        number = self.facts.number(value)
        if number is not None:
            return Affine(int(number), ())
        if (tensor := self.facts.weight(value)) is not None:
            return _ramp(tensor)
        node, name = value.producer, packet_of(value)
        if node is None:
            return None
        if name == "aten.arange":
            return self._arange(node)
        if name == "prims.iota":
            return Affine(node.argument("start"), (node.argument("step"),))
        if name in ("aten.add", "aten.sub") and node.argument("alpha") == 1:
            parts = [self.affine(a) for a in node.args[:2]]
            if parts[0] is not None and parts[1] is not None:
                return parts[0].plus(parts[1], 1 if name == "aten.add" else -1)
            return None
        if name == "aten.cat":
            return self._cat(node)
        if name == "aten.cumsum":
            return self._cumsum(node)
        if name == "aten.index":
            return self._index(node)
        if is_cast(value):
            return self.affine(node.args[0])
        if not node.args or not isinstance(node.args[0], Value):
            return None
        inner = self.affine(node.args[0])
        return None if inner is None else self._viewed(node, inner)

    @staticmethod
    def _arange(node: Node) -> Affine | None:
        if node.target == "aten.arange.default":
            return Affine(0, (1,))
        step = node.argument("step") if node.target == "aten.arange.start_step" else 1
        start = node.argument("start")
        if isinstance(start, float) or isinstance(step, float):
            return None
        return Affine(start, (step,))

    def _cat(self, node: Node) -> Affine | None:
        """Parts that continue each other along the dimension."""
        parts = node.args[0]
        dim = int(node.argument("dim")) % rank(parts[0])
        whole = self.affine(parts[-1])
        if whole is None:
            return None
        end = whole
        for part in reversed(parts[:-1]):
            before, length = self.affine(part), part.type.shape[dim]
            step = _padded(whole.steps, rank(part))[dim]
            if before is None or not isinstance(length, int):
                return None
            steps = list(_padded(before.steps, rank(part)))
            if length == 1:
                steps[dim] = step
            if not all(
                same(a, b) for a, b in zip(steps, _padded(whole.steps, rank(part)), strict=True)
            ):
                return None
            if not same(as_dim(before.constant + step * length), end.constant):
                return None
            end = Affine(before.constant, whole.steps)
        return end

    def _cumsum(self, node: Node) -> Affine | None:
        inner = self.affine(node.args[0])
        if inner is None or not inner.uniform() or rank(node.args[0]) == 0:
            return None
        count = rank(node.args[0])
        dim = int(node.args[1]) % count
        steps = tuple(inner.constant if d == dim else 0 for d in range(count))
        return Affine(inner.constant, steps)

    def _index(self, node: Node) -> Affine | None:
        """Every dimension indexed by an affine value."""
        source, indices = self.affine(node.args[0]), node.args[1]
        if source is None or len(indices) != rank(node.args[0]) or None in indices:
            return None
        total = Affine(source.constant, ())
        for step, index in zip(_padded(source.steps, len(indices)), indices, strict=True):
            if same(step, 0):
                continue
            part = self.affine(index)
            if part is None or not sympy.sympify(_lowest(part, index)).is_nonnegative:
                return None  # a negative index counts from the end
            scaled = tuple(as_dim(step * s) for s in part.steps)
            total = total.plus(Affine(as_dim(step * part.constant), scaled))
        return Affine(total.constant, _padded(total.steps, rank(node.outputs[0])))

    def _viewed(self, node: Node, inner: Affine) -> Affine | None:
        """What a view of a value with this reading reads as."""
        source, result = node.args[0], node.outputs[0]
        name = packet_of(result)
        steps = list(_padded(inner.steps, rank(source)))
        if name in ("aten.expand", "aten.broadcast_to"):
            return Affine(inner.constant, _padded(steps, rank(result)))
        if name in ("aten.permute",):
            return Affine(inner.constant, tuple(steps[int(d)] for d in node.args[1]))
        if name == "aten.slice":
            return self._sliced(node, inner, steps)
        if name not in _VIEWS:
            return None
        kept = [(d, s) for d, s in zip(source.type.shape, steps, strict=True) if d != 1]
        wanted = [d for d in result.type.shape if d != 1]
        if len(kept) != len(wanted) or not all(
            same(a, b) for (a, _), b in zip(kept, wanted, strict=True)
        ):
            return None
        queue = iter(s for _, s in kept)
        return Affine(
            inner.constant, tuple(0 if d == 1 else next(queue) for d in result.type.shape)
        )

    @staticmethod
    def _sliced(node: Node, inner: Affine, steps: list[Dim]) -> Affine | None:
        dim = int(node.argument("dim")) % len(steps)
        start, step = node.argument("start") or 0, node.argument("step")
        size = node.args[0].type.shape[dim]
        if not isinstance(start, int):
            return None
        first = start if start >= 0 else as_dim(size + start)
        if start < 0 and not sympy.sympify(first).is_nonnegative:
            return None
        constant = as_dim(inner.constant + steps[dim] * first)
        steps[dim] = as_dim(steps[dim] * step)
        return Affine(constant, tuple(steps))

    def _read_condition(self, value: Value) -> Affine | None:
        number = self.facts.number(value)
        if number is not None:
            return Affine(0 if number else -1, ())
        if (tensor := self.facts.weight(value)) is not None:
            return _triangle(tensor)
        node, name = value.producer, packet_of(value)
        if node is None:
            return None
        if name in _COMPARISONS:
            a, b = self.affine(node.args[0]), self.affine(node.args[1])
            if a is None or b is None:
                return None
            above = b.plus(a, -1) if name in ("aten.le", "aten.lt") else a.plus(b, -1)
            return above if name in ("aten.le", "aten.ge") else above.moved(-1)
        if name in ("aten.eq", "aten.ne"):
            return self._equal(node, name == "aten.eq")
        if name in _NEGATIONS:
            return _negated(self.condition(node.args[0]))
        if name in _CONJUNCTIONS:
            for one, other in (node.args[:2], node.args[1::-1]):
                if self.truth(other) and isinstance(one, Value) and rank(one) == rank(value):
                    return self.condition(one)
            return None
        if name == "aten.where" and len(node.args) == 3:
            return self._chosen(node)
        if is_cast(value):
            return self._nonzero(node.args[0])
        inner = self.condition(node.args[0]) if node.args else None
        return None if inner is None else self._viewed(node, inner)

    def _equal(self, node: Node, wanted: bool) -> Affine | None:
        if isinstance(node.args[1], (bool, int)) and node.args[1] == 0:
            nonzero = self._nonzero(node.args[0])
            if nonzero is not None:
                return _negated(nonzero) if wanted else nonzero
        a, b = self.affine(node.args[0]), self.affine(node.args[1])
        if a is None or b is None:
            return None
        gap = a.plus(b, -1)
        if not gap.uniform() or not isinstance(gap.constant, int):
            return None
        return Affine(0 if (gap.constant == 0) == wanted else -1, ())

    def _chosen(self, node: Node) -> Affine | None:
        """where(condition, x, 0) and where(condition, 0, x) as a condition, x not 0."""
        yes, no = (self.facts.number(a) for a in node.args[1:])
        if yes is None or no is None or bool(yes) == bool(no):
            return None
        found = self.condition(node.args[0])
        return found if yes else _negated(found)

    def _nonzero(self, value: Value) -> Affine | None:
        """Where a number that came from a condition is not zero."""
        if value.type.dtype == "bool":
            return self.condition(value)
        if is_cast(value):
            return self._nonzero(operand(value))
        if packet_of(value) == "aten.where" and value.producer is not None:
            return self._chosen(value.producer) if len(value.producer.args) == 3 else None
        tensor = self.facts.weight(value)
        if tensor is not None:
            return _triangle(tensor != 0)
        if value.producer is not None and packet_of(value) in (*_VIEWS, "aten.slice"):
            inner = self._nonzero(operand(value))  # part of a table made for the longest input
            return None if inner is None else self._viewed(value.producer, inner)
        return None


def _negated(found: Affine | None) -> Affine | None:
    if found is None:
        return None
    return Affine(as_dim(-found.constant - 1), tuple(as_dim(-s) for s in found.steps))


def _flat(found: Affine, value: Value) -> Affine:
    """Steps of all dimensions, zero where the size is 1."""
    steps = _padded(found.steps, rank(value))
    sizes = value.type.shape
    return Affine(
        found.constant, tuple(0 if d == 1 else s for d, s in zip(sizes, steps, strict=True))
    )


def _bounds(found: Affine, shape: Sequence[Dim]) -> tuple[Any, Any]:
    """The least and greatest value over the indices."""
    low: Any = found.constant
    high: Any = found.constant
    for step, size in zip(_padded(found.steps, len(shape)), shape, strict=True):
        if not isinstance(step, int):
            return -sympy.oo, sympy.oo
        reach = step * (size - 1)
        low, high = (low, high + reach) if step > 0 else (low + reach, high)
    return low, high


def _lowest(found: Affine, item: Any) -> Any:
    return _bounds(found, item.type.shape)[0] if isinstance(item, Value) else found.constant


def _ramp(tensor: torch.Tensor) -> Affine | None:
    """A constant that goes evenly along each dimension: positions that were folded."""
    if not 0 < tensor.numel() <= _MOST or tensor.dim() == 0:
        return None
    first = tensor[(0,) * tensor.dim()]
    steps = [
        int(tensor[tuple(int(d == e) for e in range(tensor.dim()))] - first) if size > 1 else 0
        for d, size in enumerate(tensor.shape)
    ]
    even = first.long()
    for d, (step, size) in enumerate(zip(steps, tensor.shape, strict=True)):
        along = [1] * tensor.dim()
        along[d] = size
        even = even + step * torch.arange(size).view(along)
    return Affine(int(first), tuple(steps)) if torch.equal(even, tensor.long()) else None


def _triangle(tensor: torch.Tensor) -> Affine | None:
    """A constant lower triangle."""
    if tensor.dim() < 2 or tensor.dtype != torch.bool or tensor.numel() == 0:
        return None
    plane = tensor.reshape(-1, *tensor.shape[-2:])
    if plane.shape[0] != 1 or not bool((plane[0] == torch.ones_like(plane[0]).tril()).all()):
        return None
    return Affine(0, (1, -1))


def is_causal(found: Affine | None) -> bool:
    """Whether the condition is "the key is not behind the query": i - j >= 0 over the last two
    dimensions, the same for all others."""
    if found is None or len(found.steps) < 2 or not same(found.constant, 0):
        return False
    *rest, row, column = found.steps
    return same(row, 1) and same(column, -1) and all(same(s, 0) for s in rest)
