"""Causal attention of new tokens over sequences that already have a past of their own length."""

from __future__ import annotations

import torch

from graphc.ops.library import define
from graphc.ops.record_pages import read_rows

_OPTIONS = "float scale, float soft_cap=0., Tensor? sinks=None, SymInt? back=None"


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: torch.Tensor, *,
    scale: float, soft_cap: float, sinks: torch.Tensor | None, back: int | None,
) -> torch.Tensor:  # fmt: skip
    """query [B, H, T, D], key [B, Hk, S, D], value [B, Hk, S, Dv] -> [B, H, T, Dv]."""
    kind = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.to(kind) for x in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    position = start[:, None] + torch.arange(query.shape[2])
    gap = torch.arange(key.shape[2]) - position[:, None, :, None]
    hidden = gap > 0 if back is None else (gap > 0) | (gap < -back)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(kind).expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


def _meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: torch.Tensor, *,
    scale: float, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
    back: int | None = None,
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([query.shape[0], query.shape[2], query.shape[1], value.shape[3]])


@define(f"cached_attention(Tensor query, Tensor key, Tensor value, Tensor start, *, {_OPTIONS}) "
        "-> Tensor", _meta)  # fmt: skip
def cached_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: torch.Tensor, *,
    scale: float, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
    back: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B, T, H, Dv]: query t of sequence b is at position start[b] + t and sees the keys up to
    there, `back` positions behind it at most.

    Args:
        query: [B, H, T, D].
        key, value: [B, Hk, S, D], [B, Hk, S, Dv]; H a multiple of Hk, neighbouring heads share.
        start: int32 [B].
        soft_cap, sinks: as in `graphc::attention`; sinks [H, 1, 1].
    """
    out = _attend(query, key, value, start, scale=scale, soft_cap=soft_cap, sinks=sinks, back=back)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _paged_meta(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: torch.Tensor, *,
    heads: int, width: int, scale: float, soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None, back: int | None = None, format: str = "",
) -> torch.Tensor:  # fmt: skip
    return query.new_empty([query.shape[0], query.shape[2], query.shape[1], width])


@define("paged_attention(Tensor query, Tensor pages, Tensor table, Tensor start, *, int heads, "
        f"int width, {_OPTIONS}, str format='') -> Tensor", _paged_meta)  # fmt: skip
def paged_attention(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: torch.Tensor, *,
    heads: int, width: int, scale: float, soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None, back: int | None = None, format: str = "",
) -> torch.Tensor:  # fmt: skip
    """As `cached_attention`, over rows in pages (`graphc.ops.pages`): a row is the keys of all
    `heads` (D each), then their values (`width` each). Pages [N, P, W] or, faster with few queries
    and possible where `width` is D, [N, 2 * heads, P, D].

    format: of rows in records, bytes in the place of W or D (`graphc.ops.record_pages`)."""
    batch, _, _, size = query.shape
    rows = read_rows(pages, table, query.dtype, format)
    key = rows[..., : heads * size].reshape(batch, -1, heads, size).transpose(1, 2)
    value = rows[..., heads * size :].reshape(batch, -1, heads, width).transpose(1, 2)
    out = _attend(query, key, value, start, scale=scale, soft_cap=soft_cap, sinks=sinks, back=back)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _mask_meta(start: torch.Tensor, length: int, width: int) -> torch.Tensor:
    return start.new_empty([start.shape[0], 1, length, width], dtype=torch.bool)


@define("position_mask(Tensor start, SymInt length, SymInt width) -> Tensor", _mask_meta)
def position_mask(start: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """bool [B, 1, length, width]: query t of sequence b, at position start[b] + t, sees the keys up
    to there."""
    position = start[:, None] + torch.arange(length)
    return torch.arange(width) <= position[:, None, :, None]
