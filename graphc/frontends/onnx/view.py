"""Operators that change the shape, layout or type of a tensor, and those that read its shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import FLOAT8, torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Ints, Known, Raw, Static, Tensor, product

LAST = (1 << 63) - 1


@operator("Identity")
def identity(node: OnnxNode, x: Raw) -> Any:
    return x


@operator("Dropout")
def dropout_legacy(
    node: OnnxNode,
    x: Tensor,
    *,
    ratio: float = 0.5,
    is_test: int = 1,
    consumed_inputs: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    if not is_test and ratio:
        raise node.refuse("Dropout in training mode is random")
    return x, torch.ones_like(x, dtype=x.dtype if node.opset < 10 else torch.bool)


@operator("Dropout", since=12)
def dropout(
    node: OnnxNode, x: Tensor, ratio: Known = None, training_mode: Known = None, *, seed: int = 0
) -> Any:
    if training_mode is not None:
        known = isinstance(training_mode, Static) and training_mode.concrete
        random = not known or bool(training_mode.flat[0])
        no_drop = isinstance(ratio, Static) and ratio.concrete and ratio.flat[0] == 0
        if random and not no_drop:
            raise node.refuse("Dropout in training mode is random", "export it for inference")
    if not node.wants(1):
        return x
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Shape")
def shape_of(node: OnnxNode, x: Raw, *, start: int = 0, end: int = LAST) -> Static:
    sizes = list(x.shape)
    rank = len(sizes)
    first = min(max(start + rank if start < 0 else start, 0), rank)
    last = min(max(end + rank if end < 0 else end, 0), rank)
    return Static.of(sizes[first:last])


@operator("Size")
def size_of(node: OnnxNode, x: Raw) -> Static:
    return Static.of(product(x.shape))


@operator("Cast")
def cast(
    node: OnnxNode, x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up"
) -> Tensor:
    return convert(node, x, torch_dtype(to, node.where), saturate)


@operator("CastLike")
def cast_like(
    node: OnnxNode, x: Tensor, like: Raw, *, saturate: int = 1, round_mode: str = "up"
) -> Tensor:
    return convert(node, x, like.dtype, saturate)


def convert(node: OnnxNode, x: Tensor, dtype: torch.dtype, saturate: int = 1) -> Tensor:
    """`x` in another dtype; float8 targets saturate as ONNX asks."""
    if dtype not in FLOAT8 or x.dtype == dtype:
        return x.to(dtype)
    if x.dtype == torch.float64:
        raise node.refuse("Cast from double to an 8-bit float would round twice")
    x = x.to(torch.float32)
    if saturate:
        largest = torch.finfo(dtype).max
        x = torch.clamp(x, -largest, largest)
    elif dtype == torch.float8_e4m3fn:
        # no infinity: what rounds above 448 is NaN; 464 is the tie that goes down
        x = torch.where(torch.abs(x) > 464.0, math.nan, x)
    return x.to(dtype)


@operator("BitCast")
def bit_cast(node: OnnxNode, x: Tensor, *, to: int) -> Tensor:
    dtype = torch_dtype(to, node.where)
    if dtype.itemsize != x.dtype.itemsize:
        raise node.invalid(f"BitCast from {x.dtype} to {dtype} changes the width")
    return x.view(dtype)


@operator("Reshape")
def reshape_attribute(
    node: OnnxNode, x: Tensor, *, shape: list[int], consumed_inputs: list[int] | None = None
) -> Tensor:
    return reshape(node, x, shape)


@operator("Reshape", since=5)
def reshape(node: OnnxNode, x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    return x.reshape(resolved_shape(node, list(x.shape), shape, allowzero))


def resolved_shape(
    node: OnnxNode, sizes: list[int], shape: list[int], allowzero: int = 0
) -> list[int]:
    """Reshape's target sizes with zeros replaced; -1 is filled in where torch could not."""
    target = []
    for axis, size in enumerate(shape):
        if isinstance(size, int) and size == 0 and not allowzero:
            if axis >= len(sizes):
                raise node.invalid(f"size 0 at axis {axis} of a tensor of rank {len(sizes)}")
            size = sizes[axis]
        target.append(size)
    if any(isinstance(s, int) and s == -1 for s in target):
        rest = product([s for s in target if not (isinstance(s, int) and s == -1)])
        if isinstance(rest, int) and rest == 0:
            raise node.invalid("Reshape with both a zero and a -1 has no answer")
    return target


