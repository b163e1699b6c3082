"""Kimi Delta Attention (Kimi Linear, arXiv:2510.26692): linear attention whose state forgets by key
channel and learns by the delta rule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphc.models import functional
from graphc.models.hybrid_config import HybridConfig
from graphc.models.layers import linear, wide
from graphc.models.states import States


class ForgetGate(nn.Module):
    """The log-decay of each key channel, float32 [B, T, H, K], at most 0.

    With z = f_b(f_a(x)) + dt_bias: -exp(A_log) softplus(z), or L sigmoid(exp(A_log) z) if there is
    a lower bound L.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.kda_heads, config.kda_head_dim
        self.lower_bound = config.gate_lower_bound
        self.f_a_proj = linear(config.hidden_size, self.dim)
        self.f_b_proj = linear(self.dim, self.heads * self.dim)
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.dim))
        self.A_log = nn.Parameter(torch.empty(self.heads))

    def reset(self) -> None:
        """Rates of 1 to 16 (1 with a lower bound), steps of 1e-3 to 1e-1."""
        with torch.no_grad():
            if self.lower_bound is None:
                self.A_log.uniform_(1.0, 16.0).log_()
            else:
                self.A_log.zero_()
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor) -> Tensor:
        z = wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)
        z = z.unflatten(-1, [self.heads, self.dim])
        rate = wide(self.A_log).exp().unsqueeze(1)
        if self.lower_bound is None:
            return -rate * F.softplus(z)
        return self.lower_bound * torch.sigmoid(rate * z)


class GatedNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate) by head, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        values = wide(x)
        normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide(self.weight) * normed * torch.sigmoid(wide(gate))).to(x.dtype)


class KimiDeltaAttention(nn.Module):
    """[B, T, D] -> [B, T, D]; remembers a state [K, V] a head and conv_width - 1 inputs of the
    convolution."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.dim = config.kda_heads, config.kda_head_dim
        self.beta_scale = 2.0 if config.allow_negative_eigenvalues else 1.0
        size, width = config.hidden_size, self.heads * self.dim
        self.q_proj = linear(size, width)
        self.k_proj = linear(size, width)
        self.v_proj = linear(size, width)
        self.conv_weight = nn.Parameter(torch.empty(3 * width, config.conv_width))
        self.forget_gate = ForgetGate(config)
        self.b_proj = linear(size, self.heads)
        self.g_a_proj = linear(size, self.dim)
        self.g_b_proj = linear(self.dim, width)
        self.o_norm = GatedNorm(self.dim, config.norm_eps)
        self.o_proj = linear(width, size)

    def reset(self) -> None:
        bound = self.conv_weight.shape[1] ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        self.forget_gate.reset()

    def forward(self, x: Tensor, states: States) -> Tensor:
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        before, slots = states.read(self.layer, "convolution")
        mixed, after = functional.short_convolution(
            before, mixed, self.conv_weight, None, slots, silu=True
        )
        states.write(self.layer, "convolution", after)
        query, key, value = (
            part.unflatten(-1, [self.heads, self.dim]) for part in mixed.chunk(3, -1)
        )
        beta = torch.sigmoid(self.b_proj(x)) * self.beta_scale
        before, slots = states.read(self.layer, "recurrent")
        out, after = functional.delta_rule(
            before, query, key, value, self.forget_gate(x), beta, slots,
            scale=self.dim**-0.5, normalize=True,
        )  # fmt: skip
        states.write(self.layer, "recurrent", after)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, [self.heads, self.dim])
        mixed_heads: Tensor = self.o_proj(self.o_norm(out, gate).flatten(2))
        return mixed_heads
