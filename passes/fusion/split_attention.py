"""split_attention: attention over keys in parts (a cache and the new tokens), joined at the scores,
becomes attention over the joined keys and values.

cat([q @ k1^T, q @ k2^T]) -> softmax -> p[..., :n] @ v1 + p[..., n:] @ v2 is q @ cat([k1, k2])^T ->
softmax -> p @ cat([v1, v2]): the same numbers, rounded once instead of per part. The pass
attention takes it from there, and its kernels read the parts where they lie: nothing is joined in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import Dim, as_dim, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import is_cast, operand, packet_of, rank
from passes.fusion.attention import transposed
from passes.fusion.forms import addends, product, same_sizes

aten = torch.ops.aten
_PRODUCTS = frozenset(("aten.matmul", "aten.bmm"))
_SOFTMAX = frozenset(("aten.softmax", "aten._softmax", "aten._safe_softmax"))
_BESIDE = frozenset(("aten.clone", "aten.dropout"))
_BETWEEN = frozenset(f"aten.{n}" for n in (
    "mul", "div", "true_divide", "add", "sub", "where", "masked_fill", "neg", "tanh", "clone",
)) | _BESIDE  # fmt: skip
_DEPTH = 12


@dataclass(frozen=True)
class SplitAttention:
    """Two parts or more; a part of one key may be written as a product of its weight and value."""

    name: ClassVar[str] = "split_attention"

    def run(self, graph: Graph, log: Log) -> Graph:
        facts = Facts(graph)
        sums: dict[Node, _Values | Refused] = {}
        cats: dict[Node, _Scores] = {}
        for node in graph.nodes:
            values = _read_sum(node, facts)
            if isinstance(values, _Values):
                scores = _read_scores(values.weights, facts)
                if isinstance(scores, _Scores):
                    cats[scores.cat] = scores
                elif scores is None:
                    continue
                else:
                    values = scores
            if values is not None:
                sums[node] = values
        if not sums:
            return graph
        return apply_rules(graph, [_JoinScores(cats), _JoinValues(sums)], log)


@dataclass(frozen=True)
class _Values:
    """weights @ cat(values): the weights [*, T, S] in slices, times values [*, S_i, Dv] each."""

    weights: Value
    values: tuple[Value, ...]


@dataclass(frozen=True)
class _Scores:
    """factor * query @ cat(keys): keys [*, D, S_i] as the products read them."""

    cat: Node
    query: Value
    keys: tuple[Value, ...]
    factor: float


@dataclass(frozen=True)
class _Term:
    start: Dim
    length: Dim
    weights: Value
    value: Value


def _read_sum(node: Node, facts: Facts) -> _Values | Refused | None:
    result = node.outputs[0]
    terms = list(_terms(result))
    if len(terms) < 2 or any(addends(r.outputs[0]) for r in facts.readers(result)):
        return None
    parts = [_term(term) for term in terms]
    known = [part for part in parts if part is not None]
    if not known or _softmax(known[0].weights) is None:
        return None
    weights = known[0].weights
    if len(known) < len(parts) or any(part.weights is not weights for part in known):
        return Refused("other terms are added to the weighted values")
    batch = known[0].value.type.shape[:-2]
    width = known[0].value.type.shape[-1]
    if any(
        not same_sizes(part.value.type.shape[:-2], batch)
        or not same(part.value.type.shape[-1], width)
        for part in known
    ):
        return Refused("the values of the parts have different batch sizes or widths")
    ordered: list[_Term] = []
    end: Dim = 0
    while len(ordered) < len(known):
        following = [p for p in known if same(p.start, end) and p not in ordered]
        if not following:
            return Refused("the parts leave out weights, or take some twice")
        ordered.append(following[0])
        end = as_dim(end + following[0].length)
    if not same(end, weights.type.shape[-1]):
        return Refused("the parts leave out weights, or take some twice")
    return _Values(weights, tuple(part.value for part in ordered))


def _terms(value: Value) -> Iterator[Value]:
    pair = addends(value)
    if pair is None or not all(isinstance(item, Value) for item in pair):
        yield value
        return
    for item in pair:
        yield from _terms(item)


def _term(value: Value) -> _Term | None:
    """A slice of weights times values, as a product of matrices or, of one key, of elements."""
    name = packet_of(value)
    if name in _PRODUCTS:
        part, values = value.producer.args[:2]  # type: ignore[union-attr]
    elif name == "aten.mul":
        part, values = value.producer.args[:2]  # type: ignore[union-attr]
        if packet_of(values) == "aten.slice":
            part, values = values, part
    else:
        return None
    if not isinstance(values, Value) or packet_of(part) != "aten.slice":
        return None
    if rank(values) != rank(part) or rank(part) != len(value.type.shape):
        return None
    if part.type.dtype != values.type.dtype or part.type.dtype != value.type.dtype:
        return None
    length = part.type.shape[-1]
    if name == "aten.mul" and not (length == 1 and values.type.shape[-2] == 1):
        return None
    if not same_sizes(part.type.shape[:-2], values.type.shape[:-2]):
        return None
    node = part.producer
    assert node is not None
    source = operand(part)
    if int(node.argument("dim")) % rank(source) != rank(source) - 1 or node.argument("step") != 1:
        return None
    start = node.argument("start") or 0
    if isinstance(start, int) and start < 0:
        start = as_dim(source.type.shape[-1] + start)
    return _Term(start, length, source, values)


def _softmax(value: Any) -> Value | None:
    """The softmax over the last dimension behind weights."""
    for _ in range(6):
        if packet_of(value) in _SOFTMAX:
            last = int(value.producer.args[1]) % rank(value) == rank(value) - 1
            return value if last else None
        if packet_of(value) not in _BESIDE and not is_cast(value):
            return None
        value = operand(value)
    return None


def _read_scores(weights: Value, facts: Facts) -> _Scores | Refused | None:
    softmax = _softmax(weights)
    assert softmax is not None
    cat = _joined(operand(softmax), _DEPTH)
    if cat is None:
        return None
    if not same_sizes(cat.outputs[0].type.shape, softmax.type.shape):
        return Refused("the scores are reshaped between the parts and the softmax")
    found = [_scores_of(part, facts) for part in cat.args[0]]
    query, _, factor = found[0]
    if any(q is not query or f != factor for q, _, f in found):
        return Refused("the parts of the scores have different queries or scales")
    keys = tuple(key for _, key, _ in found)
    ranks = {rank(query), *(rank(key) for key in keys)}
    batches = [query.type.shape[:-2], *(key.type.shape[:-2] for key in keys)]
    if len(ranks) > 1 or not all(same_sizes(batches[0], other) for other in batches):
        return Refused("queries and keys are broadcast over batch or heads")
    return _Scores(cat, query, keys, factor)


def _joined(value: Any, depth: int) -> Node | None:
    """The concatenation of scores behind what the softmax takes."""
    if not isinstance(value, Value) or value.producer is None or depth == 0:
        return None
    node = value.producer
    if packet_of(value) == "aten.cat":
        last = int(node.argument("dim")) % rank(value) == rank(value) - 1
        parts = [p for p in node.args[0] if _product_behind(p)]
        return node if last and len(parts) == len(node.args[0]) else None
    if packet_of(value) in _BETWEEN or is_cast(value):
        for item in node.args[:3]:
            found = _joined(item, depth - 1)
            if found is not None:
                return found
    return None


def _product_behind(value: Value) -> bool:
    while packet_of(value) in ("aten.mul", "aten.div"):
        first, second = value.producer.args[:2]  # type: ignore[union-attr]
        value = first if isinstance(first, Value) and rank(first) else second
    return packet_of(value) in _PRODUCTS


def _scores_of(value: Value, facts: Facts) -> tuple[Value, Value, float]:
    """(query, key, factor) of factor * query @ key; anything else is its own query."""
    found = product(value, facts)
    if len(found.factors) == 1 and packet_of(found.factors[0]) in _PRODUCTS:
        whole = found.factors[0]
        if whole.type.dtype == value.type.dtype and whole.type.shape == value.type.shape:
            query, key = whole.producer.args[:2]  # type: ignore[union-attr]
            return query, key, found.coefficient
    return value, value, 1.0


class _JoinScores(Rule[_Scores]):
    name = "split_attention"
    roots = frozenset(("aten.cat",))

    def __init__(self, found: Mapping[Node, _Scores]) -> None:
        self.found = found

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Scores | Refused]:
        if node in self.found:
            yield self.found[node]

    def rewrite(self, builder: Builder, found: _Scores, node: Node) -> Sequence[Value]:
        keys = tuple(transposed(builder, key) for key in found.keys)
        joined = builder.call1(aten.cat.default, keys, -2)
        made = builder.call1(aten.matmul.default, found.query, transposed(builder, joined))
        if found.factor != 1:
            made = builder.call1(aten.mul.Tensor, made, found.factor)
        return [made]


class _JoinValues(Rule[_Values]):
    name = "split_attention"
    roots = frozenset(("aten.add",))

    def __init__(self, found: Mapping[Node, _Values | Refused]) -> None:
        self.found = found

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Values | Refused]:
        if node in self.found:
            yield self.found[node]

    def rewrite(self, builder: Builder, found: _Values, node: Node) -> Sequence[Value]:
        joined = builder.call1(aten.cat.default, found.values, -2)
        return [builder.call1(aten.matmul.default, found.weights, joined)]
