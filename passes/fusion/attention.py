"""attention: softmax(scale * q @ k^T + mask) @ v becomes aten.scaled_dot_product_attention.

The operator never materialises the T x S scores (arXiv:2205.14135). A row in which everything is
masked with -inf is NaN in the written form and zeros in the operator: where a boolean mask may
hold such a row, NaN is put back. Additive masks are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.errors import InternalError
from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import product, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import is_cast, operand, packet_of, rank
from passes.fusion.attention_scores import Additive, Scores, Selective, read_scores
from passes.fusion.attention_sinks import drops_last, read_sinks
from passes.fusion.forms import same_sizes
from passes.fusion.norm import cast
from passes.fusion.positional_mask import read_condition
from passes.simplify.positions import Positions

aten = torch.ops.aten
_SOFTMAX = frozenset(("aten.softmax", "aten._softmax", "aten._safe_softmax"))
_BESIDE = frozenset(("aten.clone", "aten.dropout", "aten.expand", "aten.view", "aten._unsafe_view",
                     "aten.reshape"))  # fmt: skip
#: a finite fill that absorbs any score it is added to, in float32 and bfloat16
_ABSORBING = 1e30


@dataclass(frozen=True)
class Attention:
    """Batched heads in 4-D or merged as [batch * heads, T, D]; masks added or filled in."""

    name: ClassVar[str] = "attention"

    def run(self, graph: Graph, log: Log) -> Graph:
        graph = apply_rules(graph, [_Attention()], log)
        return apply_rules(graph, [_Strided()], log)


@dataclass(frozen=True)
class _Found:
    scores: Scores
    value: Value
    sinks: Value | None
    safe: bool  # no row without weight gives NaN: the softmax is safe, or there are sinks


class _Attention(Rule[_Found]):
    name = "attention"
    roots = frozenset(("aten.matmul", "aten.bmm"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        weights, value = node.args[:2]
        softmax = _softmax(weights)
        if isinstance(softmax, Refused):
            yield softmax
            return
        if softmax is None or rank(value) < 2:
            return
        source = softmax.value.producer
        assert source is not None
        logits, sinks = source.args[0], None
        if softmax.cut:
            sunk = read_sinks(logits)
            if sunk is None or isinstance(sunk, Refused):
                yield sunk or Refused("the last key is left out after the softmax")
                return
            logits, sinks = sunk
        for scores in read_scores(logits, facts):
            if isinstance(scores, Refused):
                yield scores
            elif int(source.args[1]) % rank(softmax.value) != rank(softmax.value) - 1:
                yield Refused("the softmax is taken over another dimension than the keys")
            else:
                safe = sinks is not None or packet_of(softmax.value) == "aten._safe_softmax"
                yield _Found(scores, value, sinks, safe)

    def check(self, found: _Found, facts: Facts) -> Refused | None:
        scores = found.scores
        query, key, value = scores.query, scores.key, found.value
        if len({query.type.dtype, key.type.dtype, value.type.dtype}) > 1:
            return Refused("queries, keys and values have different dtypes")
        general = found.sinks is not None or scores.soft_cap != 0
        if query.type.dtype not in ("float32", "bfloat16", "float16") and not (
            query.type.dtype == "float64" and not general
        ):
            return Refused(f"it is computed in {query.type.dtype}")
        if found.sinks is not None and not same_sizes(
            _spread(found.sinks.type.shape[:-2], scores.batch), scores.batch
        ):
            return Refused("the sinks are not one for each head")
        if not same_sizes(query.type.shape[:-2], key.type.shape[:-2]):
            return Refused("queries and keys are broadcast over batch or heads")
        if rank(value) != rank(query) or not same_sizes(
            query.type.shape[:-2], value.type.shape[:-2]
        ):
            return Refused("values are broadcast over batch or heads")
        if not same(product(scores.batch), product(query.type.shape[:-2])):
            return Refused("the mask adds batch or heads that the queries do not have")
        for mask in scores.masks:
            refused = self._mask(mask, query, facts) or _reshaped(mask, scores.batch)
            if refused is not None:
                return refused
        return None

    @staticmethod
    def _mask(mask: Additive | Selective, query: Value, facts: Facts) -> Refused | None:
        if isinstance(mask, Additive):
            dtype = mask.mask.type.dtype
            if dtype != query.type.dtype and mask.mask.type.dtype in ("float32", "float64"):
                return Refused(f"the mask is {dtype}, the scores {query.type.dtype}")
            return None
        if mask.condition.type.dtype != "bool":
            return Refused(f"the mask is {mask.condition.type.dtype}")
        if mask.fill == -math.inf:
            return None
        bound = 6e4 if query.type.dtype == "float16" else _ABSORBING
        if mask.fill > -bound and not row_alive(mask, facts):
            return Refused(
                f"masked scores become {mask.fill:g}, which a fully masked row would show"
            )
        return None

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        scores, batch = found.scores, found.scores.batch
        query = batched(builder, unmerged(scores.query, batch), batch)
        key = batched(builder, transposed(builder, unmerged(scores.key, batch)), batch)
        value = batched(builder, unmerged(found.value, batch), batch)
        mask = _merged(builder, scores, query.type.dtype)
        args = [query, key, value] + ([] if mask is None else [mask])
        if scores.soft_cap or found.sinks is not None:
            made = builder.call1(
                torch.ops.graphc.attention.default, *args, scale=scores.scale,
                **({"soft_cap": scores.soft_cap} if scores.soft_cap else {}),
                **({} if found.sinks is None else {"sinks": builder.of(found.sinks)}),
            )  # fmt: skip
        else:
            made = builder.call1(
                aten.scaled_dot_product_attention.default, *args, scale=scores.scale
            )
        if not found.safe:
            made = _dead_rows(builder, scores, made)
        if not same_sizes(made.type.shape, node.outputs[0].type.shape):
            made = viewed(builder, made, node.outputs[0].type.shape)
        return [made]


@dataclass(frozen=True)
class _Softmax:
    value: Value
    cut: bool  # without its last column


def _softmax(value: Any) -> _Softmax | Refused | None:
    """The softmax behind what multiplies the values."""
    cut = False
    for _ in range(6):
        name = packet_of(value)
        if name in _SOFTMAX:
            return _Softmax(value, cut) if isinstance(value, Value) else None
        if name in _BESIDE or is_cast(value):
            source = operand(value)
            if name in _BESIDE and not same_sizes(value.type.shape[-2:], source.type.shape[-2:]):
                return None
            value = source
            continue
        if name == "aten.slice" and not cut and drops_last(value):
            value, cut = operand(value), True
            continue
        if name in ("aten.mul", "aten.where", "aten.masked_fill", "aten.div", "aten.add"):
            inner = [a for a in value.producer.args[:3] if isinstance(_softmax_only(a), Value)]
            if inner:
                return Refused("the weights are changed after the softmax: rows do not sum to 1")
        return None
    return None


def _softmax_only(value: Any) -> Value | None:
    while packet_of(value) in _BESIDE or is_cast(value):
        value = operand(value)
    return value if packet_of(value) in _SOFTMAX else None


def transposed(builder: Builder, value: Value) -> Value:
    """The value with its last two dimensions exchanged; a transposition is undone."""
    count = rank(value)
    order = (*range(count - 2), count - 1, count - 2)
    value = builder.of(value)
    if packet_of(value) == "aten.permute":
        inner = tuple(int(d) % count for d in operand(value, 1))
        merged = tuple(inner[d] for d in order)
        source: Value = operand(value)
        if merged == tuple(range(count)):
            return source
        return builder.call1(aten.permute.default, source, merged)
    return builder.call1(aten.permute.default, value, order)


def unmerged(value: Value, batch: Sequence[Any]) -> Value:
    """What a view that joins batch dimensions was made of, where that is in `batch`."""
    source: Value = value
    while packet_of(source) in ("aten.view", "aten._unsafe_view", "aten.reshape"):
        source = operand(source)
        if same_sizes(source.type.shape, (*batch, *value.type.shape[-2:])):
            return source
    return value


def batched(builder: Builder, value: Value, batch: Sequence[Any]) -> Value:
    """The value with its leading dimensions seen as `batch`."""
    value = builder.of(value)
    if same_sizes(value.type.shape[:-2], batch):
        return value
    return viewed(builder, value, (*batch, *value.type.shape[-2:]))


def viewed(builder: Builder, value: Value, shape: Sequence[Any]) -> Value:
    """A view where torch allows one, a reshape otherwise."""
    try:
        return builder.call1(aten.view.default, value, tuple(shape))
    except InternalError:
        return builder.call1(aten.reshape.default, value, tuple(shape))


def row_alive(mask: Selective, facts: Facts) -> bool:
    """Whether every row surely keeps a key, as far as constants, triangles and positions tell."""
    condition, keep = mask.condition, mask.keep
    while packet_of(condition) in ("aten.logical_not", "aten.bitwise_not"):
        condition, keep = operand(condition), not keep
    if rank(condition) >= 2:
        window = read_condition(condition, keep, Positions(facts), facts)
        if window.bounded() and not window.rest:
            return window.sees_a_key(*condition.type.shape[-2:])
    tensor = facts.weight(condition)
    if tensor is not None and tensor.dim() >= 1:
        return bool((tensor if keep else ~tensor).any(-1).all())
    if packet_of(condition) == "aten.tril" and keep:
        diagonal = condition.producer.argument("diagonal")  # type: ignore[union-attr]
        return facts.number(operand(condition)) == 1 and int(diagonal) >= 0
    if packet_of(condition) == "aten.triu" and not keep:
        diagonal = condition.producer.argument("diagonal")  # type: ignore[union-attr]
        return facts.number(operand(condition)) == 1 and int(diagonal) >= 1
    return False


def _spread(shape: Sequence[Any], batch: Sequence[Any]) -> Sequence[Any]:
    """The shape with the sizes of `batch` where it has none or 1."""
    padded = (*[1] * (len(batch) - len(shape)), *shape)
    return [b if a == 1 else a for a, b in zip(padded, batch, strict=False)]


def _plane(mask: Additive | Selective) -> Value:
    return mask.mask if isinstance(mask, Additive) else mask.condition


def _reshaped(mask: Additive | Selective, batch: Sequence[Any]) -> Refused | None:
    """Why a mask of scores in one shape cannot be seen as one of scores in another, or None."""
    own = _plane(mask).type.shape[:-2]
    if same_sizes(mask.batch, batch) or all(d == 1 for d in own) or same_sizes(own, mask.batch):
        return None
    return Refused("masks apply to the scores in two shapes")


def _in_batch(builder: Builder, mask: Additive | Selective, batch: Sequence[Any]) -> Value:
    """The mask's tensor, as scores of these batch sizes take it."""
    value = builder.of(_plane(mask))
    own = value.type.shape
    if same_sizes(mask.batch, batch) or len(own) <= 2:
        return _shaped(builder, value)
    if all(d == 1 for d in own[:-2]):
        return viewed(builder, value, own[-2:])
    return viewed(builder, value, (*batch, *own[-2:]))


