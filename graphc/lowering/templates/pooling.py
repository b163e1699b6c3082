"""Pooling and the folding of windows into columns (kernels/max_pool.cpp, avg_pool.cpp, fold.cpp,
and pool_last.cpp where channels are neighbours in memory).

Inputs are [N, C, spatial...] or [C, spatial...] with one to three spatial dimensions, row-major or
channels last; lower ranks get sizes of 1 in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphc.ir.types import is_row_major, product
from graphc.lowering.context import Dim, LoweringContext, View, rule
from graphc.lowering.templates.strided import (
    bytes_tag,
    float_tag,
    floordiv,
    grain,
    tag,
    unit,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node


def spatial_rank(node: Node) -> int:
    """1, 2 or 3, from the operator's name."""
    name = str(node.op)
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in name)


def spread(value: Any, rank: int, default: int) -> list[int]:
    """A size per dimension from an int or list argument, in three dimensions."""
    items = [value] if isinstance(value, int) else list(value)
    if len(items) == 1:
        items = items * rank
    return [default] * (3 - rank) + items


def boxes(src: View, out: View, rank: int) -> tuple[Dim, list[Dim], list[Dim]]:
    """(planes, input D H W, output D H W)."""
    planes = product(src.shape[: len(src.shape) - rank])
    ones: list[Dim] = [1] * (3 - rank)
    return planes, ones + list(src.shape[-rank:]), ones + list(out.shape[-rank:])


def _window(node: Node, rank: int) -> tuple[list[int], list[int], list[int]]:
    kernel = spread(node.argument("kernel_size"), rank, 1)
    stride = spread(node.argument("stride") or node.argument("kernel_size"), rank, 1)
    return kernel, stride, spread(node.argument("padding"), rank, 0)


def _emit(
    ctx: LoweringContext,
    source: str,
    symbol: str,
    src: View,
    results: Sequence[View],
    immediates: Sequence[Dim],
    rows: Dim,
    work: Dim,
    scratch: Dim = 0,
) -> None:
    ctx.kernel(
        unit(ctx, source),
        symbol,
        pointers=[src, *results],
        immediates=immediates,
        reads=[src],
        writes=results,
        range=rows,
        grain=grain(ctx, work),
        scratch=scratch,
        label=symbol.removeprefix("gc_"),
    )


#: modes of pool_last.cpp
MAXIMUM, MEAN, ADAPTIVE_MEAN = range(3)


def image_strides(view: View, rank: int) -> list[Dim]:
    """Strides of images, channels, depth, height, width."""
    return [*view.strides[:2], *[0] * (3 - rank), *view.strides[2:]]


def _pool_last(
    ctx: LoweringContext,
    node: Node,
    mode: int,
    out: View,
    window: Sequence[Sequence[int]],
    padded: bool = False,
    divisor: int = 0,
) -> None:
    """Pooling into memory whose channels are neighbours; window: kernel, stride, padding and
    dilation in three dimensions."""
    rank = spatial_rank(node)
    src = ctx.view(node.argument("self"))
    _, size, result = boxes(src, out, rank)
    n, channels = out.shape[:2]
    _, *steps = image_strides(out, rank)
    _emit(
        ctx,
        "pool_last",
        f"gc_pool_last_{float_tag(src.dtype)}",
        src,
        [out],
        [
            mode, channels, *size, *result, *(i for items in window for i in items), int(padded),
            divisor, *image_strides(src, rank), out.strides[0], *steps[1:],
        ],
        n * result[0] * result[1],
        result[2] * channels * product(window[0]),
    )  # fmt: skip


@rule(
    "aten.max_pool1d.default",
    "aten.max_pool2d.default",
    "aten.max_pool3d.default",
    "aten.max_pool1d_with_indices.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
)
def max_pool(ctx: LoweringContext, node: Node) -> None:
    """Maxima of windows, and on demand their flat indices in the plane."""
    rank = spatial_rank(node)
    values, *places = ctx.outputs(node)
    kernel, stride, padding = _window(node, rank)
    dilation = spread(node.argument("dilation"), rank, 1)
    if not is_row_major(values.shape, values.strides):
        _pool_last(ctx, node, MAXIMUM, values, (kernel, stride, padding, dilation))
        return
    src = ctx.contiguous(node.argument("self"))
    planes, size, out = boxes(src, values, rank)
    _emit(
        ctx,
        "max_pool",
        f"gc_max_pool_{tag(src.dtype)}",
        src,
        [values, places[0] if places else values],
        [*size, *out, *kernel, *stride, *padding, *dilation, int(bool(places))],
        planes * out[0] * out[1],
        out[2] * kernel[0] * kernel[1] * kernel[2],
        16 * out[2],
    )


