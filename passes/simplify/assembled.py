"""assembled: a tensor that is filled part by part is the concatenation of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of

_EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like")


@dataclass(frozen=True)
class Assembled:
    """new_empty and copies into slices along one dimension; a copy of everything is its source."""

    name: ClassVar[str] = "assembled"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Nothing(), _Everything(), _Assembled()], log)


class _Nothing(Rule[Value]):
    """A slice without elements is written."""

    name = "empty_part"
    roots = frozenset(("aten.slice_scatter",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        if any(same(size, 0) for size in node.args[1].type.shape):
            yield node.args[0]

    def rewrite(self, builder: Builder, found: Value, node: Node) -> Sequence[Value]:
        return [found]


class _Everything(Rule[Value]):
    """All elements are overwritten by others of the same type."""

    name = "copied"
    roots = frozenset(("aten.copy",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        source = _copied(node.outputs[0])
        if source is not node.outputs[0] and packet_of(node.args[0]) in _EMPTY:
            yield source

    def rewrite(self, builder: Builder, found: Value, node: Node) -> Sequence[Value]:
        return [found]


@dataclass(frozen=True)
class _Found:
    parts: tuple[Value, ...]
    dim: int


class _Assembled(Rule[_Found]):
    name = "assembled"
    roots = frozenset(("aten.slice_scatter",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        result = node.outputs[0]
        if any(packet_of(r.outputs[0]) == "aten.slice_scatter" and r.args[0] is result
               for r in facts.readers(result)):  # fmt: skip
            return  # the last one sees them all
        size = result.type.shape[int(node.argument("dim"))]
        if not isinstance(size, int):
            return
        spans: list[tuple[int, int, Value]] = []
        here: Any = result
        dim = int(node.argument("dim")) % len(result.type.shape)
        while packet_of(here) == "aten.slice_scatter":
            step = here.producer
            if int(step.argument("dim")) % len(result.type.shape) != dim:
                return
            begin, end = step.argument("start") or 0, step.argument("end")
            end = size if end is None else end
            if not isinstance(begin, int) or not isinstance(end, int) or step.argument("step") != 1:
                return
            spans.append((begin, min(end, size), _copied(step.args[1])))
            here = step.args[0]
        if packet_of(here) not in _EMPTY:
            return
        spans.sort(key=lambda span: span[:2])
        ends = [0, *(end for _, end, _ in spans)]
        if ends[-1] != size or any(b != e for (b, _, _), e in zip(spans, ends[:-1], strict=True)):
            yield Refused("its parts overlap, or leave something out")
            return
        if any(part.type.dtype != result.type.dtype for _, _, part in spans):
            yield Refused("its parts have other dtypes")
            return
        yield _Found(tuple(part for _, _, part in spans), dim)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        return builder.call(torch.ops.aten.cat.default, found.parts, found.dim)


def _copied(part: Value) -> Value:
    """What a copy of the part's own type copies."""
    if packet_of(part) != "aten.copy":
        return part
    source: Value = operand(part, 1)
    alike = source.type.dtype == part.type.dtype and len(source.type.shape) == len(part.type.shape)
    if alike and all(map(same, source.type.shape, part.type.shape)):
        return source
    return part
