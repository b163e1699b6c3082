"""Small parts that several layers share: norms, rotary positions, a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def wide(x: Tensor) -> Tensor:
    """In float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        values = wide(x)
        normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(size, width)
        self.up_proj = linear(size, width)
        self.down_proj = linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotary(length: int, start: Tensor | None, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, float32 [B or 1, T, dim / 2]: position times theta^(-2i/dim)."""
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    position = torch.arange(length)[None]
    if start is not None:
        position = position + start[:, None]
    angle = position.unsqueeze(2).float() * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x [B, T, H, D], its pairs rotated: (2i, 2i + 1) in the layout "interleaved", (i, i + D/2) in
    "half". All first members come first in the result, whatever the layout."""
    if layout == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
