"""Lowering of convolutions, transposed ones included, to the kernels of graphc/kernels/conv.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphc.ir.types import itemsize, same
from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates import conv_winograd
from graphc.lowering.templates.conv_weights import packed_weights, weight_steps
from graphc.lowering.templates.operand import (
    FAST,
    SIMPLE,
    entry_unit,
    grain_for,
)

#: GC_CONV_PANEL, GC_CONV_ROWS and GC_CONV_GROUP in conv.h, SEGMENT in conv_depthwise.cpp
PANEL, TILE, GROUP, SEGMENT = 32, 14, 16, 112
#: bytes of input that the pixels of one unit may read: they stay in the second-level cache
INPUT_BYTES = 1 << 18
#: pixels of one unit: few where the weights stay in the second-level cache, so that results and
#: what the epilogue reads are met in long stretches; many where each unit streams the weights again
WEIGHT_BYTES, FEW, MANY, LEAST = 1 << 18, 112, 224, 56
#: addresses of one unit's table
TABLE = 4096
#: channels below which the taps of a row are read as one stretch of memory
MERGED_CHANNELS = 8
BIAS_TYPES = {"float32": 1, "bfloat16": 2, "float16": 3}


@dataclass(frozen=True)
class Convolution:
    """A convolution in its general form; the tuples have one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False


@dataclass(frozen=True)
class _Geometry:
    """What the kernel is told: images [N, groups * c, *in], three spatial dimensions, and the
    weights [groups * oc, c, *kernel] that it reads."""

    x: View
    oc: int
    c: int
    out: tuple[Dim, ...]
    kernel: tuple[int, ...]
    conv: Convolution

    @property
    def taps(self) -> int:
        return int(product_of(self.kernel))

    @property
    def expands(self) -> bool:
        """Transposed, with windows that do not overlap and cover the result."""
        conv, size = self.conv, self.x.shape[2:]
        return (
            conv.transposed and conv.groups == 1 and conv.stride == self.kernel
            and conv.padding == (0, 0, 0) and (conv.dilation == (1, 1, 1))
            and all(same(o, i * k) for o, i, k in zip(self.out, size, self.kernel, strict=True))
        )  # fmt: skip

    def minimal(self, isa: str) -> bool:
        """Windows of 3 x 3, and channels enough to pay for the transformations."""
        conv = self.conv
        return (
            not conv.transposed and self.kernel == (1, 3, 3) and conv.stride == (1, 1, 1)
            and conv.dilation == (1, 1, 1) and conv.padding[0] == 0
            and min(self.c, self.oc) >= conv_winograd.CHANNELS[isa]
        )  # fmt: skip

    @property
    def depthwise(self) -> bool:
        return self.c == 1 and self.oc == 1 and self.conv.groups > 1 and not self.conv.transposed


