"""Arithmetic on uint16, uint32 and uint64, which torch stores but does not compute with.

Values are carried as int64 with the same bits (exact for 16 and 32 bits, modulo 2**64 for 64), so
sums, products and bit operations need no care; order and division of uint64 do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED

SIGN = -(1 << 63)
SIGNED_VIEW = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def widen(x: torch.Tensor) -> torch.Tensor:
    """int64 with the value of `x` (modulo 2**64); other dtypes as they are."""
    if x.dtype == torch.uint64:
        return x.view(torch.int64)
    return x.to(torch.int64) if x.dtype in WIDE_UNSIGNED else x


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unsigned `dtype` with the low bits of an int64."""
    if dtype == torch.uint64:
        return x.view(torch.uint64)
    return x.to(dtype)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 that compare as the unsigned values do."""
    return x.view(torch.int64) ^ SIGN if x.dtype == torch.uint64 else widen(x)


def restore(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Back from `ordered`."""
    return (x ^ SIGN).view(torch.uint64) if dtype == torch.uint64 else x.to(dtype)


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Unsigned 64-bit quotient of int64 bit patterns (Hacker's Delight, 9-3)."""
    half = (a >> 1) & 0x7FFFFFFFFFFFFFFF
    safe = torch.where(b < 1, 1, b)
    quotient = torch.div(half, safe, rounding_mode="trunc") << 1
    rest = a - quotient * safe
    quotient = quotient + ((rest ^ SIGN) >= (safe ^ SIGN)).to(torch.int64)
    above = ((a ^ SIGN) >= (b ^ SIGN)).to(torch.int64)
    return torch.where(b < 0, above, quotient)


def as_signed(x: torch.Tensor) -> torch.Tensor:
    """The same bits as the signed type of the same width, for data movement."""
    return x.view(SIGNED_VIEW[x.dtype]) if x.dtype in SIGNED_VIEW else x


def moved(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`function`, which only moves elements, on any dtype."""
    return function(as_signed(x)).view(x.dtype) if x.dtype in SIGNED_VIEW else function(x)
