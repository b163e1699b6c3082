"""scaled_dot_product_attention executed for real against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import attention  # noqa: F401
from tests.kernel_harness import available_isas, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
NAME = "aten.scaled_dot_product_attention.default"
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def check(isa: str, q: Any, k: Any, v: Any, **options: Any) -> None:
    (got,) = run_rule(NAME, [q, k, v], options, isa=isa, eager_layout=q.dtype == torch.float32)
    exact = dict(options)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        exact["attn_mask"] = mask.double()
    reference = sdpa(q.double(), k.double(), v.double(), **exact)
    assert got.dtype == q.dtype and got.shape == reference.shape
    if got.numel():
        scale = max(1.0, float(reference.abs().max()))
        assert float((got.double() - reference).abs().max()) / scale < BOUND[q.dtype]


def heads(b: int, t: int, h: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """[b, h, t, d] as the transposed view of [b, t, h, d]."""
    return torch.randn(b, t, h, d).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_shapes_and_views(isa: str, dtype: torch.dtype) -> None:
    for b, h, tq, tk, d, dv in [
        (1, 2, 70, 70, 32, 32), (2, 3, 33, 150, 64, 64), (1, 1, 5, 300, 40, 24),
        (2, 2, 1, 517, 64, 64), (1, 2, 3, 9, 17, 33), (1, 1, 32, 128, 128, 64),
        (1, 1, 4, 0, 8, 8), (1, 2, 0, 5, 8, 8), (1, 1, 40, 0, 8, 8), (1, 1, 1, 1, 1, 1),
    ]:  # fmt: skip
        q, k, v = heads(b, tq, h, d, dtype), heads(b, tk, h, d, dtype), heads(b, tk, h, dv, dtype)
        check(isa, q, k, v)
    q = torch.randn(60, 24).to(dtype)
    check(isa, q[None], q[None], q.t().contiguous().t()[None], scale=0.3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_masks(isa: str, dtype: torch.dtype) -> None:
    for tq, tk in [(70, 170), (2, 300), (300, 70)]:
        q, k, v = heads(2, tq, 3, 32, dtype), heads(2, tk, 3, 32, dtype), heads(2, tk, 3, 32, dtype)
        check(isa, q, k, v, is_causal=True)
        keep = torch.rand(2, 1, 1, tk) > 0.5
        check(isa, q, k, v, attn_mask=keep)
        check(isa, q, k, v, attn_mask=torch.rand(tq, tk) > 0.3)
        check(isa, q, k, v, attn_mask=torch.randn(2, 3, tq, tk).to(dtype))
        check(isa, q, k, v, attn_mask=torch.randn(3, tk, tq).to(dtype).transpose(1, 2))
        check(isa, q, k, v, attn_mask=torch.randn(tq, 1).to(dtype))
        hidden = torch.zeros(2, 1, tq, tk, dtype=dtype)
        hidden.masked_fill_(~keep, torch.finfo(dtype).min)
        check(isa, q, k, v, attn_mask=hidden)


@pytest.mark.parametrize("isa", ISAS)
def test_fully_masked_rows_are_zero_as_in_torch(isa: str) -> None:
    for tq in (2, 40):
        q, k, v = (heads(1, t, 2, 16, torch.float32) for t in (tq, 200, 200))
        keep = torch.rand(tq, 200) > 0.5
        keep[1] = False
        (got,) = run_rule(NAME, [q, k, v, keep], isa=isa)
        assert not got[:, :, 1].any()
        assert torch.allclose(got, sdpa(q, k, v, keep), atol=1e-5)
        lowest = torch.zeros(tq, 200).masked_fill(~keep, torch.finfo(torch.float32).min)
        (got,) = run_rule(NAME, [q, k, v, lowest], isa=isa)  # equal scores: the mean of v
        assert torch.allclose(got, sdpa(q, k, v, lowest), atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_grouped_heads(isa: str) -> None:
    for tq in (1, 50):
        q, k = heads(2, tq, 6, 32, torch.float32), heads(2, 90, 2, 32, torch.float32)
        v = heads(2, 90, 2, 64, torch.float32)
        check(isa, q, k, v, enable_gqa=True)
        check(isa, q, k, v, enable_gqa=True, attn_mask=torch.randn(2, 6, tq, 90))
        check(isa, q, k, v, enable_gqa=True, attn_mask=torch.randn(2, 1, 1, 90))


WIDE = "graphc.attention.default"


def check_wide(isa: str, q: Any, k: Any, v: Any, **options: Any) -> None:
    """graphc.attention against its reference in float64."""
    (got,) = run_rule(WIDE, [q, k, v], options, isa=isa, eager_layout=q.dtype == torch.float32)
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x
        for name, x in options.items()
    }
    reference = torch.ops.graphc.attention(q.double(), k.double(), v.double(), **exact)
    scale = max(1.0, float(reference.abs().max()))
    assert float((got.double() - reference).abs().max()) / scale < BOUND[q.dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_windows_sinks_and_capped_scores(isa: str, dtype: torch.dtype) -> None:
    for tq, tk, h, g in [(1, 90, 2, 1), (70, 70, 2, 2), (300, 300, 1, 3), (40, 333, 2, 4)]:
        q = heads(2, tq, h * g, 32, dtype)
        k, v = heads(2, tk, h, 32, dtype), heads(2, tk, h, 40, dtype)
        sinks = torch.randn(1, h * g, 1, 1).to(dtype)
        slopes = torch.arange(tk) * torch.rand(h * g, 1, 1) / 8
        for options in (
            {"back": 16, "ahead": 0}, {"ahead": tk - tq}, {"back": 5, "ahead": 9},
            {"back": -3, "ahead": 40}, {"soft_cap": 2.0}, {"soft_cap": 2.0, "ahead": 0},
            {"sinks": sinks}, {"sinks": sinks, "back": 20, "ahead": 0},
            {"attn_mask": slopes.to(dtype), "ahead": tk - tq},
            {"attn_mask": torch.rand(2, 1, tq, tk) > 0.7, "sinks": sinks.float(), "soft_cap": 3.0},
        ):  # fmt: skip
            check_wide(isa, q, k, v, scale=0.4, enable_gqa=g > 1, **options)
    q, k, v = (heads(1, 40, 2, 32, dtype) for _ in range(3))
    check_wide(isa, q, k, v, scale=-0.7, ahead=0)
    check_wide(isa, q, k, v, scale=0.0, ahead=0, soft_cap=1.0)


@pytest.mark.parametrize("isa", ISAS)
def test_boolean_masks_with_empty_and_full_blocks(isa: str) -> None:
    q, k, v = (heads(1, 400, 2, 32, torch.bfloat16) for _ in range(3))
    gap = torch.arange(400)[:, None] - torch.arange(400)
    check(isa, q, k, v, attn_mask=(gap >= 0) & (gap < 50))
    check(isa, q, k, v, attn_mask=(gap.abs() > 140)[None, None])
    check(isa, q, k, v, attn_mask=((gap >= 0) & (gap < 50)).t().contiguous().t())


def test_large_scores_stay_finite_and_nan_passes() -> None:
    q, k, v = (heads(1, 64, 1, 32, torch.float32) for _ in range(3))
    check(ISAS[0], q * 30, k * 30, v)
    q[0, 0, 3, 0] = float("nan")
    (got,) = run_rule(NAME, [q, k, v], isa=ISAS[0])
    assert torch.equal(got.isnan(), sdpa(q, k, v).isnan())


def test_symbolic_lengths() -> None:
    q, k, v = (torch.randn(2, 3, t, 32) for t in (1, 77, 77))
    (got,) = run_rule(NAME, [q, k, v], {"is_causal": False}, isa=ISAS[0],
                      symbols={(0, 2): "T", (1, 2): "S", (2, 2): "S"})  # fmt: skip
    assert torch.allclose(got, sdpa(q, k, v), atol=1e-5)


def test_refusals() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(Refuse, match="dropout"):
        lower(NAME, [q, q, q], {"dropout_p": 0.5}, isa=ISAS[0])
    with pytest.raises(Refuse, match="float64"):
        lower(NAME, [q.double(), q.double(), q.double()], isa=ISAS[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_not_above_torch(isa: str, dtype: torch.dtype) -> None:
    q, k, v = (heads(1, t, 4, 64, dtype) for t in (100, 700, 700))
    reference = sdpa(q.double(), k.double(), v.double())
    (got,) = run_rule(NAME, [q, k, v], isa=isa)
    ours = (got - reference).square().mean().sqrt()
    assert ours <= 1.1 * (sdpa(q, k, v) - reference).square().mean().sqrt()
