"""Chains bound by memory, on 2048 rows of 1024: softmax, and LayerNorm with GELU between two
residual additions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Workload

ROWS, WIDTH = 2048, 1024


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class NormResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return functional.gelu(self.norm(x + residual)) + residual


CHAINS = {"softmax": (Softmax, ("x",)), "lnres": (NormResidual, ("x", "residual"))}


def make(name: str, random: np.random.Generator) -> Workload:
    module, names = CHAINS[name]
    inputs = {key: random.standard_normal((ROWS, WIDTH), dtype=np.float32) for key in names}
    return Workload(inputs, module)