def integers(value: Any, rank: int) -> tuple[int, ...]:
    """A list argument of a convolution, one entry per spatial dimension."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int) for item in items):
        raise Refuse("convolution with a symbolic stride, padding or dilation")
    return tuple(items * rank if len(items) == 1 else items)


def third(values: Sequence[Any], fill: Any) -> tuple[Any, ...]:
    """Extends per-dimension values to depth, height, width."""
    return (*[fill] * (3 - len(values)), *values)


def images(view: View, rank: int) -> View:
    """The input as [N, C, D, H, W]."""
    shape, strides = view.shape, view.strides
    if len(shape) == rank + 1:  # without a batch
        shape, strides = (1, *shape), (0, *strides)
    return view.with_(
        shape=(*shape[:2], *third(shape[2:], 1)), strides=(*strides[:2], *third(strides[2:], 0))
    )


def emit_convolution(ctx: LoweringContext, node: Any, conv: Convolution) -> None:
    """Emits the Steps of one convolution: packing of run-time weights, reordering of an input
    whose channels are no neighbours, and the kernel itself.

    Raises Refuse for dtypes without a kernel and for symbolic kernel sizes.
    """
    w = ctx.view(node.args[1])
    rank = len(w.shape) - 2
    if not 1 <= rank <= 3:
        raise Refuse(f"convolution over {rank} dimensions")
    kernel = [ctx.static(d) for d in w.shape]
    if any(d is None for d in kernel):
        raise Refuse("convolution with symbolic weight sizes")
    sizes = [int(d or 0) for d in kernel]
    x = images(ctx.view(node.args[0]), rank)
    if x.dtype != w.dtype:
        raise Refuse(f"convolution of {x.dtype} with weights of {w.dtype}")
    if conv.transposed:
        c, oc = sizes[0] // conv.groups, sizes[1]
    else:
        c, oc = sizes[1], sizes[0] // conv.groups
    bias_value = node.argument("bias")
    bias = None if bias_value is None else ctx.contiguous(bias_value)
    if bias is not None and x.dtype in FAST and bias.dtype not in BIAS_TYPES:
        raise Refuse(f"convolution bias of {bias.dtype}")
    spatial = tuple(node.outputs[0].type.shape[-rank:])
    conv = replace(
        conv, stride=third(conv.stride, 1), padding=third(conv.padding, 0),
        dilation=third(conv.dilation, 1),
    )  # fmt: skip
    geometry = _Geometry(x, oc, c, third(spatial, 1), third(sizes[2:], 1), conv)
    if x.dtype in SIMPLE:
        emit_simple(ctx, node, geometry, bias, sizes)
    elif x.dtype in FAST:
        emit_fast(ctx, node, geometry, bias, sizes)
    else:
        raise Refuse(f"no convolution kernel for {x.dtype}")


def emit_fast(
    ctx: LoweringContext, node: Any, g: _Geometry, bias: View | None, sizes: Sequence[int]
) -> None:
    """The kernels for float32, bfloat16 and float16."""
    storage, conv = g.x.dtype, g.conv
    depthwise = g.depthwise
    constant = ctx.weight(node.args[1])
    merged = (
        conv.groups == 1 and not conv.transposed and constant is not None
        and g.c <= MERGED_CHANNELS and g.kernel[2] > 1 and conv.dilation[2] == 1
    )  # fmt: skip
    widened = storage == "float16" and not depthwise
    taps, pixels, channels = g.taps, product_of(g.out), conv.groups * g.oc
    flops = 2 * g.x.shape[0] * channels * pixels * g.c * taps
    if merged or widened or not (same(g.x.strides[1], 1) or same(g.x.shape[1], 1)):
        g = arranged(ctx, node, g, merged)
    kind = FAST[g.x.dtype]
    expands = g.expands and constant is not None
    minimal = kind == "f32" and constant is not None and g.minimal(ctx.isa)
    order = (
        "merged" if merged else "expanded" if expands else "taps" if depthwise
        else "winograd" if minimal else ""
    )  # fmt: skip
    weights = packed_weights(ctx, node, storage, kind, conv.groups, conv.transposed, sizes, order)
    z = g.x.shape[0]
    tiles = z * g.out[0] * ceildiv(g.out[1], 2) * ceildiv(g.out[2], 2)
    if expands:
        block = FEW
    elif minimal:
        block = conv_winograd.unit_tiles(ctx, tiles, g.c)
        flops = 2 * tiles * channels * g.c * conv_winograd.POINTS
    else:
        block = unit_pixels(ctx, g, z * product_of(g.out))
    pointers = [g.x, weights, *([bias] if bias is not None else [])]
    immediates = immediates_of(g, bias, block)
    row = expands and channels == 1  # a tile is a row of pixels
    epilogue = ctx.epilogue(
        node, (z, channels, pixels) if row else (z, pixels, channels), len(pointers),
        len(immediates), channels_last=not row,
    )  # fmt: skip
    panels = ceildiv(conv.groups if depthwise else g.oc, PANEL)
    if depthwise:
        name, range_ = "conv_depthwise", z * g.out[0] * g.out[1] * panels
        work = g.out[2] * PANEL * taps
        scratch = 4 * (SEGMENT * PANEL + PANEL) + 8 * g.kernel[0] * g.kernel[1]
    elif expands:
        name, columns = "conv_expand", g.kernel[2] * g.oc
        segments = ceildiv(g.x.shape[4], block)
        range_ = z * g.x.shape[2] * g.x.shape[3] * segments * g.kernel[0] * g.kernel[1]
        work = columns * block * g.c
        scratch = unit_scratch(g, block) + 64 + 4 * columns * (block + 1) + 4 * PANEL
    elif conv.transposed:
        name = "conv_transposed"
        grid = [ceildiv(o, s) for o, s in zip(g.out, conv.stride, strict=True)]
        blocks = ceildiv(z * product_of(grid), block)
        range_ = conv.groups * product_of(conv.stride) * blocks * panels
        work, scratch = PANEL * block * g.c * taps, unit_scratch(g, block)
    elif minimal:
        name, blocks = "conv_winograd", conv.groups * ceildiv(tiles, block)
        range_, scratch = blocks * panels, conv_winograd.winograd_scratch(g.c, block)
        grain = conv_winograd.winograd_grain(ctx, blocks, panels)
    else:
        name, range_ = "conv", conv.groups * ceildiv(z * pixels, block) * panels
        work, scratch = PANEL * block * g.c * g.taps, unit_scratch(g, block)
    if not minimal:
        grain = grain_for(ctx, work, 16)
    finish, source = ("nullptr, ", "") if name == "conv" else ("", "")
    if finish and epilogue.finish and epilogue.writes[0].dtype == g.x.dtype:
        finish = "&finish, "
        source = f"static gc_conv_finish finish_of(const gc_args* a) {{\n{epilogue.finish}}}\n"
    text = f"""#include "conv.h"
{epilogue.source}
{source}GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
{"  const gc_conv_finish finish = finish_of(args);" if source else ""}
  gc_{name}_{kind}(args, {epilogue.name}, {finish}begin, end);
}}
"""
    unit, symbol = entry_unit(name, text)
    only = f"#define GC_ONE_DTYPE\n#define GC_ONLY_{kind}\n"
    units = [
        Unit(f"{part}_{kind}", only + ctx.header(f"{part}.cpp"))
        for part in ((name,) if minimal else (name, "conv_micro"))
    ]
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=range_,
        grain=grain,
        scratch=scratch,
        label=node.name,
        flops=flops,
        units=[Unit(name, ctx.header("conv_depthwise.cpp"))] if depthwise else units,
    )


def immediates_of(g: _Geometry, bias: View | None, block: int) -> list[Dim]:
    """gc_conv_shape of conv.h."""
    conv, x = g.conv, g.x
    return [
        x.shape[0], conv.groups, g.oc, g.c, *x.shape[2:], *g.out, *g.kernel, *conv.stride,
        *conv.padding, *conv.dilation, x.strides[0], x.strides[1], *x.strides[2:],
        0 if bias is None else BIAS_TYPES.get(bias.dtype, 1), int(conv.transposed), block,
    ]  # fmt: skip


def unit_pixels(ctx: LoweringContext, g: _Geometry, pixels: Dim) -> int:
    """Pixels of one unit; an even split where their number is known."""
    width = itemsize(g.x.dtype)
    step = 1 if g.conv.transposed else int(product_of(g.conv.stride))
    weights = g.oc * g.c * g.taps * width
    most = FEW if weights <= WEIGHT_BYTES else MANY
    block = max(LEAST, min(most, INPUT_BYTES // max(1, g.c * width * step)))
    block = max(TILE, min(block, TABLE // g.taps) // TILE * TILE)
    known = ctx.static(pixels)
    if known is None or known <= 0:
        return block
    count = ceildiv(known, block)
    return min(known, ceildiv(ceildiv(known, count), TILE) * TILE)


def unit_scratch(g: _Geometry, block: int) -> Dim:
    """Bytes of `Scratch` in conv_common.h, and the places of a transposed convolution's pixels."""
    zeros = (g.c + 1) * itemsize(g.x.dtype)
    return 4 * (TILE * PANEL + GROUP * PANEL) + 8 * (g.taps + 1) * block + zeros + 8


