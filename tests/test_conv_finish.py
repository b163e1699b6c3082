"""Convolutions whose epilogue the micro-kernels do in registers (gc_conv_finish in conv.h)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphc.api import Options
from tests.built import Built
from tests.kernel_build import TARGET_OF, available_isas

F = nn.functional
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}


class Residual(nn.Module):
    """72 channels: two panels that are finished in registers, and one that the epilogue does."""

    def __init__(self, channels: int = 72) -> None:
        super().__init__()
        self.a = nn.Conv2d(12, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 1, bias=False)
        self.c = nn.Conv2d(channels, channels, 1)
        self.d = nn.Conv2d(channels, channels, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.relu(self.a(x))  # [N, 72, H, W]
        added = h + self.b(h)
        results = F.relu(added + self.c(added)), self.d(added)
        return tuple(y.permute(0, 2, 3, 1) for y in results)


def finishes(built: Built) -> int:
    """Convolutions that hand the kernel a gc_conv_finish."""
    sources = [p.read_text() for p in (built.plan / "sources").iterdir() if p.is_file()]
    return sum("gc_conv_finish finish_of(" in text for text in sources)


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.shape == exact.shape
    error = float((got.double() - exact).abs().max()) / max(1.0, float(exact.abs().max()))
    assert error < BOUND[got.dtype], error


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(3, 7, 9), (1, 5, 3), (2, 16, 16)])
def test_residual_block(isa: str, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    torch.manual_seed(5)
    batch, height, width = size  # tiles cross from one image to the next
    module = Residual().eval().requires_grad_(False).to(dtype)
    x = torch.randn(batch, 12, height, width).to(dtype)
    exact = copy.deepcopy(module).double()(x.double())
    built = Built(module, (x,), options=Options(target=TARGET_OF[isa], jobs=1))
    try:
        assert finishes(built) == 4
        for got, expected in zip(built(x), exact, strict=True):
            close(got, expected)
    finally:
        built.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_symbolic_lengths_and_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    module = Residual(64).eval().requires_grad_(False).to(dtype)
    x = torch.randn(2, 12, 10, 12).to(dtype)
    n = torch.export.Dim("n", min=1, max=8)
    outputs = []
    for threads in (1, 2):
        built = Built(module, (x,), dynamic=({0: n},), threads=threads)
        try:
            assert finishes(built) == 4
            y = torch.randn(5, 12, 10, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
            outputs.append(built(y))
        finally:
            built.close()
    for one, two, exact in zip(*outputs, copy.deepcopy(module).double()(y.double()), strict=True):
        assert torch.equal(one, two)
        close(one, exact)


@pytest.mark.parametrize("isa", available_isas())
def test_relu_keeps_nan(isa: str) -> None:
    module = nn.Sequential(nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1))
    module = module.eval().requires_grad_(False)
    x = torch.randn(1, 32, 6, 6)
    x[0, 3, 2, 1] = float("nan")
    built = Built(module, (x,), options=Options(target=TARGET_OF[isa], jobs=1))
    try:
        assert finishes(built) == 1
        got = built(x)
    finally:
        built.close()
    assert torch.equal(got.isnan(), module(x).isnan()) and int(got.isnan().sum()) == 32


class Others(nn.Module):
    """What a finish can not do: two terms more, a bound above, a value spread over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(32, 32, 1) for _ in range(3))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return self.a(x) + x + y, F.relu6(self.b(x)), F.relu(self.c(x) + z)


def test_other_epilogues_are_left_alone() -> None:
    torch.manual_seed(7)
    module = Others().eval().requires_grad_(False)
    x, y, z = torch.randn(1, 32, 6, 6), torch.randn(1, 32, 6, 6), torch.randn(1, 32, 1, 1)
    built = Built(module, (x, y, z))
    try:
        got = built(x, y, z)
        expected = module.double()(x.double(), y.double(), z.double())
        for value, exact in zip(got, expected, strict=True):
            close(value, exact)
    finally:
        built.close()
