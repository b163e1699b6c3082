"""Generated loop nests against eager torch: elementwise rows, reductions, positions, dtypes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch

from graphc.api import Options
from graphc.errors import GraphcError
from graphc.lowering import pointwise
from graphc.lowering.context import Unit, View
from graphc.lowering.loop_codegen import generate
from graphc.lowering.loops import Compute, Load, Loop, Position, Reduce, Store
from tests.built import Built, Call, agree, results
from tests.kernel_build import (
    TARGET_OF,
    Memory,
    available_isas,
    before_a_forbidden_page,
    build,
    call,
)

aten = torch.ops.aten
T = torch.tensor
NAN, INF = float("nan"), float("inf")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)
RTOL = {torch.float32: 3e-6, torch.float64: 1e-12, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sample(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.4
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
        return x.to(dtype)
    low = 0 if dtype is torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=generator).to(dtype)


# -- every elementwise row ---------------------------------------------------------------------


def words(text: str) -> list[str]:
    return text.split()


#: operators by what they take besides x: nothing; a second tensor; a number
UNARY = words(
    "neg abs sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square sin cos "
    "tanh erf sigmoid silu gelu softplus elu tan asin acos atan sinh cosh asinh acosh atanh erfc "
    "lgamma relu relu6 hardsigmoid hardswish logical_not bitwise_not isnan isinf isfinite signbit "
    "ceil floor trunc fix round frac nan_to_num clone alias detach lift_fresh_copy leaky_relu "
    "hardtanh contiguous"
)
PAIRS = words(
    "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor true_divide.Tensor "
    "floor_divide.default remainder.Tensor fmod.Tensor pow.Tensor_Tensor maximum.default "
    "minimum.default fmax.default fmin.default atan2.default hypot.default copysign.Tensor "
    "clamp_min.Tensor clamp_max.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
    "ge.Tensor logical_and.default logical_or.default logical_xor.default bitwise_and.Tensor "
    "bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor "
    "__lshift__.Tensor __rshift__.Tensor copy.default prelu.default _prelu_kernel.default"
)
SCALARS = words(
    "add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar floor_divide.Scalar remainder.Scalar "
    "fmod.Scalar pow.Tensor_Scalar copysign.Scalar clamp_min.default clamp_max.default eq.Scalar "
    "ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar bitwise_and.Scalar bitwise_or.Scalar "
    "bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar "
    "__lshift__.Scalar __rshift__.Scalar fill.Scalar"
)

Case = tuple[str, Callable[..., Any]]


def overload(name: str) -> Any:
    operator, kind = name.split(".")
    return getattr(getattr(aten, operator), kind)


def cases() -> list[Case]:
    """(row, function of x, y, condition and a positive weight)."""
    made: list[Case] = []

    def add(row: str, function: Callable[..., Any]) -> None:
        made.append((row, function))

    for name in UNARY:
        add(f"{name}.default", lambda x, y, c, w, o=f"{name}.default": overload(o)(x))
    for name in PAIRS:
        add(name, lambda x, y, c, w, o=name: overload(o)(x, y))
    for name in SCALARS:
        add(name, lambda x, y, c, w, o=name: overload(o)(x, 3))
    for name in ("remainder.Scalar_Tensor", "pow.Scalar", "bitwise_and.Scalar_Tensor",
                 "bitwise_or.Scalar_Tensor", "bitwise_xor.Scalar_Tensor"):  # fmt: skip
        add(name, lambda x, y, c, w, o=name: overload(o)(3, y))
    for name in ("add.Tensor", "sub.Tensor", "rsub.Tensor"):
        add(name, lambda x, y, c, w, o=name: overload(o)(x, y, alpha=2))
    for mode in ("floor", "trunc", None):
        add("div.Tensor_mode", lambda x, y, c, w, m=mode: aten.div.Tensor_mode(
            x, y, rounding_mode=m))  # fmt: skip
        add("div.Scalar_mode", lambda x, y, c, w, m=mode: aten.div.Scalar_mode(
            x, 3, rounding_mode=m))  # fmt: skip
    for exponent in (0, 1, 2, 4, 0.5, -0.5, -1, -2, 2.5):
        add("pow.Tensor_Scalar", lambda x, y, c, w, e=exponent: aten.pow.Tensor_Scalar(x, e))
    add("pow.Scalar", lambda x, y, c, w: aten.pow.Scalar(0.5, y))
    add("gelu.default", lambda x, y, c, w: aten.gelu.default(x, approximate="tanh"))
    add("softplus.default", lambda x, y, c, w: aten.softplus.default(x, 2, 3))
    add("elu.default", lambda x, y, c, w: aten.elu.default(x, 0.5, 1.5, 0.75))
    add("leaky_relu.default", lambda x, y, c, w: aten.leaky_relu.default(x, 0.2))
    add("hardtanh.default", lambda x, y, c, w: aten.hardtanh.default(x, -2, 3))
    add("threshold.default", lambda x, y, c, w: aten.threshold.default(x, 1, 5))
    add("clamp.default", lambda x, y, c, w: aten.clamp.default(x, 1, 4))
    add("clamp.default", lambda x, y, c, w: aten.clamp.default(x, max=2))
    add("clamp.default", lambda x, y, c, w: aten.clamp.default(x, 4, 1))
    add("clamp.Tensor", lambda x, y, c, w: aten.clamp.Tensor(x, y, w))
    add("clamp.Tensor", lambda x, y, c, w: aten.clamp.Tensor(x, None, y))
    add("clamp.Tensor", lambda x, y, c, w: aten.clamp.Tensor(x, y))
    add("nan_to_num.default", lambda x, y, c, w: aten.nan_to_num.default(x, 1.0, 2.0, -3.0))
    add("lerp.Tensor", lambda x, y, c, w: aten.lerp.Tensor(x, y, w))
    add("lerp.Scalar", lambda x, y, c, w: aten.lerp.Scalar(x, y, 0.25))
    add("lerp.Scalar", lambda x, y, c, w: aten.lerp.Scalar(x, y, 0.75))
    add("where.self", lambda x, y, c, w: aten.where.self(c, x, y))
    add("where.ScalarOther", lambda x, y, c, w: aten.where.ScalarOther(c, x, 2))
    add("where.ScalarSelf", lambda x, y, c, w: aten.where.ScalarSelf(c, 2, y))
    add("where.Scalar", lambda x, y, c, w: aten.where.Scalar(c, 2.5, -1.0))
    add("masked_fill.Scalar", lambda x, y, c, w: aten.masked_fill.Scalar(x, c, 2))
    add("masked_fill.Tensor", lambda x, y, c, w: aten.masked_fill.Tensor(x, c, w.sum()))
    add("fill.Tensor", lambda x, y, c, w: aten.fill.Tensor(x, w.amax()))
    for dtype in DTYPES:
        add("_to_copy.default", lambda x, y, c, w, d=dtype: aten._to_copy.default(x, dtype=d))
        add("to.dtype", lambda x, y, c, w, d=dtype: aten.to.dtype(x, d))
    return made


def test_every_row_is_tested() -> None:
    rows = {name.removeprefix("aten.") for name in pointwise.ROWS if name.startswith("aten.")}
    assert rows - {name for name, _ in cases()} == set()


class Many(torch.nn.Module):
    """The functions that torch accepts, as one graph of many results."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        return [f(*args) for f in self.functions]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x and y (nonzero where torch raises on zero), a condition, a positive weight."""
    n = 101
    x, y = sample(dtype, n), sample(dtype, n, seed=1)
    if dtype.is_floating_point:
        special = T([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 3.0, 1e-3], dtype=dtype)
        a, b = (t.reshape(-1) for t in torch.meshgrid(special, special, indexing="ij"))
        x, y = torch.cat([x, a]), torch.cat([y, b])
    elif dtype is not torch.bool:
        info = torch.iinfo(dtype)
        edges = T([info.min, info.max, info.max, 1, 0], dtype=dtype)
        x, y = torch.cat([x, edges]), torch.cat([y, T([2, 3, 2, 5, 7], dtype=dtype)])
        y = torch.where(y == 0, torch.ones_like(y), y)
    weight = torch.linspace(0.1, 0.9, x.shape[0]) if dtype.is_floating_point else torch.ones(
        x.shape[0])  # fmt: skip
    return x, y, sample(torch.bool, x.shape[0], seed=2), weight.to(dtype)


