"""A residual network of 50 layers on one 224x224 picture, in the shape of ResNet-50."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Workload

#: (width, blocks, stride) of each stage
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
MULTIPLY_ADDS = 4.09e9


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, width, 1)
        self.middle = convolution(width, width, 3, stride)
        self.expand = convolution(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.middle(functional.relu(self.reduce(x))))
        return functional.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """x[1, 3, 224, 224] -> scores[1, 1000]"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 64, 7, 2)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in STAGES:
            for i in range(count):
                blocks.append(Block(inputs, width, stride if i == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1)
        scores: Tensor = self.classify(self.blocks(x).mean((2, 3)))
        return scores


def make(random: np.random.Generator) -> Workload:
    x = random.standard_normal((1, 3, 224, 224), dtype=np.float32)
    return Workload({"x": x}, ResNet, flops=2 * MULTIPLY_ADDS)
