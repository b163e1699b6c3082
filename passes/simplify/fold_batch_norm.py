"""fold_batch_norm: inference batch norm moves into the weights of what stands before it.

y = (conv(x, w) + b - mean) * g / sqrt(var + eps) + h is conv(x, w * s) + (b - mean) * s + h with
s = g / sqrt(var + eps) per output channel (computed in float64, stored in the weight's dtype).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import packet_of

_PRODUCTS = frozenset(f"aten.{n}" for n in (
    "convolution", "conv1d", "conv2d", "conv3d", "_convolution", "linear",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
))  # fmt: skip


@dataclass(frozen=True)
class FoldBatchNorm:
    """Into a convolution or a linear with constant weights that nothing else reads."""

    name: ClassVar[str] = "fold_batch_norm"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_BatchNorm()], log)


@dataclass(frozen=True)
class _Found:
    product: Node
    channel: int  # dimension of the weight that counts output channels
    weight: torch.Tensor
    scale: torch.Tensor  # float64 [C]
    shift: torch.Tensor  # float64 [C]


class _BatchNorm(Rule[_Found]):
    name = "batch_norm"
    roots = frozenset(("aten._native_batch_norm_legit_no_training", "aten.batch_norm"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        source = node.args[0]
        if packet_of(source) not in _PRODUCTS:
            return
        product = source.producer
        weight = facts.weight(product.args[1])
        if weight is None:
            yield Refused("the weight before it is not constant")
            return
        if not facts.only_reader(source):
            yield Refused("the value before the norm is read elsewhere")
            return
        if any(facts.readers(v) or v in facts.kept for v in node.outputs[1:]):
            yield Refused("its statistics are read")
            return
        if packet_of(node.outputs[0]) == "aten.batch_norm" and node.argument("training"):
            yield Refused("it is in training mode")
            return
        yield from self._found(node, product, weight, facts)

    def _found(
        self, node: Node, product: Node, weight: torch.Tensor, facts: Facts
    ) -> Iterator[_Found | Refused]:
        parts: list[torch.Tensor | None] = []
        for item in (*node.args[1:5], bias_of(product)):
            tensor = facts.weight(item)
            if item is not None and tensor is None:
                yield Refused("its parameters are not constant")
                return
            parts.append(None if tensor is None else tensor.double())
        gain, offset, mean, variance, bias = parts
        if mean is None or variance is None:
            yield Refused("it has no running statistics")
            return
        channel = channel_dim(product)
        if channel is None:
            yield Refused("a transposed convolution in groups")
            return
        if packet_of(product.outputs[0]) == "aten.linear" and len(node.args[0].type.shape) != 2:
            yield Refused("its channels are not the linear's outputs")
            return
        scale = torch.rsqrt(variance + float(node.argument("eps")))
        scale = scale if gain is None else scale * gain
        shift = ((0 if bias is None else bias) - mean) * scale
        shift = shift if offset is None else shift + offset
        yield _Found(product, channel, weight, scale, shift)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        shape = [1] * found.weight.dim()
        shape[found.channel] = -1
        folded = (found.weight.double() * found.scale.view(shape)).to(found.weight.dtype)
        product = found.product
        weight = builder.weight(product.args[1].name, folded)
        bias = builder.weight(f"{product.args[1].name}_bias", found.shift.to(found.weight.dtype))
        args = [product.args[0], weight, bias, *product.args[3:]]
        outputs = builder.call(product.op, *args, **dict(product.kwargs))
        empty = [
            builder.call1(
                torch.ops.aten.full.default, (0,), 0.0, dtype=getattr(torch, v.type.dtype)
            )
            for v in node.outputs[1:]
        ]
        return [*outputs, *empty]  # fmt: skip


def bias_of(product: Node) -> Any:
    return product.argument("bias")


def channel_dim(product: Node) -> int | None:
    """Which dimension of the weight is the output channel; None if it is split over groups."""
    name = packet_of(product.outputs[0])
    transposed = name.startswith("aten.conv_transpose")
    if name in ("aten.convolution", "aten._convolution"):
        transposed = bool(product.argument("transposed"))
    if not transposed:
        return 0
    return 1 if product.argument("groups") == 1 else None
