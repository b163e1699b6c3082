"""The short causal convolution in front of linear attention, with the inputs it remembers."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from graphc.ops.library import define

_SCHEMA = (
    "short_convolution(Tensor? state, Tensor x, Tensor weight, Tensor? bias=None, "
    "Tensor? slots=None, *, bool silu=False) -> (Tensor, Tensor)"
)


def _meta(
    state: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, slots: torch.Tensor | None = None, *, silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if state is None:
        after = x.new_empty([x.shape[0], weight.shape[1] - 1, x.shape[2]])
    else:
        after = torch.empty_like(state)
    return x.new_empty(x.shape), after


@define(_SCHEMA, _meta)
def short_convolution(
    state: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, slots: torch.Tensor | None = None, *, silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y[b, t, c] = bias[c] + sum_j weight[c, j] x[b, t - W + 1 + j, c], then SiLU if asked for.

    Args:
        state: [N, W - 1, C], the last inputs of each slot, oldest first; sequence b's is
            state[slots[b]]. Without slots it is [B, W - 1, C]; None: zeros.
        x: [B, T, C].
        weight: [C, W].
        bias: [C].
        slots: int32 [B], different ones.

    Returns (y [B, T, C] of x's dtype, the state after the last token). Sums are float32.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    if state is None:
        before = x.new_zeros([x.shape[0], width - 1, x.shape[2]])
    else:
        before = state if slots is None else state[slots.long()]
    seen = torch.cat([before.to(x.dtype), x], 1)
    y = F.conv1d(
        seen.to(kind).transpose(1, 2), weight.to(kind).unsqueeze(1),
        None if bias is None else bias.to(kind), groups=x.shape[2],
    ).transpose(1, 2)  # fmt: skip
    kept = seen[:, seen.shape[1] - (width - 1) :].clone()
    if state is not None:
        kept = kept.to(state.dtype)
        kept = kept if slots is None else state.index_copy(0, slots.long(), kept)
    return (F.silu(y) if silu else y).to(x.dtype).contiguous(), kept
