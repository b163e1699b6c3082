"""Attention of a few queries over many keys (kernels/attention_decode.h).

Keys and values are read in place, also where they are a concatenation of a cache and new tokens:
then each part is a segment, and the concatenation is made only if something else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._sympy.functions import FloorDiv

from graphc.ir.types import dim_max, same
from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv
from graphc.lowering.templates.attention_operands import MASK_TYPES, broadcast_step, head_walks
from graphc.lowering.templates.operand import (
    BATCH_DIMS,
    FAST,
    grain_for,
    merge_dims,
    padded,
)
from graphc.lowering.templates.strided import float_bits
from graphc.lowering.tuning import Choice

#: up to this many queries (known at build time) keys and values are read in place; up to the
#: second number `--tune` measures whether they should be
QUERIES, MOST_QUERIES = 8, 32
IN_PLACE_OR_PANELS = ("in place", "panels")
#: keys of a unit of work, about: long caches occupy all threads
PIECE = 512
#: GC_DECODE_ROWS; of attention_decode_driver.h the most that FEW is, and twice block_keys() up to
#: FEW rows and beyond (64 rows, assumed where their number is not known, take more)
ROWS, FEW, BLOCKS = 64, 4, (1024, 256)
MAX_SEGMENTS = 8


@dataclass(frozen=True)
class Segment:
    """Some of the keys and their values, [*, S, D] and [*, S, Dv]."""

    key: View
    value: View


@dataclass(frozen=True)
class Scoring:
    """What becomes of a score: see graphc.attention. The masks are views of [*, T, S] and
    [*, 1, 1], broadcast."""

    scale: float
    back: Dim
    ahead: Dim
    soft_cap: float = 0.0
    mask: View | None = None
    sinks: View | None = None


def segments(ctx: LoweringContext, node: Any) -> list[Segment] | None:
    """The segments of an attention node with few queries; None if it has many, or rows that are
    not read as they lie."""
    queries = ctx.static(node.args[0].type.shape[-2])
    if queries is None or queries > MOST_QUERIES:
        return None
    keys, values = ctx.parts(node.args[1], -2), ctx.parts(node.args[2], -2)
    alike = len(keys) == len(values) and all(
        same(k.shape[-2], v.shape[-2]) for k, v in zip(keys, values, strict=True)
    )
    if not alike or len(keys) > MAX_SEGMENTS:
        keys, values = [ctx.view(node.args[1])], [ctx.view(node.args[2])]
    if any(ctx.static(view.strides[-1]) != 1 for view in (*keys, *values)):
        return None
    if queries > 1:  # panels are made once for all queries; which pays depends on the sizes
        choice = Choice("attention.keys", IN_PLACE_OR_PANELS, IN_PLACE_OR_PANELS[queries > QUERIES])
        query, key, value = (node.args[i].type for i in range(3))
        heads = (product_of(query.shape[:-2]), product_of(key.shape[:-2]))
        sizes = (*heads, queries, key.shape[-2], query.shape[-1], value.shape[-1])
        if ctx.choose(choice, query.dtype, *sizes) != IN_PLACE_OR_PANELS[0]:
            return None
    return [Segment(k, v) for k, v in zip(keys, values, strict=True)]


def emit(
    ctx: LoweringContext, node: Any, found: Sequence[Segment], scoring: Scoring, *, grouped: bool
) -> None:
    """The two Steps: pieces of the keys, then their sum."""
    q = ctx.view(node.args[0])
    if q.dtype not in FAST or any(
        view.dtype != q.dtype for part in found for view in (part.key, part.value)
    ):
        raise Refuse(f"attention over {q.dtype}, {found[0].key.dtype}, {found[0].value.dtype}")
    (out,) = ctx.outputs(node)
    tq, d, dv = q.shape[-2], q.shape[-1], out.shape[-1]
    tk: Dim = sum((part.key.shape[-2] for part in found), 0)
    masks = [scoring.mask, scoring.sinks]
    views = [q, out, *(m for m in masks if m is not None)]
    for part in found:
        views += [part.key, part.value]
    size, walks, group, steps = _walks(ctx, views, len(views) - 2 * len(found), grouped)
    if len(size) > BATCH_DIMS:
        raise Refuse(f"attention over {len(size)} batch dimensions that cannot be merged")
    walk, step = iter(walks), iter(steps)
    q_z, out_z = next(walk), next(walk)
    q_g, out_g = next(step), next(step)
    mask_z, sink_z = (next(walk) if m is not None else [] for m in masks)
    mask_g, sink_g = (next(step) if m is not None else 0 for m in masks)
    mask, sinks = masks
    over: list[Dim] = []
    if mask is not None:
        over = [broadcast_step(ctx, mask, -2, tq), broadcast_step(ctx, mask, -1, tk)]
    chunks = dim_max(1, tk // PIECE if isinstance(tk, int) else FloorDiv(tk, PIECE))
    immediates: list[Dim] = [
        tq, tk, d, dv, group, chunks, float_bits(scoring.scale), float_bits(scoring.soft_cap),
        scoring.back, scoring.ahead,
        *([MASK_TYPES[mask.dtype], *over, mask_g] if mask is not None else (0, 0, 0, 0)),
        *([MASK_TYPES[sinks.dtype], sink_g] if sinks is not None else (0, 0)),
        q.strides[-2], q.strides[-1], q_g, out.strides[-2], out.strides[-1], out_g,
        *padded(size, 1), *padded(q_z, 0), *padded(out_z, 0), *padded(mask_z, 0),
        *padded(sink_z, 0), len(found),
    ]  # fmt: skip
    pointers: list[View] = []
    for part in found:
        immediates += [part.key.shape[-2], part.key.strides[-2], *padded(next(walk), 0)]
        immediates += [part.value.strides[-2], *padded(next(walk), 0)]
        pointers += [part.key, part.value]
    rows, batch = group * tq, product_of(size)
    record = 16 + 32 * ceildiv(dv, 32)
    partial = out if ctx.static(chunks) == 1 else ctx.workspace([batch * rows, chunks, record],
                                                                "float32")  # fmt: skip
    extra = [m for m in masks if m is not None]
    pointers = [q, out, partial, mask or q, sinks or q, *pointers]
    kind = FAST[q.dtype]
    name = f"attention_decode_{kind}"
    unit = Unit(name, ctx.header(f"{name}.cpp"))
    own = _least(ctx, rows)
    wide, deep = 32 * ceildiv(dv, 32), 32 * ceildiv(d, 32)
    ctx.kernel(
        unit,
        name,
        pointers=pointers,
        immediates=immediates,
        reads=[q, *pointers[5:], *extra],
        writes=[out] if partial is out else [out, partial],
        range=batch * chunks * ceildiv(rows, ROWS),
        grain=grain_for(ctx, ceildiv(tk, chunks) * rows * (d + dv), 16),
        scratch=4 * (own * (wide + deep + 2 * BLOCKS[own > FEW]) + wide + 3 * ROWS),
        label=node.name,
        flops=2 * batch * rows * tk * (d + dv),
        units=[],
    )
    if partial is not out:
        ctx.kernel(
            unit,
            f"attention_merge_{kind}",
            pointers=pointers[:5],
            immediates=immediates,
            reads=[q, partial, *extra],
            writes=[out],
            range=batch * rows,
            grain=grain_for(ctx, 16 * record, 64),
            scratch=4 * wide,
            label=f"{node.name}.merge",
        )


def _least(ctx: LoweringContext, rows: Dim) -> Dim:
    known = ctx.static(rows)
    return ROWS if known is None else min(ROWS, known)


def _walks(
    ctx: LoweringContext, views: Sequence[View], shared: int, grouped: bool
) -> tuple[list[Dim], list[list[Dim]], Dim, list[Dim]]:
    """Batch sizes and the strides of all views over them, then the size and strides of the group:
    the dimension in which the keys and values (views from `shared` on) are the same."""
    shape, walks = head_walks(ctx, views, range(shared, len(views)), grouped)
    alike = [
        i for i, n in enumerate(shape)
        if ctx.static(n) != 1 and all(ctx.static(walk[i]) == 0 for walk in walks[shared:])
    ]  # fmt: skip
    group_size: Dim = 1
    group_steps: list[Dim] = [0] * len(views)
    if alike:
        group_size = shape.pop(alike[-1])
        group_steps = [walk.pop(alike[-1]) for walk in walks]
    size, merged = merge_dims(shape, walks)
    return size, merged, group_size, group_steps
