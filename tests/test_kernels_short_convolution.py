"""The short convolution's kernels against eager torch in float64, on every ISA level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401  (the operator)
from tests.eager import ISAS, TOLERANCE, refused
from tests.kernel_harness import Constant, lookup, run_rule
from tests.kernel_in_place import run_in_place

NAME = "graphc.short_convolution.default"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def case(
    batch: int, tokens: int, channels: int, width: int = 4, dtype: torch.dtype = torch.float32,
    state: torch.dtype | None = None, bias: bool = True,
) -> list[Any]:  # fmt: skip
    """Arguments without slots; the states hold what x's dtype can."""
    before = torch.randn(batch, width - 1, channels).to(dtype).to(state or dtype)
    x, weight = torch.randn(batch, tokens, channels), torch.randn(channels, width)
    return [
        before,
        x.to(dtype),
        weight.to(dtype),
        torch.randn(channels).to(dtype) if bias else None,
    ]


def exact(args: Sequence[Any], **kw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    plain = [a.tensor if isinstance(a, Constant) else a for a in args]
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in plain]
    y, after = lookup(NAME)(*wide, **kw)
    return y, after


def compare(ours: tuple[torch.Tensor, ...], args: Sequence[Any], **kw: Any) -> None:
    truth, state = exact(args, **kw)
    dtype = args[1].dtype
    assert ours[0].dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(ours[0].double(), truth, rtol=bound, atol=bound)
    assert torch.equal(ours[1].double(), state)  # inputs, as they were


def verify(isa: str, args: Sequence[Any], **kw: Any) -> None:
    compare(run_rule(NAME, args, kw, isa=isa), args, **kw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(isa: str, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 3, 4, 7, 8, 31, 32, 33, 70):
        for channels, width in ((40, 4), (7, 4), (523, 4), (33, 3), (16, 8), (5, 2), (20, 1)):
            args = case(2, tokens, channels, width, dtype, bias=tokens % 2 == 0)
            verify(isa, args, silu=tokens % 3 > 0)
            verify(isa, [None, *args[1:]], silu=tokens % 3 == 0)


def test_operands(isa: str) -> None:
    """Weights known before, states in float32, strided x, parameters of other dtypes."""
    for dtype in DTYPES:
        args = case(2, 37, 48, dtype=dtype, state=torch.float32)
        verify(isa, args, silu=True)
        verify(isa, [*args[:2], Constant(args[2]), Constant(args[3])], silu=True)
        verify(isa, [*args[:2], args[2].float(), args[3].float()])
        verify(isa, [*args[:2], args[2].t().contiguous().t(), args[3]])
        part = torch.randn(2, 37, 100).to(dtype)[:, :, 20:68]
        verify(isa, [args[0], part, *args[2:]])
        verify(isa, [args[0], part.transpose(1, 2).contiguous().transpose(1, 2), *args[2:]])


def test_special_values(isa: str) -> None:
    """SiLU of large numbers stays finite, and NaN reaches the tokens of its window alone."""
    args = case(1, 20, 32)
    args[1] *= 1e4
    ours = run_rule(NAME, args, {"silu": True}, isa=isa)
    truth = exact(args, silu=True)
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=2e-6, atol=1e-2)
    args[1][0, 5, 3] = float("nan")
    bad = run_rule(NAME, args, {"silu": True}, isa=isa)[0].isnan().nonzero()
    assert bad.tolist() == [[0, t, 3] for t in range(5, 9)]


def test_split_anywhere(isa: str) -> None:
    """Going on from a state is going on, to the bit."""
    args = case(2, 40, 24)
    whole = run_rule(NAME, args, {"silu": True}, isa=isa)
    for cut in (1, 2, 3, 16, 33, 39):
        first = run_rule(NAME, [args[0], args[1][:, :cut], *args[2:]], {"silu": True}, isa=isa)
        rest = run_rule(NAME, [first[1], args[1][:, cut:], *args[2:]], {"silu": True}, isa=isa)
        assert torch.equal(torch.cat([first[0], rest[0]], 1), whole[0])
        assert torch.equal(rest[1], whole[1])


def test_slots_and_in_place(isa: str) -> None:
    """States in any slots, in place and copied; the other slots stay."""
    for tokens in (1, 2, 3, 5, 70):
        for dtype in (torch.float32, torch.bfloat16):
            args = case(3, tokens, 530, dtype=dtype)
            compare(run_in_place(NAME, args, isa=isa, parts=4), args)
            args[0] = torch.randn(6, 3, 530).to(dtype)
            args.append(torch.tensor([4, 0, 5], dtype=torch.int32))
            compare(run_rule(NAME, args, isa=isa, parts=4), args)
            compare(run_in_place(NAME, args, isa=isa, parts=4), args)


def test_symbols(isa: str) -> None:
    args = case(2, 45, 24)
    names = {(0, 0): "B", (1, 0): "B", (1, 1): "T"}
    compare(run_rule(NAME, args, isa=isa, symbols=names), args)


def test_refusals() -> None:
    args = case(1, 4, 8, 9)
    refused(NAME, args)
    args = case(1, 4, 8)
    refused(NAME, [x.double() for x in args])
    refused(NAME, [args[0].half(), *args[1:]])
