"""sinkhorn: dividing columns and rows of small matrices by their sums, round after round, is one
operator; written out, a hyper-connection of twenty rounds is over a hundred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of


@dataclass(frozen=True)
class Sinkhorn:
    """x / (sum + eps), over columns and rows in turn, beginning and ending with columns."""

    name: ClassVar[str] = "sinkhorn"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Sinkhorn()], log)


@dataclass(frozen=True)
class _Found:
    x: Value
    rounds: int
    eps: float


class _Sinkhorn(Rule[_Found]):
    name = "sinkhorn"
    roots = frozenset(("aten.div",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        here = node.outputs[0]
        if any(packet_of(reader.outputs[0]) == "aten.sum" for reader in facts.readers(here)):
            return  # it goes on
        dims: list[int] = []
        eps: float | None = None
        while True:
            step = _divided(here, facts)
            if step is None or eps not in (None, step[2]):
                break
            here, dim, eps = step
            dims.append(dim)
        if len(dims) < 3:
            return
        assert eps is not None
        if any(dim != (-2, -1)[i % 2] for i, dim in enumerate(dims)) or len(dims) % 2 == 0:
            yield Refused("columns and rows do not take turns, or rows begin or end")
            return
        yield _Found(here, len(dims) // 2 + 1, eps)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        return builder.call(torch.ops.graphc.sinkhorn.default, found.x, found.rounds, found.eps)


def _divided(value: Value, facts: Facts) -> tuple[Value, int, float] | None:
    """(x, dim, eps) of x / (sum of x over the dim + eps), dim -1 or -2."""
    if packet_of(value) != "aten.div" or len(value.type.shape) < 2:
        return None
    x, shifted = operand(value), operand(value, 1)
    if packet_of(shifted) != "aten.add" or shifted.producer.argument("alpha") != 1:
        return None
    total, eps = operand(shifted), facts.number(operand(shifted, 1))
    if eps is None or packet_of(total) != "aten.sum" or operand(total) is not x:
        return None
    dims, rank = total.producer.argument("dim"), len(x.type.shape)
    kept = total.producer.argument("keepdim")
    if not dims or len(dims) != 1 or not kept or total.type.dtype != x.type.dtype:
        return None
    dim = int(dims[0]) % rank - rank
    return (x, dim, float(eps)) if dim in (-1, -2) else None
