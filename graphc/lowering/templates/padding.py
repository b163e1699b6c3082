"""Copies with another order of items (kernels/mapped_copy.cpp): padding by reflection,
replication or wrapping, rolls, flips, repeats and the shuffles between channels and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphc.ir.types import product, row_major
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.strided import (
    CIRCULAR,
    IDENTITY,
    REFLECT,
    REPLICATE,
    Axis,
    fill,
    floordiv,
    mapped_copy,
    normal_dim,
    scalar,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node


def _pad(
    ctx: LoweringContext, src: View, out: View, padding: Sequence[Dim], mode: int, label: str
) -> None:
    """`padding` is torch's: (left, right) pairs from the last dimension on."""
    if mode == CIRCULAR and any(isinstance(item, int) and item < 0 for item in padding):
        raise Refuse("circular padding that crops")
    axes = []
    for i, (size, to, from_) in enumerate(zip(out.shape, out.strides, src.strides, strict=True)):
        back = len(out.shape) - 1 - i
        if 2 * back + 1 < len(padding):
            left, right = padding[2 * back], padding[2 * back + 1]
            if left == 0 and right == 0:
                axes.append(Axis(size, to, from_))
            else:
                axes.append(Axis(size, to, from_, mode, left, src.shape[i]))
        else:
            axes.append(Axis(size, to, from_))
    mapped_copy(ctx, src, out, axes, label)


@rule(
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
    "aten._pad_circular.default",
)
def edge_pad(ctx: LoweringContext, node: Node) -> None:
    """Padding from the tensor's own items; negative padding crops."""
    name = str(node.op)
    circular = "circular" in name
    mode = CIRCULAR if circular else REFLECT if "reflection" in name else REPLICATE
    padding = node.argument("pad" if circular else "padding")
    src = ctx.view(node.argument("self"))
    (out,) = ctx.outputs(node)
    _pad(ctx, src, out, padding, mode, "pad")


@rule("aten.pad.default")
def pad(ctx: LoweringContext, node: Node) -> None:
    """torch.nn.functional.pad in every mode."""
    modes = {"reflect": REFLECT, "replicate": REPLICATE, "circular": CIRCULAR}
    mode = node.argument("mode")
    padding = list(node.argument("pad"))
    src = ctx.view(node.argument("self"))
    if mode in modes:
        (out,) = ctx.outputs(node)
        _pad(ctx, src, out, padding, modes[mode], "pad")
        return
    if mode != "constant":
        raise Refuse(f"padding mode {mode!r}")
    if not all(isinstance(item, int) for item in padding):
        raise Refuse("constant padding by a symbolic width")
    value = node.argument("value")
    (out,) = ctx.outputs(node)
    fill(ctx, scalar(ctx, node, "value", value or 0, out.dtype), out, "pad")
    axes: list[Axis] = []
    to_offset, from_offset = out.offset, src.offset
    rank = len(out.shape)
    for i, (size, to, from_) in enumerate(zip(src.shape, out.strides, src.strides, strict=True)):
        back = rank - 1 - i
        left, right = padding[2 * back : 2 * back + 2] if 2 * back < len(padding) else (0, 0)
        to_offset = to_offset + max(left, 0) * to
        from_offset = from_offset + max(-left, 0) * from_
        axes.append(Axis(size + min(left, 0) + min(right, 0), to, from_))
    mapped_copy(ctx, src.with_(offset=from_offset), out.with_(offset=to_offset), axes, "pad")


@rule("aten.roll.default")
def roll(ctx: LoweringContext, node: Node) -> None:
    """Items shifted along dimensions, wrapping around; without dims over the flattened tensor."""
    shifts, dims = node.argument("shifts"), node.argument("dims")
    shifts = [shifts] if not isinstance(shifts, list | tuple) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        src = ctx.contiguous(node.argument("self"))
        (out,) = ctx.outputs(node)
        count = product(src.shape)
        mapped_copy(ctx, src, out, [Axis(count, 1, 1, CIRCULAR, shifts[0], count)], "roll")
        return
    src = ctx.view(node.argument("self"))
    (out,) = ctx.outputs(node)
    total: dict[int, Dim] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        at = normal_dim(dim, len(src.shape))
        total[at] = total.get(at, 0) + shift
    axes = [
        Axis(size, to, from_, CIRCULAR, total[i], size) if i in total else Axis(size, to, from_)
        for i, (size, to, from_) in enumerate(zip(src.shape, out.strides, src.strides, strict=True))
    ]
    mapped_copy(ctx, src, out, axes, "roll")


