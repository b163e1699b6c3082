"""lightning_indexer: the scores of every key and the choice of the best ones become one operator;
no scores of queries and keys are ever in memory.

Where every key is chosen anyway, the indexer vanishes: sparse attention over all positions is
attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import Dim, Symbol, as_dim, largest, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import is_cast, operand, packet_of, widened
from passes.fusion.forms import product

_INDEXERS = ("graphc.lightning_indexer", "graphc.paged_lightning_indexer")
_VIEWS = ("aten.squeeze", "aten.unsqueeze", "aten.view", "aten.select")


@dataclass(frozen=True)
class LightningIndexer:
    """sum over heads of weight * relu(query . key), causal, and its top-k positions."""

    name: ClassVar[str] = "lightning_indexer"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(
            graph, [_AllKeys(), _AllPools(graph.symbols), _AllRows(graph.symbols), _Indexer()], log
        )


@dataclass(frozen=True)
class Scores:
    """factor * sum over h of weights[..., h] * relu(query[..., h] . key)."""

    query: Value  # [B, T, H, D]
    weights: Value  # [B, T, H]
    factor: float
    key: Value  # [B, S, D]


def choice(builder: Builder, scores: Scores, start: Value, count: int) -> Value:
    """int32 [B, T, count]: the best keys by these scores."""
    weights = scores.weights
    if scores.factor != 1.0:
        weights = builder.call1(torch.ops.aten.mul.Tensor, weights, scores.factor)
    made: Value = builder.call1(
        torch.ops.graphc.lightning_indexer.default, scores.query, weights, scores.key, start,
        count=count,
    )  # fmt: skip
    return made


@dataclass(frozen=True)
class _Found:
    scores: Scores
    start: Value
    count: int


def chosen_by(indices: Any) -> Node | None:
    """The topk whose positions these are."""
    while is_cast(indices):
        indices = operand(indices)
    if packet_of(indices) == "aten.topk" and indices.index == 1:
        node: Node = indices.producer
        return node
    return None


class _AllIsChosen(Rule[Node]):
    """Sparse attention over all that a token sees is attention over the cache."""

    roots = frozenset(("graphc.sparse_attention",))

    def rewrite(self, builder: Builder, found: Node, node: Node) -> Sequence[Value]:
        return builder.call(
            torch.ops.graphc.cached_attention.default, *node.args[:3], node.argument("start"),
            scale=node.argument("scale"),
        )  # fmt: skip


class _AllKeys(_AllIsChosen):
    name = "every_key_is_chosen"

    def pattern(self, node: Node, facts: Facts) -> Iterator[Node | Refused]:
        topk = chosen_by(node.args[3])
        if topk is None or node.argument("start") is None:
            return
        scores = topk.args[0]
        if same(topk.args[1], scores.type.shape[-1]):
            yield topk


@dataclass(frozen=True)
class _AllPools(_AllIsChosen):
    """Of an indexer over pools: every whole one, and the tokens behind, are all that is seen."""

    symbols: Mapping[str, Symbol]

    name = "every_pool_is_chosen"

    def pattern(self, node: Node, facts: Facts) -> Iterator[Node | Refused]:
        indices, start = node.argument("indices"), node.argument("start")
        if packet_of(indices) != "graphc.pooled_indexer" or start is None:
            return
        indexer: Node = indices.producer
        pages, table = indexer.argument("pages"), indexer.argument("table")
        pools = largest(as_dim(table.type.shape[1] * pages.type.shape[1]), self.symbols)
        if indexer.argument("start") is start and pools <= indexer.argument("count"):
            yield indexer


@dataclass(frozen=True)
class _AllRows(Rule[Node]):
    symbols: Mapping[str, Symbol]

    name = "every_row_is_chosen"
    roots = frozenset(("graphc.latent_attention",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Node | Refused]:
        indices = node.argument("indices")
        if packet_of(indices) not in _INDEXERS:
            return
        indexer: Node = indices.producer
        count = indexer.argument("count")
        rows = largest(_rows(indexer), self.symbols)
        if indexer.argument("start") is node.argument("start") and rows <= count:
            yield indexer

    def rewrite(self, builder: Builder, found: Node, node: Node) -> Sequence[Value]:
        return builder.call(node.op, *node.args[:4], None, **node.kwargs)


def _rows(indexer: Node) -> Dim:
    """Keys that there is room for."""
    if packet_of(indexer.outputs[0]) == "graphc.lightning_indexer":
        length: Dim = indexer.args[2].type.shape[1]
        return length
    pages, table = indexer.argument("pages"), indexer.argument("table")
    return as_dim(table.type.shape[1] * pages.type.shape[-2])


class _Indexer(Rule[_Found]):
    name = "lightning_indexer"
    roots = frozenset(("aten._to_copy",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if node.outputs[0].type.dtype != "int32":
            return
        topk = chosen_by(node.outputs[0])
        if (
            topk is None
            or topk.args[0].type.dtype != "float32"
            or len(topk.args[0].type.shape) != 3
        ):
            return
        masked = topk.args[0]
        hidden = _hidden(masked, facts)
        if hidden is None:
            return
        scores, start = hidden
        count = topk.args[1]
        dim, largest = topk.argument("dim"), topk.argument("largest")
        found = index_scores(scores, facts)
        if found is None:
            yield Refused("the scores are no weighted sum of clipped products")
        elif not isinstance(count, int):
            yield Refused(f"the number of chosen keys, {count}, depends on a length")
        elif dim not in (-1, 2) or not largest:
            yield Refused("it does not choose the largest scores of keys")
        else:
            yield _Found(found, start, count)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        return [choice(builder, found.scores, found.start, found.count)]


def _hidden(masked: Value, facts: Facts) -> tuple[Value, Value] | None:
    """(scores, start) of scores where later keys are -inf."""
    if packet_of(masked) != "aten.masked_fill" or facts.number(operand(masked, 2)) != -torch.inf:
        return None
    negated = operand(masked, 1)
    if packet_of(negated) not in ("aten.bitwise_not", "aten.logical_not"):
        return None
    mask = operand(negated)
    while packet_of(mask) in _VIEWS:
        mask = operand(mask)
    if packet_of(mask) != "graphc.position_mask":
        return None
    scores = operand(masked)
    if not same(operand(mask, 2), scores.type.shape[2]):
        return None
    return scores, operand(mask)


def index_scores(scores: Value, facts: Facts) -> Scores | None:
    """The parts of squeeze(weights[:, :, None] @ relu(query @ key^T * c)), [B, T, S]."""
    if packet_of(scores) not in ("aten.squeeze", "aten.view"):
        return None
    outer = operand(scores)
    if packet_of(outer) != "aten.matmul" or len(outer.type.shape) != 4:
        return None
    row, clipped = operand(outer), operand(outer, 1)
    if packet_of(clipped) != "aten.relu" or packet_of(row) not in ("aten.unsqueeze", "aten.view"):
        return None
    weights = operand(row)
    parts = product(operand(clipped), facts)
    if len(parts.factors) != 1 or parts.coefficient <= 0:
        return None  # clipping commutes with a positive factor only
    inner = parts.factors[0]
    if packet_of(inner) != "aten.matmul" or len(inner.type.shape) != 4:
        return None
    query, key = widened(operand(inner)), _key(operand(inner, 1))
    if key is None or len(query.type.shape) != 4 or len(weights.type.shape) != 3:
        return None
    batch, length, heads, width = query.type.shape
    if not all(map(same, weights.type.shape, (batch, length, heads))):
        return None
    if not all(map(same, key.type.shape, (batch, scores.type.shape[2], width))):
        return None
    return Scores(query, weights, parts.coefficient, key)


def _key(turned: Value) -> Value | None:
    """[B, S, D] of its [B, 1, D, S]."""
    while True:
        name = packet_of(turned)
        if name == "aten.unsqueeze" and len(turned.type.shape) == 4:
            turned = operand(turned)
        elif is_cast(turned) and widened(turned) is not turned and len(turned.type.shape) < 4:
            turned = widened(turned)
        else:
            break
    node = turned.producer
    if node is None or len(turned.type.shape) != 3:
        return None
    swapped = (
        packet_of(turned) == "aten.permute" and tuple(int(d) % 3 for d in node.args[1]) == (0, 2, 1)
    ) or (
        packet_of(turned) == "aten.transpose" and {int(d) % 3 for d in node.args[1:3]} == {1, 2}
    )  # fmt: skip
    return operand(turned) if swapped else None
