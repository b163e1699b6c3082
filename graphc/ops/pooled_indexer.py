"""The indexer of GLM-5.3 over pooled keys: pools of consecutive tokens are scored, not tokens.

A pool of the tokens [j P, (j + 1) P) has one key, per channel a mean of its tokens' keys:

    pooled[j] = sum_p softmax_p(gate[j P + p] + bias[p]) * key[j P + p]

It is made once, when its last token arrives, and kept in pages of one row per pool. Keys and gates
are kept beside it of the last P tokens of a sequence only, in a ring.

A query at position p sees the pools that end at p or before. It is given the tokens of the best
`count` of them, ordered as in `graphc.ops.lightning_indexer`, and the tokens behind its last whole
pool, fewer than P, in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define
from graphc.ops.record_pages import narrowed, read_rows
from graphc.ops.records import record_format


def _pool_meta(
    pages: torch.Tensor, ring: torch.Tensor, key: torch.Tensor, gate: torch.Tensor,
    bias: torch.Tensor, table: torch.Tensor, start: torch.Tensor, slots: torch.Tensor, *,
    format: str = "",
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(pages)


@define("pool_keys(Tensor pages, Tensor ring, Tensor key, Tensor gate, Tensor bias, Tensor table, "
        "Tensor start, Tensor slots, *, str format='') -> Tensor", _pool_meta)  # fmt: skip
def pool_keys(
    pages: torch.Tensor, ring: torch.Tensor, key: torch.Tensor, gate: torch.Tensor,
    bias: torch.Tensor, table: torch.Tensor, start: torch.Tensor, slots: torch.Tensor, *,
    format: str = "",
) -> torch.Tensor:  # fmt: skip
    """The pages with the keys of the pools that the new tokens complete.

    Args:
        pages: [N, R, D], R pools a page (`graphc.ops.pages`, a row is a pool).
        ring: [slots, P, 2 D], as `append_ring` leaves it: [key | gate] of the token at position p
            in row p % P.
        key, gate: [B, T, D] of the tokens at the positions start[b] + t.
        bias: [P, D].
        table: int32 [B, M]; a pool whose page is -1 is not written.
        start, slots: int32 [B].
        format: of pages that hold records, [N, R, bytes] (`graphc.ops.record_pages`).
    """
    out = pages.clone()
    size, rows = bias.shape[0], pages.shape[1]
    kind = torch.promote_types(key.dtype, torch.float32)
    for b in range(key.shape[0]):
        first = int(start[b])
        old = ring[int(slots[b])].to(kind)
        new = torch.cat([key[b], gate[b]], -1).to(kind)
        for pool in range(first // size, (first + key.shape[1]) // size):
            page = int(table[b, pool // rows])
            if page < 0:
                continue
            places = range(pool * size, (pool + 1) * size)
            tokens = torch.stack([old[p % size] if p < first else new[p - first] for p in places])
            keys, gates = tokens.chunk(2, -1)
            shares = torch.softmax(gates + bias.to(kind), 0)
            mean = (shares * keys).sum(0)
            if format:
                mean = record_format(format).encode(mean)
            out[page, pool % rows] = mean.to(pages.dtype)
    return out


def _ring_meta(
    ring: torch.Tensor, rows: Sequence[torch.Tensor], start: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(ring)


@define("append_ring(Tensor ring, Tensor[] rows, Tensor start, Tensor slots) -> Tensor", _ring_meta)
def append_ring(
    ring: torch.Tensor, rows: Sequence[torch.Tensor], start: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """The ring [slots, P, W] with the rows of the last P tokens: that of the token at position p is
    row p % P of its sequence's slot.

    Args:
        rows: [B, T, Wi] each, side by side W wide, of the tokens at the positions start[b] + t;
            converted to the ring's dtype.
        start, slots: int32 [B]; no slot twice.
    """
    out = ring.clone()
    new = torch.cat([part.to(ring.dtype) for part in rows], -1)
    size, length = ring.shape[1], new.shape[1]
    for b in range(new.shape[0]):
        for t in range(max(0, length - size), length):
            out[int(slots[b]), (int(start[b]) + t) % size] = new[b, t]
    return out


def _meta(
    query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, *, count: int, pool: int, format: str = "",
) -> torch.Tensor:  # fmt: skip
    width = count * pool + pool - 1
    return query.new_empty([*query.shape[:2], width], dtype=torch.int32)


@define("pooled_indexer(Tensor query, Tensor weights, Tensor pages, Tensor table, Tensor start, *, "
        "int count, int pool, str format='') -> Tensor", _meta)  # fmt: skip
def pooled_indexer(
    query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, *, count: int, pool: int, format: str = "",
) -> torch.Tensor:  # fmt: skip
    """int32 [B, T, count * pool + pool - 1]: positions of tokens in ascending order, then -1.

    Args:
        query: [B, T, Hi, D].
        weights: [B, T, Hi], any sign.
        pages: [N, R, D], pooled keys of `pool` tokens each, R of them a page.
        table: int32 [B, M].
        start: int32 [B]: query t of sequence b is at position start[b] + t.
        format: of keys in records, [N, R, bytes]; queries are narrowed in the same way.
    """
    if format:
        query = narrowed(query, format)
    key = read_rows(pages, table, query.dtype, format)
    kind = torch.promote_types(query.dtype, torch.float32)
    batch, length = query.shape[:2]
    inside = torch.arange(pool)
    out = query.new_full([batch, length, count * pool + pool - 1], -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(length):
            seen = int(start[b]) + t + 1
            whole = seen // pool
            dots = torch.relu(query[b, t].to(kind) @ key[b, :whole].to(kind).T)
            scores = weights[b, t].to(kind) @ dots + 0.0
            best = torch.sort(scores, descending=True, stable=True).indices[:count]
            tokens = (torch.sort(best).values[:, None] * pool + inside).flatten()
            tokens = torch.cat([tokens, torch.arange(whole * pool, seen)])
            out[b, t, : tokens.shape[0]] = tokens.to(torch.int32)
    return out