def _kept(builder: Builder, mask: Selective, batch: Sequence[Any]) -> Value:
    """True where the scores stay."""
    condition = _in_batch(builder, mask, batch)
    return condition if mask.keep else builder.call1(aten.logical_not.default, condition)


def _merged(builder: Builder, scores: Scores, dtype: str) -> Value | None:
    """One mask for the operator: boolean if there is only one -inf fill, else additive."""
    masks = scores.masks
    if len(masks) == 1 and isinstance(masks[0], Selective) and masks[0].fill == -math.inf:
        return _kept(builder, masks[0], scores.batch)
    total: Value | None = None
    for mask in masks:
        if isinstance(mask, Additive):
            part = cast(builder, _in_batch(builder, mask, scores.batch), dtype)
            if mask.factor != 1:
                part = builder.call1(aten.mul.Scalar, part, mask.factor)
        else:
            kind = getattr(torch, dtype)
            zero = builder.call1(aten.scalar_tensor.default, 0.0, dtype=kind)
            fill = builder.call1(aten.scalar_tensor.default, mask.fill, dtype=kind)
            part = builder.call1(aten.where.self, _kept(builder, mask, scores.batch), zero, fill)
        total = part if total is None else builder.call1(aten.add.Tensor, total, part)
    return total


def _shaped(builder: Builder, mask: Value) -> Value:
    """At least [1, S]."""
    missing = 2 - rank(mask)
    if missing <= 0:
        return mask
    return viewed(builder, mask, (*[1] * missing, *mask.type.shape))


