"""A mixture of experts after routing: every token through its experts, and their weighted sum."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from graphc.ops.library import define


def _meta(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@define("experts(Tensor x, Tensor index, Tensor weight, Tensor gate_up, Tensor down) -> Tensor",
        _meta)  # fmt: skip
def experts(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """y[t] = sum_j weight[t, j] * down[e] @ (silu(gate[e] @ x[t]) * up[e] @ x[t]), e = index[t, j].

    Args:
        x: [T, D].
        index: int64 or int32 [T, K]; an index of E or more is no expert.
        weight: [T, K].
        gate_up: [E, 2 I, D], the gate's rows first.
        down: [E, D, I].

    The sum runs over j in order, in float32; hidden values have x's dtype.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape, dtype=kind)
    parts = x.new_zeros([*index.shape, x.shape[1]], dtype=kind)
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(index == expert)
        if token.numel():
            gate, up = F.linear(x[token], gate_up[expert]).to(kind).chunk(2, -1)
            made = F.linear((F.silu(gate) * up).to(x.dtype), down[expert])
            parts[token, slot] = made.to(kind) * weight[token, slot, None].to(kind)
    for j in range(index.shape[1]):
        out += parts[:, j]
    return out.to(x.dtype)
