"""Convolutions executed for real against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphc.lowering.context import Refuse
from graphc.lowering.templates import convolution
from tests.kernel_harness import Constant, available_isas, lookup, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-14}
CONV2D = "aten.conv2d.default"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def check(name: str, isa: str, x: Any, w: Any, b: Any, *options: Any, **more: Any) -> None:
    exact = [None if t is None else t.double() for t in (x, w, b)]
    reference = lookup(name)(*exact, *options)
    for weight in (Constant(w), w):
        (got,) = run_rule(name, [x, weight, b, *options], isa=isa, **more)
        assert got.dtype == x.dtype and got.shape == reference.shape
        if got.numel():
            scale = max(1.0, float(reference.abs().max()))
            error = float((got.double() - reference).abs().max()) / scale
            assert error < BOUND[x.dtype], (tuple(x.shape), tuple(w.shape), options, error)


# input, weight, stride, padding, dilation, groups
CASES_2D: list[tuple[Any, ...]] = [
    ((2, 3, 17, 19), (16, 3, 3, 3), 1, 1, 1, 1),
    ((1, 16, 9, 40), (24, 16, 1, 1), 1, 0, 1, 1),
    ((1, 20, 12, 13), (30, 20, 3, 3), 1, 0, 1, 1),
    ((1, 8, 15, 33), (200, 8, 3, 3), 2, 1, 1, 1),
    ((2, 5, 11, 10), (7, 5, 5, 2), (3, 1), (2, 0), (1, 2), 1),
    ((1, 12, 10, 10), (18, 4, 3, 3), 1, 1, 1, 3),
    ((1, 130, 6, 7), (9, 130, 3, 3), 1, 2, 2, 1),
    ((1, 2, 4, 4), (3, 2, 4, 4), 4, 0, 1, 1),
    ((1, 4, 3, 3), (6, 4, 3, 3), 3, 5, 1, 1),
    ((0, 4, 5, 5), (6, 4, 3, 3), 1, 1, 1, 1),
    ((4, 5, 6), (6, 4, 1, 1), 2, 0, 1, 1),
]
DEPTHWISE: list[tuple[Any, ...]] = [
    ((2, 6, 13, 40), (6, 1, 3, 3), 1, 1, 1, 6),
    ((1, 6, 20, 37), (6, 1, 5, 5), 1, 2, 1, 6),
    ((1, 4, 21, 37), (4, 1, 3, 3), 2, 1, 1, 4),
    ((1, 4, 22, 70), (4, 1, 5, 5), 2, 2, 1, 4),
    ((1, 4, 9, 8), (4, 1, 3, 3), 1, 1, 1, 4),
    ((1, 4, 9, 33), (4, 1, 2, 7), (2, 1), (0, 3), 1, 4),
    ((1, 4, 19, 33), (4, 1, 3, 3), (2, 1), 2, 2, 4),
    ((1, 4, 19, 53), (4, 1, 3, 3), 3, 1, 1, 4),
    ((1, 3, 2, 2), (3, 1, 3, 3), 1, 4, 1, 3),
    ((1, 3, 100, 90), (3, 1, 3, 3), 1, 1, 1, 3),
    # whole vectors of channels, and more
    ((1, 40, 7, 41), (40, 1, 5, 5), 1, 2, 1, 40),
    ((2, 16, 6, 150), (16, 1, 3, 3), 1, 1, 1, 16),
    ((1, 37, 9, 29), (37, 1, 3, 3), 2, 1, 1, 37),
    ((1, 20, 9, 30), (20, 1, 5, 5), (1, 2), 2, 1, 20),
    ((1, 33, 8, 27), (33, 1, 3, 3), 1, 2, 2, 33),
    ((1, 24, 4, 26), (24, 1, 2, 4), (1, 3), 1, 1, 24),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conv2d(isa: str, dtype: torch.dtype) -> None:
    for x_shape, w_shape, stride, padding, dilation, groups in [*CASES_2D, *DEPTHWISE]:
        x, w = random(*x_shape, dtype=dtype), random(*w_shape, dtype=dtype)
        b = random(w_shape[0], dtype=dtype) if w_shape[0] % 4 else None
        pair = [[v, v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        check(CONV2D, isa, x, w, b, *pair, groups)


# 3 x 3 with step 1 and channels enough for Winograd's tiles: odd sizes, several units, rows that
# units share, images of one or two pixels, narrow last panels, channels that fill no vector
WINOGRAD: list[tuple[Any, ...]] = [
    ((1, 24, 12, 14), (32, 24, 3, 3), 1, 1, 1, 1),
    ((3, 29, 7, 9), (41, 29, 3, 3), 1, 1, 1, 1),
    ((1, 24, 33, 35), (24, 24, 3, 3), 1, (0, 2), 1, 1),
    ((2, 64, 5, 4), (80, 32, 3, 3), 1, (2, 1), 1, 2),
    ((1, 150, 3, 3), (30, 150, 3, 3), 1, 0, 1, 1),
    ((5, 32, 1, 2), (24, 32, 3, 3), 1, 1, 1, 1),
    ((1, 700, 8, 7), (40, 700, 3, 3), 1, 1, 1, 1),
    ((0, 24, 5, 5), (24, 24, 3, 3), 1, 1, 1, 1),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_winograd(isa: str, dtype: torch.dtype) -> None:
    for x_shape, w_shape, stride, padding, dilation, groups in WINOGRAD:
        x, w = random(*x_shape, dtype=dtype), random(*w_shape, dtype=dtype) / w_shape[1] ** 0.5
        b = random(w_shape[0], dtype=dtype) if w_shape[0] % 4 else None
        pair = [[v, v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        context = lower(CONV2D, [x, Constant(w), b, *pair, groups], isa=isa)
        assert any("conv_winograd" in step.symbol for step in context.steps)
        check(CONV2D, isa, x, w, b, *pair, groups)
    x, w = random(2, 24, 3, 8, 9), random(32, 24, 1, 3, 3)
    check("aten.conv3d.default", isa, x, w, random(32), [1] * 3, [0, 1, 1])
    check(CONV2D, isa, random(2, 24, 10, 31), random(40, 24, 3, 3), random(40), [1, 1], [1, 1],
          symbols={(0, 0): "N", (0, 2): "H", (0, 3): "W"})  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [24, 64, 128, 512])
def test_winograd_is_as_exact_as_eager(isa: str, channels: int) -> None:
    """Of normal values, and of values after a relu, which are harder."""
    w = random(channels, channels, 3, 3) / (9 * channels) ** 0.5
    for x in (random(2, channels, 14, 14), random(2, channels, 14, 14).relu()):
        exact = torch.conv2d(x.double(), w.double(), padding=1)
        (got,) = run_rule(CONV2D, [x, Constant(w), None, [1, 1], [1, 1]], isa=isa)
        eager = torch.conv2d(x, w, padding=1)
        assert (got - exact).norm() <= (eager - exact).norm()


@pytest.mark.parametrize("isa", ISAS)
def test_conv1d_and_conv3d(isa: str) -> None:
    check("aten.conv1d.default", isa, random(2, 5, 70), random(9, 5, 4), random(9), [2], [3])
    check("aten.conv1d.default", isa, random(2, 5, 70), random(5, 1, 4), None, [1], [3], [1], 5)
    x = random(2, 4, 6, 7, 9)
    check("aten.conv3d.default", isa, x, random(6, 4, 3, 2, 3), random(6), [2, 1, 1], [1, 0, 2])
    check("aten.conv3d.default", isa, x, random(4, 1, 3, 3, 3), None, [1] * 3, [1] * 3, [1] * 3, 4)


@pytest.mark.parametrize("isa", ISAS)
def test_named_padding(isa: str) -> None:
    x, w = random(1, 4, 13, 14), random(5, 4, 4, 3)
    for mode in ("same", "valid"):
        check("aten.conv2d.padding", isa, x, w, random(5), [1, 1], mode, [1, 2])
    check("aten.conv1d.padding", isa, random(1, 4, 20), random(4, 1, 6), None, [1], "same", [1], 4)


@pytest.mark.parametrize("isa", ISAS)
def test_transposed(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random(2, 6, 7, 9, dtype=dtype)
        name = "aten.conv_transpose2d.input"
        check(name, isa, x, random(6, 5, 2, 2, dtype=dtype), random(5, dtype=dtype), [2, 2])
        check(
            name, isa, x, random(6, 4, 3, 4, dtype=dtype), None, [2, 3], [1, 2], [1, 0], 2, [2, 1]
        )
        check(name, isa, x, random(6, 1, 2, 3, dtype=dtype), random(1, dtype=dtype), [2, 3])
        check(name, isa, x, random(6, 23, 1, 2, dtype=dtype), None, [1, 2])
    check("aten.conv_transpose1d.default", isa, random(1, 3, 30), random(3, 8, 4), random(8), [4])
    check("aten.conv_transpose1d.default", isa, random(1, 3, 230), random(3, 8, 2), random(8), [2])
    check("aten.conv_transpose3d.input", isa, random(1, 3, 4, 5, 3), random(3, 2, 2, 3, 2), None,
          [2, 1, 2])  # fmt: skip
    check("aten.convolution.default", isa, random(1, 6, 8, 8), random(6, 3, 3, 3), None,
          [2, 2], [1, 1], [1, 1], True, [1, 1], 2)  # fmt: skip
    check("aten.convolution.default", isa, random(1, 6, 8, 8), random(4, 3, 3, 3), random(4),
          [2, 2], [1, 1], [1, 1], False, [0, 0], 2)  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_strided_input_and_epilogue(isa: str) -> None:
    w, b = random(20, 8, 3, 3), random(20)
    for x in (
        random(2, 16, 10, 11)[:, ::2],
        random(2, 10, 11, 8).permute(0, 3, 1, 2),
        random(1, 8, 10, 11).expand(2, 8, 10, 11),
    ):
        check(CONV2D, isa, x, w, b, [1, 1], [1, 1])
    x = random(1, 8, 10, 11)
    (got,) = run_rule(CONV2D, [x, Constant(w), b], isa=isa, epilogue="x > 0 ? x : 0")
    assert torch.allclose(got, torch.relu(torch.conv2d(x, w, b)), atol=1e-4)


def test_symbolic_sizes() -> None:
    w = random(20, 8, 3, 3)
    check(CONV2D, ISAS[0], random(2, 8, 10, 31), w, random(20), [1, 1], [1, 1],
          symbols={(0, 0): "N", (0, 2): "H", (0, 3): "W"})  # fmt: skip
    check(CONV2D, ISAS[0], random(2, 8, 10, 31), random(8, 1, 3, 3), None, [2, 2], [1, 1], [1, 1],
          8, symbols={(0, 2): "H", (0, 3): "W"})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integer_convolution(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (2, 6, 9, 10), dtype=dtype)
    w, b = torch.randint(0, 9, (4, 3, 3, 3), dtype=dtype), torch.randint(0, 9, (4,), dtype=dtype)
    options: list[Any] = [[2, 1], [1, 1], [1, 1], 2]
    (got,) = run_rule(CONV2D, [x, Constant(w), b, *options], isa=ISAS[0])
    reference = torch.conv2d(x.double(), w.double(), b.double(), *options)
    assert torch.equal(got, reference.long().to(dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_float64_convolution(isa: str) -> None:
    x = random(2, 4, 9, 10).double()
    check(
        CONV2D, isa, x, random(6, 2, 3, 3).double(), random(6).double(), [2, 1], [1, 1], [1, 2], 2
    )
    check("aten.conv_transpose2d.input", isa, x, random(4, 3, 3, 2).double(), None, [2, 3], [1, 0])


def test_padding_hides_nan_of_neighbours() -> None:
    x, w = random(1, 4, 6, 40), random(3, 4, 3, 3)
    x[0, 1, 2, 39] = float("nan")
    (got,) = run_rule(CONV2D, [x, Constant(w), None, [1, 1], [1, 1]], isa=ISAS[0])
    assert torch.equal(got.isnan(), torch.conv2d(x, w, padding=1).isnan())


def test_refusals() -> None:
    x = torch.zeros(1, 2, 4, 4)
    with pytest.raises(Refuse, match="bfloat16"):
        context = lower(CONV2D, [x, torch.zeros(2, 2, 1, 1)], isa=ISAS[0])
        assert context.steps
        convolution.emit_convolution(
            context,
            _mixed(x),
            convolution.Convolution((1, 1), (0, 0), (1, 1), 1),
        )


def _mixed(x: torch.Tensor) -> Any:
    from tests.kernel_harness import FakeNode, FakeType, FakeValue

    def value(t: torch.Tensor) -> FakeValue:
        return FakeValue(FakeType(str(t.dtype).removeprefix("torch."), tuple(t.shape)), t)

    weight = torch.zeros(2, 2, 1, 1, dtype=torch.bfloat16)
    return FakeNode(lookup(CONV2D), (value(x), value(weight), None), {}, (value(x),))
