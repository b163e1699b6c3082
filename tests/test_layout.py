"""Networks of convolutions stored channels last, against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphc.ir.types import row_major
from graphc.lowering.layout import channels_last_strides, is_channels_last
from tests.built import Built


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


class Net(nn.Module):
    """A stem, `body` on [N, 24, 12, 15], and a last convolution."""

    def __init__(self, body: Callable[[Any], Any], channels: int = 24, out: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.last = nn.Conv2d(out, 5, 1)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.body(torch.relu(self.stem(x))))
        return result


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 6, 1), nn.Conv2d(6, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * F.hardsigmoid(scale)


BODIES: dict[str, tuple[Callable[[], Any], int]] = {
    "max_pool": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), 24),
    "avg_pool": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), 24),
    "avg_pool_override": (lambda: lambda x: F.avg_pool2d(x, 2, divisor_override=3), 24),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d((5, 4)), 24),
    "indices": (lambda: lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 24),
    "nearest": (lambda: nn.Upsample(scale_factor=2), 24),
    "bilinear": (lambda: nn.Upsample(size=(17, 20), mode="bilinear"), 24),
    "bicubic": (lambda: nn.Upsample(size=(17, 20), mode="bicubic"), 24),
    "squeeze": (lambda: Squeeze(24), 24),
    "depthwise": (lambda: nn.Conv2d(24, 24, 5, 2, 2, groups=24), 24),
    "transposed": (lambda: nn.ConvTranspose2d(24, 24, 2, 2), 24),
    "expanded": (lambda: nn.Sequential(nn.ConvTranspose2d(24, 1, 2, 2), nn.Sigmoid(),
                                       nn.ConvTranspose2d(1, 40, (1, 2), (1, 2)), nn.ReLU()), 40),
    "cat": (lambda: lambda x: torch.cat([x, x.sigmoid(), x * 2], 1), 72),
    "cat_twice": (lambda: lambda x: torch.cat([torch.cat([x * 2, x.relu()], 1), x.relu(), x, x], 1),
                  120),
    "cat_rows": (lambda: lambda x: torch.cat([x, x + 1], 2), 24),
    "pad": (lambda: nn.ZeroPad2d((1, 2, 0, 3)), 24),
    "reflect": (lambda: nn.ReflectionPad2d(1), 24),
    "chunk": (lambda: lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1], 12),
    "shuffle": (lambda: nn.ChannelShuffle(4), 24),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), 6),
    "norm": (lambda: nn.GroupNorm(4, 24), 24),
    "softmax": (lambda: nn.Softmax(1), 24),
    "layer_norm": (lambda: lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (24,)).permute(0, 3, 1, 2),
                   24),
    "flatten": (lambda: lambda x: x.flatten(2).transpose(1, 2).unflatten(1, (12, 15))
                .permute(0, 3, 1, 2), 24),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_keeps_its_meaning(name: str, tmp_path: Path) -> None:
    body, out = BODIES[name]
    module = Net(body(), out=out).eval()
    x = torch.randn(2, 3, 12, 15)
    built = Built(module, (x,), folder=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["max_pool", "bilinear", "squeeze", "depthwise", "cat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keeps_its_meaning_in_16_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    body, out = BODIES[name]
    module, x = Net(body(), out=out).eval().to(dtype), torch.randn(2, 3, 12, 15).to(dtype)
    built = Built(module, (x,), folder=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=3e-2, atol=3e-2)


class Wide(nn.Module):
    """Pixels of 2048 bytes, which lie a cache line further apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 512, 1), nn.Conv2d(512, 512, 3, 2, 1), None
        self.d = nn.Conv2d(8, 512, 1, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.max_pool2d(torch.relu(self.b(self.a(x))) + self.d(x), 2)
        return y.mean((2, 3)), y.amax(1), torch.cat([y, y], 1).sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_in_a_pool(dtype: torch.dtype, tmp_path: Path) -> None:
    """NaN is larger than all, wherever it stands in a window; a window may hold -inf alone."""
    convolutions = [nn.Conv2d(43, 43, 1, groups=43, bias=False) for _ in range(2)]
    for layer in convolutions:
        nn.init.ones_(layer.weight)
    module = nn.Sequential(convolutions[0], nn.MaxPool2d(3, 2, 1), convolutions[1]).to(dtype)
    x = torch.randn(1, 43, 24, 28).to(dtype)
    x[0, :, 3, 4] = x[0, 1, 10, 10] = float("nan")
    x[0, 2, 12:18, 12:18] = x[0, 42, 12:18, 12:18] = float("-inf")
    built = Built(module, (x,), folder=tmp_path)
    assert list((built.plan / "sources").glob("gc_pool_last*"))
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=0, atol=0, equal_nan=True)


def test_padded_pixels(tmp_path: Path) -> None:
    module, x = Wide().eval(), torch.randn(2, 8, 9, 8)
    built = Built(module, (x,), folder=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=1e-5, atol=1e-5)


def test_lengths(tmp_path: Path) -> None:
    body = nn.Sequential(nn.Conv2d(24, 24, 3, 2, 1, groups=24), Squeeze(24), nn.MaxPool2d(2))
    module = Net(body).eval()
    x = torch.randn(2, 3, 24, 40)
    h, w = torch.export.Dim("h", min=8, max=64), torch.export.Dim("w", min=8, max=64)
    built = Built(module, (x,), dynamic=({2: h, 3: w},), folder=tmp_path)
    for height, width in ((24, 40), (9, 8), (64, 17)):
        y = torch.randn(2, 3, height, width)
        with torch.no_grad():
            torch.testing.assert_close(built(y), module(y), rtol=1e-5, atol=1e-5)


class Signal(nn.Module):
    """One dimension, and values that leave the graph on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 20, 5, 2), nn.Conv1d(20, 20, 3, padding=2, dilation=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.silu(self.a(x))
        z = self.b(y) + y
        return y, z, F.max_pool1d(z, 2)


def test_signals(tmp_path: Path) -> None:
    module, x = Signal().eval(), torch.randn(3, 2, 70)
    built = Built(module, (x,), folder=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=1e-5, atol=1e-5)


def test_strides() -> None:
    shape = (2, 24, 3, 5)
    assert channels_last_strides(shape, "float32") == (360, 1, 120, 24)
    assert channels_last_strides((1, 512, 3, 5), "float32") == (528 * 15, 1, 528 * 5, 528)
    assert is_channels_last(shape, (360, 1, 120, 24))
    assert not is_channels_last(shape, row_major(shape))
