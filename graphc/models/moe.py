"""A mixture of experts with sigmoid routing, a correction bias and a shared expert (DeepSeek-V3,
arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphc.models import functional
from graphc.models.hybrid_config import HybridConfig
from graphc.models.layers import MLP, wide

#: beside the sum that weights are divided by
WEIGHT_EPS = 1e-20


class Router(nn.Module):
    """[N, D] -> (experts int64 [N, k], weights float32 [N, k]); see `functional.route`. Logits are
    float32 products.

    e_score_correction_bias is no parameter: training moves it so that experts get equal shares.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.e_score_correction_bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return functional.route(
            F.linear(wide(x), wide(self.weight)), self.e_score_correction_bias,
            config.experts_per_token, config.groups, config.kept_groups, "sigmoid",
            WEIGHT_EPS if config.normalize_weights else None, config.routed_scale,
        )  # fmt: skip


class Experts(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        count, size, width = config.experts, config.hidden_size, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, size))
        self.down_proj = nn.Parameter(torch.empty(count, size, width))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return functional.experts(x, index, weight, self.gate_up_proj, self.down_proj)


class MixtureOfExperts(nn.Module):
    """[B, T, D] -> [B, T, D]: the chosen experts' weighted sum and the shared expert."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.expert_size * config.shared_experts
        self.shared_experts = MLP(config.hidden_size, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        out: Tensor = self.experts(flat, *self.gate(flat)).view(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)
