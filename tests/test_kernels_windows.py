"""Kernels of windows, resizing and index-mapped copies against eager torch."""

from __future__ import annotations

import pytest
import torch

from tests.eager import FLOATS, PLAIN, check, refused, sample, special


@pytest.fixture(params=PLAIN)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pool(isa: str, dtype: torch.dtype) -> None:
    symbols = {(0, 0): "n", (0, 2): "h"}
    x1, x2, x3 = sample(dtype, 2, 3, 37), special(dtype, 2, 3, 13, 41), sample(dtype, 2, 5, 6, 7)
    check(isa, "aten.max_pool1d.default", [x1, [3], [2], [1], [2], True])
    check(isa, "aten.avg_pool1d.default", [x1, [3], [2], [1], True, False])
    for kernel, stride, padding, ceil in (
        ([3, 3], [2, 2], [1, 1], False), ([2, 2], [], [0, 0], True), ([3, 5], [1, 1], [1, 2], True),
        ([5, 4], [3, 3], [2, 1], True),
    ):  # fmt: skip
        arguments = [x2, kernel, stride, padding]
        name = "aten.max_pool2d_with_indices.default"
        check(isa, name, [*arguments, [1, 1], ceil], symbols=symbols)
        check(isa, "aten.max_pool2d.default", [*arguments, [1, 1], ceil])
        check(isa, "aten.max_pool2d.default", [*arguments, [2, 2], ceil])
        y = sample(dtype, 2, 3, 13, 41)
        for include in (True, False):
            check(isa, "aten.avg_pool2d.default", [y, kernel, stride, padding, ceil, include])
        check(isa, "aten.avg_pool2d.default", [y[0], kernel, stride, padding, ceil, True, 7])
    if dtype is torch.float32:  # eager torch has no other dtype here, or loses accuracy
        check(isa, "aten.max_pool3d_with_indices.default", [x3, [2, 3, 2], [1, 2, 2], [1, 1, 0]])
        check(isa, "aten.avg_pool3d.default", [x3, [2, 3, 2], [1, 2, 2], [1, 1, 0], True, False])
    for size in ([1, 1], [3, 4], [13, 41], [20, 2]):
        y = sample(dtype, 2, 3, 13, 41)
        check(isa, "aten._adaptive_avg_pool2d.default", [y, size], symbols=symbols)
        check(isa, "aten.adaptive_max_pool2d.default", [x2, size])
    check(isa, "aten.adaptive_avg_pool1d.default", [x1, [5]])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fold(isa: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 2, 3, 8, 19)
    for kernel, dilation, padding, stride in (
        ([3, 3], [1, 1], [1, 1], [1, 1]), ([2, 3], [2, 1], [0, 2], [2, 3]),
    ):  # fmt: skip
        check(isa, "aten.im2col.default", [x, kernel, dilation, padding, stride],
              symbols={(0, 0): "n"})  # fmt: skip
        columns = torch.ops.aten.im2col(x, kernel, dilation, padding, stride)
        check(isa, "aten.col2im.default", [columns, [8, 19], kernel, dilation, padding, stride])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8], ids=str)
def test_mapped_copies(isa: str, dtype: torch.dtype) -> None:
    symbols = {(0, 0): "a", (0, 1): "b"}
    x = sample(dtype, 3, 4, 6, 5)
    for y in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        check(isa, "aten.pad.default", [y, [2, 1, 3, 0], "reflect"], symbols=symbols)
        check(isa, "aten.pad.default", [y, [7, 1, 3, -2], "replicate"])
        check(isa, "aten.pad.default", [y, [2, 1, 0, 3], "circular"], symbols=symbols)
        check(isa, "aten.pad.default", [y, [2, 1, -1, 3, 0, 2], "constant", 2.0])
        check(isa, "aten.roll.default", [y, [2, -1], [1, 3]], symbols=symbols)
        check(isa, "aten.roll.default", [y, [17]])
        check(isa, "aten.flip.default", [y, [0, 3]], symbols=symbols)
        check(isa, "aten.repeat.default", [y, [2, 1, 1, 3, 2]], symbols=symbols)
        check(isa, "aten.tile.default", [y, [2, 3]])
        check(isa, "aten.repeat_interleave.self_int", [y, 3, 1], symbols=symbols)
        check(isa, "aten.repeat_interleave.self_int", [y, 2])
        check(isa, "aten.pixel_shuffle.default", [y, 2], symbols={(0, 0): "a"})
        check(isa, "aten.channel_shuffle.default", [y, 2])
    z = sample(dtype, 2, 3, 6, 9)
    check(isa, "aten.pixel_unshuffle.default", [z, 3])
    check(isa, "aten.flip.default", [x[:0], [0]])
    check(isa, "aten.repeat.default", [sample(dtype), [3]])
    if dtype is torch.float32:
        check(isa, "aten.reflection_pad1d.default", [x[0], [3, 4]])
        check(isa, "aten.reflection_pad2d.default", [x, [3, 4, 5, 2]])
        check(isa, "aten.replication_pad2d.default", [x, [9, 0, 5, 2]])
        check(isa, "aten.roll.default", [torch.randn(1 << 17), [5], [0]])
        check(isa, "aten.repeat.default", [torch.randn(1 << 17), [1]])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_resize(isa: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 2, 3, 7, 11)
    symbols = {(0, 0): "n", (0, 2): "h", (0, 3): "w"}
    for size in ([14, 22], [9, 5], [1, 40], [7, 11], [23, 33]):
        for exact in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
            check(isa, f"aten.{exact}.default", [x, size], symbols=symbols)
        for corners in (False, True):
            for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
                check(isa, f"aten.{name}.default", [x, size, corners], scale=8.0, symbols=symbols)
    for factors in ([1.7, 2.3], [0.6, 3.0]):
        check(isa, "aten.upsample_nearest2d.vec", [x, None, factors])
        check(isa, "aten._upsample_nearest_exact2d.vec", [x, None, factors])
        check(isa, "aten.upsample_bilinear2d.vec", [x, None, False, factors], scale=8.0)
        check(isa, "aten.upsample_bicubic2d.vec", [x, None, True, factors], scale=8.0)
    check(isa, "aten.upsample_linear1d.vec", [x[0], [17], False, None], scale=8.0)
    check(isa, "aten.upsample_nearest1d.vec", [x[0], [17], None])
    check(isa, "aten.upsample_trilinear3d.vec", [x[None], [5, 9, 6], False, None], scale=8.0)


def test_resize_bytes(isa: str) -> None:
    x = torch.randint(0, 255, (1, 2, 9, 13), dtype=torch.uint8)
    for n in range(1, 40, 3):
        check(isa, "aten.upsample_nearest2d.vec", [x, [n, 2 * n + 1], None])
        check(isa, "aten._upsample_nearest_exact2d.vec", [x.float(), [n, 2 * n + 1], None])
    refused("aten.upsample_bilinear2d.vec", [x, [4, 4], False, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_grid_sampler(isa: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 2, 3, 7, 11)
    grid = (torch.rand(2, 5, 19, 2) * 3 - 1.5).to(dtype)
    for mode in (0, 1):
        for padding in (0, 1, 2):
            # how often 1e30 reflects is a matter of rounding
            grid[0, 0, 0, 0] = 0.3 if padding == 2 else 1e30
            for corners in (False, True):
                arguments = [x, grid, mode, padding, corners]
                check(isa, "aten.grid_sampler_2d.default", arguments, scale=20.0)
    refused("aten.grid_sampler_2d.default", [x, grid, 2, 0, False])
