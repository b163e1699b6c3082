"""Linear attention with the delta rule: Kimi Delta Attention (arXiv:2510.26692) and Gated DeltaNet
(arXiv:2412.06464), whose states forget by key channel and by head.

For each value head, t = 1 .. T, from the state S [K, V]:

    S' = diag(exp g_t) S,  u_t = beta_t (v_t - S'^T k_t),  S = S' + k_t u_t^T,  o_t = scale S^T q_t
"""

from __future__ import annotations

import torch

from graphc.ops.library import define

_SCHEMA = (
    "delta_rule(Tensor? state, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, "
    "Tensor? slots=None, *, float scale, bool normalize=False, float? strength=None) "
    "-> (Tensor, Tensor)"
)
#: under the root of the sum of squares, as in fla and transformers
NORM_EPS = 1e-6


def _meta(
    state: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    decay: torch.Tensor, beta: torch.Tensor, slots: torch.Tensor | None = None, *, scale: float,
    normalize: bool = False, strength: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if state is None:
        batch, _, heads, width = value.shape
        kind = torch.promote_types(value.dtype, torch.float32)
        after = value.new_empty([batch, heads, key.shape[3], width], dtype=kind)
    else:
        after = torch.empty_like(state)
    return value.new_empty(value.shape), after


@define(_SCHEMA, _meta)
def delta_rule(
    state: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    decay: torch.Tensor, beta: torch.Tensor, slots: torch.Tensor | None = None, *, scale: float,
    normalize: bool = False, strength: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o [B, T, H, V] of value's dtype, the states after the last token).

    Args:
        state: float32 [N, H, K, V], key channels first; sequence b's is state[slots[b]]. Without
            slots it is [B, H, K, V]; None: zeros.
        query, key: [B, T, Hk, K], H a multiple of Hk: value head h reads key head h // (H / Hk).
        value: [B, T, H, V].
        decay: g, at most 0: [B, T, H, K] by key channel, or [B, T, H] one for a head.
        beta: [B, T, H].
        slots: int32 [B], different ones.
        normalize: query and key are divided by sqrt(sum of squares + 1e-6) first.
        strength: beta is strength * sigmoid of what is given, not that itself.

    Computed in float32 (float64 for float64 values), whatever the dtypes.
    """
    kind = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, b = (x.to(kind) for x in (query, key, value, decay, beta))
    if strength is not None:
        b = strength * torch.sigmoid(b)
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for x in (q, k))
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(group, 2) * scale, k.repeat_interleave(group, 2)
    if g.dim() == 3:
        g = g.unsqueeze(-1)
    if state is None:
        now = v.new_zeros([v.shape[0], v.shape[2], k.shape[3], v.shape[3]])
    else:
        now = (state if slots is None else state[slots.long()]).to(kind)
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        now = now * g[:, t].exp().unsqueeze(-1)
        told = (now * k[:, t].unsqueeze(-1)).sum(-2)
        u = b[:, t].unsqueeze(-1) * (v[:, t] - told)
        now = now + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out[:, t] = (now * q[:, t].unsqueeze(-1)).sum(-2)
    if state is None:
        after = now
    elif slots is None:
        after = now.to(state.dtype)
    else:
        after = state.index_copy(0, slots.long(), now.to(state.dtype))
    return out.to(value.dtype), after