def _dead_rows(builder: Builder, scores: Scores, made: Value) -> Value:
    """NaN in rows that a boolean mask of -inf empties, as softmax gives it."""
    facts = Facts(builder.graph)
    for mask in scores.masks:
        if not isinstance(mask, Selective) or mask.fill != -math.inf or row_alive(mask, facts):
            continue
        kept = _kept(builder, mask, scores.batch)
        alive = builder.call1(aten.any.dim, kept, -1, True)
        nan = builder.call1(
            aten.scalar_tensor.default, math.nan, dtype=getattr(torch, made.type.dtype)
        )
        made = builder.call1(aten.where.self, alive, made, nan)
    return made


class _Strided(Rule[tuple[Any, ...]]):
    """Attention reads its operands with their strides: copies that only pack them are left out."""

    name = "strided_operands"
    roots = frozenset(("aten.scaled_dot_product_attention", "graphc.attention"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[tuple[Any, ...] | Refused]:
        operands = tuple(_unpacked(a) for a in node.args[:3])
        if any(a is not b for a, b in zip(operands, node.args, strict=False)):
            yield operands

    def rewrite(self, builder: Builder, found: tuple[Any, ...], node: Node) -> Sequence[Value]:
        return builder.call(node.op, *found, *node.args[3:], **dict(node.kwargs))


def _unpacked(value: Value) -> Value:
    while packet_of(value) in ("aten.clone", "aten.contiguous"):
        source: Value = operand(value)
        if packet_of(source) == "aten.expand":
            return value  # a repetition that grouped_query may take
        value = source
    return value
