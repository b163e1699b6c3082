"""Lowering of scaled_dot_product_attention and graphc.attention to the kernels of
graphc/kernels/attention_prefill.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from graphc.ir.types import product as product_of
from graphc.ir.types import same
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, ceildiv, rule
from graphc.lowering.templates import attention_decode, attention_operands
from graphc.lowering.templates.attention_operands import MASK_TYPES
from graphc.lowering.templates.operand import (
    BATCH_DIMS,
    FAST,
    Operand,
    entry_unit,
    float_literal,
    grain_for,
    padded,
    plain_store,
)
from graphc.lowering.templates.pack import PANEL
from graphc.lowering.templates.strided import unit as constant_unit

#: GC_ATTENTION_PANELS and GC_ATTENTION_KEYS of attention_prefill.h
PANELS, KEYS = 4, 128
#: no bound on the distance of keys
FAR = 1 << 40
#: fp32 values whose rows lie further apart (in elements) are packed: their lines would compete for
#: a few sets of the cache
NEAR_ROWS = 512


def packed(
    ctx: LoweringContext,
    node: Any,
    view: View,
    size: Sequence[Dim],
    batch: Sequence[Dim],
    columns: tuple[Dim, Dim],
    depth: tuple[Dim, Dim],
) -> tuple[View, list[Dim], Dim]:
    """A Step that copies matrices to panels [ceil(n/32)][steps][32] of fp32 or pairs of bf16, one
    per batch that `view` really has. columns and depth are (length, stride). Gives the panels,
    their batch strides, and the size of a panel."""
    (n, b_n), (k, b_k) = columns, depth
    own = [1 if ctx.static(s) == 0 else n_ for n_, s in zip(size, batch, strict=True)]
    panels = ceildiv(n, PANEL)
    pairs = view.dtype == "bfloat16"
    steps = ceildiv(k, 2) if pairs else k
    workspace = ctx.workspace([*own, panels, steps, PANEL], "int32" if pairs else "float32")
    strides: list[Dim] = []
    running: Dim = panels * steps * PANEL
    for n_, stride in zip(reversed(own), reversed(batch), strict=True):
        strides.insert(0, 0 if ctx.static(stride) == 0 else running)
        running = running * n_
    ctx.kernel(
        constant_unit(ctx, "attention_pack", FAST[view.dtype]),
        f"gc_attention_pack_{FAST[view.dtype]}",
        pointers=[view, workspace],
        immediates=[n, k, b_n, b_k, *padded(own, 1), *padded(batch, 0)],
        reads=[view],
        writes=[workspace],
        range=product_of(own) * panels,
        grain=grain_for(ctx, k * PANEL * 8, 64),
        label=f"{node.name}.pack",
    )
    return workspace, strides, steps * PANEL


@rule("aten.scaled_dot_product_attention.default")
def attention(ctx: LoweringContext, node: Any) -> None:
    """query [*, Tq, D], key [*, Tk, D], value [*, Tk, Dv] -> [*, Tq, Dv].

    Operands are read with their strides. Raises Refuse for dropout, dtypes without a kernel, and
    batch structures beyond four dimensions.
    """
    causal = bool(node.argument("is_causal"))
    parts = attention_decode.segments(ctx, node)
    if parts is not None:
        mask, scale = attention_operands.mask_and_scale(ctx, node)
        scoring = attention_decode.Scoring(scale, FAR, 0 if causal else FAR, 0.0, mask)
        grouped = bool(node.argument("enable_gqa"))
        attention_decode.emit(ctx, node, parts, scoring, grouped=grouped)
        return
    found = attention_operands.operands(ctx, node)
    extras = Extras(ahead=0 if causal else FAR)
    emit(ctx, node, found, extras, found.k.shape[-2])  # lowering/work.py halves causal work


@rule("graphc.attention.default")
def general_attention(ctx: LoweringContext, node: Any) -> None:
    """The same with windows, sinks and capped scores; see graphc/ops/attention.py."""
    views: list[View | None] = []
    for name in ("attn_mask", "sinks"):
        value = node.argument(name)
        view = None if value is None else ctx.view(value)
        if view is not None and view.dtype not in MASK_TYPES:
            raise Refuse(f"attention with {name} of {view.dtype}")
        views.append(view)
    mask, sinks = views
    grouped = bool(node.argument("enable_gqa"))
    scale, soft_cap = float(node.argument("scale")), float(node.argument("soft_cap"))
    back, ahead = (FAR if node.argument(n) is None else node.argument(n) for n in ("back", "ahead"))
    parts = attention_decode.segments(ctx, node)
    if parts is not None:
        scoring = attention_decode.Scoring(scale, back, ahead, soft_cap, mask, sinks)
        attention_decode.emit(ctx, node, parts, scoring, grouped=grouped)
        return
    q, k, v = (ctx.view(node.args[i]) for i in range(3))
    if q.dtype not in FAST or k.dtype != q.dtype or v.dtype != q.dtype:
        raise Refuse(f"attention over {q.dtype}, {k.dtype}, {v.dtype}")
    (out,) = ctx.outputs(node)
    size, walks = attention_operands.batch_walks(ctx, q, k, v, out, mask, grouped, sinks)
    if len(size) > BATCH_DIMS:
        raise Refuse(f"attention over {len(size)} batch dimensions that cannot be merged")
    found = attention_operands.Attention(q, k, v, mask, out, scale, False, size, walks)
    extras = Extras(back, ahead, soft_cap, sinks)
    emit(ctx, node, found, extras, _keys_seen(q.shape[-2], k.shape[-2], extras))


@dataclass(frozen=True)
class Extras:
    """What the kernel does beyond scaled_dot_product_attention: query i sees the keys i - back to
    i + ahead; `sinks` walks last among the operands."""

    back: Dim = FAR
    ahead: Dim = FAR
    soft_cap: float = 0.0
    sinks: View | None = None


def emit(
    ctx: LoweringContext, node: Any, found: attention_operands.Attention, extras: Extras, seen: Dim
) -> None:
    """The Steps for many queries: panels of keys and values, then blocks of queries. `seen` keys
    of a query count as work."""
    q, k, v, size, walks = found.q, found.k, found.v, found.size, found.walks
    tq, tk, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    kind = FAST[q.dtype]
    grouped = bool(size) and ctx.static(walks[1][-1]) == 0 and ctx.static(walks[2][-1]) == 0
    group: Dim = size[-1] if grouped else 1
    k_view, k_batch, _ = packed(ctx, node, k, size, walks[1], (tk, k.strides[-2]),
                                (d, k.strides[-1]))  # fmt: skip
    width, row = ctx.static(dv), ctx.static(v.strides[-2])
    in_place = (
        kind == "f32" and width is not None and width % PANEL == 0
        and ctx.static(v.strides[-1]) == 1 and row is not None and row <= NEAR_ROWS
    )  # fmt: skip
    if in_place:
        v_view, v_batch, v_row, v_panel = v, walks[2], v.strides[-2], PANEL
    else:
        v_view, v_batch, v_panel = packed(ctx, node, v, size, walks[2], (dv, v.strides[-1]),
                                          (tk, v.strides[-2]))  # fmt: skip
        v_row = PANEL

    sinks = extras.sinks
    pointers = [q, k_view, v_view, *(x for x in (found.mask, sinks) if x is not None)]
    sunk: list[Dim] = [0, *padded((), 0)]
    if sinks is not None:
        sunk = [MASK_TYPES[sinks.dtype], *padded(walks[-1], 0)]
    immediates: list[Dim] = [
        tq, tk, d, dv, group, *padded(size, 1), q.strides[-2], q.strides[-1],
        *padded(walks[0], 0), *padded(k_batch, 0), v_row, v_panel, *padded(v_batch, 0),
        *found.mask_immediates(ctx), *sunk, extras.back, extras.ahead,
    ]  # fmt: skip
    result = Operand(found.out, found.out.strides[-2], found.out.strides[-1], tuple(walks[3]))
    epilogue = plain_store(result, size, len(pointers), len(immediates))
    constants = f"{float_literal(found.scale)}, {float_literal(extras.soft_cap)}"
    text = f"""#include "attention_prefill.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_prefill_{kind}(args, {epilogue.name}, {constants}, begin, end);
}}
"""
    columns = PANEL * ceildiv(dv, PANEL)
    scratch = PANEL * (KEYS + 1 + PANELS * (d + columns + 3))
    if kind == "bf16":
        scratch += KEYS * (d + columns)
    if found.mask is not None:
        scratch += 2 * PANEL * KEYS
    unit, symbol = entry_unit("attention", text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=product_of(size[:-1] if grouped else size)
        * ceildiv(ceildiv(tq * group, PANEL), PANELS),
        grain=grain_for(ctx, PANELS * PANEL * tk * (d + dv), 16),
        scratch=4 * scratch,
        label=node.name,
        flops=2 * product_of(size) * tq * seen * (d + dv),
        units=[constant_unit(ctx, "attention_prefill", kind)],
    )


def _keys_seen(tq: Dim, tk: Dim, extras: Extras) -> Dim:
    """Keys of a query, about: the width of a narrow window, or half of them below a diagonal."""
    if isinstance(extras.back, int) and isinstance(extras.ahead, int):
        width = extras.back + extras.ahead + 1
        if width < FAR:
            return min(width, tk) if isinstance(tk, int) else sympy.Min(width, tk)
        if extras.back == FAR and extras.ahead == 0 and same(tq, tk):
            return ceildiv(tk + 1, 2)
    return tk
