"""rms_norm: x / sqrt(mean(x^2) + eps) [* gain] becomes aten.rms_norm (arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules, apply_until_stable
from passes.fusion.forms import same_number
from passes.fusion.norm import GainRule, Normalised, cast, normalised, refuse, shape_of


@dataclass(frozen=True)
class RmsNorm:
    """All usual spellings: rsqrt, 1/sqrt, pow(-0.5), division; x**2, x*x; mean or sum/n; with
    the statistics in float32 and the gain before or after the cast back, 1 + w included."""

    name: ClassVar[str] = "rms_norm"

    def run(self, graph: Graph, log: Log) -> Graph:
        graph = apply_rules(graph, [_RmsNorm()], log)
        return apply_until_stable(graph, [_Gain()], log)


class _RmsNorm(Rule[Normalised]):
    name = "rms_norm"
    roots = frozenset(("aten.mul", "aten.div", "aten.true_divide"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Normalised | Refused]:
        yield from normalised(node.outputs[0], facts)

    def check(self, found: Normalised, facts: Facts) -> Refused | None:
        if not same_number(found.x, found.z):
            return Refused("the norm is of another tensor than the one it scales")
        if found.kind.startswith("var"):
            return Refused("it divides by a standard deviation, without subtracting the mean")
        return refuse(found)

    def rewrite(self, builder: Builder, found: Normalised, node: Node) -> Sequence[Value]:
        dtype = node.outputs[0].type.dtype
        x = found.z if found.z.type.dtype == dtype else cast(builder, found.x, dtype)
        shape = shape_of(found)
        return builder.call(torch.ops.aten.rms_norm.default, x, shape, None, found.eps)


class _Gain(GainRule):
    norms = frozenset(("aten.rms_norm",))
