"""joined_slices: neighbouring slices of one tensor, put side by side, are a slice of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of


@dataclass(frozen=True)
class JoinedSlices:
    """Concatenations of slices, as merged products leave them."""

    name: ClassVar[str] = "joined_slices"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Joined()], log)


@dataclass(frozen=True)
class _Found:
    source: Value
    dim: int
    begin: int
    end: int


class _Joined(Rule[_Found]):
    name = "joined_slices"
    roots = frozenset(("aten.cat",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        parts: Sequence[Value] = node.args[0]
        if len(parts) < 2 or any(packet_of(part) != "aten.slice" for part in parts):
            return
        source: Value = operand(parts[0])
        rank = len(source.type.shape)
        dim = int(node.argument("dim")) % rank
        spans: list[tuple[int, int]] = []
        for part in parts:
            call = part.producer
            assert call is not None
            begin, size = call.argument("start") or 0, part.type.shape[dim]
            if call.args[0] is not source or int(call.argument("dim")) % rank != dim:
                return
            if call.argument("step") != 1 or not isinstance(begin, int) or begin < 0:
                return
            if not isinstance(size, int):
                return
            spans.append((begin, begin + size))
        if any(a[1] != b[0] for a, b in zip(spans, spans[1:], strict=False)):
            yield Refused("the slices are not neighbours")
        else:
            yield _Found(source, dim, spans[0][0], spans[-1][1])

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        size = found.source.type.shape[found.dim]
        if (found.begin, found.end) == (0, size):
            return [builder.of(found.source)]
        return builder.call(
            torch.ops.aten.slice.Tensor, found.source, found.dim, found.begin, found.end
        )
