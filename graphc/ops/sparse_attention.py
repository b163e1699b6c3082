"""Attention over chosen keys (DeepSeek Sparse Attention), with expanded heads as models write it
and over the latent rows that are really kept (absorbed form: one key for all heads).

A row that is given no key is zero.
"""

from __future__ import annotations

import torch

from graphc.ops.library import define
from graphc.ops.record_pages import read_rows


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor,
    start: torch.Tensor | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    """query [B, H, T, D], key [B, H, S, D], value [B, H, S, Dv], indices [B, T, K]."""
    kind = torch.promote_types(query.dtype, torch.float32)
    batch, _, length, _ = query.shape
    position = torch.arange(length).expand(batch, length)
    if start is not None:
        position = position + start[:, None]
    chosen = indices.long()
    seen = (chosen >= 0) & (chosen <= position[:, :, None])
    mask = query.new_zeros([batch, length, key.shape[2] + 1], dtype=torch.bool)
    mask.scatter_(2, torch.where(seen, chosen, key.shape[2]), True)
    mask = mask[:, None, :, : key.shape[2]]
    scores = (query.to(kind) @ key.to(kind).transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return weights @ value.to(kind)


def _meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor,
    start: torch.Tensor | None = None, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([query.shape[0], query.shape[2], query.shape[1], value.shape[3]])


@define("sparse_attention(Tensor query, Tensor key, Tensor value, Tensor indices, "
        "Tensor? start=None, *, float scale) -> Tensor", _meta)  # fmt: skip
def sparse_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor,
    start: torch.Tensor | None = None, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """softmax over the chosen keys of scale * query @ key^T, times value: [B, T, H, Dv].

    Args:
        query: [B, H, T, D].
        key, value: [B, H, S, D], [B, H, S, Dv].
        indices: int32 [B, T, K], different positions below S; -1, and positions after the query's
            own, are left out.
        start: int32 [B]: query t of sequence b is at position start[b] + t; None: 0.
    """
    out = _attend(query, key, value, indices, start, scale)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _latent_meta(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: torch.Tensor,
    indices: torch.Tensor | None = None, rope: torch.Tensor | None = None, *, latent: int,
    scale: float, format: str = "",
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([*query.shape[:3], latent])


@define("latent_attention(Tensor query, Tensor pages, Tensor table, Tensor start, "
        "Tensor? indices=None, Tensor? rope=None, *, int latent, float scale, "
        "str format='') -> Tensor", _latent_meta)  # fmt: skip
def latent_attention(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: torch.Tensor,
    indices: torch.Tensor | None = None, rope: torch.Tensor | None = None, *, latent: int,
    scale: float, format: str = "",
) -> torch.Tensor:  # fmt: skip
    """The absorbed form of latent attention (DeepSeek-V2, arXiv:2405.04434) over paged rows
    [latent | rope], which all heads share: keys are whole rows, values their latent part.

    Args:
        query: [B, T, H, W], [absorbed | rope] parts as the rows.
        pages, table, start: rows of W numbers, see `graphc.ops.pages`; query t of sequence b is at
            position start[b] + t and sees the rows up to there.
        indices: int32 [B, T, K], different positions; -1 and later ones are left out. None: all.
        rope: what stands behind the rows, in pages of its own [N, P, R]; rows are of W - R then.
        latent: width of the values.
        format: of rows in records, pages being [N, P, bytes] (`graphc.ops.record_pages`).

    Returns [B, T, H, latent].
    """
    rows = read_rows(pages, table, query.dtype, format)
    if rope is not None:
        rows = torch.cat([rows, torch.ops.graphc.read_pages(rope, table, 0, rope.shape[2])], -1)
    if indices is None:
        every = torch.arange(rows.shape[1], dtype=torch.int32)
        indices = every.expand(query.shape[0], query.shape[1], rows.shape[1])
    key = rows[:, None].expand(-1, query.shape[2], -1, -1)
    out = _attend(query.transpose(1, 2), key, key[..., :latent], indices, start, scale)
    return out.transpose(1, 2).to(query.dtype).contiguous()
