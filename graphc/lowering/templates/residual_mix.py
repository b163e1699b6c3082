"""Attention Residuals: softmax-weighted sums of candidates (kernels/residual_mix.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.operand import (
    STORAGE,
    entry_unit,
    float_literal,
    grain_for,
    merge_dims,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: MIX_COLUMNS
_COLUMNS = 1024


@rule("graphc.residual_mix.default")
def residual_mix(ctx: LoweringContext, node: Node) -> None:
    """candidates [..., D] each, query [D], gain [D] -> [..., D], mixed or mixed and normalised. The
    last candidate may be float32 where the others are not."""
    query = ctx.contiguous(node.argument("query"))
    rows = [_rows(ctx, value) for value in node.argument("candidates")]
    shape, dtype = rows[0][0].shape, rows[0][0].dtype
    if dtype not in STORAGE or query.dtype not in STORAGE or not shape:
        raise Refuse(f"a mix of {dtype} by a query of {query.dtype}")
    *others, last = (view.dtype for view, _ in rows)
    alike = all(view.shape == shape for view, _ in rows) and set(others) <= {dtype}
    if not alike or last not in (dtype, "float32"):
        raise Refuse("candidates of different kinds")
    width, tokens = shape[-1], product(shape[:-1])
    norm_eps, gain = node.argument("norm_eps"), node.argument("gain")
    gains = [] if norm_eps is None or gain is None else [ctx.contiguous(gain)]
    if any(view.dtype not in STORAGE for view in gains):
        raise Refuse("a gain of doubles")
    pointers = [query, *gains, *(view for view, _ in rows)]
    immediates: list[Dim] = [width, len(rows), *(step for _, step in rows)]
    epilogue = ctx.epilogue(node, (1, tokens, width), len(pointers), len(immediates))
    kernel, numbers = "residual_mix", float_literal(node.argument("eps"))
    types = f"{STORAGE[dtype]}, {STORAGE[last]}, {STORAGE[query.dtype]}"
    scratch: Dim = 4 * _COLUMNS
    if norm_eps is not None:
        kernel, numbers = "residual_mix_norm", f"{numbers}, {float_literal(norm_eps)}"
        types += f", {STORAGE[gains[0].dtype] if gains else 'void'}"
        scratch = 4 * (width + 15)
    unit, symbol = entry_unit(
        "residual_mix",
        f"""#include "residual_mix.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc::{kernel}<{types}>(args, {epilogue.name}, {numbers}, begin, end);
}}
""",
    )
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=tokens,
        grain=grain_for(ctx, 8 * len(rows) * width, 64),
        scratch=scratch + 16 * len(rows),
        label=node.name,
        flops=(6 * len(rows) + (0 if norm_eps is None else 4)) * tokens * width,
    )


def _rows(ctx: LoweringContext, value: object) -> tuple[View, Dim]:
    """A candidate as rows of neighbouring elements, and the distance between them."""
    view = ctx.view(value)
    if not view.shape:
        return view, 0
    sizes, (steps,) = merge_dims(view.shape[:-1], [view.strides[:-1]])
    if len(sizes) > 1 or ctx.static(view.strides[-1]) != 1:
        view = ctx.contiguous(value)
        sizes, (steps,) = merge_dims(view.shape[:-1], [view.strides[:-1]])
    return view, steps[0] if steps else 0
