"""Linear attention with a recurrent state: plain, gated, delta rule and gated delta rule."""

from __future__ import annotations

import math

import torch

from graphc.frontends.onnx.attention import merge_heads, split_heads
from graphc.frontends.onnx.control import TRIP_LIMIT
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Tensor

RULES = ("linear", "gated", "delta", "gated_delta")


@operator("LinearAttention", since=27)
def linear_attention(
    node: OnnxNode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, Tensor]:
    """The recurrence step by step, with the state in float32 at least; needs a known length.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,  o_t = scale q_t^T S_t
    (ONNX LinearAttention-27; without the gate or the delta term for the simpler rules).
    """
    if update_rule not in RULES:
        raise node.invalid(f"unknown update_rule {update_rule!r}")
    gated, delta = "gated" in update_rule, "delta" in update_rule
    if (gated and decay is None) or (delta and beta is None):
        raise node.invalid(f"the rule {update_rule} needs decay or beta")
    steps = query.shape[1]
    if not isinstance(steps, int) or steps > TRIP_LIMIT:
        raise node.refuse(
            "LinearAttention over a symbolic or very long sequence",
            "export the model with a fixed sequence length",
        )
    dtype = query.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    q = split_heads(query, q_num_heads).to(work)  # [B, Hq, T, dk]
    k = split_heads(key, kv_num_heads).to(work)
    v = split_heads(value, kv_num_heads).to(work)
    groups = q_num_heads // kv_num_heads
    factor = scale if scale else 1.0 / math.sqrt(q.shape[3])
    batch, heads, _, width = k.shape
    gate = step = None
    if gated and decay is not None:
        gate = torch.exp(split_heads(decay, kv_num_heads).to(work))  # [B, H, T, dk or 1]
    if delta and beta is not None:
        step = split_heads(beta, beta.shape[2]).to(work)  # [B, H or 1, T, 1]
    if past_state is None:
        state = torch.zeros([batch, heads, width, v.shape[3]], dtype=work)
    else:
        state = past_state.to(work)
    outputs = []
    for t in range(steps):
        kt, vt = k[:, :, t].unsqueeze(3), v[:, :, t].unsqueeze(2)  # [B, H, dk, 1], [B, H, 1, dv]
        if gate is not None:
            state = state * gate[:, :, t].unsqueeze(3)
        if step is not None:
            known = torch.matmul(kt.transpose(2, 3), state)
            vt = (vt - known) * step[:, :, t].unsqueeze(3)
        state = state + kt * vt
        seen = torch.repeat_interleave(state, groups, 1) if groups != 1 else state
        outputs.append(torch.matmul(q[:, :, t].unsqueeze(2), seen))  # [B, Hq, 1, dv]
    y = merge_heads(torch.cat(outputs, 2) * factor).to(dtype)
    return y, state.to(dtype if past_state is None else past_state.dtype)
