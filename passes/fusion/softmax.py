"""softmax: exp(x - max) / sum(exp(x - max)) becomes aten.softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of
from passes.fusion.forms import difference, quotient, reduction


@dataclass(frozen=True)
class Softmax:
    """Only with the maximum subtracted: without it, exp overflows where softmax does not."""

    name: ClassVar[str] = "softmax"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Softmax()], log)


@dataclass(frozen=True)
class _Found:
    x: Value
    dim: int


class _Softmax(Rule[_Found]):
    name = "softmax"
    roots = frozenset(("aten.div", "aten.true_divide", "aten.mul"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        for exponential, below in _ratios(node.outputs[0]):
            if packet_of(exponential) != "aten.exp":
                continue
            total = reduction(below, facts)
            if total is None or total.kind != "sum" or packet_of(total.x) != "aten.exp":
                continue
            if total.x is not exponential:
                yield Refused("it divides by the sum of another exponential")
            elif len(total.dims) != 1 or not total.keep:
                yield Refused("the sum is over several dimensions")
            else:
                yield from self._shifted(operand(exponential), total.dims, facts)

    @staticmethod
    def _shifted(inner: Value, dims: tuple[int, ...], facts: Facts) -> Iterator[_Found | Refused]:
        pair = difference(inner)
        top = None if pair is None else reduction(pair[1], facts)
        if pair is None or top is None or top.kind != "max" or top.x is not pair[0]:
            yield Refused("no maximum is subtracted: it overflows where softmax does not")
        elif top.dims != dims or not top.keep:
            yield Refused("the maximum is taken over another dimension than the sum")
        else:
            yield _Found(pair[0], dims[0])

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        return builder.call(torch.ops.aten.softmax.int, found.x, found.dim)


def _ratios(value: Value) -> Iterator[tuple[Value, Value]]:
    divided = quotient(value)
    if divided is not None:
        yield divided
    if packet_of(value) == "aten.mul":
        for a, b in ((operand(value), operand(value, 1)), (operand(value, 1), operand(value))):
            if packet_of(b) == "aten.reciprocal":
                yield a, operand(b)