def undefined(name: str, dtype: torch.dtype) -> bool:
    """Where torch's own result is undefined or depends on its vector width."""
    shifts = name.split(".")[0] in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__",
                                    "__rshift__")  # fmt: skip
    return shifts and dtype is torch.bool


QUICK = (torch.float32, torch.int64, torch.bool)


@pytest.mark.parametrize(
    "dtype",
    [d if d in QUICK else pytest.param(d, marks=pytest.mark.heavy) for d in DTYPES],
    ids=named,
)
def test_every_row_against_eager(dtype: torch.dtype) -> None:
    args = operands(dtype)
    kept: list[tuple[str, Callable[..., Any], torch.Tensor]] = []
    for name, function in cases():
        if undefined(name, dtype) or name.endswith(".Scalar_Tensor"):
            continue
        try:
            expected = function(*args)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # torch refuses this dtype too
        kept.append((name, function, expected))
    module = Many([f for _, f, _ in kept])
    ours, fallbacks = results(module, *args)
    wrong = []
    for (name, _, expected), got in zip(kept, ours, strict=True):
        rtol = RTOL.get(expected.dtype, 0.0)
        x = args[0]
        if name in ("_to_copy.default", "to.dtype") and not expected.dtype.is_floating_point:
            if dtype.is_floating_point and expected.dtype is not torch.bool:
                fine = x.isfinite() & (x.abs() < 100)  # out of range is undefined in C++ and torch
                if expected.dtype is torch.uint8:
                    fine &= x >= 0
                got, expected = got[fine], expected[fine]
        if name in ("lgamma.default", "tan.default", "hypot.default"):
            rtol *= 4
        if name in ("sin.default", "cos.default") and not dtype.is_floating_point:
            fine = x.double().abs() < 3e15  # beyond, an angle in float32 has no digits left
            got, expected = got[fine], expected[fine]
        if name == "pow.Tensor_Scalar" and dtype is torch.float16:
            # of -inf and -0: torch's pow in float16, sqrt in the other dtypes
            fine = ~x.signbit() | (x.isfinite() & (x != 0))
            got, expected = got[fine], expected[fine]
        if name == "gelu.default":  # of infinity: NaN in torch's vector loop, infinity in its rest
            got, expected = got[x.isfinite()], expected[x.isfinite()]
        try:
            agree(got, expected, rtol, max(rtol, 0.0), name)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    allowed = {"no kernels", "on bool"}
    odd = [f for f in fallbacks if not any(a in f[1] for a in allowed)]
    assert not odd


