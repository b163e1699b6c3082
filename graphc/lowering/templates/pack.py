"""Weight layouts of the product kernels, made once at build time.

Panels hold 32 output features each (`GC_NR` in graphc/kernels/isa.h), the last one zero-padded,
and serve every ISA level unchanged; the layouts are described in graphc/kernels/gemm.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

PANEL = 32


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N/32), K, 32], any dtype; N is zero-padded."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % PANEL))
    return padded.view(-(-n // PANEL), PANEL, k).transpose(1, 2).contiguous()


def pair_panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N/32), ceil(K/2), 32, 2]: neighbours in K side by side, as a bf16 dot
    product instruction reads them; N and K are zero-padded."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, k % 2, 0, -n % PANEL))
    return padded.view(-(-n // PANEL), PANEL, (k + 1) // 2, 2).transpose(1, 2).contiguous()


#: packed weights by what they were made of, while several graphs of one model are lowered
_KNOWN: ContextVar[dict[Any, tuple[torch.Tensor, torch.Tensor, str]] | None] = ContextVar(
    "graphc_packed", default=None
)


@contextmanager
def remembered() -> Iterator[None]:
    """The same weight is packed once inside: graphs of one plan share most of theirs."""
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def pack_weight(weight: torch.Tensor) -> tuple[torch.Tensor, str]:
    """[N, K] in the layout of its dtype's kernel (float32, float16, bfloat16), with its name."""
    known = _KNOWN.get()
    if known is None:
        return _packed(weight)
    key = (weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride())
    if key not in known:
        known[key] = (weight, *_packed(weight))  # the weight itself: its address stays taken
    return known[key][1:]


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, str]:
    if weight.dtype == torch.bfloat16:
        return pair_panels(weight), "pair_panels32"
    return panels(weight), "panels32"