@operator("Flatten")
def flatten(node: OnnxNode, x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.ndim if axis < 0 else axis
    first, second = product(x.shape[:axis]), product(x.shape[axis:])
    return x.reshape(first, second)


@operator("Transpose")
def transpose(node: OnnxNode, x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(range(x.ndim))[::-1])


@operator("Squeeze")
def squeeze_attribute(node: OnnxNode, x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    return squeeze(node, x, axes)


@operator("Squeeze", since=13)
def squeeze(node: OnnxNode, x: Tensor, axes: Ints | None = None) -> Tensor:
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    for axis in axes:
        size = x.shape[axis]
        if isinstance(size, int) and size != 1:
            raise node.invalid(f"Squeeze of axis {axis}, whose size is {size}")
    return torch.squeeze(x, [int(axis) for axis in axes])


@operator("Unsqueeze")
def unsqueeze_attribute(node: OnnxNode, x: Tensor, *, axes: list[int]) -> Tensor:
    return unsqueeze(node, x, axes)


@operator("Unsqueeze", since=13)
def unsqueeze(node: OnnxNode, x: Tensor, axes: Ints) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(int(a) % rank for a in axes):
        x = torch.unsqueeze(x, axis)
    return x


@operator("Expand")
def expand(node: OnnxNode, x: Tensor, shape: Ints) -> Tensor:
    return x.expand(expanded_sizes(list(x.shape), shape))


def expanded_sizes(sizes: list[int], shape: list[int]) -> list[int]:
    """Sizes of the two-way broadcast of a tensor and a target shape."""
    rank = max(len(sizes), len(shape))
    have = [1] * (rank - len(sizes)) + sizes
    want = [1] * (rank - len(shape)) + shape
    return [h if isinstance(w, int) and w == 1 else w for h, w in zip(have, want, strict=True)]


@operator("Tile")
def tile(node: OnnxNode, x: Tensor, repeats: Ints) -> Tensor:
    if node.opset < 6:
        raise node.refuse("Tile before opset 6 is not supported")
    return unsigned.moved(x, lambda t: t.repeat(repeats))


@operator("Concat")
def concat(node: OnnxNode, *tensors: Tensor, axis: int = 1) -> Tensor:
    first, *others = tensors
    return torch.cat(tensors, axis) if others else first


@operator("Split")
def split_attribute(
    node: OnnxNode, x: Tensor, *, axis: int = 0, split: list[int] | None = None
) -> tuple[Tensor, ...]:
    return split_input(node, x, split, axis=axis)


@operator("Split", since=13)
def split_input(
    node: OnnxNode,
    x: Tensor,
    split: Ints | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
) -> tuple[Tensor, ...]:
    count = num_outputs or len(node.outputs)
    if split is None:
        split = equal_parts(x.shape[axis], count)
    return torch.split(x, split, axis)


def equal_parts(size: Any, count: int) -> list[int]:
    """Sizes of `count` chunks, the last one smaller if need be."""
    each = (size + count - 1) // count
    return [each] * (count - 1) + [size - each * (count - 1)]


@operator("Slice")
def slice_attributes(
    node: OnnxNode, x: Tensor, *, starts: list[int], ends: list[int], axes: list[int] | None = None
) -> Tensor:
    return slice_(node, x, starts, ends, axes)


@operator("Slice", since=10)
def slice_(
    node: OnnxNode,
    x: Tensor,
    starts: Ints,
    ends: Ints,
    axes: Ints | None = None,
    steps: Ints | None = None,
) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if not isinstance(step, int) or step == 0:
            raise node.refuse("a Slice step must be a nonzero constant")
        x = _slice_axis(x, int(axis) % x.ndim, start, end, step)
    return x


def _slice_axis(x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    if step > 0:
        if isinstance(start, int) and start == 0 and isinstance(end, int) and end >= LAST >> 32:
            if step == 1 and end >= LAST:
                return x
        return torch.ops.aten.slice.Tensor(x, axis, start, end, step)  # type: ignore[no-any-return]
    size = x.shape[axis]
    start = start + size if start < 0 else start
    start = start if start < size else size - 1
    end = end + size if end < 0 else end
    end = end if end > -1 else -1
    # position p of the flipped axis is position size - 1 - p
    first, last = size - 1 - start, size - 1 - end
    if isinstance(first, int) and isinstance(last, int) and last <= first:
        return torch.narrow(x, axis, 0, 0)
    return torch.ops.aten.slice.Tensor(  # type: ignore[no-any-return]
        torch.flip(x, [axis]), axis, first, last, -step
    )


@operator("DepthToSpace")
def depth_to_space(node: OnnxNode, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(node: OnnxNode, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    b = blocksize
    y = x.reshape(n, c, h // b, b, w // b, b)
    y = y.permute(0, 3, 5, 1, 2, 4) if mode == "DCR" else y.permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)