@pytest.mark.parametrize("name", ["remainder", "bitwise_or", "bitwise_xor", "bitwise_and"])
def test_a_number_in_front(name: str) -> None:
    y = T([1, 2, 3, 4, 5])
    function = getattr(aten, name).Scalar_Tensor
    ours, _ = results(lambda y: function(3, y), y)
    assert torch.equal(ours, function(3, y))


# -- shapes and dtypes of whole loops ----------------------------------------------------------


def check(function: Callable[..., Any], *args: torch.Tensor, rtol: float | None = None,
          native: bool = True) -> None:  # fmt: skip
    ours, fallbacks = results(function, *args)
    theirs = function(*args)
    for a, b in zip(
        ours if isinstance(ours, tuple | list) else [ours],
        theirs if isinstance(theirs, tuple | list) else [theirs], strict=True,
    ):  # fmt: skip
        tolerance = RTOL.get(b.dtype, 0.0) if rtol is None else rtol
        agree(a, b, tolerance, tolerance)
    if native:
        assert not fallbacks


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_reductions(dtype: torch.dtype) -> None:
    """Sums, extrema, positions and truth over the last, middle, first, several and all axes."""
    x = sample(dtype, 3, 5, 70)
    inexact = dtype.is_floating_point

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x.sum(), x.any(), x.all(), x.argmax(), x.sum(0, keepdim=True), x.sum((0, 2))]
        made += [x.prod(1)] if inexact or dtype is torch.int64 else []
        for dim in (0, 1, 2):
            made += [x.sum(dim), x.amax(dim), x.amin(dim, keepdim=True), x.any(dim), x.all(dim)]
            made += [x.argmax(dim), x.argmin(dim, keepdim=True), *x.max(dim), *x.min(dim)]
            if inexact:
                made += [x.mean(dim), x.var(dim), torch.softmax(x, dim), x.log_softmax(dim)]
        made += [x.amax((0, 2)), x.amax((1, 2)), x.amin((0, 1)), x.amax(), x.amin((0, 1, 2))]
        if inexact:
            made += [x.mean(), x.mean((0, 1)), x.mean((1, 2), keepdim=True), x.norm(dim=1)]
        return made

    if dtype is torch.bool:  # torch has no argmax of bool

        def function(x: torch.Tensor) -> list[torch.Tensor]:  # fmt: skip
            return [x.sum(), x.any(), x.all(), x.sum(1), x.any(1), x.all(0), x.any(2), x.amax(1),
                    x.amin(0), x.sum((0, 1)), x.all(2)]  # fmt: skip

    check(function, x)


