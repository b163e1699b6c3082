"""absorbed_latent: attention over latent rows without expanding keys and values per head.

Latent attention (DeepSeek-V2, arXiv:2405.04434) keeps one row [latent | rope] per token and makes
keys and values of all heads from it, key = [Wk_h latent | rope], value = Wv_h latent. The products
move to the other side: a query is multiplied by Wk_h once, attention runs over the rows themselves,
and its result is multiplied by Wv_h. For few queries, or chosen keys, that is far less work; for
many queries over all keys it is more, so such attention stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import Dim, as_dim, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of
from passes.fusion.dense_rows import DenseRows, dense_rows
from passes.fusion.paged_rows import (
    Rows,
    base_of,
    heads_of_rows,
    laid_out,
    read_rows,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class AbsorbedLatent:
    """Sparse attention over rows in pages or in tensors, and attention of one token over pages."""

    name: ClassVar[str] = "absorbed_latent"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Absorbed()], log)


@dataclass(frozen=True)
class _Found:
    rows: Rows | DenseRows
    weight: torch.Tensor  # [H * (n + v), L]
    nope: int
    rope: int
    value: int


class _Absorbed(Rule[_Found]):
    name = "absorbed_latent"
    roots = frozenset(("graphc.sparse_attention", "graphc.cached_attention"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        query, key, value = node.args[:3]
        keys, rope = _parts(key)
        made_keys, made_values = _piece(keys), _piece(value)
        if made_keys.source is not made_values.source:
            return
        linear = base_of(made_keys.source)
        if packet_of(linear) != "aten.linear":
            return
        rows: Rows | DenseRows | None = read_rows(base_of(operand(linear)))
        if rows is None and packet_of(node.outputs[0]) == "graphc.sparse_attention":
            rows = dense_rows(operand(linear), rope, node)
        if rows is None:
            return
        weight = facts.weight(operand(linear, 1))
        refusal = _refusal(node, query, key, linear, rows, weight)
        nope, width = made_keys.width, made_values.width
        if refusal is None and (made_keys.offset, made_values.offset) != (0, nope):
            refusal = "a head's key and value do not stand one behind the other"
        if refusal is None and not _is_expansion(made_keys.source, linear, nope + width):
            refusal = "the heads are laid out in another way"
        rope_width = 0
        if rope is not None:
            rope_width = int(rope.type.shape[3])
        if refusal is None and isinstance(rows, Rows):
            refusal = _other_row(rope, rows, rope_width)
        if refusal is not None:
            yield Refused(refusal)
            return
        assert weight is not None
        yield _Found(rows, weight, nope, rope_width, width)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        query = node.args[0]
        heads = int(query.type.shape[1])
        latent = found.rows.width
        weight = found.weight.reshape(heads, found.nope + found.value, latent)
        down = builder.weight("absorbed_key", weight[:, : found.nope].contiguous())
        up = builder.weight("absorbed_value", weight[:, found.nope :].transpose(1, 2).contiguous())
        plain = query
        if found.rope:
            plain = builder.call1(aten.slice.Tensor, query, 3, 0, found.nope)
        asked = _by_head(builder, builder.call1(aten.permute.default, plain, (0, 2, 1, 3)), down)
        if found.rope:
            turned = builder.call1(aten.slice.Tensor, query, 3, found.nope, found.nope + found.rope)
            turned = builder.call1(aten.permute.default, turned, (0, 2, 1, 3))
            asked = builder.call1(aten.cat.default, (asked, turned), -1)
        sparse = packet_of(node.outputs[0]) == "graphc.sparse_attention"
        places = (node.argument("start"), node.argument("indices") if sparse else None)
        if isinstance(found.rows, Rows):
            source: tuple[Any, ...] = (found.rows.pages, found.rows.table, *places)
            keywords = found.rows.keywords
        else:
            source, keywords = found.rows.places(builder, *places), {}
        seen = builder.call1(
            torch.ops.graphc.latent_attention.default, asked, *source, latent=latent,
            scale=node.argument("scale"), **keywords,
        )  # fmt: skip
        return [_by_head(builder, seen, up)]


@dataclass(frozen=True)
class _Piece:
    """Elements [offset, offset + width) of the last dimension of `source`."""

    source: Value
    offset: int
    width: int


def _piece(value: Value) -> _Piece:
    width = value.type.shape[-1]
    size = width if isinstance(width, int) else -1
    node, name = value.producer, packet_of(value)
    if node is not None and name == "aten.split_with_sizes" and _last(node.argument("dim"), value):
        return _Piece(node.args[0], sum(map(int, node.args[1][: value.index])), size)
    if node is not None and name == "aten.slice" and _last(node.argument("dim"), value):
        begin = node.argument("start") or 0
        if node.argument("step") == 1 and isinstance(begin, int) and begin >= 0:
            return _Piece(node.args[0], begin, size)
    return _Piece(value, 0, size)


def _last(dim: Any, value: Value) -> bool:
    return int(dim) % len(value.type.shape) == len(value.type.shape) - 1


def _parts(key: Value) -> tuple[Value, Value | None]:
    """(what is made of the latent, what is shared by all heads) of a key."""
    node = key.producer
    if node is None or packet_of(key) != "aten.cat" or not _last(node.argument("dim"), key):
        return key, None
    parts: tuple[Value, ...] = node.args[0]
    return (parts[0], parts[1]) if len(parts) == 2 else (key, None)


def _refusal(
    node: Node, query: Value, key: Value, linear: Value, rows: Rows | DenseRows,
    weight: torch.Tensor | None,
) -> str | None:  # fmt: skip
    length = query.type.shape[2]
    call = linear.producer
    assert call is not None
    if node.argument("start") is None:
        return "the positions of queries are not told"
    if packet_of(node.outputs[0]) == "graphc.cached_attention":
        if not same(length, 1):
            return "many queries see all keys: expanding the keys is less work"
        if node.argument("soft_cap") or node.argument("sinks") or node.argument("back") is not None:
            return "its scores are changed, or bounded by a window"
    elif not isinstance(node.argument("indices").type.shape[-1], int):
        return "whether all keys are chosen depends on a length"
    if weight is None or call.argument("bias") is not None:
        return "keys and values are no plain product of a constant and the rows"
    if not same(query.type.shape[1], key.type.shape[1]):
        return "heads of the query share keys"
    if isinstance(rows, Rows) and (
        rows.offset != 0 or not heads_of_rows(_four(operand(linear)), rows, 1, rows.width)
    ):
        return "the latent is a part of the rows"
    return None


def _four(value: Value) -> Value:
    """The operand of the expansion before views that only add a dimension of one."""
    while packet_of(value) in ("aten.view", "aten.unsqueeze", "aten.squeeze") and (
        len(value.type.shape) != 4
    ):
        value = operand(value)
    return value


def _is_expansion(source: Value, linear: Value, width: int) -> bool:
    """Whether `source` is [B, H, S, width] of the linear's rows [..., H * width]."""
    batch, heads, length, size = source.type.shape
    whole = as_dim(heads * width)
    return same(size, width) and same(linear.type.shape[-1], whole) and laid_out(
        source, (batch, heads, length, width), (as_dim(length * whole), width, whole, 1)
    )  # fmt: skip


