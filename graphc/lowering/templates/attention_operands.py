"""What the attention kernels share: operands, batch walks, masks of one attention node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from graphc.ir.types import same
from graphc.lowering.context import Dim, LoweringContext, Refuse, View
from graphc.lowering.templates.operand import BATCH_DIMS, FAST, merge_dims, padded

MASK_TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "bool": 4}


@dataclass(frozen=True)
class Attention:
    """q [*, Tq, D], k [*, Tk, D], v [*, Tk, Dv], out [*, Tq, Dv]; `size` are the merged batch
    dimensions, `walks` the strides of q, k, v, out (and mask) over them."""

    q: View
    k: View
    v: View
    mask: View | None
    out: View
    scale: float
    causal: bool
    size: list[Dim]
    walks: list[list[Dim]]

    def mask_immediates(self, ctx: LoweringContext) -> list[Dim]:
        """mask_type, mask_q, mask_k, mask_z of gc_attention_shape."""
        if self.mask is None:
            return [0, 0, 0, *padded((), 0)]
        rows, columns = (
            broadcast_step(ctx, self.mask, i, n)
            for i, n in ((-2, self.q.shape[-2]), (-1, self.k.shape[-2]))
        )
        return [MASK_TYPES[self.mask.dtype], rows, columns, *padded(self.walks[4], 0)]


def broadcast_step(ctx: LoweringContext, view: View, dim: int, length: Dim) -> Dim:
    """The stride of a dimension that is 1 or `length`; 0 where it is broadcast."""
    if len(view.shape) < -dim:
        return 0
    size, stride = view.shape[dim], view.strides[dim]
    if same(size, length):
        return stride
    if ctx.static(size) == 1:
        return 0
    return stride * sympy.Min(1, size - 1)  # known at run time


def batch_walks(
    ctx: LoweringContext, q: View, k: View, v: View, out: View, mask: View | None, grouped: bool,
    sinks: View | None = None,
) -> tuple[list[Dim], list[list[Dim]]]:  # fmt: skip
    """Batch sizes and the strides of q, k, v, out (, mask, sinks) over them; grouped heads split
    in two."""
    views = [view for view in (q, k, v, out, mask, sinks) if view is not None]
    return merge_dims(*head_walks(ctx, views, range(1, 3), grouped))


def head_walks(
    ctx: LoweringContext, views: Sequence[View], shared: Sequence[int], grouped: bool
) -> tuple[list[Dim], list[list[Dim]]]:
    """Batch sizes and the strides of views over them, the queries first; heads that share keys and
    values (the views at `shared`) split in two: heads of keys, and queries of each."""
    rank = max(len(view.shape) for view in views) - 2
    shape: list[Dim] = []
    walks: list[list[Dim]] = [[] for _ in views]
    for i in range(-rank - 2, -2):
        sizes = [view.shape[i] if len(view.shape) >= -i else 1 for view in views]
        steps = [view.strides[i] if len(view.shape) >= -i else 0 for view in views]
        full = next((s for s in sizes if ctx.static(s) != 1), 1)
        if i == -3 and grouped and not all(same(sizes[0], sizes[j]) for j in shared):
            heads, keys = ctx.static(sizes[0]), ctx.static(sizes[shared[0]])
            if heads is None or keys is None or not all(same(sizes[j], keys) for j in shared):
                raise Refuse("grouped attention with an unknown or uneven number of heads")
            group = heads // keys
            shape += [keys, group]
            for index, (walk, size, step) in enumerate(zip(walks, sizes, steps, strict=True)):
                if index in shared:
                    walk += [step, 0]
                else:
                    walk += [0, 0] if ctx.static(size) == 1 else [step * group, step]
            continue
        shape.append(full)
        for walk, size, step in zip(walks, sizes, steps, strict=True):
            walk.append(0 if ctx.static(size) == 1 and ctx.static(full) != 1 else step)
    return shape, walks


def mask_and_scale(ctx: LoweringContext, node: Any) -> tuple[View | None, float]:
    """The mask and the scale of a scaled_dot_product_attention node; Refuse for dropout."""
    if node.argument("dropout_p") != 0:
        raise Refuse("attention with dropout")
    mask_value = node.argument("attn_mask")
    mask = None if mask_value is None else ctx.view(mask_value)
    if mask is not None and mask.dtype not in MASK_TYPES:
        raise Refuse(f"attention mask of {mask.dtype}")
    scale = node.argument("scale")
    if scale is None:
        width = ctx.static(node.args[0].type.shape[-1])
        if width is None:
            raise Refuse("attention with a symbolic head dimension")
        scale = 1.0 / math.sqrt(width) if width else 1.0
    if not isinstance(scale, int | float):
        raise Refuse("attention with a symbolic scale")
    return mask, float(scale)


def operands(ctx: LoweringContext, node: Any) -> Attention:
    """The operands of a scaled_dot_product_attention node; Refuse for dropout, dtypes without a
    kernel, and batch structures beyond four dimensions."""
    mask, scale = mask_and_scale(ctx, node)
    q, k, v = (ctx.view(node.args[i]) for i in range(3))
    if q.dtype not in FAST or k.dtype != q.dtype or v.dtype != q.dtype:
        raise Refuse(f"attention over {q.dtype}, {k.dtype}, {v.dtype}")
    (out,) = ctx.outputs(node)
    size, walks = batch_walks(ctx, q, k, v, out, mask, bool(node.argument("enable_gqa")))
    if len(size) > BATCH_DIMS:
        raise Refuse(f"attention over {len(size)} batch dimensions that cannot be merged")
    return Attention(q, k, v, mask, out, scale, bool(node.argument("is_causal")), size, walks)