def test_extrema_of_nan_and_ties() -> None:
    x = sample(torch.float32, 6, 33).round()
    x[1, 7] = NAN
    x[2, 3], x[2, 20] = NAN, NAN
    x[3] = -INF
    x[4] = INF
    x[5] = 2.0

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        made = [*x.max(1), *x.min(1), x.amax(0), x.amin(0), x.argmax(0), x.argmax(), x.argmin()]
        made += [x.t().argmax(1), x.relu().t().argmax(), x.argmax(1, keepdim=True), x.sum(1)]
        return [*made, *x.max(0), torch.softmax(x, 1), x.max(), x.min()]

    check(function, x)


def test_sizes_one_and_zero() -> None:
    one, empty = sample(torch.float32, 1, 4, 1), torch.zeros(0, 4)

    def function(x: torch.Tensor, e: torch.Tensor) -> list[torch.Tensor]:
        made = [x.sum(0), x.sum(2), x.amax((0, 2)), x.argmax(0), x.argmax(2), *x.max(0), x.mean(2)]
        made += [x.any(0), x.all(2), torch.softmax(x, 0), torch.softmax(x, 2), x.squeeze().sum()]
        made += [e.sum(), e.sum(0), e.sum(1), e.prod(0), e.any(), e.all(0), e + 1, e.amax(1)]
        return [*made, (e * 2).sum(0) + x.sum(), e.mean(1)]

    check(function, one, empty, native=False)


