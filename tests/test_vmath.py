"""vmath.h against float64 over its range, on every instruction set this machine can execute."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphc.lowering.context import Unit
from tests.kernel_build import available_isas, build

torch.set_num_threads(1)
INF = float("inf")

#: name -> (float64 reference, low, high, ulp of float32)
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float, float]] = {
    "vexp": (torch.exp, -110, 95, 3),
    "vexpm1": (torch.expm1, -30, 95, 3),
    "vlog": (torch.log, 0, 3e38, 3),
    "vlog1p": (torch.log1p, -1, 1e10, 3),
    "vsigmoid": (torch.sigmoid, -87, 100, 4),
    "vtanh": (torch.tanh, -20, 20, 3),
    "verf": (torch.erf, -6, 6, 3),
    "vsin": (torch.sin, -100, 100, 3),
    "vcos": (torch.cos, -100, 100, 3),
    "vsilu": (torch.nn.functional.silu, -80, 100, 4),
    "vsoftplus": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), -80, 100, 4),
}
#: absolute error, relative to max(1, |x|): these cancel for negative x, as torch's do
ABSOLUTE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float, float]] = {
    "vgelu": (torch.nn.functional.gelu, -20, 20, 3e-7),
    "vgelu_tanh": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), -20, 20, 3e-7),
}
NAMES = [*FUNCTIONS, *ABSOLUTE]
INTS = {"i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}
BINARY = ("floordiv", "truncdiv", "pymod", "truncmod")
CTYPES = {"i8": "int8_t", "u8": "uint8_t", "i32": "int32_t", "i64": "int64_t", "f32": "float",
          "f64": "double"}  # fmt: skip


def _source() -> str:
    lines = ['#include "prelude.h"', '#include "vmath.h"']
    for name in NAMES:
        for kind, ctype in (("f32", "float"), ("f64", "double")):
            lines.append(
                f'extern "C" __attribute__((visibility("default"))) void {name}_{kind}'
                f"(const {ctype}* __restrict x, {ctype}* __restrict y, int64_t n) {{\n"
                f"  for (int64_t i = 0; i < n; ++i) y[i] = gc::{name}(x[i]);\n}}"
            )
    for name in NAMES:  # explicit vectors, the last ones partial
        lines.append(
            f'extern "C" __attribute__((visibility("default"))) void {name}_vec'
            f"(const float* __restrict x, float* __restrict y, int64_t n) {{\n"
            f"  gc::sweep<1>(0, n, [&](int64_t i, auto w, auto) {{\n"
            f"    gc::vstore(y + i, gc::{name}(gc::vload(x + i, w)), w);\n  }});\n}}"
        )
    for name in (*BINARY, "vmax", "vmin", "ipow"):
        for kind, ctype in CTYPES.items():
            lines.append(
                f'extern "C" __attribute__((visibility("default"))) void {name}_{kind}'
                f"(const {ctype}* __restrict x, const {ctype}* __restrict w, {ctype}* __restrict y,"
                f" int64_t n) {{\n"
                f"  for (int64_t i = 0; i < n; ++i) y[i] = gc::{name}(x[i], w[i]);\n}}"
            )
    return "\n".join(lines) + "\n"


UNIT = Unit("vmath_test", _source())


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return build([UNIT], request.param)


def run(library: ctypes.CDLL, symbol: str, *inputs: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(inputs[0])
    inputs = tuple(x.contiguous() for x in inputs)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, y)]
    getattr(library, symbol)(*pointers, ctypes.c_int64(y.numel()))
    return y


def points(low: float, high: float, count: int = 200_000) -> torch.Tensor:
    """Even and logarithmic spacing over [low, high], tiny values of both signs included."""
    even = torch.linspace(low, high, count, dtype=torch.float64)
    size = torch.logspace(-44, np.log10(max(abs(low), abs(high))), count, dtype=torch.float64)
    both = torch.cat([even, size, -size]).float()
    return both[(both >= low) & (both <= high)]


def ulp(y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|y - exact| in units of the last place of float32 at exact."""
    nearest = exact.float().abs().clamp(min=1.2e-38)
    following = torch.nextafter(nearest, torch.tensor(INF))
    unit = (following.double() - nearest.double()).clamp(min=2.0**-149)
    error = (y.double() - exact).abs() / unit
    same = (y == exact.float()) | (y.isnan() & exact.isnan())
    return torch.where(same, torch.zeros_like(error), error)


