"""Lowering of scaled_dot_product_attention to the kernels of graphc/kernels/attention.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphc.ir.types import product as product_of
from graphc.ir.types import same
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.operand import (
    BATCH_DIMS,
    FAST,
    Operand,
    entry_unit,
    float_literal,
    grain_for,
    merge_dims,
    padded,
    plain_store,
)
from graphc.lowering.templates.pack import PANEL

#: up to this many queries (known at build time) the kernel without packing is taken
DECODE_QUERIES = 4
MASK_TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "bool": 4}


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


def batch_walks(
    ctx: LoweringContext, q: View, k: View, v: View, out: View, mask: View | None, grouped: bool
) -> tuple[list[Dim], list[list[Dim]]]:
    """Batch sizes and the strides of q, k, v, out, mask over them; grouped heads split in two."""
    views = [view for view in (q, k, v, out, mask) if view is not None]
    rank = max(len(view.shape) for view in views) - 2
    shape: list[Dim] = []
    walks: list[list[Dim]] = [[] for _ in views]
    for i in range(-rank - 2, -2):
        sizes = [view.shape[i] if len(view.shape) >= -i else 1 for view in views]
        steps = [view.strides[i] if len(view.shape) >= -i else 0 for view in views]
        full = next((s for s in sizes if ctx.static(s) != 1), 1)
        if i == -3 and grouped and not same(sizes[0], sizes[1]):
            heads, shared = ctx.static(sizes[0]), ctx.static(sizes[1])
            if heads is None or shared is None or not same(sizes[1], sizes[2]):
                raise Refuse("grouped attention with an unknown number of heads")
            group = heads // shared
            shape += [shared, group]
            for index, (walk, size, step) in enumerate(zip(walks, sizes, steps, strict=True)):
                if index in (1, 2):
                    walk += [step, 0]
                else:
                    walk += [0, 0] if ctx.static(size) == 1 else [step * group, step]
            continue
        shape.append(full)
        for walk, size, step in zip(walks, sizes, steps, strict=True):
            walk.append(0 if ctx.static(size) == 1 and ctx.static(full) != 1 else step)
    return merge_dims(shape, walks)


@rule("aten.scaled_dot_product_attention.default")
def attention(ctx: LoweringContext, node: Any) -> None:
    """query [*, Tq, D], key [*, Tk, D], value [*, Tk, Dv] -> [*, Tq, Dv].

    Operands are read with their strides. Raises Refuse for dropout, dtypes without a kernel, and
    batch structures beyond four dimensions.
    """
    if node.argument("dropout_p") != 0:
        raise Refuse("attention with dropout")
    q, k, v = (ctx.view(node.args[i]) for i in range(3))
    if q.dtype not in FAST or k.dtype != q.dtype or v.dtype != q.dtype:
        raise Refuse(f"attention over {q.dtype}, {k.dtype}, {v.dtype}")
    mask_value = node.argument("attn_mask")
    mask = None if mask_value is None else ctx.view(mask_value)
    if mask is not None and mask.dtype not in MASK_TYPES:
        raise Refuse(f"attention mask of {mask.dtype}")
    causal = bool(node.argument("is_causal"))
    tq, tk, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    scale = node.argument("scale")
    if scale is None:
        width = ctx.static(d)
        if width is None:
            raise Refuse("attention with a symbolic head dimension")
        scale = 1.0 / math.sqrt(width) if width else 1.0
    if not isinstance(scale, int | float):
        raise Refuse("attention with a symbolic scale")
    (out,) = ctx.outputs(node)
    size, walks = batch_walks(ctx, q, k, v, out, mask, bool(node.argument("enable_gqa")))
    if len(size) > BATCH_DIMS:
        raise Refuse(f"attention over {len(size)} batch dimensions that cannot be merged")
    z = product_of(size)

    queries = ctx.static(tq)
    decode = (
        queries is not None and queries <= DECODE_QUERIES
        and ctx.static(k.strides[-1]) == 1 and ctx.static(v.strides[-1]) == 1
    )  # fmt: skip
    kind = FAST[q.dtype]
    k_view, v_view, k_batch, v_batch = k, v, walks[1], walks[2]
    v_step, v_panel = v.strides[-2], PANEL
    if decode:
        function, name = f"gc_attention_decode_{kind}", "attention_decode"
        range_, work = z * tq, tk * (d + dv)
        scratch = 4 * (d + dv + 2 * 256)
    else:
        function, name = f"gc_attention_{kind}", "attention"
        range_, work = z * ceildiv(tq, PANEL), PANEL * tk * (d + dv)
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
    masked: list[Dim] = [0, 0, 0, *padded((), 0)]
    if mask is not None:
        rows, columns = (
            0 if len(mask.shape) < -i or (ctx.static(mask.shape[i]) == 1 and ctx.static(n) != 1)
            else mask.strides[i]
            for i, n in ((-2, tq), (-1, tk))
        )  # fmt: skip
        masked = [MASK_TYPES[mask.dtype], rows, columns, *padded(walks[4], 0)]
    immediates: list[Dim] = [
        tq, tk, d, dv, *padded(size, 1), q.strides[-2], q.strides[-1], *padded(walks[0], 0),
        k.strides[-2], *padded(k_batch, 0), v_step, v_panel, *padded(v_batch, 0), *masked,
        int(causal),
    ]  # fmt: skip
    result = Operand(out, out.strides[-2], out.strides[-1], tuple(walks[3]))
    epilogue = plain_store(result, size, len(pointers), len(immediates))
    text = f"""#include "attention.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  {function}(args, {epilogue.name}, {float_literal(scale)}, begin, end);
}}
"""
    unit, symbol = entry_unit(name, text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=range_,
        grain=grain_for(ctx, work, 16),
        scratch=scratch,
        label=node.name,
        flops=2 * z * tq * tk * (d + dv),
        units=[Unit(name, ctx.header(f"{name}.cpp"))],
    )