def arranged(ctx: LoweringContext, node: Any, g: _Geometry, merged: bool) -> _Geometry:
    """The input with neighbouring channels, in fp32 if it was fp16. Merged: its rows hold their
    padding, so that the taps of a row are one stretch of memory, one tap of more channels."""
    x, conv = g.x, g.conv
    n, channels, depth, height, width = x.shape
    left = 0
    wide: Dim = width
    if merged:
        left = conv.padding[2]
        wide = (g.out[2] - 1) * conv.stride[2] + g.kernel[2]
    dtype = "float32" if x.dtype == "float16" else x.dtype
    copy = ctx.workspace([n, depth, height, wide, channels], dtype)
    ctx.kernel(
        Unit("conv_arrange", ctx.header("conv_arrange.cpp")),
        f"gc_conv_arrange_{FAST[x.dtype]}",
        pointers=[x, copy],
        immediates=[
            channels, depth, height, width, x.strides[0], x.strides[1], *x.strides[2:], left, wide,
        ],
        reads=[x],
        writes=[copy],
        range=n * depth * height,
        grain=grain_for(ctx, channels * wide, 16),
        label=f"{node.name}.arrange",
    )  # fmt: skip
    order = (0, 4, 1, 2, 3)
    view = copy.with_(
        shape=tuple(copy.shape[d] for d in order), strides=tuple(copy.strides[d] for d in order)
    )
    if not merged:
        return replace(g, x=view)
    return replace(
        g, x=view, c=g.c * g.kernel[2], kernel=(*g.kernel[:2], 1),
        conv=replace(conv, padding=(*conv.padding[:2], 0)),
    )  # fmt: skip