@rule("aten.flip.default")
def flip(ctx: LoweringContext, node: Node) -> None:
    """Items in reverse order along `dims`."""
    src = ctx.view(node.argument("self"))
    (out,) = ctx.outputs(node)
    dims = {normal_dim(dim, len(src.shape)) for dim in node.argument("dims")}
    offset = src.offset
    axes = []
    for i, (size, to, from_) in enumerate(zip(src.shape, out.strides, src.strides, strict=True)):
        if i in dims:
            offset = offset + (size - 1) * from_
            axes.append(Axis(size, to, -from_))
        else:
            axes.append(Axis(size, to, from_))
    if any(size == 0 for size in src.shape):
        return
    mapped_copy(ctx, src.with_(offset=offset), out, axes, "flip")


@rule("aten.repeat.default", "aten.tile.default")
def repeat(ctx: LoweringContext, node: Node) -> None:
    """The tensor laid side by side `repeats` times along each dimension."""
    src = ctx.view(node.argument("self"))
    counts = list(node.argument("dims" if "tile" in str(node.op) else "repeats"))
    (out,) = ctx.outputs(node)
    rank = len(out.shape)
    counts = [1] * (rank - len(counts)) + counts
    sizes = [1] * (rank - len(src.shape)) + list(src.shape)
    strides = [0] * (rank - len(src.shape)) + list(src.strides)
    axes = []
    for count, size, from_, to in zip(counts, sizes, strides, out.strides, strict=True):
        if size == 1:
            axes.append(Axis(count, to, 0))
            continue
        if count != 1:
            axes.append(Axis(count, to * size, 0))
        axes.append(Axis(size, to, from_))
    mapped_copy(ctx, src, out, axes, "repeat")


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(ctx: LoweringContext, node: Node) -> None:
    """Each entry of dimension `dim` several times in a row."""
    count, dim = node.argument("repeats"), node.argument("dim")
    if dim is None:
        src = ctx.contiguous(node.argument("self"))
        src = src.with_(shape=(product(src.shape),), strides=(1,))
        dim = 0
    else:
        src = ctx.view(node.argument("self"))
        dim = normal_dim(dim, len(src.shape))
    (out,) = ctx.outputs(node)
    axes = []
    for i, (size, from_, to) in enumerate(zip(src.shape, src.strides, out.strides, strict=True)):
        axes.append(Axis(size, to * count if i == dim else to, from_))
        if i == dim:
            axes.append(Axis(count, to, 0))
    mapped_copy(ctx, src, out, axes, "repeat_interleave")


def _shuffle(
    ctx: LoweringContext,
    src: View,
    out: View,
    sizes: Sequence[Dim],
    order: Sequence[int],
    last: int,
    label: str,
) -> None:
    """out = src viewed as `sizes`, permuted by `order`; `last` is the dimension of `sizes` that
    makes the inner loop."""
    from_ = row_major(sizes)
    to = row_major([sizes[i] for i in order])
    where = {dim: to[i] for i, dim in enumerate(order)}
    loops = [i for i in order if i != last] + [last]
    axes = [Axis(sizes[i], where[i], from_[i], IDENTITY) for i in loops]
    mapped_copy(ctx, src, out, axes, label)


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(ctx: LoweringContext, node: Node) -> None:
    """[..., C*r*r, H, W] <-> [..., C, H*r, W*r]."""
    src = ctx.contiguous(node.argument("self"))
    (out,) = ctx.outputs(node)
    if "unshuffle" in str(node.op):
        r = node.argument("downscale_factor")
        channels, height, width = src.shape[-3], out.shape[-2], out.shape[-1]
        batch = product(src.shape[:-3])
        _shuffle(
            ctx, src, out, [batch, channels, height, r, width, r], [0, 1, 3, 5, 2, 4], 4,
            "pixel_unshuffle",
        )  # fmt: skip
        return
    r = node.argument("upscale_factor")
    channels, height, width = out.shape[-3], src.shape[-2], src.shape[-1]
    batch = product(src.shape[:-3])
    _shuffle(
        ctx, src, out, [batch, channels, r, r, height, width], [0, 1, 4, 2, 5, 3], 5,
        "pixel_shuffle",
    )  # fmt: skip


@rule("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(ctx: LoweringContext, node: Node) -> None:
    """[N, g*c, ...] -> [N, c*g, ...]."""
    src = ctx.contiguous(node.argument("self"))
    (out,) = ctx.outputs(node)
    groups = node.argument("groups")
    rest = product(src.shape[2:])
    sizes = [src.shape[0], groups, floordiv(src.shape[1], groups), rest]
    _shuffle(ctx, src, out, sizes, [0, 2, 1, 3], 3, "channel_shuffle")
