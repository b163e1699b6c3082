"""The parts of a hybrid model that are one operator each, in plain torch and differentiable.

The modules call these by their name in this module, with the arguments and results of the
operators of that name in `graphc.ops`, so that a capture may put an operator in a function's place:
`functional.delta_rule = torch.ops.graphc.delta_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from graphc.models.chunked_delta_rule import NORM_EPS as NORM_EPS
from graphc.models.chunked_delta_rule import delta_rule as delta_rule
from graphc.models.layers import wide

#: queries whose scores, or whose chosen rows, are in memory at a time
_QUERIES = 128


def short_convolution(
    state: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    slots: Tensor | None = None, *, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `graphc::short_convolution`: y[b, t, c] = bias[c] + sum_j weight[c, j] x[b, t-W+1+j, c],
    then SiLU, and the last W - 1 inputs.

    state [N, W-1, C] or None, x [B, T, C], weight [C, W], slots int32 [B] -> (y of x's dtype,
    state).
    """
    width = weight.shape[1]
    if state is None:
        before = x.new_zeros([x.shape[0], width - 1, x.shape[2]])
    else:
        before = state if slots is None else state[slots.long()]
    seen = torch.cat([before.to(x.dtype), x], 1)
    taps, values = wide(weight), wide(seen)
    y = sum((values[:, j : j + x.shape[1]] * taps[:, j] for j in range(1, width)),
            start=values[:, : x.shape[1]] * taps[:, 0])  # fmt: skip
    y = y if bias is None else y + wide(bias)
    kept = seen[:, seen.shape[1] - (width - 1) :]
    if state is not None:
        kept = kept.to(state.dtype)
        kept = kept if slots is None else state.index_copy(0, slots.long(), kept)
    return (F.silu(y) if silu else y).to(x.dtype), kept


def index_scores(
    query: Tensor, weights: Tensor, key: Tensor, first: int, start: Tensor | None
) -> Tensor:
    """sum_h weights[t, h] relu(query[t, h] . key[s]) of the queries t = first.., -inf for keys
    behind them: float32 [B, T, S]. Arguments as in `lightning_indexer`."""
    batch, length, heads, dim = query.shape
    dots = wide(query).reshape(batch, length * heads, dim) @ wide(key).transpose(1, 2)
    dots = F.relu(dots).view(batch, length, heads, key.shape[1])
    scores = (wide(weights).unsqueeze(2) @ dots).squeeze(2)
    return scores.masked_fill(~_visible(first, length, key.shape[1], start), -torch.inf)


def _visible(first: int, length: int, keys: int, start: Tensor | None) -> Tensor:
    """bool [B or 1, T, S]: the keys up to each query's own position."""
    position = torch.arange(first, first + length)[None]
    if start is not None:
        position = position + start[:, None]
    return torch.arange(keys) <= position.unsqueeze(2)


