"""residual_norm: the norm that a sub-layer begins with is taken where its input is mixed, while the
row is in registers and the first level: the mix itself is never in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import packet_of
from passes.fusion.forms import unrounded


@dataclass(frozen=True)
class ResidualNorm:
    """rms_norm of a residual_mix that nothing else reads."""

    name: ClassVar[str] = "residual_norm"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_ResidualNorm()], log)


class _ResidualNorm(Rule[Node]):
    name = "residual_norm"
    roots = frozenset(("aten.rms_norm",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Node | Refused]:
        mixed = unrounded(node.args[0])
        if packet_of(mixed) != "graphc.residual_mix":
            return
        if mixed.producer.argument("norm_eps") is not None:
            return
        value = node.args[0]
        while value is not mixed and facts.only_reader(value):
            value = value.producer.args[0]
        if value is not mixed or not facts.only_reader(mixed):
            yield Refused("something else reads the mix")
        elif len(node.args[1]) != 1:
            yield Refused("the norm is over several dimensions")
        else:
            yield mixed.producer

    def rewrite(self, builder: Builder, found: Node, node: Node) -> Sequence[Value]:
        out = node.outputs[0].type.dtype
        dtype = getattr(torch, out)
        eps, gain = node.argument("eps"), node.argument("weight")
        if eps is None:
            eps = torch.finfo(dtype).eps
        own = found.outputs[0].type.dtype == out
        builder.module = found.module or builder.module
        return builder.call(
            torch.ops.graphc.residual_mix.default, *found.args[:3], float(eps), gain,
            **({} if own else {"dtype": dtype}),
        )  # fmt: skip
