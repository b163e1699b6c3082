"""chosen_keys: attention under a mask of the best keys reads those keys and no others.

DeepSeek Sparse Attention as transformers ships it (deepseek_v32) scores every key, scatters the
positions of the best into a mask and attends to all keys under that mask. The scores and the choice
become graphc.lightning_indexer, the attention graphc.sparse_attention: no T x S scores, mask or
expanded key that nobody chose is left.

Absorbed attention (see absorbed_latent) costs more for a key than attention over expanded keys:
where queries see little more than they choose, all keys under a mask are less work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import Dim, as_dim, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import addends
from passes.fusion.lightning_indexer import Scores, choice, chosen_by, index_scores
from passes.fusion.positional_mask import read_mask
from passes.simplify.positions import Positions

aten = torch.ops.aten
#: an additive mask at least this low leaves no weight to what it masks
_LOW = {"float16": -6e4}
_LOW_ENOUGH = -1e30
#: queries from which on they are many
_MANY = 32
_NEGATIONS = frozenset(("aten.logical_not", "aten.bitwise_not"))
_CONJUNCTIONS = frozenset(("aten.logical_and", "aten.bitwise_and"))
_LENGTHENED = frozenset(("aten.unsqueeze", "aten.squeeze", "aten.view", "aten.select"))


@dataclass(frozen=True)
class ChosenKeys:
    """Masks that are added or boolean, over a causal mask or none. Attention stays one over all
    keys where many queries see on average at most `seen` times as many keys as they choose, and
    their mask takes at most `mask_bytes`."""

    seen: float = 2.5
    mask_bytes: int = 1 << 24
    name: ClassVar[str] = "chosen_keys"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Chosen(Positions(Facts(graph)), self)], log)


@dataclass(frozen=True)
class _Found:
    scores: Scores
    count: int
    start: Dim  # the last key that the first query sees
    masked: bool  # attention over all keys under a mask
    plain: Value | None  # the mask that is left where all keys are chosen


@dataclass(frozen=True)
class _Chosen(Rule[_Found]):
    positions: Positions
    options: ChosenKeys

    name = "chosen_keys"
    roots = frozenset(("aten.scaled_dot_product_attention",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        parts = _masked(node.argument("attn_mask"), facts)
        if parts is None:
            return
        base, hidden = parts
        topk = _scattered(hidden, facts)
        if topk is None:
            return
        masked = _masked_scores(topk.args[0], facts)
        if masked is None:
            yield Refused("the scores that keys are chosen by are not masked")
        elif not _alike(_root(masked[1]), _root(base), masked[2], facts):
            yield Refused("scores and attention are masked in different ways")
        else:
            yield self._read(node, topk, masked[0], base, facts)

    def _read(
        self, node: Node, topk: Node, scores: Value, base: Value, facts: Facts
    ) -> _Found | Refused:
        query, key, value = node.args[:3]
        queries, keys = query.type.shape[-2], key.type.shape[-2]
        found = index_scores(scores, facts)
        if found is None:
            return Refused("the scores are no weighted sum of clipped products")
        count = _count(topk.args[1], keys)
        if count is None:
            return Refused(f"the number of chosen keys, {topk.args[1]}, depends on a length")
        if topk.argument("dim") not in (-1, 2) or not topk.argument("largest"):
            return Refused("it does not choose the largest scores of keys")
        if node.argument("dropout_p") != 0 or node.argument("is_causal"):
            return Refused("the attention drops weights, or has another mask")
        if any(rank(x) != 4 for x in (query, key, value)) or not all(
            same(query.type.shape[i], key.type.shape[i]) for i in (0, 1)
        ):
            return Refused("heads of the query share keys")
        if query.type.dtype not in ("float32", "bfloat16", "float16"):
            return Refused(f"queries are {query.type.dtype}")
        start = self._start(_root(base), queries, keys, facts)
        if isinstance(start, Refused):
            return start
        masked = self._masked(query.type.shape, keys, count, start)
        every = isinstance(keys, int) and count >= keys
        return _Found(found, count, start, masked, base if every else None)

    def _masked(self, shape: Sequence[Dim], keys: Dim, count: int, start: Dim) -> bool:
        """Whether attention over all keys is less work."""
        batch, _, queries, _ = shape
        if not all(isinstance(d, int) for d in (batch, queries, keys, start)):
            return False
        seen = sum(min(int(start) + t + 1, int(keys)) for t in range(int(queries)))
        return (
            int(queries) >= _MANY
            and seen <= self.options.seen * count * int(queries)
            and int(batch) * int(queries) * int(keys) <= self.options.mask_bytes
        )

    def _start(self, base: Value, queries: Dim, keys: Dim, facts: Facts) -> Dim | Refused:
        """The last key that the first query sees under a causal mask, or under none."""
        number = facts.number(base)
        if number is not None and number == (1 if base.type.dtype == "bool" else 0):
            if same(queries, 1):
                return as_dim(keys - 1)
            return Refused("many queries see all keys")
        window = read_mask(base, self.positions, facts)
        if window.rest or window.back is not None or window.ahead is None:
            return Refused("what queries may see is not all keys up to a position")
        if not window.sees_a_key(queries, keys):
            return Refused("a query may see no key")
        return window.ahead

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        query, key, value = node.args[:3]
        if found.plain is not None:
            kwargs = {k: v for k, v in node.kwargs.items() if k != "attn_mask"}
            return builder.call(node.op, query, key, value, found.plain, **kwargs)
        start = _starts(builder, query.type.shape[0], found.start)
        indices = choice(builder, found.scores, start, found.count)
        scale: Any = node.argument("scale")
        if scale is None:
            scale = 1 / math.sqrt(int(query.type.shape[-1]))
        if found.masked:
            mask = _as_mask(builder, indices, key.type.shape[2])
            return builder.call(
                torch.ops.graphc.attention.default, query, key, value, mask, scale=float(scale),
                ahead=found.start,
            )  # fmt: skip
        made = builder.call1(
            torch.ops.graphc.sparse_attention.default, query, key, value, indices, start,
            scale=float(scale),
        )  # fmt: skip
        return [builder.call1(aten.permute.default, made, (0, 2, 1, 3))]


def _as_mask(builder: Builder, indices: Value, keys: Dim) -> Value:
    """bool [B, 1, T, S]: the chosen keys. What stands behind the last, -1, becomes 0: a query that
    sees fewer keys than are wanted has chosen all."""
    nothing = builder.call1(
        aten.zeros.default, (*indices.type.shape[:2], keys), dtype=torch.bool
    )  # fmt: skip
    places = builder.call1(aten.clamp.default, indices, 0)
    places = builder.call1(aten._to_copy.default, places, dtype=torch.int64)
    mask = builder.call1(aten.scatter.value, nothing, 2, places, True)
    return builder.call1(aten.unsqueeze.default, mask, 1)


def _starts(builder: Builder, batch: Dim, start: Dim) -> Value:
    """int32 [B]: the same of every sequence."""
    if isinstance(batch, int) and isinstance(start, int):
        return builder.weight("start", torch.full((batch,), start, dtype=torch.int32))
    return builder.call1(aten.full.default, (batch,), start, dtype=torch.int32)


def _low(item: Any, dtype: str, facts: Facts) -> bool:
    number = facts.number(item)
    return number is not None and number <= _LOW.get(dtype, _LOW_ENOUGH)


def _masked(mask: Any, facts: Facts) -> tuple[Value, Value] | None:
    """(what else hides keys, True where a key was not chosen) of the mask of an attention."""
    if packet_of(mask) == "aten.masked_fill":
        base, hidden, fill = mask.producer.args[:3]
        return (base, hidden) if _low(fill, mask.type.dtype, facts) else None
    if packet_of(mask) in _CONJUNCTIONS:
        for base, kept in (mask.producer.args[:2], mask.producer.args[1::-1]):
            if packet_of(kept) in _NEGATIONS and packet_of(_root(operand(kept))) == "aten.scatter":
                return base, operand(kept)
    return None


def _scattered(hidden: Value, facts: Facts) -> Node | None:
    """The topk whose positions alone are False in [B, 1, T, S]."""
    flat = _root(hidden)
    node = flat.producer
    if node is None or node.target != "aten.scatter.value" or rank(flat) != 3:
        return None
    everything, dim, indices, value = node.args[:4]
    if int(dim) % 3 != 2 or facts.number(everything) != 1 or facts.number(value) != 0:
        return None
    batch, queries, keys = flat.type.shape
    if not all(map(same, hidden.type.shape, (batch, 1, queries, keys))):
        return None
    return chosen_by(indices)


def _masked_scores(scores: Value, facts: Facts) -> tuple[Value, Value, bool] | None:
    """(scores [B, T, S], mask, whether it is True where they are hidden) of scores with a mask
    added or filled in."""
    pair = addends(scores)
    if pair is not None:
        first, second = pair
        made = packet_of(_root(first)) == "aten.matmul"
        return (first, second, False) if made else (second, first, False)
    if packet_of(scores) == "aten.masked_fill" and facts.number(operand(scores, 2)) == -math.inf:
        hidden = operand(scores, 1)
        if packet_of(hidden) in _NEGATIONS:
            return operand(scores), operand(hidden), False
        return operand(scores), hidden, True
    return None


def _alike(a: Value, b: Value, inverse: bool, facts: Facts) -> bool:
    """Whether two masks are the same, or constants of the same (or inverse, as a negation that was
    folded) elements in the same order."""
    if inverse:
        one, other = facts.weight(a), facts.weight(b)
        return one is not None and other is not None and torch.equal(~one.ravel(), other.ravel())
    if a is b:
        return True
    number = facts.number(a)
    if number is not None and number == facts.number(b):
        return True
    one, other = facts.weight(a), facts.weight(b)
    return one is not None and other is not None and torch.equal(one.ravel(), other.ravel())


def _count(count: Any, keys: Dim) -> int | None:
    """The number of chosen keys, as far as there are so many."""
    if isinstance(count, sympy.Min):
        known = [a for a in count.args if not same(a, keys)]
        count = known[0] if len(known) == 1 else count
    return int(count) if isinstance(count, (int, sympy.Integer)) else None


def _root(value: Any) -> Any:
    """The value before views that add or drop dimensions of one element."""
    while packet_of(value) in _LENGTHENED:
        source = operand(value)
        wide = [d for d in source.type.shape if not same(d, 1)]
        if [str(d) for d in wide] != [str(d) for d in value.type.shape if not same(d, 1)]:
            break
        value = source
    return value