def emit_simple(
    ctx: LoweringContext, node: Any, g: _Geometry, bias: View | None, sizes: Sequence[int]
) -> None:
    """float64 and integer convolution by plain loops."""
    x, w = g.x, ctx.contiguous(node.args[1])
    if bias is not None and bias.dtype != x.dtype:
        raise Refuse(f"bias of {bias.dtype} for a convolution of {x.dtype}")
    (out,) = ctx.outputs(node)
    reads = [x, w, *([bias] if bias is not None else [])]
    ctx.kernel(
        Unit("conv_simple", ctx.header("conv_simple.cpp")),
        f"gc_conv_simple_{SIMPLE[x.dtype]}",
        pointers=[*reads, out],
        immediates=[
            *immediates_of(g, bias, 1), *weight_steps(g.conv.groups, g.conv.transposed, sizes),
        ],
        reads=reads,
        writes=[out],
        range=x.shape[0] * g.conv.groups * g.oc * product_of(g.out[:2]),
        grain=8,
        label=node.name,
    )  # fmt: skip


def constant_weight_rank(node: Any) -> int:
    return len(node.args[1].type.shape) - 2


@rule("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def conv(ctx: LoweringContext, node: Any) -> None:
    """input [N, C, *spatial] or [C, *spatial], weight [OC, C / groups, *kernel]."""
    rank = constant_weight_rank(node)
    stride, padding, dilation = (
        integers(node.argument(name), rank) for name in ("stride", "padding", "dilation")
    )
    emit_convolution(ctx, node, Convolution(stride, padding, dilation, node.argument("groups")))


@rule("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding")
def conv_named_padding(ctx: LoweringContext, node: Any) -> None:
    """padding "valid" (none) or "same" (output as large as input; the odd zero goes to the end)."""
    rank = constant_weight_rank(node)
    stride = integers(node.argument("stride"), rank)
    dilation = integers(node.argument("dilation"), rank)
    mode, padding = node.argument("padding"), tuple([0] * rank)
    if mode == "same":
        kernel = [ctx.static(d) for d in node.args[1].type.shape[2:]]
        if any(k is None for k in kernel):
            raise Refuse("convolution with symbolic weight sizes")
        padding = tuple(d * (int(k or 1) - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    elif mode != "valid":
        raise Refuse(f"convolution with padding {mode!r}")
    emit_convolution(ctx, node, Convolution(stride, padding, dilation, node.argument("groups")))


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(ctx: LoweringContext, node: Any) -> None:
    """weight [C, OC / groups, *kernel]; output_padding only lengthens the output."""
    rank = constant_weight_rank(node)
    stride, padding, dilation = (
        integers(node.argument(name), rank) for name in ("stride", "padding", "dilation")
    )
    groups = node.argument("groups")
    emit_convolution(ctx, node, Convolution(stride, padding, dilation, groups, transposed=True))


@rule("aten.convolution.default", "aten._convolution.default")
def convolution(ctx: LoweringContext, node: Any) -> None:
    """The general form, where `transposed` chooses."""
    rank = constant_weight_rank(node)
    stride, padding, dilation = (
        integers(node.argument(name), rank) for name in ("stride", "padding", "dilation")
    )
    groups, transposed = node.argument("groups"), bool(node.argument("transposed"))
    emit_convolution(ctx, node, Convolution(stride, padding, dilation, groups, transposed))