def test_fused_rows() -> None:
    """Layer norm, RMS norm and softmax with what stands around them, over long and short rows."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        h = torch.nn.functional.gelu(x) + b
        n = torch.nn.functional.layer_norm(h, (x.shape[-1],), w, b)
        r = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w
        s = torch.softmax(x.masked_fill(x < -1, -INF) * 0.3, -1) * w
        return [n, r, s, n.sum(-1), (n * r).amax(-1), torch.logsumexp(x, -1)]

    for width in (3, 64, 1025):
        x = sample(torch.float32, 2, 5, width)
        check(function, x, sample(torch.float32, width), sample(torch.float32, width), rtol=2e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_columns_side_by_side(isa: str) -> None:
    """Reductions over dims that are not the last: several levels, blocks of columns."""

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        centred = x - x.mean(0, keepdim=True)
        wide = y.float()
        return [
            x.softmax(0), x.log_softmax(0), x.sum(0), x.amax(0), x.amin(0, keepdim=True),
            centred * (x.var(0, keepdim=True) + 1e-5).rsqrt() * w + x,
            (x > 0).any(0), (x > -9).all(0), x.prod(0), x * (w > 0), x.mean(0) * w,
            wide.softmax(1), wide.mean((0, 1)), wide.amax((0, 1), keepdim=True) - wide,
            wide.sum(1), (wide * wide).mean(1, keepdim=True).sqrt() + wide,
        ]  # fmt: skip

    for columns, rows in ((8, 5), (37, 300), (1100, 7)):
        x = sample(torch.float32, rows, columns)
        y = sample(torch.bfloat16, 3, 5, columns, seed=1)
        w = sample(torch.float32, columns, seed=2)
        built = Built(Call(function), (x, y, w), options=Options(jobs=1, target=TARGET_OF[isa]))
        try:
            assert not built.fallbacks
            x[rows // 2, 3] = NAN
            x[0, 5] = INF
            agree(built(x, y, w), function(x, y, w), 1e-5, 1e-5)
        finally:
            built.close()


@pytest.mark.parametrize("isa", available_isas())
def test_transposed_copies_keep_every_bit(isa: str) -> None:
    """Tiles and their remainders, of elements of every width."""

    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for x in xs:
            made += [x.permute(0, 2, 1).contiguous(), x.permute(2, 0, 1).contiguous(), x.clone()]
            made += [x[:, 3:, 1:].transpose(1, 2).contiguous()]
        return made

    generator = torch.Generator().manual_seed(3)
    shape = (2, 37, 83)
    bits = torch.randint(-(2**62), 2**62, shape, generator=generator)
    xs = [
        bits.view(torch.float64)[..., :50], bits.to(torch.int32).view(torch.float32),
        bits.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16).view(torch.float16),
        bits.to(torch.int8), bits,
    ]  # fmt: skip
    raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    built = Built(Call(function), tuple(xs), options=Options(jobs=1, target=TARGET_OF[isa]))
    try:
        for got, exact in zip(built(*xs), function(*xs), strict=True):
            width = raw[exact.element_size()]
            assert torch.equal(got.contiguous().view(width), exact.contiguous().view(width))
    finally:
        built.close()


@pytest.mark.parametrize("isa", available_isas())
def test_vectors_of_every_length(isa: str) -> None:
    """Whole vectors, remainders and steps between elements, at each width of vector."""

    def function(x: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        z = y.float() * 2 - x
        return [
            torch.where(m, z.exp(), x.sign()), z.softmax(-1), (z > x) & m, z.sum(-1),
            (x - x.mean(-1, keepdim=True)).relu(), torch.where(m.all(-1, True), x, z),
            z[..., ::2].tanh() + x[..., ::2], x.clamp(-1, 1).floor() + z.lgamma(), (z * m).amax(-1),
        ]  # fmt: skip

    for length in (3, 16, 33, 1030):
        x = sample(torch.float32, 3, length)
        y = sample(torch.bfloat16, 3, length, seed=1)
        m = sample(torch.bool, 3, length, seed=2)
        built = Built(Call(function), (x, y, m), options=Options(jobs=1, target=TARGET_OF[isa]))
        try:
            agree(built(x, y, m), function(x, y, m), 2e-5, 2e-5)
        finally:
            built.close()


def test_long_sums_are_accurate() -> None:
    x = torch.rand(2, 300_001, generator=torch.Generator().manual_seed(0))
    (rows, columns), _ = results(lambda x: (x.sum(1), x.t().contiguous().sum(0)), x)
    exact = x.double().sum(1)
    theirs = (x.sum(1).double() - exact).abs().max()
    for ours in (rows, columns):
        assert float((ours.double() - exact).abs().max()) <= float(theirs) + 0.02


def test_positions_in_every_axis() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        a, b, c = x.shape
        i, j, k = torch.arange(a), torch.arange(b), torch.arange(c)
        made = [x + i[:, None, None], x * j[:, None], x - k, i[:, None] * j, j[:, None] < k]
        made += [(x + k).sum(1), (x * j[:, None]).sum(1), (x * i[:, None, None]).amax(0)]
        made += [torch.arange(3, 20, 4), torch.arange(0, 1, 0.125), torch.arange(5, -3, -2)]
        made += [torch.arange(7, dtype=torch.float16), torch.arange(2, 7, dtype=torch.int32)]
        made += [(j[:, None] >= k).to(x.dtype) + x, torch.linspace(0, 1, 9)]
        return [*made, torch.ones(b, c).tril(), torch.ones(b, c).triu(1)]

    check(function, sample(torch.float32, 3, 5, 7), native=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rounding(dtype: torch.dtype) -> None:
    """An explicit cast rounds (ties to even); chains are computed in float and rounded once."""
    x = torch.cat([torch.linspace(-3, 3, 997), T([65504.0, 65519.0, 65520.0, 1e-8, 3e38, NAN])])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        h = x.to(dtype)
        return [h, h.float(), h.float() * 2, (h.float() == x), (x * 1.001).to(dtype).float()]

    check(function, x, rtol=0.0)
    (ours,), _ = results(lambda h: [(h * h + h) * 0.5], x.to(dtype))
    exact = ((x.to(dtype).double() ** 2 + x.to(dtype).double()) * 0.5).to(dtype)
    finite = exact.isfinite()
    eager = (x.to(dtype) * x.to(dtype) + x.to(dtype)) * 0.5
    error = (ours.double() - exact.double()).abs()[finite]
    assert float(error.max()) <= float((eager.double() - exact.double()).abs()[finite].max())


@pytest.mark.parametrize("dtype", INTS, ids=named)
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    x = T([info.min, info.max, 0, 1, 7, info.max // 2 + 1], dtype=dtype)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x + 1, x * 3, -x, x - 2, x * x * x, (x + 1) // 2, (x * 3) % 7, x.abs(), x.square()]
        return [*made, x.sum(), x.cumsum(0), (x + 1).sum(dtype=dtype), x.to(torch.int8) * 2]

    check(function, x)


def test_mixed_dtypes_promote() -> None:
    args = [sample(d, 9, seed=k) for k, d in enumerate(DTYPES)]
    zero_d = [T(2.5), T(3, dtype=torch.int64), T(2.0, dtype=torch.float64)]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for a in args:
            made += [a * b for b in args] + [a >= b for b in args] + [a + 2, a * 1.5, a == 1]
            made += [torch.where(args[9], a, args[4]), torch.maximum(a, args[3])]
            made += [a + z for z in zero_d]
        return made

    check(function, *args)


def test_views_inside_a_loop() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        t = x.transpose(0, 2)
        made = [t + y.permute(2, 1, 0), x[:, 1:4] * 2, x[..., ::3].exp(), t.contiguous()]
        made += [(x + 1).transpose(0, 1) * y.transpose(0, 1), x[:, :, None] - y[:, None, :, :1]]
        made += [x.expand(2, 3, 5, 7) + 1, x.unfold(2, 3, 2).sum(-1), x.flip(1) + y]
        made += [torch.diagonal(x, 0, 1, 2) * 2, (x * 2).reshape(15, 7).t(), x.view(3, 35).sum(0)]
        return [*made, x.select(1, -1) + y.select(0, 1)[:3], t.sum(0), t.amax((1, 2))]

    check(function, sample(torch.float32, 3, 5, 7), sample(torch.float32, 3, 5, 7, seed=3))


# -- one loop alone, on guarded memory, for every instruction set ------------------------------


def view(buffer: int, dtype: str, shape: Sequence[Any], strides: Sequence[Any]) -> View:
    return View(buffer, dtype, tuple(shape), tuple(strides))


def execute(
    loop: Loop, tensors: Sequence[torch.Tensor], out: torch.Tensor, isa: str,
    bindings: dict[sympy.Symbol, int] | None = None, parts: int = 3,
) -> torch.Tensor:  # fmt: skip
    """Buffers 0.. are `tensors` (their end may not be read past), the next one is the result."""
    made = generate(loop)

    def number(dim: Any) -> int:
        return dim if isinstance(dim, int) else int(sympy.sympify(dim).subs(bindings or {}))

    memory = Memory(out.numel() * out.element_size())
    inputs = [before_a_forbidden_page(t) for t in tensors]
    addresses = []
    for pointer in made.pointers:
        base = memory.address if pointer.buffer == len(tensors) else inputs[pointer.buffer][0]
        addresses.append(base + number(pointer.offset) * getattr(torch, pointer.dtype).itemsize)
    library: ctypes.CDLL = build([Unit("loop", made.source)], isa)
    total = number(made.range)
    cuts = sorted({total * i // parts for i in range(parts + 1)})
    pieces = list(zip(cuts[:-1], cuts[1:], strict=True))[::-1]
    call(library, made.symbol, addresses, [number(d) for d in made.immediates], pieces,
         number(made.scratch))  # fmt: skip
    memory.check("result")
    return memory.tensor(out.dtype, out.shape).clone()


@pytest.mark.parametrize("isa", available_isas())
def test_flat_and_rows_stay_in_bounds(isa: str) -> None:
    n = sympy.Symbol("N", integer=True, positive=True)
    x = sample(torch.float32, 13, 37)
    load = Load("float32", view(0, "float32", (n, 37), (37, 1)), (37, 1))
    double = Compute("float32", "({0} + {0})", (load,), ("float32",))
    flat = Loop([n, 37], stores=[Store(double, view(1, "float32", (n, 37), (37, 1)), (37, 1))])
    assert torch.equal(execute(flat, [x], x, isa, {n: 13}), x * 2)
    rows = Loop([n, 37], stores=[Store(double, view(1, "float32", (37, n), (n, 1)), (1, n))])
    out = torch.empty(37, 13)
    assert torch.equal(execute(rows, [x], out, isa, {n: 13}), (x * 2).t())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "argmax", "prod"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reducing_loops_stay_in_bounds(isa: str, kind: str, axis: int) -> None:
    """Axis 1 is the row kernel, axis 0 the column kernel (but for argmax)."""
    r, c = (sympy.Symbol(name, integer=True, positive=True) for name in "RC")
    for rows, columns in ((7, 70), (70, 129)):
        x = sample(torch.float32, rows, columns)
        load = Load("float32", view(0, "float32", (r, c), (c, 1)), (c, 1))
        dtype = "int64" if kind == "argmax" else "float32"
        reduce = Reduce(dtype, kind, load, (r, c)[axis] if kind == "mean" else 1)
        strides = (0, 1) if axis == 0 else (1, 0)
        store = Store(reduce, view(1, dtype, ((c, r)[axis],), (1,)), strides)
        loop = Loop([r, c], frozenset({axis}), [store])
        function = {"max": torch.amax, "min": torch.amin}.get(kind, getattr(torch, kind))
        expected = function(x, axis)
        ours = execute(loop, [x], expected, isa, {r: rows, c: columns})
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_softmax_keeps_exponentials_in_scratch(isa: str) -> None:
    n = sympy.Symbol("N", integer=True, positive=True)
    x = sample(torch.float32, 5, 201)
    load = Load("float32", view(0, "float32", (5, n), (n, 1)), (n, 1))
    top = Reduce("float32", "max", load)
    takes = ("float32", "float32")
    e = Compute("float32", "gc::vexp({0} - {1})", (load, top), takes, heavy=True)
    quotient = Compute("float32", "({0} / {1})", (e, Reduce("float32", "sum", e)), takes)
    loop = Loop([5, n], frozenset({1}),
                [Store(quotient, view(1, "float32", (5, n), (n, 1)), (n, 1))])  # fmt: skip
    assert generate(loop).scratch != 0
    ours = execute(loop, [x], x, isa, {n: 201})
    torch.testing.assert_close(ours, torch.softmax(x, 1), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("isa", available_isas())
def test_position_of_a_reduced_axis(isa: str) -> None:
    x = sample(torch.float32, 4, 9)
    load = Load("float32", view(0, "float32", (4, 9), (9, 1)), (9, 1))
    weight = Compute("float32", "({0} * {1})", (load, Position("int64", 1, 1, 2)),
                     ("float32", "float32"))  # fmt: skip
    loop = Loop([4, 9], frozenset({1}),
                [Store(Reduce("float32", "sum", weight), view(1, "float32", (4,), (1,)), (1, 0))])  # fmt: skip # noqa: E501
    expected = (x * (1 + 2 * torch.arange(9))).sum(1)
    ours = execute(loop, [x], expected, isa)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_symbolic_lengths_of_every_axis() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x.sum(0), x.sum(1), x.mean((0, 1)), torch.softmax(x, 1), x.amax(0), x.argmax(1)]
        made += [x.transpose(0, 1).reshape(-1) * 2, x + torch.arange(x.shape[1])[:, None]]
        return [*made, x[:, 1:].flatten(1), x * x.shape[0] + x.shape[1], torch.ones(x.shape[0])]

    a, b = torch.export.Dim("A", min=1, max=64), torch.export.Dim("B", min=3, max=64)
    x = sample(torch.float32, 5, 6, 3)
    built = Built(Call(function), (x,), dynamic=({0: a, 1: b},))
    try:
        assert not built.fallbacks
        for rows, columns in ((5, 6), (1, 3), (40, 3), (1, 64), (33, 17)):
            x = sample(torch.float32, rows, columns, 3)
            agree(built(x), function(x), 3e-6, 3e-6, f"{rows}x{columns}")
        with pytest.raises(GraphcError):
            built(sample(torch.float32, 5, 1, 3))
    finally:
        built.close()


def test_constants_of_every_kind() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x * INF, x + NAN, x * -1e-40, x - 1e30, torch.full((3,), -INF), x * math.pi]
        made += [torch.full((2,), 2**63 - 1), torch.full((2,), -(2**63)), torch.zeros(0) + 1]
        return [*made, torch.full((2,), True), x.new_zeros(2), torch.full_like(x, 7)]

    check(function, sample(torch.float32, 5))
