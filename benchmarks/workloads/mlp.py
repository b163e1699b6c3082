"""Two linear layers, 1024 to 4096 and back, with GELU between."""

from __future__ import annotations

import numpy as np
from torch import nn

from benchmarks.workloads import Workload

WIDTH, INNER = 1024, 4096


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


def make(length: int, random: np.random.Generator) -> Workload:
    """`length` rows."""
    x = random.standard_normal((length, WIDTH), dtype=np.float32)
    return Workload({"x": x}, _module, flops=4.0 * length * WIDTH * INNER)