@rule("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(ctx: LoweringContext, node: Node) -> None:
    """Means of windows."""
    rank = spatial_rank(node)
    (result,) = ctx.outputs(node)
    kernel, stride, padding = _window(node, rank)
    divisor = node.argument("divisor_override") if rank > 1 else None
    if not is_row_major(result.shape, result.strides):
        padded = bool(node.argument("count_include_pad"))
        window = (kernel, stride, padding, [1, 1, 1])
        _pool_last(ctx, node, MEAN, result, window, padded, divisor or 0)
        return
    src = ctx.contiguous(node.argument("self"))
    planes, size, out = boxes(src, result, rank)
    _emit(
        ctx,
        "avg_pool",
        f"gc_avg_pool_{float_tag(src.dtype)}",
        src,
        [result],
        [
            *size, *out, *kernel, *stride, *padding,
            int(bool(node.argument("count_include_pad"))), divisor or 0,
        ],
        planes * out[0] * out[1],
        out[2] * kernel[0] * kernel[1] * kernel[2],
        8 * out[2],
    )  # fmt: skip


@rule(
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
    "aten.adaptive_max_pool1d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.adaptive_max_pool3d.default",
)
def adaptive_pool(ctx: LoweringContext, node: Node) -> None:
    """Means or maxima of the windows that give an output of a chosen size."""
    rank = spatial_rank(node)
    maximum = "max" in str(node.op)
    made = ctx.outputs(node)
    if not is_row_major(made[0].shape, made[0].strides):
        _pool_last(ctx, node, ADAPTIVE_MEAN, made[0], ([1, 1, 1], [1, 1, 1], [0] * 3, [1, 1, 1]))
        return
    src = ctx.contiguous(node.argument("self"))
    suffix = tag(src.dtype) if maximum else float_tag(src.dtype)
    planes, size, out = boxes(src, made[0], rank)
    inputs = product(size)
    per_row = ctx.static(inputs)
    rows = ctx.static(out[0] * out[1])
    work: Dim = inputs if per_row is None or not rows else max(1, per_row // rows)
    _emit(
        ctx,
        "max_pool" if maximum else "avg_pool",
        f"gc_adaptive_{'max' if maximum else 'avg'}_pool_{suffix}",
        src,
        made,
        [*size, *out],
        planes * out[0] * out[1],
        work,
    )


def _fold(node: Node, names: Sequence[str]) -> list[int]:
    result: list[int] = []
    for name in names:
        result += spread(node.argument(name), 2, 1)[1:]
    return result


@rule("aten.im2col.default")
def im2col(ctx: LoweringContext, node: Node) -> None:
    """[N, C, H, W] -> [N, C * KH * KW, L]: each window a column; zeros outside."""
    src = ctx.contiguous(node.argument("self"))
    (out,) = ctx.outputs(node)
    kh, kw, sh, sw, ph, pw, dh, dw = _fold(node, ("kernel_size", "stride", "padding", "dilation"))
    channels, ih, iw = src.shape[-3:]
    oh = floordiv(ih + 2 * ph - dh * (kh - 1) - 1, sh) + 1
    ow = floordiv(iw + 2 * pw - dw * (kw - 1) - 1, sw) + 1
    _emit(
        ctx,
        "fold",
        f"gc_im2col_{bytes_tag(src.dtype)}",
        src,
        [out],
        [channels, ih, iw, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw],
        product(src.shape[:-2]) * kh * kw,
        oh * ow,
    )


@rule("aten.col2im.default")
def col2im(ctx: LoweringContext, node: Node) -> None:
    """The sum of windows back in place: the transpose of im2col."""
    src = ctx.contiguous(node.argument("self"))
    suffix = float_tag(src.dtype)
    (out,) = ctx.outputs(node)
    kh, kw, sh, sw, ph, pw, dh, dw = _fold(node, ("kernel_size", "stride", "padding", "dilation"))
    channels, ih, iw = out.shape[-3:]
    oh = floordiv(ih + 2 * ph - dh * (kh - 1) - 1, sh) + 1
    ow = floordiv(iw + 2 * pw - dw * (kw - 1) - 1, sw) + 1
    _emit(
        ctx,
        "fold",
        f"gc_col2im_{suffix}",
        src,
        [out],
        [channels, ih, iw, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw],
        product(out.shape[:-2]),
        oh * ow * kh * kw,
        8 * iw,
    )
