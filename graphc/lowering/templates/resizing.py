"""Interpolation and grid sampling (kernels/resize.cpp, resize_last.cpp for channels last)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphc.ir.types import is_row_major
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.pooling import boxes, image_strides, spatial_rank
from graphc.lowering.templates.strided import bytes_tag, float_bits, float_tag, grain, unit

if TYPE_CHECKING:
    from graphc.ir.graph import Node

_SUFFIX = {1: ("",), 2: ("_h", "_w"), 3: ("_d", "_h", "_w")}


def _scales(node: Node, rank: int) -> list[int]:
    """Bits of the user's scale factors, 0 where there is none."""
    given: list[Any]
    if str(node.op).endswith(".vec"):
        factors = node.argument("scale_factors")
        given = [None] * rank if factors is None else list(factors)
    else:
        given = [node.argument(f"scales{suffix}") for suffix in _SUFFIX[rank]]
    for item in given:
        if item is not None and not isinstance(item, int | float):
            raise Refuse("a scale factor that is not a number")
    bits = [0 if item is None else float_bits(float(item)) for item in given]
    return [0] * (3 - rank) + bits


def _emit(ctx: LoweringContext, node: Node, symbol: str, flag: bool) -> None:
    rank = spatial_rank(node)
    name = "input" if str(node.op).endswith(".vec") else "self"
    scales = _scales(node, rank)
    (result,) = ctx.outputs(node)
    if not is_row_major(result.shape, result.strides):
        _emit_last(ctx, ctx.view(node.argument(name)), result, rank, symbol, [*scales, int(flag)])
        return
    src = ctx.contiguous(node.argument(name))
    planes, size, out = boxes(src, result, rank)
    immediates: list[Dim] = [*size, *out, *scales, int(flag)]
    ctx.kernel(
        unit(ctx, "resize", symbol.rpartition("_")[2]),
        symbol,
        pointers=[src, result],
        immediates=immediates,
        reads=[src],
        writes=[result],
        range=planes * out[0] * out[1],
        grain=grain(ctx, out[2] + size[2]),
        scratch=48 * out[2] + 8 * size[2],
        label=symbol.removeprefix("gc_"),
    )


def _emit_last(
    ctx: LoweringContext, src: View, out: View, rank: int, symbol: str, options: Sequence[Dim]
) -> None:
    """Into memory whose channels are neighbours."""
    _, size, result = boxes(src, out, rank)
    n, channels = out.shape[:2]
    _, *steps = image_strides(out, rank)
    kind = symbol.split("_")[1]
    ctx.kernel(
        unit(ctx, "resize_last"),
        f"gc_{kind}_last_{float_tag(src.dtype)}",
        pointers=[src, out],
        immediates=[
            *size, *result, *options, channels, *image_strides(src, rank), out.strides[0],
            *steps[1:],
        ],
        reads=[src],
        writes=[out],
        range=n * result[0] * result[1],
        grain=grain(ctx, result[2] * channels),
        label=f"{kind}_last",
    )  # fmt: skip


@rule(
    *(
        f"aten.{name}{rank}d.{overload}"
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for rank in (1, 2, 3)
        for overload in ("default", "vec")
    )
)
def nearest(ctx: LoweringContext, node: Node) -> None:
    """The nearest item; the exact form measures from pixel centres."""
    dtype = node.outputs[0].type.dtype
    suffix = "f64" if dtype == "float64" else bytes_tag(dtype)
    _emit(ctx, node, f"gc_nearest_{suffix}", "exact" in str(node.op))


@rule(
    *(
        f"aten.upsample_{name}.{overload}"
        for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
        for overload in ("default", "vec")
    )
)
def interpolate(ctx: LoweringContext, node: Node) -> None:
    """Linear or cubic interpolation of floating tensors."""
    kind = "cubic" if "cubic" in str(node.op) else "linear"
    suffix = float_tag(node.outputs[0].type.dtype)
    _emit(ctx, node, f"gc_{kind}_{suffix}", bool(node.argument("align_corners")))


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler.default")
def grid_sampler(ctx: LoweringContext, node: Node) -> None:
    """input [N, C, IH, IW] read at grid [N, OH, OW, 2] -> [N, C, OH, OW]."""
    mode, padding = node.argument("interpolation_mode"), node.argument("padding_mode")
    if mode not in (0, 1):
        raise Refuse("bicubic grid sampling")
    src = ctx.contiguous(node.argument("input"))
    if len(src.shape) != 4:
        raise Refuse("grid sampling of volumes")
    grid = ctx.contiguous(node.argument("grid"))
    suffix = float_tag(src.dtype)
    (out,) = ctx.outputs(node)
    batch, channels, oh, ow = out.shape
    ctx.kernel(
        unit(ctx, "resize", suffix),
        f"gc_grid_sample_{suffix}",
        pointers=[src, grid, out],
        immediates=[
            channels, src.shape[2], src.shape[3], oh, ow, mode, padding,
            int(bool(node.argument("align_corners"))),
        ],
        reads=[src, grid],
        writes=[out],
        range=batch * oh,
        grain=grain(ctx, 4 * ow * channels),
        scratch=64 * ow,
        label="grid_sample",
    )  # fmt: skip
