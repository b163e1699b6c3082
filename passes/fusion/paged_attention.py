"""paged_attention: attention and the indexer read keys straight from pages; the rows of a sequence
are never put one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import widened
from passes.fusion.paged_rows import Rows, base_of, heads_of_rows, read_rows


@dataclass(frozen=True)
class PagedAttention:
    """cached_attention and lightning_indexer over read_pages."""

    name: ClassVar[str] = "paged_attention"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Attention(), _Indexer()], log)


class _Attention(Rule[Rows]):
    name = "paged_attention"
    roots = frozenset(("graphc.cached_attention",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Rows | Refused]:
        query, key, value = node.args[:3]
        keys, values = read_rows(base_of(key)), read_rows(base_of(value))
        if keys is None and values is None:
            return
        if keys is None or values is None:
            yield Refused("keys or values are computed from the rows")
            return
        heads, width = key.type.shape[1], value.type.shape[3]
        whole = keys.whole
        if keys.pages is not values.pages or keys.table is not values.table:
            yield Refused("keys and values are in different pages")
        elif not heads_of_rows(key, keys, heads, query.type.shape[3]) or not heads_of_rows(
            value, values, heads, width
        ):
            yield Refused("keys or values are a part of the rows")
        elif keys.offset != 0 or values.offset != keys.width:
            yield Refused("values do not stand behind the keys")
        elif not same(whole, keys.width + values.width):
            yield Refused("rows hold more than keys and values")
        else:
            yield keys

    def rewrite(self, builder: Builder, found: Rows, node: Node) -> Sequence[Value]:
        query, key, value, start = node.args[:4]
        return builder.call(
            torch.ops.graphc.paged_attention.default, query, found.pages, found.table, start,
            heads=key.type.shape[1], width=value.type.shape[3], **node.kwargs, **found.keywords,
        )  # fmt: skip


class _Indexer(Rule[Rows]):
    name = "paged_indexer"
    roots = frozenset(("graphc.lightning_indexer",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Rows | Refused]:
        key = node.args[2]
        rows = read_rows(base_of(widened(key)))
        if rows is None or node.argument("start") is None:
            return
        if rows.offset != 0 or not same(rows.whole, rows.width):
            yield Refused("keys are a part of the rows")
        elif not heads_of_rows(widened(key), rows, 1, rows.width) and widened(key) is not rows.base:
            yield Refused("keys are not the rows themselves")
        else:
            yield rows

    def rewrite(self, builder: Builder, found: Rows, node: Node) -> Sequence[Value]:
        query, weights, _, start = node.args[:4]
        return builder.call(
            torch.ops.graphc.paged_lightning_indexer.default, widened(query), weights, found.pages,
            found.table, start, **node.kwargs, **found.keywords,
        )  # fmt: skip
