"""Lowering of scaled_dot_product_attention to the kernels of graphc/kernels/attention.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Unit, View, ceildiv, rule
from graphc.lowering.templates import attention_decode, attention_operands
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


def packed_f32(
    ctx: LoweringContext,
    node: Any,
    view: View,
    size: Sequence[Dim],
    batch: Sequence[Dim],
    columns: tuple[Dim, Dim],
    depth: tuple[Dim, Dim],
) -> tuple[View, list[Dim]]:
    """A Step that copies matrices to fp32 panels [ceil(n/32)][k][32], one per batch that `view`
    really has. columns and depth are (length, stride). Gives the panels and their batch strides."""
    (n, b_n), (k, b_k) = columns, depth
    own = [1 if ctx.static(s) == 0 else n_ for n_, s in zip(size, batch, strict=True)]
    panels = ceildiv(n, PANEL)
    workspace = ctx.workspace([*own, panels, k, PANEL], "float32")
    strides: list[Dim] = []
    running: Dim = panels * k * PANEL
    for n_, stride in zip(reversed(own), reversed(batch), strict=True):
        strides.insert(0, 0 if ctx.static(stride) == 0 else running)
        running = running * n_
    ctx.kernel(
        Unit("attention", ctx.header("attention.cpp")),
        f"gc_attention_pack_{FAST[view.dtype]}",
        pointers=[view, workspace],
        immediates=[n, k, b_n, b_k, *padded(own, 1), *padded(batch, 0)],
        reads=[view],
        writes=[workspace],
        range=product_of(own) * panels,
        grain=grain_for(ctx, k * PANEL * 8, 64),
        label=f"{node.name}.pack",
    )
    return workspace, strides


@rule("aten.scaled_dot_product_attention.default")
def attention(ctx: LoweringContext, node: Any) -> None:
    """query [*, Tq, D], key [*, Tk, D], value [*, Tk, Dv] -> [*, Tq, Dv].

    Operands are read with their strides. Raises Refuse for dropout, dtypes without a kernel, and
    batch structures beyond four dimensions.
    """
    found = attention_operands.operands(ctx, node)
    if attention_decode.takes(ctx, found):
        attention_decode.emit(ctx, node, found)
        return
    q, k, v, mask, out = found.q, found.k, found.v, found.mask, found.out
    size, walks = found.size, found.walks
    tq, tk, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    z = product_of(size)
    kind = FAST[q.dtype]
    v_view, v_batch = v, walks[2]
    v_step, v_panel = v.strides[-2], PANEL
    scratch = 4 * PANEL * (d + 3 * 128 + 3 + PANEL * ceildiv(dv, PANEL))
    k_view, k_batch = packed_f32(ctx, node, k, size, walks[1], (tk, k.strides[-2]),
                                 (d, k.strides[-1]))  # fmt: skip
    width = ctx.static(dv)
    whole = width is not None and width % PANEL == 0 and ctx.static(v.strides[-1]) == 1
    if kind != "f32" or not whole:
        v_view, v_batch = packed_f32(ctx, node, v, size, walks[2], (dv, v.strides[-1]),
                                     (tk, v.strides[-2]))  # fmt: skip
        v_step, v_panel = PANEL, tk * PANEL

    pointers = [q, k_view, v_view, *([mask] if mask is not None else [])]
    immediates: list[Dim] = [
        tq, tk, d, dv, *padded(size, 1), q.strides[-2], q.strides[-1], *padded(walks[0], 0),
        k.strides[-2], *padded(k_batch, 0), v_step, v_panel, *padded(v_batch, 0),
        *found.mask_immediates(ctx), int(found.causal),
    ]  # fmt: skip
    result = Operand(out, out.strides[-2], out.strides[-1], tuple(walks[3]))
    epilogue = plain_store(result, size, len(pointers), len(immediates))
    text = f"""#include "attention.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_attention_{kind}(args, {epilogue.name}, {float_literal(found.scale)}, begin, end);
}}
"""
    unit, symbol = entry_unit("attention", text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=z * ceildiv(tq, PANEL),
        grain=grain_for(ctx, PANEL * tk * (d + dv), 16),
        scratch=scratch,
        label=node.name,
        flops=2 * z * tq * tk * (d + dv),
        units=[Unit("attention", ctx.header("attention.cpp"))],
    )
