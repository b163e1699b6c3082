"""grouped_query: attention over keys and values repeated for groups of heads reads them as they
are (enable_gqa; arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import same_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class GroupedQuery:
    """unsqueeze, expand, reshape over the heads, or repeat_interleave."""

    name: ClassVar[str] = "grouped_query"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Repeated()], log)


@dataclass(frozen=True)
class _Found:
    key: Value
    value: Value


class _Repeated(Rule[_Found]):
    name = "grouped_query"
    roots = frozenset(("aten.scaled_dot_product_attention", "graphc.attention"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if node.argument("enable_gqa") or rank(node.args[0]) != 4:
            return
        key, value = unrepeated(node.args[1]), unrepeated(node.args[2])
        if key is None and value is None:
            return
        if key is None or value is None or key.type.shape[1] != value.type.shape[1]:
            yield Refused("keys and values are not repeated alike")
        else:
            yield _Found(key, value)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        keywords = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
        args = (node.args[0], found.key, found.value, *node.args[3:])
        return builder.call(node.op, *args, enable_gqa=True, **keywords)


def unrepeated(value: Value) -> Value | None:
    """[B, G, S, D] of its repetition [B, G * n, S, D] with neighbours alike."""
    if packet_of(value) == "aten.repeat_interleave":
        node = value.producer
        assert node is not None
        if node.target == "aten.repeat_interleave.self_int" and node.argument("dim") in (1, -3):
            return _four(operand(value))
        return None
    spread = value
    while packet_of(spread) in ("aten.view", "aten.reshape", "aten._unsafe_view"):
        spread = operand(spread)
    if spread is value:
        return None
    if packet_of(spread) == "aten.clone":
        spread = operand(spread)
    if packet_of(spread) != "aten.expand" or rank(spread) != 5:
        return None
    source = operand(spread)
    if rank(source) != 5 or source.type.shape[2] != 1 or packet_of(source) != "aten.unsqueeze":
        return None
    base = _four(operand(source))
    if base is None or not _is_repetition(value, spread, base):
        return None
    return base


def _four(value: Value) -> Value | None:
    return value if rank(value) == 4 else None


def _is_repetition(value: Value, spread: Value, base: Value) -> bool:
    batch, heads, length, width = base.type.shape
    if not same_sizes(spread.type.shape[:2], (batch, heads)):
        return False
    if not same_sizes(spread.type.shape[3:], (length, width)):
        return False
    count = spread.type.shape[2]
    if not isinstance(heads, int) or not isinstance(count, int):
        return False
    return same_sizes(value.type.shape, (batch, heads * count, length, width))
