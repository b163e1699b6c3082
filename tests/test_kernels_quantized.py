"""Weights of 8 and 4 bits: encoding, and products with them against float64 at every level."""

from __future__ import annotations

import pytest
import torch

from graphc.ops.experts import decode_experts, encode_experts
from graphc.ops.weight_forms import FORMS, decode, encode, nbytes
from tests.eager import ISAS, refused
from tests.kernel_harness import Constant, lookup, run_rule

LINEAR = "graphc.quantized_linear.default"
EXPERTS = "graphc.experts.default"
GROUPED = "graphc.quantized_grouped_mm.default"
#: [N, K]: whole panels and groups, and neither; a chunk of K, and more
SHAPES = [(32, 128), (70, 33), (33, 2), (1, 1), (64, 260), (40, 2049), (65, 4231)]
#: relative rms error of normal weights: measured, and what is allowed
BUDGET = {"int8": 0.0066, "int4_g32": 0.0845, "int4_g128": 0.0985, "mxfp4": 0.1135}
BITS = {"int8": 8.125, "int4_g32": 4.5, "int4_g128": 4.125, "mxfp4": 4.25}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_errors_and_bytes(form: str) -> None:
    """What is promised for normal weights of any size; nothing is lost by encoding twice."""
    w = torch.randn(256, 4096) * 10.0 ** torch.randint(-20, 20, (256, 1))
    coded = encode(w, form)
    assert coded.dtype == torch.uint8
    assert coded.numel() * 8 / w.numel() == BITS[form]
    back = decode(coded, form, 256, 4096)
    errors = (back - w).double().norm(dim=1) / w.double().norm(dim=1)
    assert 0.9 * BUDGET[form] < float(errors.mean()) < BUDGET[form]
    assert float(errors.max()) < 1.15 * BUDGET[form]
    if FORMS[form].bits == 4:
        assert torch.equal(back.bfloat16().float(), back)


@pytest.mark.parametrize("form", FORMS)
def test_any_shape(form: str) -> None:
    for n, k in SHAPES:
        w = torch.randn(n, k)
        coded = encode(w, form)
        assert coded.numel() == nbytes(form, n, k)
        back = decode(coded, form, n, k)
        assert back.shape == (n, k)
        assert rms(back - w) < 1.5 * BUDGET[form] * rms(w) + 1e-30
        turned = decode(encode(w.t().contiguous().t().bfloat16(), form), form, n, k)
        assert torch.equal(turned, decode(encode(w.bfloat16(), form), form, n, k))


def test_all_codes_of_mxfp4() -> None:
    """Every element with every scale comes back bit for bit, signed zeros included."""
    values = torch.cat((E2M1, -E2M1))
    for exponent in range(-127, 126):
        group = torch.cat((values, values.flip(0))).double() * 2.0**exponent
        w = group.float()[None]
        assert torch.equal(decode(encode(w, "mxfp4"), "mxfp4", 1, 32), w), exponent
        assert torch.equal(w.bfloat16().float(), w)
    for top in E2M1[1:]:  # groups that do not use the largest element
        w = values[values.abs() <= top].repeat(16)[None, :32]
        assert torch.equal(decode(encode(w, "mxfp4"), "mxfp4", 1, 32), w)


def test_all_integers() -> None:
    """Codes in every place of a word, and of each panel's columns."""
    for form, low, high in (("int8", -127, 127), ("int4_g32", -8, 7), ("int4_g128", -8, 7)):
        group = FORMS[form].group
        w = torch.randint(low, high + 1, (96, 3 * group)).float()
        w.view(96, 3, group)[:, :, 0] = low
        for scale in (1.0, -0.375, 2.0**-100):
            assert torch.equal(decode(encode(w * scale, form), form, 96, 3 * group), w * scale)


@pytest.mark.parametrize("form", FORMS)
def test_odd_groups(form: str) -> None:
    """Zeros, tiny weights and one outlier a group."""
    w = torch.zeros(3, 256)
    w[1] = 1e-39
    w[2, ::32] = 1e30
    back = decode(encode(w, form), form, 3, 256)
    assert not back[0].any()
    assert back.isfinite().all()
    assert float(back[1].abs().max()) < 1e-37
    assert torch.allclose(back[2], w[2], rtol=0.25)


