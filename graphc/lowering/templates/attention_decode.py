"""Attention of a few queries over many keys (kernels/attention_decode.cpp)."""

from __future__ import annotations

from typing import Any

from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Unit
from graphc.lowering.templates.attention_operands import Attention
from graphc.lowering.templates.operand import (
    FAST,
    Operand,
    entry_unit,
    float_literal,
    grain_for,
    padded,
    plain_store,
)
from graphc.lowering.templates.pack import PANEL

#: up to this many queries (known at build time) the kernel without packing is taken
DECODE_QUERIES = 4


def takes(ctx: LoweringContext, found: Attention) -> bool:
    """Few queries, and rows of keys and values that are read as they lie."""
    queries = ctx.static(found.q.shape[-2])
    return (
        queries is not None and queries <= DECODE_QUERIES
        and ctx.static(found.k.strides[-1]) == 1 and ctx.static(found.v.strides[-1]) == 1
    )  # fmt: skip


def emit(ctx: LoweringContext, node: Any, found: Attention) -> None:
    """The Step for few queries."""
    q, k, v, size, walks = found.q, found.k, found.v, found.size, found.walks
    tq, tk, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    pointers = [q, k, v, *([found.mask] if found.mask is not None else [])]
    immediates: list[Dim] = [
        tq, tk, d, dv, *padded(size, 1), q.strides[-2], q.strides[-1], *padded(walks[0], 0),
        k.strides[-2], *padded(walks[1], 0), v.strides[-2], PANEL, *padded(walks[2], 0),
        *found.mask_immediates(ctx), int(found.causal),
    ]  # fmt: skip
    result = Operand(found.out, found.out.strides[-2], found.out.strides[-1], tuple(walks[3]))
    epilogue = plain_store(result, size, len(pointers), len(immediates))
    function = f"gc_attention_decode_{FAST[q.dtype]}"
    text = f"""#include "attention.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  {function}(args, {epilogue.name}, {float_literal(found.scale)}, begin, end);
}}
"""
    unit, symbol = entry_unit("attention_decode", text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=product_of(size) * tq,
        grain=grain_for(ctx, tk * (d + dv), 16),
        scratch=4 * (d + dv + 2 * 256),
        label=node.name,
        flops=2 * product_of(size) * tq * tk * (d + dv),
        units=[Unit("attention_decode", ctx.header("attention_decode.cpp"))],
    )
