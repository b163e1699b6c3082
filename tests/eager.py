"""Comparison of one operator's kernels with eager torch, for the kernel tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphc.lowering.context import Refuse
from graphc.lowering.templates import load_rules
from tests.kernel_harness import Constant, available_isas, lookup, run_rule

load_rules()
torch.set_num_threads(1)
ISAS = available_isas()
# Only the products differ between ISA levels by source; all else is plain C++ whose build is what
# these tests spend their time on, so the level in the middle is left to GRAPHC_TEST_ALL_ISAS=1.
PLAIN = (
    ISAS if os.environ.get("GRAPHC_TEST_ALL_ISAS") else tuple(dict.fromkeys((ISAS[0], ISAS[-1])))
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float64: 1e-13,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}


def strip(argument: Any) -> Any:
    """Without the marks of constants."""
    if isinstance(argument, list):
        return [strip(item) for item in argument]
    return argument.tensor if isinstance(argument, Constant) else argument


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    low = 0 if dtype is torch.uint8 else -9
    return torch.randint(low, 9, shape).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 1.0) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    tolerance = TOLERANCE.get(theirs.dtype, 0.0) * scale
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(
    isa: str, name: str, args: Sequence[Any], scale: float = 1.0, symbols: Any = None, **kw: Any
) -> None:
    """Our results against eager torch's."""
    eager = lookup(name)(*strip(list(args)), **kw)
    ours = run_rule(name, args, kw, isa=isa, symbols=symbols)
    expected = eager if isinstance(eager, tuple | list) else (eager,)
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        close(a, b, scale)


def refused(name: str, args: Sequence[Any], **kw: Any) -> None:
    with pytest.raises(Refuse):
        run_rule(name, args, kw, isa=ISAS[-1])


def special(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values with ties, and for floats NaN, both infinities and both zeros."""
    x = sample(dtype, *shape)
    if dtype.is_floating_point:
        x = (x * 2).round()
        kinds = torch.randint(0, 12, shape)
        for i, v in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 0.0)):
            x = torch.where(kinds == i, torch.tensor(v, dtype=dtype), x)
    return x
