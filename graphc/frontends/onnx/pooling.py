"""Poolings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from graphc.frontends.onnx.convolution import CONV
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.spatial import Window, pad_spatial, window
from graphc.frontends.onnx.values import Ints, Tensor, product

F = torch.nn.functional
MAX: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _is_native(shape: Window) -> bool:
    """True if torch's pooling accepts this padding."""
    return shape.symmetric and all(
        2 * b <= k for b, k in zip(shape.begin, shape.kernel, strict=True)
    )


def _ceil_end(sizes: list[Any], shape: Window) -> list[Any]:
    """Padding after each axis such that flooring the output size gives the ceiled one.

    A window that would start in the padding behind the input is dropped, as in torch and ONNX.
    """
    ends = []
    for axis, size in enumerate(sizes):
        stride, extent = shape.strides[axis], shape.extent(axis)
        padded = size + shape.begin[axis] + shape.end[axis]
        count = -((extent - padded) // stride) + 1
        if (count - 1) * stride >= size + shape.begin[axis]:
            count = count - 1
        ends.append((count - 1) * stride + extent - size - shape.begin[axis])
    return ends


@operator("MaxPool")
def max_pool(
    node: OnnxNode,
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
) -> Any:
    sizes = list(x.shape[2:])
    shape = window(node, sizes, kernel_shape, strides, dilations, pads, auto_pad)
    rank = len(kernel_shape)
    if rank not in MAX:
        raise node.refuse(f"MaxPool over {rank} spatial axes is not supported")
    source = x if x.is_floating_point() else x.to(torch.float32)
    padding: Any = shape.begin
    offsets: list[Any] = [0] * rank
    ceil = bool(ceil_mode)
    if not _is_native(shape):
        end = _ceil_end(sizes, shape) if ceil else shape.end
        source = pad_spatial(source, shape.begin, end, -math.inf)
        padding, ceil, offsets = 0, False, shape.begin
    result = MAX[rank](
        source,
        shape.kernel,
        shape.strides,
        padding,
        shape.dilations,
        ceil,
        return_indices=node.wants(1),
    )
    if not node.wants(1):
        return result.to(x.dtype)
    values, places = result
    planes = list(source.shape[2:])
    return values.to(x.dtype), _flat_indices(places, planes, offsets, sizes, storage_order)


def _flat_indices(
    places: Tensor, planes: list[Any], offsets: list[Any], sizes: list[Any], storage_order: int
) -> Tensor:
    """Indices into a (possibly padded) plane as indices into the whole unpadded tensor."""
    coordinates = []
    for size in reversed(planes):
        coordinates.append(torch.remainder(places, size))
        places = torch.div(places, size, rounding_mode="floor")
    coordinates = [c - o for c, o in zip(reversed(coordinates), offsets, strict=True)]
    axes = list(range(len(sizes)))
    flat: Any = 0
    for axis in reversed(axes) if storage_order else axes:
        flat = flat * sizes[axis] + coordinates[axis]
    n, c = places.shape[:2]
    plane = torch.arange(n * c).reshape([n, c] + [1] * len(sizes))
    return flat + plane * product(sizes)  # type: ignore[no-any-return]


@operator("MaxUnpool")
def max_unpool(
    node: OnnxNode,
    x: Tensor,
    indices: Tensor,
    output_shape: Ints | None = None,
    *,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = len(kernel_shape)
    strides, pads = strides or [1] * rank, pads or [0] * (2 * rank)
    natural = list(x.shape[:2]) + [
        (x.shape[2 + i] - 1) * strides[i] - pads[i] - pads[rank + i] + kernel_shape[i]
        for i in range(rank)
    ]
    flat = torch.zeros(product(natural), dtype=x.dtype)
    y = torch.scatter(flat, 0, indices.reshape(-1), x.reshape(-1)).reshape(natural)
    if output_shape is None:
        return y
    # indices count in the natural size; a larger output continues it with zeros
    extra = [o - n for o, n in zip(output_shape[2:], natural[2:], strict=True)]
    return pad_spatial(y, [0] * rank, extra)


def window_sum(x: Tensor, shape: Window, end: list[Any]) -> Tensor:
    """The sum under each window of `x` [N, C, spatial], zero-padded."""
    rank = len(shape.kernel)
    padded = pad_spatial(x, shape.begin, end)
    planes = padded.reshape(-1, 1, *padded.shape[2:])
    ones = torch.ones([1, 1, *shape.kernel], dtype=x.dtype)
    total = CONV[rank](planes, ones, None, shape.strides, 0, shape.dilations)
    return total.reshape(*x.shape[:2], *total.shape[2:])


@operator("AveragePool")
def average_pool(
    node: OnnxNode,
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    sizes = list(x.shape[2:])
    rank = len(kernel_shape)
    if rank not in AVERAGE:
        raise node.refuse(f"AveragePool over {rank} spatial axes is not supported")
    shape = window(node, sizes, kernel_shape, strides, dilations, pads, auto_pad)
    if _is_native(shape) and all(d == 1 for d in shape.dilations):
        return AVERAGE[rank](
            x, shape.kernel, shape.strides, shape.begin, bool(ceil_mode), bool(count_include_pad)
        )
    end = _ceil_end(sizes, shape) if ceil_mode else shape.end
    ones = torch.ones([1, 1, *sizes], dtype=x.dtype)
    if count_include_pad:
        ones = pad_spatial(ones, shape.begin, shape.end, 1.0)
        beyond = [e - p for e, p in zip(end, shape.end, strict=True)]
        counted = Window(shape.kernel, shape.strides, shape.dilations, [0] * rank, beyond)
        counts = window_sum(ones, counted, beyond)
    else:
        counts = window_sum(ones, shape, end)
    return window_sum(x, shape, end) / counts


@operator("LpPool")
def lp_pool(
    node: OnnxNode,
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    p: int = 2,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    sizes = list(x.shape[2:])
    if len(kernel_shape) not in CONV:
        raise node.refuse(f"LpPool over {len(kernel_shape)} spatial axes is not supported")
    shape = window(node, sizes, kernel_shape, strides, dilations, pads, auto_pad)
    end = _ceil_end(sizes, shape) if ceil_mode else shape.end
    return torch.pow(window_sum(torch.pow(torch.abs(x), p), shape, end), 1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.mean(x, list(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.amax(x, list(range(2, x.ndim)), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(node: OnnxNode, x: Tensor, *, p: int = 2) -> Tensor:
    total = torch.sum(torch.pow(torch.abs(x), p), list(range(2, x.ndim)), keepdim=True)
    return torch.pow(total, 1.0 / p)
