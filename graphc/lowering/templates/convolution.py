"""Lowering of convolutions, transposed ones included, to the kernels of graphc/kernels/conv.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.types import product as product_of
from graphc.ir.types import same
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.operand import (
    FAST,
    SIMPLE,
    entry_unit,
    grain_for,
)
from graphc.lowering.templates.pack import pack_conv_weight

#: GC_CONV_PANEL, GC_CONV_MAX_GROUP and GC_CONV_CHUNK in conv.h
PIXELS, MAX_GROUP, CHUNK = 32, 8, 1024
#: output channels of one unit: many share a gathered panel, few make more units for threads;
#: multiples of the micro tile's rows at every ISA level (14 and 6)
ROWS = (504, 252, 168, 84)
#: units that keep 16 threads busy
ENOUGH_UNITS = 16
#: floats of scratch that leave the second-level cache to the weights
SCRATCH = 1 << 17
#: floats of a depthwise tile: TILE in conv_depthwise.cpp
DEPTHWISE_TILE = 4096
BIAS_TYPES = {"float32": 1, "bfloat16": 2, "float16": 3}


@dataclass(frozen=True)
class Convolution:
    """A convolution in its general form; the tuples have one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False


def integers(value: Any, rank: int) -> tuple[int, ...]:
    """A list argument of a convolution, one entry per spatial dimension."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int) for item in items):
        raise Refuse("convolution with a symbolic stride, padding or dilation")
    return tuple(items * rank if len(items) == 1 else items)


def third(values: Sequence[Any], fill: Any) -> list[Any]:
    """Extends per-dimension values to depth, height, width."""
    return [*[fill] * (3 - len(values)), *values]


def micro_rows(ctx: LoweringContext) -> int:
    """Rows of the largest micro tile (GC_MR in isa.h)."""
    return 14 if ctx.isa == "avx512" else 6


def images(ctx: LoweringContext, value: Any, rank: int) -> View:
    """The input as [N, C, *spatial], a copy only if its spatial part is not row-major."""
    view = ctx.view(value)
    running: Dim = 1
    for i in range(-1, -rank - 1, -1):
        if ctx.static(view.shape[i]) != 1 and not same(view.strides[i], running):
            view = ctx.contiguous(value)
            break
        running = running * view.shape[i]
    if len(view.shape) == rank + 1:  # without a batch
        view = view.with_(shape=(1, *view.shape), strides=(0, *view.strides))
    return view


def emit_convolution(ctx: LoweringContext, node: Any, conv: Convolution) -> None:
    """Emits the Steps of one convolution: packing of run-time weights and the kernel itself.

    Raises Refuse for dtypes without a kernel and for symbolic kernel sizes.
    """
    weight_value, bias_value = node.args[1], node.argument("bias")
    w = ctx.view(weight_value)
    rank = len(w.shape) - 2
    if not 1 <= rank <= 3:
        raise Refuse(f"convolution over {rank} dimensions")
    kernel = [ctx.static(d) for d in w.shape]
    if any(d is None for d in kernel):
        raise Refuse("convolution with symbolic weight sizes")
    sizes = [int(d or 0) for d in kernel]
    x = images(ctx, node.args[0], rank)
    if x.dtype != w.dtype:
        raise Refuse(f"convolution of {x.dtype} with weights of {w.dtype}")
    groups = conv.groups
    if conv.transposed:
        c, oc = sizes[0] // groups, sizes[1]
    else:
        c, oc = sizes[1], sizes[0] // groups
    taps = int(product_of(sizes[2:]))
    out_shape = node.outputs[0].type.shape
    spatial = list(out_shape[-rank:])
    bias = None if bias_value is None else ctx.contiguous(bias_value)
    if bias is not None and x.dtype in FAST and bias.dtype not in BIAS_TYPES:
        raise Refuse(f"convolution bias of {bias.dtype}")
    panels = x.shape[0] * groups * ceildiv(product_of(spatial), PIXELS)
    known = ctx.static(panels)
    rows = next(
        (r for r in ROWS if known is None or known * ceildiv(oc, r) >= ENOUGH_UNITS), ROWS[-1]
    )
    if conv.transposed:
        rows = ROWS[-1]
    steps = min(CHUNK, c * taps) + 1 + min(oc, rows)
    group = max(1, min(MAX_GROUP, SCRATCH // (PIXELS * steps)))
    shape: list[Dim] = [
        x.shape[0], groups, oc, c, *third(x.shape[2:], 1), *third(spatial, 1),
        *third(sizes[2:], 1), *third(conv.stride, 1), *third(conv.padding, 0),
        *third(conv.dilation, 1), int(conv.transposed), x.strides[0], x.strides[1],
        0 if bias is None else BIAS_TYPES.get(bias.dtype, 1), rows, group,
    ]  # fmt: skip
    if x.dtype in SIMPLE:
        emit_simple(ctx, node, conv, x, bias, shape, sizes)
        return
    if x.dtype not in FAST:
        raise Refuse(f"no convolution kernel for {x.dtype}")
    kind = FAST[x.dtype]
    strides = weight_steps(conv, sizes)
    weights = packed_weights(ctx, node, conv, kind, strides, (oc, c, taps))
    z, channels, pixels = x.shape[0], groups * oc, product_of(spatial)
    pointers = [x, weights, *([bias] if bias is not None else [])]
    epilogue = ctx.epilogue(node, (z, channels, pixels), len(pointers), len(shape))
    depthwise = (
        c == 1 and oc == 1 and not conv.transposed and sizes[2:-2] in ([], [1])
        and third(conv.padding, 0)[0] == 0 and third(conv.stride, 1)[0] == 1
        and ctx.static(third(x.shape[2:], 1)[0]) == 1
    )  # fmt: skip
    pieces = 1
    if depthwise:
        name, function = "conv_depthwise", f"gc_conv_depthwise_{kind}"
        range_: Dim = z * groups
        work = pixels * taps
        scratch = depthwise_scratch(third(spatial, 1), third(sizes[2:], 1), conv)
    elif conv.transposed:
        name, function = "conv_transposed", f"gc_conv_transposed_{kind}"
        phases = conv.stride[-1]
        segment = PIXELS * phases
        range_ = (
            z * groups * ceildiv(oc, rows) * product_of(spatial[:-1])
            * ceildiv(spatial[-1], segment)
        )  # fmt: skip
        work = min(oc, rows) * PIXELS * c * taps
        scratch = 4 * PIXELS * (128 + 2 * min(oc, rows) * phases)
    else:
        name, function = "conv", f"gc_conv_{kind}"
        range_ = panels * ceildiv(oc, rows)
        pieces = group if known is None or known >= ENOUGH_UNITS * group else 1
        work = min(oc, rows) * PIXELS * c * taps
        scratch = 4 * (PIXELS * group * steps + CHUNK * 14 // 2)
    text = f"""#include "conv.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  {function}(args, {epilogue.name}, begin, end);
}}
"""
    unit, symbol = entry_unit(name, text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*shape, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=range_,
        grain=max(grain_for(ctx, work, 16), pieces),
        scratch=scratch,
        label=node.name,
        flops=2 * z * channels * pixels * c * taps,
        units=[Unit(name, ctx.header(f"{name}.cpp"))],
    )


def depthwise_scratch(out: Sequence[Dim], kernel: Sequence[int], conv: Convolution) -> Dim:
    """Bytes for the tile and the padded plane of `Plane` in conv_depthwise.cpp."""
    _, height, width = out
    stride, dilation = third(conv.stride, 1), third(conv.dilation, 1)
    phase = width + 16 + (kernel[2] - 1) * dilation[2] // stride[2] + 1 + 16
    rows = (height - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1
    return 4 * (DEPTHWISE_TILE + width + phase * stride[2] * rows)


def weight_steps(conv: Convolution, sizes: Sequence[int]) -> list[int]:
    """Strides of contiguous weights over (group, output channel, channel, tap)."""
    taps = int(product_of(sizes[2:]))
    if conv.transposed:  # [groups * C, OC, *kernel]
        c = sizes[0] // conv.groups
        return [c * sizes[1] * taps, taps, sizes[1] * taps, 1]
    return [sizes[0] // conv.groups * sizes[1] * taps, sizes[1] * taps, taps, 1]


def packed_weights(
    ctx: LoweringContext,
    node: Any,
    conv: Convolution,
    kind: str,
    steps: Sequence[int],
    sizes: tuple[int, int, int],
) -> View:
    """The weights in the kernel's layout, fp32: packed now if constant, else by a Step."""
    oc, c, taps = sizes
    constant = ctx.weight(node.args[1])
    if constant is not None:
        if conv.transposed:
            per_group = constant.reshape(conv.groups, c, oc, *constant.shape[2:])
            constant = per_group.transpose(1, 2).reshape(conv.groups * oc, c, *constant.shape[2:])
        data = pack_conv_weight(constant, conv.groups, micro_rows(ctx))
        return ctx.constant(f"{node.name}.weight", data, layout=f"conv{micro_rows(ctx)}")
    source = ctx.contiguous(node.args[1])
    workspace = ctx.workspace([conv.groups * oc * c * taps], "float32")
    ctx.kernel(
        Unit("conv", ctx.header("conv.cpp")),
        f"gc_conv_pack_{kind}",
        pointers=[source, workspace],
        immediates=[conv.groups, oc, c, taps, *steps],
        reads=[source],
        writes=[workspace],
        range=conv.groups,
        grain=max(1, (1 << 14) // max(1, oc * c * taps)),
        label=f"{node.name}.pack",
    )
    return workspace


def emit_simple(
    ctx: LoweringContext,
    node: Any,
    conv: Convolution,
    x: View,
    bias: View | None,
    shape: Sequence[Dim],
    sizes: Sequence[int],
) -> None:
    """float64 and integer convolution by plain loops."""
    w = ctx.contiguous(node.args[1])
    if bias is not None and bias.dtype != x.dtype:
        raise Refuse(f"bias of {bias.dtype} for a convolution of {x.dtype}")
    (out,) = ctx.outputs(node)
    reads = [x, w, *([bias] if bias is not None else [])]
    spatial = node.outputs[0].type.shape[-(len(sizes) - 2) :]
    channels = shape[1] * shape[2]
    ctx.kernel(
        Unit("conv_simple", ctx.header("conv_simple.cpp")),
        f"gc_conv_simple_{SIMPLE[x.dtype]}",
        pointers=[*reads, out],
        immediates=[*shape, *weight_steps(conv, sizes)],
        reads=reads,
        writes=[out],
        range=x.shape[0] * channels * product_of(spatial[:-1]),
        grain=8,
        label=node.name,
    )


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
