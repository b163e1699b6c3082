"""Products (linear, mm, bmm, matmul, addmm) executed for real against float64 references."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from graphc.lowering import templates  # noqa: F401
from graphc.lowering.context import Refuse, Unit
from graphc.lowering.templates import linear, matmul  # noqa: F401
from tests import kernel_build
from tests.kernel_build import KERNELS
from tests.kernel_harness import (
    Constant,
    FakeContext,
    FakeNode,
    FakeType,
    FakeValue,
    available_isas,
    dtype_name,
    lookup,
    lower,
    run_rule,
)

torch.set_num_threads(1)
ISAS = available_isas()
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
#: largest error allowed, as a share of the largest reference value
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-14}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def check(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """`reference` is in float64; the dtype of the result decides the bound."""
    assert result.shape == reference.shape
    if result.numel() == 0:
        return
    scale = max(float(reference.abs().max()), 1e-3)
    error = float((result.double() - reference).abs().max()) / scale
    assert error < BOUND[dtype or result.dtype], error


def exact(tensor: Any) -> Any:
    return tensor.double() if isinstance(tensor, torch.Tensor) else tensor


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


SHAPES = [(1, 384, 96), (16, 300, 65), (5, 1, 1), (84, 33, 31), (85, 129, 64), (253, 40, 37),
          (2, 7, 300), (4, 0, 9), (0, 3, 4)]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear(isa: str, dtype: torch.dtype) -> None:
    for m, k, n in SHAPES:
        x, w, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
        reference = torch.nn.functional.linear(x.double(), w.double(), b.double())
        for weight in (Constant(w), w):  # packed at build time, or at run time
            (got,) = run_rule("aten.linear.default", [x, weight, Constant(b)], isa=isa)
            assert got.dtype == dtype
            check(got, reference)


@pytest.mark.parametrize("isa", ISAS)
def test_linear_error_is_not_above_torch(isa: str) -> None:
    x, w = random(64, 3000), random(48, 3000)
    reference = x.double() @ w.double().T
    (got,) = run_rule("aten.linear.default", [x, Constant(w)], isa=isa)
    ours = (got - reference).square().mean().sqrt()
    eager = (torch.nn.functional.linear(x, w) - reference).square().mean().sqrt()
    assert ours <= 1.1 * eager


@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_reads_strided_activations(dtype: torch.dtype) -> None:
    w = random(40, 24, dtype=dtype)
    for x in (
        random(3, 24, 10, dtype=dtype).transpose(1, 2),
        random(3, 10, 48, dtype=dtype)[:, ::2, 5:29],
        random(2, 3, 24, 5, dtype=dtype).permute(0, 3, 1, 2),
        random(24, dtype=dtype),
        random(1, 10, 24, dtype=dtype).expand(4, 10, 24),
    ):
        (got,) = run_rule("aten.linear.default", [x, Constant(w)], isa=ISAS[0])
        check(got, x.double() @ w.double().T)


def test_linear_of_a_symbolic_length_and_fused_epilogue() -> None:
    x, w, b = random(2, 45, 64), random(70, 64), random(70)
    (got,) = run_rule("aten.linear.default", [x, Constant(w), Constant(b)], isa=ISAS[0],
                      symbols={(0, 1): "T"}, epilogue="x > 0 ? 2.0f * x : 0.0f")  # fmt: skip
    check(got, 2 * torch.relu(torch.nn.functional.linear(x.double(), w.double(), b.double())))


def test_equal_layers_share_their_units() -> None:
    x = random(4, 32)
    first, second = (
        lower("aten.linear.default", [x, Constant(random(n, 32))], isa=ISAS[0]).steps[0].units
        for n in (32, 64)
    )
    assert first == second


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_broadcasts_batches(isa: str, dtype: torch.dtype) -> None:
    cases = [
        ((5, 33), (33, 40)),
        ((2, 3, 90, 17), (2, 3, 17, 35)),
        ((2, 1, 9, 17), (3, 17, 64)),
        ((4, 6, 8), (8, 5)),
        ((9, 8), (4, 8, 33)),
        ((1, 9, 8), (4, 8, 33)),
        ((17,), (17, 40)),
        ((2, 5, 17), (17,)),
        ((17,), (3, 17, 40)),
        ((17,), (17,)),
        ((2, 0, 4), (2, 4, 3)),
        ((2, 3, 0), (2, 0, 3)),
    ]
    for left, right in cases:
        a, b = random(*left, dtype=dtype), random(*right, dtype=dtype)
        (got,) = run_rule("aten.matmul.default", [a, b], isa=isa)
        check(got, torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_constant_for_each_batch_is_packed_at_build_time(isa: str, dtype: torch.dtype) -> None:
    w = random(4, 33, 70, dtype=dtype)
    for name, a in (
        ("bmm", random(4, 1, 33, dtype=dtype)),
        ("bmm", random(9, 4, 33, dtype=dtype).transpose(0, 1)),
        ("matmul", random(4, 90, 33, dtype=dtype)),
        ("matmul", random(2, 4, 5, 33, dtype=dtype)),  # batches share constants
    ):
        made = lower(f"aten.{name}.default", [a, Constant(w)], isa=isa)
        assert a.dim() > 3 or len(made.steps) == 1
        (got,) = run_rule(f"aten.{name}.default", [a, Constant(w)], isa=isa)
        check(got, a.double() @ w.double())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_of_views(isa: str, dtype: torch.dtype) -> None:
    q = random(2, 50, 4, 16, dtype=dtype).transpose(1, 2)
    k = random(2, 37, 4, 16, dtype=dtype).transpose(1, 2)
    (scores,) = run_rule("aten.matmul.default", [q, k.transpose(2, 3)], isa=isa)
    check(scores, q.double() @ k.double().transpose(2, 3))
    (mixed,) = run_rule("aten.matmul.default", [scores, k], isa=isa)
    check(mixed, scores.double() @ k.double())
    one = random(2, 1, 4, 16, dtype=dtype).transpose(1, 2)
    (row,) = run_rule("aten.matmul.default", [one, k.transpose(2, 3)], isa=isa)
    check(row, one.double() @ k.double().transpose(2, 3))


@pytest.mark.parametrize("isa", ISAS)
def test_addmm_family(isa: str) -> None:
    a, b, c = random(30, 20), random(20, 45), random(30, 45)
    for weight in (b, Constant(b)):
        (got,) = run_rule("aten.addmm.default", [c, a, weight], isa=isa)
        check(got, c.double() + a.double() @ b.double())
    (got,) = run_rule("aten.addmm.default", [c[0], a, b], {"alpha": 0.5, "beta": 3}, isa=isa)
    check(got, 3 * c[0].double() + 0.5 * (a.double() @ b.double()))
    nan = torch.full((45,), float("nan"))
    (got,) = run_rule("aten.addmm.default", [nan, a, b], {"beta": 0}, isa=isa)
    check(got, a.double() @ b.double())
    x, y, z = random(3, 8, 9), random(3, 9, 40), random(8, 1)
    (got,) = run_rule("aten.baddbmm.default", [z, x, y], isa=isa)
    check(got, z.double() + x.double() @ y.double())
    (got,) = run_rule("aten.bmm.default", [x, y], isa=isa)
    check(got, x.double() @ y.double())


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_products_wrap_as_in_torch(dtype: torch.dtype) -> None:
    for m, k, n in [(9, 70, 130), (1, 3, 2), (3, 0, 4)]:
        info = torch.iinfo(dtype)
        a = torch.randint(info.min // 2, info.max // 2, (m, k), dtype=dtype)
        b = torch.randint(info.min // 2, info.max // 2, (k, n), dtype=dtype)
        (got,) = run_rule("aten.mm.default", [a, b], isa=ISAS[0])
        assert torch.equal(got, a @ b)
        (got,) = run_rule("aten.mm.default", [a, Constant(b)], isa=ISAS[0])
        assert torch.equal(got, a @ b)
        (got,) = run_rule("aten.matmul.default", [a.expand(2, m, k), b], isa=ISAS[0])
        assert torch.equal(got, a.expand(2, m, k) @ b)


@pytest.mark.parametrize("isa", ISAS)
def test_float64_products(isa: str) -> None:
    x, w, b = (random(*s).double() for s in ((3, 11, 70), (130, 70), (130,)))
    (got,) = run_rule("aten.linear.default", [x, Constant(w), Constant(b)], isa=isa)
    check(got, torch.nn.functional.linear(x, w, b))
    (got,) = run_rule("aten.addmm.default", [b, x[0], w.t()], {"alpha": 2, "beta": 0.5}, isa=isa)
    check(got, 0.5 * b + 2 * (x[0] @ w.t()))


def test_refusals() -> None:
    half = torch.zeros(2, 2, dtype=torch.complex64)
    with pytest.raises(Refuse, match="complex64"):
        lower("aten.mm.default", [half, half], isa=ISAS[0])


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_pass(isa: str) -> None:
    x, w = random(20, 40), random(33, 40)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    (got,) = run_rule("aten.linear.default", [x, Constant(w)], isa=isa)
    eager = torch.nn.functional.linear(x, w)
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())


class Cast:
    """Stands for the node that made an int32 value from an 8-bit one."""

    target = "aten._to_copy.default"

    def __init__(self, source: Any) -> None:
        self.args = (source,)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_quantised_products_take_the_16_bit_kernel(isa: str, wide: torch.dtype) -> None:
    for m, k, n in [(1, 64, 33), (90, 301, 70), (3, 1, 1), (16, 384, 64)]:
        a = torch.randint(0, 256, (m, k), dtype=torch.uint8)
        b = torch.randint(-128, 128, (k, n), dtype=torch.int8)
        for constant in (True, False):
            context = FakeContext(isa)
            values = [
                FakeValue(FakeType(dtype_name(wide), tuple(t.shape)), t.to(wide), is_constant)
                for t, is_constant in ((a, False), (b, constant))
            ]
            for value, narrow in zip(values, (a, b), strict=True):
                source = FakeValue(FakeType(dtype_name(narrow.dtype), tuple(narrow.shape)), narrow)
                object.__setattr__(value, "producer", Cast(source))
            out = FakeValue(FakeType(dtype_name(wide), (m, n)), torch.empty(m, n, dtype=wide))
            node = FakeNode(lookup("aten.mm.default"), tuple(values), {}, (out,))
            matmul.mm(context, node)
            assert any("gemm_i16" in step.symbol for step in context.steps)
            context.execute(2)
            assert torch.equal(context.results[0], a.to(wide) @ b.to(wide))


@pytest.mark.parametrize("isa", ISAS)
def test_int_mm(isa: str) -> None:
    a = torch.randint(-128, 128, (40, 72), dtype=torch.int8)
    b = torch.randint(-128, 128, (72, 48), dtype=torch.int8)
    for right in (b, Constant(b), b.t().contiguous().t()):
        (got,) = run_rule("aten._int_mm.default", [a, right], isa=isa)
        assert torch.equal(got, a.int() @ b.int())


def test_vector_weight() -> None:
    x, w = random(3, 5, 40), random(40)
    for weight in (w, Constant(w)):
        (got,) = run_rule("aten.linear.default", [x, weight], isa=ISAS[0])
        check(got, x.double() @ w.double())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_vector_products(dtype: torch.dtype) -> None:
    a, b = random(37, 50, dtype=dtype), random(50, dtype=dtype)
    (got,) = run_rule("aten.mv.default", [a, b], isa=ISAS[0])
    check(got, a.double() @ b.double())
    (got,) = run_rule("aten.dot.default", [a[3], b], isa=ISAS[0])
    check(got, a[3].double() @ b.double())


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("kind", ["f32", "bf16", "coded"])
def test_sums_stay_in_registers(kind: str, tmp_path: Path) -> None:
    """A compiler that spills accumulators costs two thirds of the speed and no result."""
    unit = Unit(f"gemm_{kind}", (KERNELS / f"gemm_{kind}.cpp").read_text())
    library = kernel_build.build((unit,), ISAS[0])
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library._name], capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    kernels = [part for part in listing.split("\n\n") if re.match(r"\S+ <[^>]*micro", part)]
    assert len(kernels) > 5
    for text in kernels:
        stack = [line for line in text.splitlines() if re.search(r"[xyz]mm", line)
                 and re.search(r"\(%[er]sp", line)]  # fmt: skip
        assert len(stack) <= 4, text.splitlines()[0]  # spilled sums have dozens, in the loop
