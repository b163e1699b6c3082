"""index_arithmetic: values that depend on position alone, worked out for every length.

Models build masks from arange, cumsum and comparisons. Where such a value is the same everywhere,
it becomes a constant fill, so that "and True" can disappear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from passes.simplify.positions import Positions


@dataclass(frozen=True)
class IndexArithmetic:
    """Integers and truths only; the sizes stay symbols."""

    name: ClassVar[str] = "index_arithmetic"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Uniform(Positions(Facts(graph)))], log)


@dataclass(frozen=True)
class _Uniform(Rule[int]):
    positions: Positions

    name = "uniform"
    roots = frozenset(f"aten.{n}" for n in (
        "le", "lt", "ge", "gt", "eq", "ne", "bitwise_and", "logical_and", "logical_not",
        "bitwise_not", "cumsum", "sub", "index",
    ))  # fmt: skip

    def pattern(self, node: Node, facts: Facts) -> Iterator[int | Refused]:
        value = node.outputs[0]
        if facts.number(value) is not None or not list(node.inputs()):
            return
        if value.type.dtype == "bool":
            truth = self.positions.truth(value)
            if truth is not None:
                yield int(truth)
            return
        found = self.positions.affine(value)
        if found is not None and found.uniform() and isinstance(found.constant, int):
            yield found.constant

    def rewrite(self, builder: Builder, found: int, node: Node) -> Sequence[Value]:
        value = node.outputs[0]
        fill = bool(found) if value.type.dtype == "bool" else found
        dtype = getattr(torch, value.type.dtype)
        one = builder.call1(torch.ops.aten.full.default, (), fill, dtype=dtype)
        if not value.type.shape:
            return [one]
        return builder.call(torch.ops.aten.expand.default, one, tuple(value.type.shape))