def exact(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(
        x.double(), w.double(), None if bias is None else bias.double()
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(isa: str, form: str, dtype: torch.dtype) -> None:
    """As close to float64 on the decoded weight as its rounding to the dtype, plus sums in float32:
    with each number of rows of a tile, around the limit of few rows, more than a block of rows."""
    for n, k in [(70, 33), (65, 4231), (32, 128)]:
        coded = encode(torch.randn(n, k) / k**0.5, form)
        plain = decode(coded, form, n, k)
        bias = torch.randn(n).to(dtype)
        for m in (*range(1, 15), 28, 29, 85):
            if m > 4 and k > 4000 and m not in (13, 28, 85):
                continue
            x = torch.randn(m, k).to(dtype)
            (got,) = run_rule(LINEAR, [x, Constant(coded), form, n, Constant(bias)], isa=isa)
            assert got.dtype == dtype
            truth = exact(x, plain, bias)
            best = rms(truth.to(dtype).double() - truth)
            assert rms(got.double() - truth) <= 1.02 * best + 4e-7 * rms(truth), (n, k, m)


@pytest.mark.parametrize("isa", ISAS)
def test_operands(isa: str) -> None:
    """Every remainder of K, batches, broadcast rows, no bias; what is refused."""
    for form in FORMS:
        for k in (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 129):
            coded, x = encode(torch.randn(32, k), form), torch.randn(2, 1, k).bfloat16()
            for rows in (x[:1], x, x.expand(2, 40, k)):
                (got,) = run_rule(LINEAR, [rows, Constant(coded), form, 32], isa=isa)
                truth = exact(rows, decode(coded, form, 32, k), None)
                assert got.shape == truth.shape
                torch.testing.assert_close(got.double(), truth, rtol=0.005, atol=0.01)
    refused(LINEAR, [torch.randn(2, 32), encode(torch.randn(8, 32), "int8"), "int8", 8])
    coded = encode(torch.randn(8, 32), "int8")
    refused(LINEAR, [torch.randn(2, 32).double(), Constant(coded), "int8", 8])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts(isa: str, form: str, dtype: torch.dtype) -> None:
    """As close to float64 on the decoded weights as sums in float32, one rounding of hidden values
    and one of each expert's result; experts without tokens are not read."""
    for count, slots, width, hidden in ((4, 1, 64, 32), (8, 2, 72, 40), (16, 4, 33, 21)):
        gate_up = torch.randn(count, 2 * hidden, width) / width**0.5
        down = torch.randn(count, width, hidden) / hidden**0.5
        coded = encode_experts(gate_up, down, form)
        plain = decode_experts(*coded, form, hidden, width)
        assert rms(plain[0] - gate_up) < 1.3 * BUDGET[form] * rms(gate_up)
        assert rms(plain[1] - down) < 1.3 * BUDGET[form] * rms(down)
        for tokens in (1, 5, 120):
            x = torch.randn(tokens, width).to(dtype)
            index = torch.rand(tokens, count).topk(slots).indices
            weight = torch.rand(tokens, slots)
            arguments = [x, index, weight, *map(Constant, coded)]
            options = {"form": form, "hidden": hidden}
            (ours,) = run_rule(EXPERTS, arguments, options, isa=isa, parts=5)
            eager = lookup(EXPERTS)(x, index, weight, *coded, **options)
            truth = lookup(EXPERTS)(x.double(), index, weight, *(w.double() for w in plain))
            assert ours.dtype == dtype
            unit = 3e-7 * rms(truth)
            assert rms(ours.double() - truth) <= 1.02 * rms(eager.double() - truth) + unit


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped(isa: str, form: str, dtype: torch.dtype) -> None:
    """Rows sorted by group, groups without rows, rows behind the last group."""
    for n, k in ((70, 33), (32, 260)):
        plain = torch.randn(5, n, k) / k**0.5
        coded = torch.stack([encode(matrix, form) for matrix in plain])
        x = torch.randn(140, k).to(dtype)
        ends = torch.tensor([1, 1, 40, 130, 135])
        for offs in (ends, ends.int()):
            arguments = [x, Constant(coded), offs, form, n]
            (got,) = run_rule(GROUPED, arguments, isa=isa, parts=7)
            assert got.dtype == dtype
            assert not got[135:].any()
            truth = lookup(GROUPED)(x.double(), coded, offs, form, n)
            best = rms(truth.to(dtype).double() - truth)
            assert rms(got.double() - truth) <= 1.02 * best + 4e-7 * rms(truth)
    refused(GROUPED, [x, coded, ends, form, n])
