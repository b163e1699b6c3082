"""Attention of a few queries, executed for real against float64 references."""

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
BOUND = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
SDPA = "aten.scaled_dot_product_attention.default"
GENERAL = "graphc.attention.default"
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def check(
    isa: str, name: str, operands: list[torch.Tensor], cuts: Any = (), **options: Any
) -> None:
    """Against the operator in float64."""
    (got,) = run_rule(name, operands, options, isa=isa, cuts=tuple(cuts))
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.dtype != torch.bool else v
        for k, v in options.items()
    }
    operator = sdpa if name == SDPA else torch.ops.graphc.attention
    reference = operator(*(x.double() for x in operands), **exact)
    dtype = operands[0].dtype
    assert got.dtype == dtype and got.shape == reference.shape
    error = float((got.double() - reference).abs().max())
    assert error / max(1.0, float(reference.abs().max())) < BOUND[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_lengths_and_widths(isa: str, dtype: torch.dtype) -> None:
    for heads, tq, tk, d, dv in [
        (2, 1, 1, 128, 128), (2, 1, 517, 128, 128), (1, 3, 1300, 64, 64), (1, 8, 63, 80, 72),
        (1, 5, 1024, 17, 33), (1, 2, 130, 256, 96), (1, 4, 7, 8, 200), (1, 1, 2049, 1, 1),
    ]:  # fmt: skip
        q, k = rows(1, heads, tq, d, dtype=dtype), rows(1, heads, tk, d, dtype=dtype)
        check(isa, SDPA, [q, k, rows(1, heads, tk, dv, dtype=dtype)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_heads_that_share_keys(isa: str, dtype: torch.dtype) -> None:
    for group, tq in [(2, 1), (3, 2), (8, 1), (16, 8)]:
        q = rows(2, tq, 2 * group, 64, dtype=dtype).transpose(1, 2)
        k, v = (rows(2, 600, 2, 64, dtype=dtype).transpose(1, 2) for _ in range(2))
        check(isa, SDPA, [q, k, v], enable_gqa=True)
        spread = [x[:, :1].expand(2, 2 * group, 600, 64) for x in (k, v)]
        check(isa, SDPA, [q, *spread])
    mask = torch.rand(2, 32, 8, 600) > 0.4
    check(isa, SDPA, [q, k, v], enable_gqa=True, attn_mask=mask)
    check(isa, SDPA, [q, k, v], enable_gqa=True, attn_mask=mask[:, :1, :1])
    check(isa, SDPA, [q, k, v], enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_widths_of_heads_that_share_keys(isa: str, dtype: torch.dtype) -> None:
    """Wide and uneven rows, few and many heads: each way to read them."""
    for group, d, dv in [
        (1, 256, 256), (1, 192, 192), (2, 256, 256), (3, 64, 512), (4, 80, 72), (4, 128, 128),
        (7, 17, 300), (8, 256, 128), (12, 128, 128), (20, 64, 96),
    ]:  # fmt: skip
        q = rows(1, group, 1, d, dtype=dtype)
        for tk in (40, 700):
            k, v = rows(1, 1, tk, d, dtype=dtype), rows(1, 1, tk, dv, dtype=dtype)
            check(isa, SDPA, [q, k, v], enable_gqa=True)
            check(isa, SDPA, [q, k, v], [30], enable_gqa=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_segments(isa: str, dtype: torch.dtype) -> None:
    """Keys in pieces, as a cache and new tokens: also where a piece ends inside a block."""
    for cuts in ([1299], [1], [63, 64, 65], [700, 701, 1024, 1290]):
        q = rows(1, 4, 2, 128, dtype=dtype)
        k, v = (rows(1, 2, 1300, 128, dtype=dtype) for _ in range(2))
        check(isa, SDPA, [q, k, v], cuts, enable_gqa=True)
        mask = torch.randn(2, 1300).to(dtype)
        check(isa, SDPA, [q, k, v], cuts, enable_gqa=True, attn_mask=mask)


@pytest.mark.parametrize("isa", ISAS)
def test_windows_sinks_and_caps(isa: str) -> None:
    dtype = torch.float32
    for tk in (40, 1100):
        q = rows(2, 4, 3, 32, dtype=dtype)
        k, v = (rows(2, 2, tk, 32, dtype=dtype) for _ in range(2))
        sinks = torch.randn(4, 1, 1)
        for options in (
            {"soft_cap": 3.0}, {"sinks": sinks}, {"back": 1, "ahead": 20},
            {"back": -(tk - 20), "ahead": tk - 3}, {"ahead": -1, "sinks": sinks}, {"back": -2 * tk},
        ):  # fmt: skip
            check(isa, GENERAL, [q, k, v], scale=0.4, enable_gqa=True, **options)


@pytest.mark.parametrize("isa", ISAS)
def test_masked_rows_and_nan(isa: str) -> None:
    q, k, v = (rows(1, 2, t, 16, dtype=torch.float32) for t in (3, 1200, 1200))
    keep = torch.rand(3, 1200) > 0.5
    keep[1] = False
    keep[2, :600] = False  # a whole piece
    (got,) = run_rule(SDPA, [q, k, v, keep], isa=isa)
    assert not got[:, :, 1].any()
    assert torch.allclose(got, sdpa(q, k, v, keep), atol=1e-5)
    q[0, 0, 2, 3] = float("nan")
    (got,) = run_rule(SDPA, [q, k, v], isa=isa)
    assert torch.equal(got.isnan(), sdpa(q, k, v).isnan())


def test_symbolic_lengths() -> None:
    for length in (3, 77, 1500):
        q, k, v = (torch.randn(2, 3, t, 32) for t in (1, length, length))
        (got,) = run_rule(SDPA, [q, k, v], isa=ISAS[0],
                          symbols={(1, 2): "S", (2, 2): "S"})  # fmt: skip
        assert torch.allclose(got, sdpa(q, k, v), atol=1e-5)


def test_same_bits_however_the_range_is_cut() -> None:
    q, k, v = (rows(1, 3, t, 64, dtype=torch.bfloat16) for t in (2, 1700, 1700))
    first, *others = (run_rule(SDPA, [q, k, v], isa=ISAS[0], parts=n)[0] for n in (1, 2, 5))
    assert all(torch.equal(first, other) for other in others)


def test_uneven_heads_are_refused() -> None:
    q, k, v = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8)
    with pytest.raises(Refuse, match="uneven"):
        lower(SDPA, [q, k, v], {"enable_gqa": True}, isa=ISAS[0])


def test_many_queries_are_left_to_blocks() -> None:
    def steps(tq: int) -> list[str]:
        q, k = torch.zeros(1, 1, tq, 32), torch.zeros(1, 1, 40, 32)
        return [step.symbol for step in lower(SDPA, [q, k, k], isa=ISAS[0]).steps]

    assert steps(8) == ["attention_decode_f32"]
    assert not any("decode" in symbol for symbol in steps(9))


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_error_is_not_above_torch(dtype: torch.dtype, group: int) -> None:
    q = rows(1, 8 * group, 1, 128, dtype=dtype)
    k, v = (rows(1, 8, 2048, 128, dtype=dtype) for _ in range(2))
    reference = sdpa(q.double(), k.double(), v.double(), enable_gqa=True)
    (got,) = run_rule(SDPA, [q, k, v], {"enable_gqa": True}, isa=ISAS[0])
    torchs = sdpa(q, k, v, enable_gqa=True)
    ours, theirs = ((x.double() - reference).square().mean().sqrt() for x in (got, torchs))
    assert ours <= 1.02 * theirs, f"{ours:.3e} against {theirs:.3e}"


@pytest.mark.parametrize("isa", ISAS)
def test_a_mask_may_turn_out_to_be_broadcast(isa: str) -> None:
    q, k, v = (rows(1, 2, n, 16, dtype=torch.float32) for n in (3, 7, 7))
    for mask, dim in ((rows(1, 1, 1, 7, dtype=torch.float32), 2), (torch.zeros(1, 1, 3, 1), 3)):
        operands = [q, k, v, mask]
        (got,) = run_rule(SDPA, operands, isa=isa, symbols={(3, dim): "L"})  # known at run time
        torch.testing.assert_close(got, sdpa(*operands), atol=2e-6, rtol=2e-6)
