"""integer_conv: a convolution of 8-bit values with int32 sums is computed in float32, where that is
exact.

A float32 sum of integers is exact as long as no partial sum reaches 2**24, in any order. The
largest partial sum is the largest magnitude of the input times the sum of an output channel's
weights' magnitudes, which is known: weights are constants. Where all input channels together may
reach it, they are split into a few convolutions whose results are added as int32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import packet_of
from passes.quantization.exactness import EXACT, magnitude

aten = torch.ops.aten

_PARTS = 8  # beyond, the additions and re-reads of the input cost what the faster kernel gains


@dataclass(frozen=True)
class IntegerConv:
    """ONNX's ConvInteger and QLinearConv, as they are captured."""

    name: ClassVar[str] = "integer_conv"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_IntegerConv()], log)


@dataclass(frozen=True)
class _Found:
    """bounds are input channels [b0, b1), [b1, b2), ... of one convolution each."""

    node: Node
    weight: torch.Tensor
    bounds: list[int]


class _IntegerConv(Rule[_Found]):
    name = "integer_conv"
    roots = frozenset(f"aten.{n}" for n in ("conv1d", "conv2d", "conv3d", "convolution"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if node.outputs[0].type.dtype != "int32":
            return
        weight, span = facts.weight(node.args[1]), magnitude(node.args[0])
        if weight is None or node.argument("bias") is not None:
            yield Refused("its weights are not constant, or it has a bias")
            return
        if packet_of(node.outputs[0]) == "aten.convolution" and node.argument("transposed"):
            yield Refused("it is transposed")
            return
        if span is None:
            yield Refused("its input is not made of 8-bit values")
            return
        bounds = split(weight, span)
        if bounds is None or (len(bounds) > 2 and node.argument("groups") != 1):
            yield Refused("its sums do not fit float32 exactly")
            return
        yield _Found(node, weight, bounds)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        x, name = found.node.args[0], found.node.args[1].name
        wide = builder.call1(aten._to_copy.default, x, dtype=torch.float32)
        parts: list[Value] = []
        for i, (begin, end) in enumerate(zip(found.bounds, found.bounds[1:], strict=False)):
            part = wide
            if len(found.bounds) > 2:
                part = builder.call1(aten.slice.Tensor, wide, 1, begin, end)
            data = found.weight[:, begin:end].to(torch.float32).contiguous()
            weight = builder.weight(f"{name}_exact{i}", data)
            sums = builder.call1(node.op, part, weight, *node.args[2:], **dict(node.kwargs))
            parts.append(builder.call1(aten._to_copy.default, sums, dtype=torch.int32))
        total = parts[0]
        for part in parts[1:]:
            total = builder.call1(aten.add.Tensor, total, part)
        return [total]


def split(weight: torch.Tensor, span: int) -> list[int] | None:
    """Bounds of runs of input channels whose sums with inputs of magnitude <= span stay exact in
    float32; None if there would be too many. weight: [N, C, *kernel], integers."""
    each = weight.to(torch.int64).abs().flatten(2).sum(2) if weight.ndim > 2 else weight.abs()
    bounds, running = [0], torch.zeros(weight.shape[0], dtype=torch.int64)
    for channel in range(weight.shape[1]):
        if int((running + each[:, channel]).max()) * span >= EXACT:
            if bounds[-1] == channel or len(bounds) == _PARTS:
                return None
            bounds.append(channel)
            running.zero_()
        running += each[:, channel]
    return [*bounds, weight.shape[1]]
