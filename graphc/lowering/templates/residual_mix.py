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
    """candidates [..., D] each, query [D] -> [..., D]."""
    query = ctx.contiguous(node.argument("query"))
    rows = [_rows(ctx, value) for value in node.argument("candidates")]
    shape, dtype = rows[0][0].shape, rows[0][0].dtype
    if dtype not in STORAGE or query.dtype not in STORAGE or not shape:
        raise Refuse(f"a mix of {dtype} by a query of {query.dtype}")
    if any(view.dtype != dtype or view.shape != shape for view, _ in rows):
        raise Refuse("candidates of different kinds")
    width, tokens = shape[-1], product(shape[:-1])
    pointers = [query, *(view for view, _ in rows)]
    immediates: list[Dim] = [width, len(rows), *(step for _, step in rows)]
    epilogue = ctx.epilogue(node, (1, tokens, width), len(pointers), len(immediates))
    unit, symbol = entry_unit(
        "residual_mix",
        f"""#include "residual_mix.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc::residual_mix<{STORAGE[dtype]}, {STORAGE[query.dtype]}>(
      args, {epilogue.name}, {float_literal(node.argument("eps"))}, begin, end);
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
        scratch=4 * _COLUMNS + 16 * len(rows),
        label=node.name,
        flops=6 * len(rows) * tokens * width,
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
