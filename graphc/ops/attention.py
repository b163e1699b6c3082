"""Attention with what torch's scaled_dot_product_attention lacks: windows, sinks, capped scores."""

from __future__ import annotations

import torch

from graphc.ops.library import define

_SCHEMA = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, float scale, "
    "float soft_cap=0., Tensor? sinks=None, SymInt? back=None, SymInt? ahead=None, "
    "bool enable_gqa=False) -> Tensor"
)


def _meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, *, scale: float, soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None, back: int | None = None, ahead: int | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    shape = [*query.shape[:-1], value.shape[-1]]
    if len(shape) != 4:
        return query.new_empty(shape)
    batch, heads, length, width = shape  # heads side by side in memory, as torch's operator
    return query.new_empty([batch, length, heads, width]).transpose(1, 2)


@define(_SCHEMA, _meta)
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, *, scale: float, soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None, back: int | None = None, ahead: int | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(soft_cap * tanh(scale * query @ key^T / soft_cap) + attn_mask) @ value.

    query [*, T, D], key [*, S, D], value [*, S, Dv] of one floating dtype -> [*, T, Dv].

    Args:
        attn_mask: bool (True: keep) or an addend, broadcast to [*, T, S].
        soft_cap: 0 leaves the scores as they are (arXiv:2408.00118).
        sinks: [*, 1, 1], one more score for each head, whose weight is dropped (arXiv:2309.17453).
        back, ahead: query i sees the keys i - back to i + ahead; None: no bound.
        enable_gqa: key and value have fewer heads, each for neighbouring heads of the query.

    A row that sees no key is zero, unlike a softmax over -inf.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(kind) for x in (query, key, value))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    hidden = -torch.inf
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, hidden)
    elif attn_mask is not None:
        scores = scores + attn_mask
    gap = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    if back is not None:
        scores = scores.masked_fill(gap < -back, hidden)
    if ahead is not None:
        scores = scores.masked_fill(gap > ahead, hidden)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(kind).expand(*scores.shape[:-1], 1)], -1)
    empty = (scores == hidden).all(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)[..., : k.shape[-2]]
    out = _meta(query, key, value, scale=scale)
    out.copy_(weights @ v)
    return out