def _other_row(rope: Value | None, rows: Rows, width: int) -> str | None:
    """Why the shared part of the keys is not the rest of the rows."""
    if not same(rows.whole, rows.width + width):
        return "rows hold more than latent and rope"
    if rope is None:
        return None
    shared = operand(rope) if packet_of(rope) == "aten.expand" else rope
    found = read_rows(base_of(shared))
    if found is None or found.pages is not rows.pages or found.table is not rows.table:
        return "the part that all heads share is not in the same rows"
    if found.offset != rows.width or found.width != width:
        return "the part that all heads share does not stand behind the latent"
    return None if heads_of_rows(shared, found, 1, width) else "the shared part is rearranged"


def _by_head(builder: Builder, x: Value, weight: Value) -> Value:
    """x [B, T, H, K] times weight [H, K, N], head by head: [B, T, H, N]."""
    batch, length, heads, size = x.type.shape
    width = weight.type.shape[2]
    rows: Dim = as_dim(batch * length)
    turned = builder.call1(aten.permute.default, x, (2, 0, 1, 3))
    flat = builder.call1(aten.reshape.default, turned, (heads, rows, size))
    made = builder.call1(aten.bmm.default, flat, weight)
    split = builder.call1(aten.view.default, made, (heads, batch, length, width))
    return builder.call1(aten.permute.default, split, (1, 2, 0, 3))