@pytest.mark.parametrize("form", ["f32", "vec"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_in_ulp(library: ctypes.CDLL, name: str, form: str) -> None:
    function, low, high, bound = FUNCTIONS[name]
    x = points(low, high)
    error = ulp(run(library, f"{name}_{form}", x), function(x.double()))
    worst = int(error.argmax())
    assert float(error[worst]) <= bound, f"{name}({float(x[worst])!r}): {float(error[worst])} ulp"


@pytest.mark.parametrize("form", ["f32", "vec"])
@pytest.mark.parametrize("name", ABSOLUTE)
def test_absolute_error(library: ctypes.CDLL, name: str, form: str) -> None:
    function, low, high, bound = ABSOLUTE[name]
    x = points(low, high)
    error = (run(library, f"{name}_{form}", x).double() - function(x.double())).abs()
    error = error / x.double().abs().clamp(min=1)
    worst = int(error.argmax())
    assert float(error[worst]) <= bound, f"{name}({float(x[worst])!r}): {float(error[worst])}"


@pytest.mark.parametrize("name", ["vsin", "vcos"])
@pytest.mark.parametrize("size", [1e4, 1e6, 1e9, 1e12, 2.9e15])
def test_large_angles(library: ctypes.CDLL, name: str, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(4096, generator=generator, dtype=torch.float64) * 2 - 1).mul(size).float()
    error = (run(library, f"{name}_f32", x).double() - FUNCTIONS[name][0](x.double())).abs()
    fused = library is not build([UNIT], "portable")
    assert float(error.max()) <= 1e-7 + (0 if fused else 1.2e-16 * size), f"{float(error.max())}"


@pytest.mark.parametrize("name", ["vsin", "vcos"])
def test_angles_beyond_the_reduction_are_nan(library: ctypes.CDLL, name: str) -> None:
    x = torch.tensor([4e15, -4e15, 1e30, -3e38, INF, -INF])
    assert bool(run(library, f"{name}_f32", x).isnan().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["f32", "f64", "vec"])
def test_special_values(library: ctypes.CDLL, name: str, kind: str) -> None:
    function = (FUNCTIONS | ABSOLUTE)[name][0]
    dtype = torch.float64 if kind == "f64" else torch.float32
    tiny = [1e-45, 1e-40, 1.1754944e-38, 1e-30]
    x = torch.tensor(
        [0.0, -0.0, INF, -INF, float("nan"), *tiny, *(-t for t in tiny), 1.0, -1.0, 3e38, -3e38],
        dtype=dtype,
    ).repeat(5)  # long enough for the vector loop and its remainder
    y, exact = run(library, f"{name}_{kind}", x), function(x.double()).to(dtype)
    if name == "vsilu":
        exact = torch.nn.functional.silu(x)  # NaN at -inf, as torch in float32
    if kind != "f64" and name in ("vsin", "vcos"):
        exact = torch.where(x.abs() > 3e15, torch.tensor(float("nan")), exact)
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-44, equal_nan=True)
    if name not in ("vexp", "vsigmoid", "vcos", "vsoftplus", "vlog"):
        zeros = x == 0
        assert torch.equal(y[zeros].signbit(), x[zeros].signbit()), "the sign of zero"


@pytest.mark.parametrize("name", NAMES)
def test_float64(library: ctypes.CDLL, name: str) -> None:
    function, low, high, _ = (FUNCTIONS | ABSOLUTE)[name]
    x = points(low, high, 2000).double()
    torch.testing.assert_close(
        run(library, f"{name}_f64", x), function(x), rtol=1e-13, atol=1e-15, equal_nan=True
    )


def _reference(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if name == "floordiv":
        return torch.div(a, b, rounding_mode="floor")
    if name == "truncdiv":
        return torch.div(a, b, rounding_mode="trunc")
    return torch.remainder(a, b) if name == "pymod" else torch.fmod(a, b)


@pytest.mark.parametrize("kind", INTS)
@pytest.mark.parametrize("name", BINARY)
def test_integer_division(library: ctypes.CDLL, name: str, kind: str) -> None:
    dtype = INTS[kind]
    info = torch.iinfo(dtype)
    edges = [v for v in (-7, -3, -2, -1, 0, 1, 2, 3, 5, 100, 127, 128, 200, 254, 255)
             if info.min <= v <= info.max]  # fmt: skip
    values = torch.tensor(sorted({*edges, info.min + 1, info.max, info.max - 1}), dtype=dtype)
    a, b = (t.reshape(-1) for t in torch.meshgrid(values, values, indexing="ij"))
    a, b = a[b != 0], b[b != 0]
    assert torch.equal(run(library, f"{name}_{kind}", a, b), _reference(name, a, b))
    # no trap on a zero divisor or on overflow
    lowest = torch.full((4,), info.min, dtype=dtype)
    run(library, f"{name}_{kind}", lowest, torch.zeros_like(lowest))
    run(library, f"{name}_{kind}", lowest, torch.full_like(lowest, info.max))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", BINARY)
def test_float_division(library: ctypes.CDLL, name: str, kind: str) -> None:
    dtype = torch.float32 if kind == "f32" else torch.float64
    values = torch.tensor(
        [0.0, -0.0, 0.1, -0.1, 0.3, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 1e10, INF, -INF, float("nan")],
        dtype=dtype,
    )
    a, b = (t.reshape(-1) for t in torch.meshgrid(values, values, indexing="ij"))
    ours, theirs = run(library, f"{name}_{kind}", a, b), _reference(name, a, b)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["vmax", "vmin"])
def test_maximum_propagates_nan(library: ctypes.CDLL, name: str, kind: str) -> None:
    dtype = torch.float32 if kind == "f32" else torch.float64
    values = torch.tensor([0.0, 1.0, -2.0, INF, -INF, float("nan")], dtype=dtype)
    a, b = (t.reshape(-1) for t in torch.meshgrid(values, values, indexing="ij"))
    theirs = torch.maximum(a, b) if name == "vmax" else torch.minimum(a, b)
    torch.testing.assert_close(
        run(library, f"{name}_{kind}", a, b), theirs, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", INTS)
def test_integer_power_wraps(library: ctypes.CDLL, kind: str) -> None:
    dtype = INTS[kind]
    low = 0 if kind == "u8" else -5
    base, exponent = (
        t.reshape(-1).to(dtype)
        for t in torch.meshgrid(torch.arange(low, 12), torch.arange(0, 20), indexing="ij")
    )
    ours: Any = run(library, f"ipow_{kind}", base, exponent)
    assert torch.equal(ours, torch.pow(base, exponent))


# -- the storage types ----------------------------------------------------------------------------

STORAGE = Unit(
    "vec_test",
    '#include "prelude.h"\n#include "vec.h"\n'
    + "\n".join(
        f'extern "C" __attribute__((visibility("default"))) void {verb}_{name}'
        f"(const {source}* x, {target}* y, int64_t n) {{\n"
        f"  gc::sweep<2>(0, n, [&](int64_t i, auto w, auto) {{\n"
        f"    gc::vstore(y + i, gc::vload(x + i, w), w);\n  }});\n}}"
        for name, ctype in (("bf16", "gc::bf16"), ("f16", "gc::f16"))
        for verb, source, target in (("narrow", "float", ctype), ("widen", ctype, "float"))
    )
    + "\n",
)
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def converted(isa: str, symbol: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.full((x.numel() + 1,), 7, dtype=dtype)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    getattr(build([STORAGE], isa), symbol)(*pointers, ctypes.c_int64(x.numel()))
    assert float(y[-1]) == 7  # nothing behind the last element
    return y[:-1]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", HALVES)
def test_every_half_widens_exactly(isa: str, name: str) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(HALVES[name])
    y = converted(isa, f"widen_{name}", x, torch.float32)
    torch.testing.assert_close(y, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("count", [1, 3, 16, 37, 200_000])
def test_narrowing_rounds_to_even(isa: str, name: str, count: int) -> None:
    dtype = HALVES[name]
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    ties = (bits & ~0xFFFF) | 0x8000  # half way between two bfloat16
    x = torch.cat([bits, ties, bits & ~0xFFF]).to(torch.int32).view(torch.float32)
    got, exact = converted(isa, f"narrow_{name}", x, dtype), x.to(dtype)
    if name == "bf16":  # the AVX512-BF16 instruction takes subnormals for zero
        small = x.abs() < 1.1754944e-38
        assert bool((got[small].float().abs() < 1.2e-38).all())
        got, exact = got[~small], exact[~small]
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


# -- the table in docs/vector-math.md ---------------------------------------------------------


def test_the_documented_errors_hold() -> None:
    """Each figure of the table is an upper bound of what is measured, and no loose one."""
    text = (Path(__file__).parents[1] / "docs" / "vector-math.md").read_text(encoding="utf-8")
    isas = ["avx512", "avx2", "portable"]
    rows = re.findall(r"^\| `(v\w+)` \|[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.M)
    assert {row[0] for row in rows} == set(FUNCTIONS)
    for name, *stated in rows:
        function, low, high, _ = FUNCTIONS[name]
        x = points(low, high)
        for isa, figure in zip(isas, stated, strict=True):
            if isa not in available_isas():
                continue
            library = build([UNIT], isa)
            worst = float(ulp(run(library, f"{name}_vec", x), function(x.double())).max())
            assert worst <= float(figure) <= worst + 0.4, f"{name} on {isa}: {worst:.2f} ulp"
