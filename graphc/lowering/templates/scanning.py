"""Running sums, products and extremes along a dimension (kernels/scan.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import LoweringContext, Refuse, View, rule
from graphc.lowering.templates.strided import (
    FLOATS,
    around,
    convert,
    float_tag,
    grain,
    normal_dim,
    tag,
    unit,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node


def _emit(ctx: LoweringContext, symbol: str, src: View, results: list[View], dim: int) -> None:
    outer, n, inner = around(src.shape, dim)
    ctx.kernel(
        unit(ctx, "scan", symbol.rpartition("_")[2]),
        symbol,
        pointers=[src, *results],
        immediates=[n, inner],
        reads=[src],
        writes=results,
        range=outer * inner,
        # neighbouring columns share cache lines: never hand out fewer than a line of them
        grain=max(1 if inner == 1 else 32, grain(ctx, 4 * n)),
        label=symbol.removeprefix("gc_"),
    )


@rule("aten.cumsum.default", "aten.cumprod.default")
def cumsum(ctx: LoweringContext, node: Node) -> None:
    """Running sum or product; integers give int64 unless `dtype` says otherwise."""
    src = ctx.contiguous(node.argument("self"))
    (out,) = ctx.outputs(node)
    name = "cumprod" if "cumprod" in str(node.op) else "cumsum"
    dim = normal_dim(node.argument("dim"), len(src.shape))
    if out.dtype not in FLOATS and out.dtype != "int64":
        raise Refuse(f"{name} with a result of {out.dtype}")
    natural = src.dtype if src.dtype in FLOATS else "int64"
    if out.dtype != natural:
        middle = src
        if out.dtype in ("bfloat16", "float16") and src.dtype != "float32":
            middle = ctx.workspace(src.shape, "float32")
            convert(ctx, src, middle, name)
        cast = ctx.workspace(src.shape, out.dtype)
        convert(ctx, middle, cast, name)
        src = cast
    _emit(ctx, f"gc_{name}_{tag(src.dtype)}", src, [out], dim)


@rule("aten.logcumsumexp.default")
def logcumsumexp(ctx: LoweringContext, node: Node) -> None:
    """log(cumsum(exp(x))), stable."""
    src = ctx.contiguous(node.argument("self"))
    (out,) = ctx.outputs(node)
    dim = normal_dim(node.argument("dim"), len(src.shape))
    _emit(ctx, f"gc_logcumsumexp_{float_tag(src.dtype)}", src, [out], dim)


@rule("aten.cummax.default", "aten.cummin.default")
def cummax(ctx: LoweringContext, node: Node) -> None:
    """(values, indices); of equal values the latest index."""
    src = ctx.contiguous(node.argument("self"))
    values, indices = ctx.outputs(node)
    name = "cummin" if "cummin" in str(node.op) else "cummax"
    dim = normal_dim(node.argument("dim"), len(src.shape))
    _emit(ctx, f"gc_{name}_{tag(src.dtype)}", src, [values, indices], dim)
