"""The Lightning Indexer of DeepSeek Sparse Attention (DeepSeek-V3.2): a cheap score of every key,
and the keys that attention will read.

    I[t, s] = sum_h weights[t, h] * relu(query[t, h] . key[s])       for s <= position of t

Scores are ordered by (score descending, position ascending), -0 counting as 0: which keys are
chosen does not depend on how many there are, so that prefill, chunks and decode agree.
"""

from __future__ import annotations

import math

import torch

from graphc.ops.library import define
from graphc.ops.record_pages import narrowed, read_rows

#: candidates more than are chosen, at least
MORE = 64


def candidates_for(count: int, factor: float) -> int:
    """How many keys first terms choose, among which both choose `count`: `factor` times as many,
    and at least `MORE` more. Of few keys among many, noise moves more than a share of them."""
    return max(math.ceil(factor * count), count + MORE)


def _choose(
    query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, start: torch.Tensor | None,
    count: int,
) -> torch.Tensor:  # fmt: skip
    batch, length = query.shape[:2]
    kind = torch.promote_types(query.dtype, torch.float32)
    out = query.new_full([batch, length, count], -1, dtype=torch.int32)
    for b in range(batch):
        first = 0 if start is None else int(start[b])
        for t in range(length):
            seen = key[b, : first + t + 1].to(kind)
            dots = torch.relu(query[b, t].to(kind) @ seen.T)
            scores = weights[b, t].to(kind) @ dots + 0.0
            best = torch.sort(scores, descending=True, stable=True).indices[:count]
            out[b, t, : best.shape[0]] = torch.sort(best).values.to(torch.int32)
    return out


def _meta(
    query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor,
    start: torch.Tensor | None = None, *, count: int,
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([*query.shape[:2], count], dtype=torch.int32)


@define("lightning_indexer(Tensor query, Tensor weights, Tensor key, Tensor? start=None, *, "
        "int count) -> Tensor", _meta)  # fmt: skip
def lightning_indexer(
    query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor,
    start: torch.Tensor | None = None, *, count: int,
) -> torch.Tensor:  # fmt: skip
    """int32 [B, T, count]: positions of the best keys in ascending order, then -1.

    Args:
        query: [B, T, Hi, D].
        weights: [B, T, Hi], any sign.
        key: [B, S, D], one for all heads.
        start: int32 [B]: query t of sequence b is at position start[b] + t and sees the keys up
            to there; None: 0.
    """
    return _choose(query, weights, key, start, count)


def _paged_meta(
    query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, *, count: int, format: str = "", candidates: int = 0,
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([*query.shape[:2], count], dtype=torch.int32)


@define("paged_lightning_indexer(Tensor query, Tensor weights, Tensor pages, Tensor table, "
        "Tensor start, *, int count, str format='', int candidates=0) -> Tensor",
        _paged_meta)  # fmt: skip
def paged_lightning_indexer(
    query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, *, count: int, format: str = "", candidates: int = 0,
) -> torch.Tensor:  # fmt: skip
    """As `lightning_indexer`, over keys in pages [N, P, D] (`graphc.ops.pages`); the positions are
    those in the sequence, not in the pool.

    Args:
        format: of keys in records, [N, P, bytes] (`graphc.ops.record_pages`); the queries are
            narrowed in the same way.
        candidates: so many are chosen like that, and `count` of them by the queries as they are
            and both terms of the keys, in pages [N, 2, P, bytes] then.
    """
    if not format:
        return _choose(query, weights, read_rows(pages, table, query.dtype, ""), start, count)
    first, second = pages, None
    if candidates:
        first, second = pages[:, 0].contiguous(), pages[:, 1].contiguous()
    key = read_rows(first, table, torch.float32, format)
    most = candidates or count
    chosen = _choose(narrowed(query, format), weights, key.to(query.dtype), start, most)
    if second is None:
        return chosen
    key = (key + read_rows(second, table, torch.float32, format)).to(query.dtype)
    out = chosen.new_full([*chosen.shape[:2], count], -1)
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            among = chosen[b, t][chosen[b, t] >= 0]
            place = torch.tensor([len(among) - 1], dtype=torch.int32)
            best = _choose(query[b : b + 1, t : t + 1], weights[b : b + 1, t : t + 1],
                           key[b : b + 1, among.long()], place, count)[0, 0]  # fmt: skip
            kept = best[best >= 0].long()
            out[b, t, : len(kept)] = among[kept]
    return out
