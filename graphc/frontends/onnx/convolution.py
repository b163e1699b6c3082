"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.spatial import Window, pad_spatial, window
from graphc.frontends.onnx.values import Ints, Tensor, product

F = torch.nn.functional
CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def convolve(
    node: OnnxNode, x: Tensor, w: Tensor, b: Tensor | None, group: int, shape: Window
) -> Tensor:
    """The convolution of `x` [N, C, spatial] with `w` [M, C / group, kernel]."""
    rank = len(shape.kernel)
    if rank not in CONV:
        raise node.refuse(f"convolution over {rank} spatial axes is not supported")
    if shape.symmetric:
        return CONV[rank](x, w, b, shape.strides, shape.begin, shape.dilations, group)
    x = pad_spatial(x, shape.begin, shape.end)
    return CONV[rank](x, w, b, shape.strides, 0, shape.dilations, group)


@operator("Conv")
def conv(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    kernel = kernel_sizes(node, w, kernel_shape)
    shape = window(node, list(x.shape[2:]), kernel, strides, dilations, pads, auto_pad)
    return convolve(node, x, w, b, group, shape)


def kernel_sizes(node: OnnxNode, w: Tensor, declared: list[int] | None) -> list[int]:
    kernel = list(w.shape[2:])
    if not all(isinstance(k, int) for k in kernel):
        raise node.refuse("a convolution kernel of symbolic size is not supported")
    if declared is not None and list(declared) != kernel:
        raise node.invalid(f"kernel_shape {declared} expected, the weight has {kernel}")
    return [int(k) for k in kernel]


@operator("ConvTranspose")
def conv_transpose(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    kernel = kernel_sizes(node, w, kernel_shape)
    rank = len(kernel)
    if rank not in TRANSPOSED:
        raise node.refuse(f"ConvTranspose over {rank} spatial axes is not supported")
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    sizes = list(x.shape[2:])
    # sizes of the result without any padding taken off
    full = [
        s * (n - 1) + (k - 1) * d + 1
        for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)
    ]
    begin, end = _transposed_pads(node, sizes, full, strides, extra, auto_pad, output_shape, pads)
    native = all(
        isinstance(p, int) and isinstance(q, int) and p == q and p >= 0 and e < max(s, d)
        for p, q, e, s, d in zip(begin, end, extra, strides, dilations, strict=True)
    )
    if native:
        return TRANSPOSED[rank](x, w, b, strides, begin, extra, group, dilations)
    y = TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
    y = pad_spatial(y, [-p for p in begin], [e - q for e, q in zip(extra, end, strict=True)])
    return y if b is None else y + b.reshape([-1] + [1] * rank)


def _transposed_pads(
    node: OnnxNode,
    sizes: list[Any],
    full: list[Any],
    strides: list[int],
    extra: list[int],
    auto_pad: str,
    output_shape: list[int] | None,
    pads: list[int] | None,
) -> tuple[list[Any], list[Any]]:
    rank = len(sizes)
    same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
    if output_shape is None and not same:
        amounts = pads if pads and auto_pad != "VALID" else [0] * (2 * rank)
        return list(amounts[:rank]), list(amounts[rank:])
    wanted: list[Any] = [n * s for n, s in zip(sizes, strides, strict=True)]
    if output_shape is not None:
        wanted = list(output_shape[-rank:])
    begin, end = [], []
    for size, out, more in zip(full, wanted, extra, strict=True):
        total = size + more - out
        if isinstance(total, int) and total < 0:
            total = 0 if output_shape is None else total
        half = total // 2
        begin.append(half if auto_pad == "SAME_UPPER" else total - half)
        end.append(total - half if auto_pad == "SAME_UPPER" else half)
    return begin, end


@operator("CausalConvWithState")
def causal_conv_with_state(
    node: OnnxNode,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution of `x` [B, C, T], carrying the last k - 1 positions."""
    if activation not in ("none", "silu", "swish"):
        raise node.invalid(f"unknown activation {activation!r}")
    keep = weight.shape[2] - 1
    joined = torch.cat([past, x], 2) if past is not None else F.pad(x, (keep, 0))
    y = F.conv1d(joined, weight, bias, groups=x.shape[1])
    present = torch.narrow(joined, 2, joined.shape[2] - keep, keep)
    return (F.silu(y) if activation != "none" else y), present


@operator("Col2Im")
def col2im(
    node: OnnxNode,
    x: Tensor,
    image: Ints,
    block: Ints,
    *,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Sums sliding blocks [N, C * block, L] back into images [N, C, image]."""
    rank = len(block)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = pads or [0] * (2 * rank)
    begin, end = pads[:rank], pads[rank:]
    padded = [s + b + e for s, b, e in zip(image, begin, end, strict=True)]
    counts = [
        (s - (k - 1) * d - 1) // t + 1
        for s, k, d, t in zip(padded, block, dilations, strides, strict=True)
    ]
    # position of element (kernel offset, block number) on each axis, then flat
    flat: Any = torch.zeros([1] * (2 * rank), dtype=torch.int64)
    for axis in range(rank):
        offsets = torch.arange(block[axis]) * dilations[axis]
        starts = torch.arange(counts[axis]) * strides[axis]
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = block[axis], counts[axis]
        flat = flat * padded[axis] + (offsets.unsqueeze(1) + starts).reshape(shape)
    channels = x.shape[1] // product(block)
    source = x.reshape(x.shape[0], channels, -1)
    places = flat.reshape(1, 1, -1).expand(source.shape)
    zeros = torch.zeros([x.shape[0], channels, product(padded)], dtype=x.dtype)
    result = torch.scatter_add(zeros, 2, places, source).reshape(x.shape[0], channels, *padded)
    return pad_spatial(result, [-b for b in begin], [-e for e in end])