def select(scores: Tensor, count: int) -> Tensor:
    """bool like scores [..., S]: the `count` best by (score descending, position ascending); -inf
    is never chosen."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    last = scores.topk(count, -1).values[..., -1:]
    above = scores > last
    tied = (scores == last) & (scores > -torch.inf)
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def lightning_indexer(
    query: Tensor, weights: Tensor, key: Tensor, start: Tensor | None = None, *, count: int
) -> Tensor:
    """As `graphc::lightning_indexer`: int32 [B, T, count], the positions of the best keys in
    ascending order, then -1.

    query [B, T, Hi, D], weights [B, T, Hi], key [B, S, D] (what `States.append` gave), start
    int32 [B] or None.
    """
    found = []
    last = key.shape[1]
    for first in range(0, query.shape[1], _QUERIES):
        rows = slice(first, first + _QUERIES)
        chosen = select(index_scores(query[:, rows], weights[:, rows], key, first, start), count)
        where = torch.where(chosen, torch.arange(last), last)
        best = where.topk(min(count, last), -1, largest=False).values
        best = torch.where(best == last, -1, best)
        found.append(F.pad(best, [0, count - best.shape[-1]], value=-1))
    return torch.cat(found, 1).to(torch.int32)


def latent_attention(
    query: Tensor, rows: Tensor, start: Tensor | None, indices: Tensor | None = None, *,
    latent: int, scale: float,
) -> Tensor:  # fmt: skip
    """As `graphc::latent_attention`, the pages and their table being one tensor of rows:
    softmax(scale query . row) over the chosen rows, times their first `latent` numbers.

    query [B, T, H, W], rows [B, S, W] (what `States.append` gave), start int32 [B] or None,
    indices int32 [B, T, K] (-1: none) or None for all up to the query -> [B, T, H, latent].
    """
    parts = []
    for first in range(0, query.shape[1], _QUERIES):
        block = query[:, first : first + _QUERIES]
        if indices is None:
            mask = _visible(first, block.shape[1], rows.shape[1], start)
            seen = rows.unsqueeze(1)
        else:
            chosen = indices[:, first : first + _QUERIES].long()
            mask = chosen >= 0
            flat = chosen.clamp(min=0).flatten(1).unsqueeze(2).expand(-1, -1, rows.shape[2])
            seen = rows.gather(1, flat).unflatten(1, chosen.shape[1:])
        parts.append(_attend(block, seen, mask, latent, scale))
    return torch.cat(parts, 1)


def _attend(query: Tensor, rows: Tensor, mask: Tensor, latent: int, scale: float) -> Tensor:
    """query [B, T, H, W], rows [B, T or 1, K, W], mask [B or 1, T, K] -> [B, T, H, latent]."""
    rows = wide(rows)
    scores = wide(query) @ rows.transpose(2, 3) * scale
    weights = torch.softmax(scores.masked_fill(~mask.unsqueeze(2), -torch.inf), -1)
    return (weights @ rows[..., :latent]).to(query.dtype)


def route(
    logits: Tensor, bias: Tensor | None, count: int, groups: int = 1, kept: int = 1,
    score: str = "sigmoid", eps: float | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `graphc::route`: (experts int64 [T, count], their weights float32 [T, count]).

    Scores are the sigmoid (or softmax) of logits [T, E], to which bias [E] is added for the choice
    only; ties go to the lower number. With groups > 1 only experts in the `kept` groups of the
    largest two scores together compete. Weights are divided by their sum + eps, unless that is
    None, and multiplied by scale.
    """
    scores = torch.sigmoid(wide(logits)) if score == "sigmoid" else wide(logits).softmax(-1)
    choice = scores if bias is None else scores + wide(bias)
    if groups > 1:
        by_group = choice.unflatten(1, [groups, -1])
        value = by_group.topk(2, -1).values.sum(-1)
        best = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, :kept]
        allowed = torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True)
        choice = by_group.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
    index = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :count]
    chosen = scores.gather(1, index)
    if eps is not None:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps)
    return index, chosen * scale


def experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `graphc::experts`: y[t] = sum_j weight[t, j] * expert index[t, j] of x[t].

    x [T, D], index [T, K], weight [T, K], gate_up [E, 2 I, D] (the gate's rows first), down
    [E, D, I] -> [T, D].
    """
    order = torch.sort(index.flatten(), stable=True).indices
    counts = torch.bincount(index.flatten(), minlength=gate_up.shape[0]).tolist()
    made = []
    for expert, tokens in enumerate(x[order // index.shape[1]].split(counts)):
        if expert < gate_up.shape[0] and tokens.shape[0]:
            gate, up = wide(F.linear(tokens, gate_up[expert])).chunk(2, -1)
            made.append(wide(F.linear((F.silu(gate) * up).to(x.dtype), down[expert])))
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    rows = torch.cat(made)
    if rows.shape[0] < order.shape[0]:  # the last ones went to no expert
        rows = F.pad(rows, [0, 0, 0, order.shape[0] - rows.shape[0]])
    parts = rows[place].view(*index.shape, -1) * wide(weight).unsqueeze(2)
    return parts.sum(1).to(x.dtype)


def residual_mix(candidates: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """As `graphc::residual_mix`: sum_j softmax_j(query . z_j / sqrt(mean(z_j^2) + eps)) z_j over
    the candidates z_j [..., D]; query [D] with the gain of the keys' norm in it."""
    folded = wide(query)
    z = [wide(c) for c in candidates]
    scores = [(c @ folded) * torch.rsqrt(c.square().mean(-1) + eps) for c in z]
    weights = torch.softmax(torch.stack(scores, -1), -1)
    parts = [weights[..., j, None] * c for j, c in enumerate(z)]
    return sum(parts[1:], start=parts[0]).to(candidates[0].dtype)
