"""integer_linear: an int32 product of 8-bit values with 8-bit weights becomes one
graphc.integer_linear, if it is taken to float32 or if float32 holds its sums exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ops.integer_linear import integer_linear
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of
from passes.quantization.exactness import EXACT, magnitude

_BYTES = ("uint8", "int8")
_PRODUCTS = frozenset(("aten.matmul", "aten.mm"))


@dataclass(frozen=True)
class IntegerLinear:
    """x.int() [- zero] times constant weights, as ONNX's MatMulInteger is captured: the bytes are
    read as they are, and nothing is widened in memory."""

    name: ClassVar[str] = "integer_linear"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Converted(), _Exact()], log)


@dataclass(frozen=True)
class _Found:
    """weight is int32 [K, N]; zero an integer value of one element, a number, or None."""

    product: Value
    x: Value
    zero: Any
    weight: Value
    data: torch.Tensor


class _IntegerLinear(Rule[_Found]):
    name = "integer_linear"

    def product(self, product: Value, facts: Facts) -> Iterator[_Found | Refused]:
        if product.type.dtype != "int32" or packet_of(product) not in _PRODUCTS:
            return
        left, right = operand(product), operand(product, 1)
        data = facts.weight(right)
        if data is None or data.ndim != 2 or len(left.type.shape) < 2:
            yield Refused("its right operand is not a constant matrix")
            return
        zero = None
        if packet_of(left) == "aten.sub" and left.producer.argument("alpha") == 1:
            left, zero = operand(left), operand(left, 1)
        if packet_of(left) != "aten._to_copy" or operand(left).type.dtype not in _BYTES:
            yield Refused("its left operand is not made of 8-bit values")
            return
        yield _Found(product, operand(left), _narrow(zero), right, data)

    def check(self, found: _Found, facts: Facts) -> Refused | None:
        zero = found.zero
        if isinstance(zero, Value):
            if zero.type.dtype not in (*_BYTES, "int32"):
                return Refused(f"its zero point is {zero.type.dtype}")
            if any(size != 1 for size in zero.type.shape):
                return Refused("its left operand has several zero points")
        elif zero is not None and not isinstance(zero, int):
            return Refused("its zero point is not an integer")
        if int(found.data.min()) < -128 or int(found.data.max()) > 127:
            return Refused("its weights less their zero points do not fit 8 bits")
        return None

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        name, zero = found.weight.name, found.zero
        data = found.data.t().to(torch.int8).contiguous()
        weight = builder.weight(f"{name}_bytes", data)
        if isinstance(zero, int):
            zero = builder.weight(f"{name}_zero", torch.tensor(zero, dtype=torch.int32))
        return builder.call(integer_linear, found.x, zero, weight)


class _Converted(_IntegerLinear):
    roots = frozenset(("aten._to_copy",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if _to_float(node):
            yield from self.product(operand(node.outputs[0]), facts)


class _Exact(_IntegerLinear):
    roots = _PRODUCTS

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if not all(map(_to_float, facts.readers(node.outputs[0]))):
            yield from self.product(node.outputs[0], facts)

    def check(self, found: _Found, facts: Facts) -> Refused | None:
        span = magnitude(operand(found.product))
        if span is None or span * int(found.data.abs().sum(0).max()) >= EXACT:
            return Refused("its sums do not fit float32 exactly")
        return super().check(found, facts)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        (sums,) = super().rewrite(builder, found, node)
        return builder.call(torch.ops.aten._to_copy.default, sums, dtype=torch.int32)


def _to_float(node: Node) -> bool:
    return packet_of(node.outputs[0]) == "aten._to_copy" and (
        node.outputs[0].type.dtype == "float32"
    )


def _narrow(zero: Any) -> Any:
    """A zero point before it was widened: one small Step less."""
    if packet_of(zero) == "aten._to_copy" and operand(zero).type.dtype in _BYTES:
        return operand(zero)
    return zero
