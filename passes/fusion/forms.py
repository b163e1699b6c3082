"""How rules read arithmetic: products, sums, squares, means and roots in their usual spellings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.graph import Value
from graphc.ir.types import same
from graphc.rewrite.facts import Facts, axes, is_cast, operand, packet_of, rank, widened

_PRODUCT_DEPTH = 6
#: types of kernels that compute in float32
FLOATS = ("float32", "bfloat16", "float16")


#: what two roundings to float32 make of a number: a constant written with fewer digits (0.1667 for
#: a sixth) is another one, and the operator that means the exact one would be less precise
_ROUNDED = 1.5e-7


def unrounded(value: Any) -> Any:
    """The value before conversions between floats: they only round."""
    while is_cast(value) and {value.type.dtype, operand(value).type.dtype} <= set(FLOATS):
        value = operand(value)
    return value


def close(a: float, b: float) -> bool:
    """Equal but for the rounding of constants to float32."""
    return math.isclose(a, b, rel_tol=_ROUNDED, abs_tol=1e-12)


def same_number(a: Any, b: Any) -> bool:
    """Whether two values hold the same numbers: one may be a wider copy of the other."""
    return widened(a) is widened(b)


@dataclass(frozen=True)
class Product:
    """coefficient * factors[0] * factors[1] * ..."""

    coefficient: float
    factors: tuple[Value, ...]


def quotient(value: Any) -> tuple[Any, Any] | None:
    """(a, b) of a / b."""
    if packet_of(value) in ("aten.div", "aten.true_divide"):
        node = value.producer
        if len(node.args) == 2 and node.kwargs.get("rounding_mode") is None:
            return node.args[0], node.args[1]
    return None


def product(value: Value, facts: Facts, depth: int = _PRODUCT_DEPTH) -> Product:
    """The factors of a chain of multiplications, divisions by numbers and negations."""
    name = packet_of(value)
    if depth and name == "aten.mul":
        a, b = value.producer.args[:2]  # type: ignore[union-attr]
        parts = [_part(a, value, facts, depth), _part(b, value, facts, depth)]
        return Product(
            parts[0].coefficient * parts[1].coefficient, parts[0].factors + parts[1].factors
        )
    divided = quotient(value) if depth else None
    if divided is not None:
        number = facts.number(divided[1])
        if number:
            part = _part(divided[0], value, facts, depth)
            return Product(part.coefficient / number, part.factors)
    if depth and name == "aten.neg":
        part = _part(operand(value), value, facts, depth)
        return Product(-part.coefficient, part.factors)
    return Product(1.0, (value,))


def _part(item: Any, whole: Value, facts: Facts, depth: int) -> Product:
    number = facts.number(item)
    if number is not None:
        return Product(number, ())
    assert isinstance(item, Value)
    if item.type.dtype != whole.type.dtype:
        return Product(1.0, (item,))
    return product(item, facts, depth - 1)


def addends(value: Any) -> tuple[Any, Any] | None:
    """(a, b) of a + b."""
    if packet_of(value) == "aten.add" and value.producer.argument("alpha") == 1:
        return value.producer.args[0], value.producer.args[1]
    return None


def shifted(value: Any, facts: Facts) -> tuple[Value, float] | None:
    """(x, c) of x + c or c + x with a number c."""
    pair = addends(value)
    if pair is None:
        return None
    for x, other in (pair, pair[::-1]):
        number = facts.number(other)
        if number is not None and isinstance(x, Value):
            return x, number
    return None


def difference(value: Any) -> tuple[Any, Any] | None:
    """(a, b) of a - b."""
    if packet_of(value) == "aten.sub" and value.producer.argument("alpha") == 1:
        return value.producer.args[0], value.producer.args[1]
    return None


def squared(value: Any, facts: Facts) -> Value | None:
    """x of x**2, x * x or square(x)."""
    name = packet_of(value)
    if name == "aten.square":
        return _value(operand(value))
    if name == "aten.pow" and facts.number(operand(value, 1)) == 2:
        return _value(operand(value))
    if name == "aten.mul" and operand(value) is operand(value, 1):
        return _value(operand(value))
    return None


def _value(item: Any) -> Value | None:
    return item if isinstance(item, Value) else None


@dataclass(frozen=True)
class Reduction:
    """A reduction of x over dims. kind: "sum", "mean" or "max"; keep: reduced dims stay as 1."""

    kind: str
    x: Value
    dims: tuple[int, ...]
    keep: bool


_REDUCTIONS = {"aten.sum": "sum", "aten.mean": "mean", "aten.amax": "max", "aten.max": "max"}


def reduction(value: Any, facts: Facts) -> Reduction | None:
    """A sum, mean or maximum; a sum divided by the count is a mean."""
    kind = _REDUCTIONS.get(packet_of(value))
    if kind is not None and value.index == 0:
        node = value.producer
        if node.target in ("aten.max.other", "aten.max.default", "aten.sum.default",
                           "aten.mean.default"):  # fmt: skip
            return None
        dims = axes(node.argument("dim"), rank(node.args[0]))
        return Reduction(kind, node.args[0], dims, bool(node.argument("keepdim")))
    if not isinstance(value, Value):
        return None
    parts = product(value, facts)
    if len(parts.factors) == 1 and parts.factors[0] is not value:
        inner = reduction(parts.factors[0], facts)
        if inner is not None and inner.kind == "sum":
            count = 1
            for dim in inner.dims:
                size = inner.x.type.shape[dim]
                count *= size if isinstance(size, int) else 0
            if count and close(parts.coefficient, 1 / count):
                return Reduction("mean", inner.x, inner.dims, inner.keep)
    return None


def inverse_root(value: Any, facts: Facts) -> Value | None:
    """a of 1 / sqrt(a)."""
    name = packet_of(value)
    if name == "aten.rsqrt":
        return _value(operand(value))
    if name == "aten.pow" and facts.number(operand(value, 1)) == -0.5:
        return _value(operand(value))
    if name == "aten.reciprocal":
        return root(operand(value), facts)
    divided = quotient(value)
    if divided is not None and facts.number(divided[0]) == 1:
        return root(divided[1], facts)
    return None


def root(value: Any, facts: Facts) -> Value | None:
    """a of sqrt(a)."""
    name = packet_of(value)
    if name == "aten.sqrt" or (
        name == "aten.pow" and facts.number(operand(value, 1)) == 0.5
    ):  # fmt: skip
        return _value(operand(value))
    return None


def over_root(value: Value, facts: Facts) -> Iterator[tuple[Value, Value, bool]]:
    """(x, a, outside) of x / sqrt(a), in any spelling; outside: x / (sqrt(a) + c)."""
    if packet_of(value) == "aten.mul":
        a, b = operand(value), operand(value, 1)
        for x, inverse in ((a, b), (b, a)):
            inside = inverse_root(inverse, facts)
            if inside is not None and isinstance(x, Value):
                yield x, inside, False
    divided = quotient(value)
    if divided is not None and isinstance(divided[0], Value):
        inside = root(divided[1], facts)
        if inside is not None:
            yield divided[0], inside, False
        moved = shifted(divided[1], facts)
        if moved is not None and (inside := root(moved[0], facts)) is not None:
            yield divided[0], inside, True


Polynomial = dict[tuple[int, ...], float]


def polynomial(
    value: Any, variables: Sequence[Value], facts: Facts, depth: int = 8
) -> Polynomial | None:
    """The value as a polynomial in `variables` (exponents -> coefficient), or None."""
    for position, variable in enumerate(variables):
        if value is variable:
            return {tuple(int(i == position) for i in range(len(variables))): 1.0}
    number = facts.number(value)
    if number is not None:
        return {(0,) * len(variables): number}
    if depth == 0 or not isinstance(value, Value) or value.producer is None:
        return None

    def read(item: Any) -> Polynomial | None:
        return polynomial(item, variables, facts, depth - 1)

    node, name = value.producer, packet_of(value)
    if name == "aten.neg":
        return _scale(read(node.args[0]), -1.0)
    if name in ("aten.add", "aten.sub", "aten.rsub"):
        left, right = node.argument("self"), node.argument("other")
        if name == "aten.rsub":
            left, right = right, left
        alpha = facts.number(node.argument("alpha"))
        sign = -1.0 if name != "aten.add" else 1.0
        return _add(read(left), _scale(read(right), sign * (alpha or 0.0)))
    if name == "aten.mul":
        return _multiply(read(node.args[0]), read(node.args[1]))
    divided = quotient(value)
    if divided is not None:
        divisor = facts.number(divided[1])
        return _scale(read(divided[0]), 1 / divisor) if divisor else None
    power = {"aten.square": 2.0}.get(name)
    if name == "aten.pow":
        power = facts.number(node.args[1])
    if power in (1.0, 2.0, 3.0):
        base = read(node.args[0])
        result = base
        for _ in range(int(power) - 1):
            result = _multiply(result, base)
        return result
    return None


def matches(found: Polynomial | None, wanted: Mapping[tuple[int, ...], float]) -> bool:
    """Whether a polynomial is the wanted one, but for rounding to float32."""
    if found is None:
        return False
    keys = {k for k, c in found.items() if c} | set(wanted)
    return all(close(found.get(k, 0.0), wanted.get(k, 0.0)) for k in keys)


def _scale(a: Polynomial | None, factor: float) -> Polynomial | None:
    return None if a is None else {k: c * factor for k, c in a.items()}


def _add(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}


def _multiply(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    result: Polynomial = {}
    for one, c in a.items():
        for other, d in b.items():
            key = tuple(x + y for x, y in zip(one, other, strict=True))
            result[key] = result.get(key, 0.0) + c * d
    return result


def trailing(dims: Sequence[int], count: int) -> bool:
    """Whether dims are the last ones of `count`."""
    return tuple(dims) == tuple(range(count - len(dims), count)) and len(dims) > 0


def describe_dims(dims: Sequence[int]) -> str:
    return "dimension " + ", ".join(map(str, dims))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
