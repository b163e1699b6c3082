"""layer_norm: (x - mean) / sqrt(var + eps) [* gain] [+ bias] becomes aten.layer_norm
(arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules, apply_until_stable
from graphc.rewrite.facts import widened
from passes.fusion.forms import difference, reduction, same_number
from passes.fusion.norm import BiasRule, GainRule, Normalised, cast, normalised, refuse, shape_of


@dataclass(frozen=True)
class LayerNorm:
    """Written out with mean, sub, pow or mul, sqrt or rsqrt, or with var(correction=0)."""

    name: ClassVar[str] = "layer_norm"

    def run(self, graph: Graph, log: Log) -> Graph:
        graph = apply_rules(graph, [_LayerNorm()], log)
        graph = apply_until_stable(graph, [_Gain()], log)
        return apply_until_stable(graph, [_Bias()], log)


@dataclass(frozen=True)
class _Found:
    """parts.x is x - mean(x, dims); parts.z is x (for a variance) or the centred x itself."""

    parts: Normalised
    x: Value
    dims: tuple[int, ...]


class _LayerNorm(Rule[_Found]):
    name = "layer_norm"
    roots = frozenset(("aten.mul", "aten.div", "aten.true_divide"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        for parts in normalised(node.outputs[0], facts):
            centred = _centred(parts.x, facts)
            if centred is not None:  # else an RMS norm, or none of ours
                yield _Found(parts, *centred)

    def check(self, found: _Found, facts: Facts) -> Refused | None:
        parts, variance = found.parts, found.parts.kind.startswith("var")
        # the variance of a centred value is the variance of the value
        inner = found.x if variance and _centred(parts.z, facts) is None else parts.x
        if not _equal(parts.z, inner, facts):
            return Refused("the variance is of another tensor than the one it scales")
        if found.dims != parts.dims:
            return Refused("mean and variance are taken over different dimensions")
        if parts.kind == "var1":
            return Refused("the variance divides by n - 1")
        if parts.kind not in ("var0", "mean", "sum"):
            return Refused(f"the variance has the correction {parts.kind[3:]}")
        return refuse(replace(parts, kind="mean" if variance else parts.kind))

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        x = cast(builder, found.x, node.outputs[0].type.dtype)
        args = (x, shape_of(found.parts), None, None, found.parts.eps)
        return builder.call(torch.ops.aten.layer_norm.default, *args)


def _centred(value: Value, facts: Facts) -> tuple[Value, tuple[int, ...]] | None:
    """(x, dims) of x - mean(x, dims)."""
    pair = difference(widened(value))
    if pair is None or not isinstance(pair[0], Value):
        return None
    mean = reduction(pair[1], facts) or reduction(widened(pair[1]), facts)
    if mean is None or mean.kind != "mean" or not mean.keep or not same_number(mean.x, pair[0]):
        return None
    return pair[0], mean.dims


def _equal(a: Value, b: Value, facts: Facts) -> bool:
    """The same value, or the same difference computed twice."""
    if same_number(a, b):
        return True
    one, other = _centred(a, facts), _centred(b, facts)
    if one is None or other is None:
        return False
    return same_number(one[0], other[0]) and one[1] == other[1]


class _Gain(GainRule):
    norms = frozenset(("aten.layer_norm",))


class _Bias(BiasRule):
    norms = frozenset(("aten.layer_norm",))
