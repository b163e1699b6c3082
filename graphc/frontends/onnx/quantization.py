"""Quantization, dequantization and products of quantized tensors."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.convolution import convolve, kernel_sizes
from graphc.frontends.onnx.dtypes import FLOAT8, limits, torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.spatial import window
from graphc.frontends.onnx.values import Tensor
from graphc.frontends.onnx.view import convert


def along(node: OnnxNode, t: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """A scale or zero point (one, one per `axis` index or one per block) as `x` broadcasts."""
    if t.ndim == 0 or t.numel() == 1 and t.ndim <= 1:
        return t.reshape(())
    axis = axis % x.ndim
    if block_size:
        wide = torch.repeat_interleave(t, block_size, dim=axis)
        return torch.narrow(wide, axis, 0, x.shape[axis])
    if t.ndim != 1:
        raise node.invalid(f"a scale of rank 0 or 1 expected, found rank {t.ndim}")
    shape = [1] * x.ndim
    shape[axis] = -1
    return t.reshape(shape)


def quantized(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    dtype: torch.dtype,
    saturate: int = 1,
) -> Tensor:
    """round(x / scale) + zero, half to even, saturated to `dtype`."""
    if dtype in FLOAT8:
        scaled = x / scale
        return convert(
            node, scaled if zero is None else scaled + zero.to(scaled.dtype), dtype, saturate
        )
    low, high = limits(dtype)
    y = torch.round(x / scale)
    y = y.to(torch.float32) if y.dtype in (torch.float16, torch.bfloat16) else y
    y = y if zero is None else y + zero.to(y.dtype)
    return torch.clamp(y, low, high).to(dtype)


@operator("QuantizeLinear")
def quantize_linear(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    dtype = torch.uint8
    if zero is not None:
        dtype = zero.dtype
    elif output_dtype:
        dtype = torch_dtype(output_dtype, node.where)
    work = torch_dtype(precision, node.where) if precision else scale.dtype
    if not x.is_floating_point():
        x = x.to(torch.float32)
    if precision or x.dtype != scale.dtype:
        x, scale = x.to(work), scale.to(work)
    axis = axis if x.ndim else 0
    zero = zero if zero is None else along(node, zero, x, axis, block_size)
    return quantized(node, x, along(node, scale, x, axis, block_size), zero, dtype, saturate)


@operator("DequantizeLinear")
def dequantize_linear(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    result = torch_dtype(output_dtype, node.where) if output_dtype else scale.dtype
    axis = axis if x.ndim else 0
    factor = along(node, scale, x, axis, block_size)
    if x.dtype in FLOAT8:
        values = x.to(torch.float32)
        if zero is not None:
            values = values - along(node, zero.to(torch.float32), x, axis, block_size)
    elif zero is not None:
        values = x.to(torch.int32) - along(node, zero.to(torch.int32), x, axis, block_size)
    else:
        values = x
    if factor.dtype in (torch.float16, torch.bfloat16):
        return (values.to(torch.float32) * factor.to(torch.float32)).to(result)
    return (values.to(factor.dtype) * factor).to(result)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(node: OnnxNode, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 with the scale and zero point of the data's range, which includes zero."""
    low = torch.clamp(torch.amin(x), max=0.0)
    high = torch.clamp(torch.amax(x), min=0.0)
    scale = (high - low) / 255.0
    scale = torch.where(scale == 0, 1.0, scale)
    zero = torch.round(torch.clamp(-low / scale, 0.0, 255.0))
    y = torch.clamp(torch.round(x / scale) + zero, 0.0, 255.0).to(torch.uint8)
    return y, scale, zero.to(torch.uint8)


def centered(x: Tensor, zero: Tensor | None, shape: list[int] | None = None) -> Tensor:
    """x - zero in int32; `shape` spreads a zero point of several elements."""
    wide = x.to(torch.int32)
    if zero is None:
        return wide
    offset = zero.to(torch.int32)
    if offset.numel() == 1:
        offset = offset.reshape(())
    elif shape is not None:
        offset = offset.reshape(shape)
    return wide - offset


@operator("MatMulInteger")
def matmul_integer(
    node: OnnxNode,
    a: Tensor,
    b: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
) -> Tensor:
    rows = [-1, 1] if a_zero is not None and a_zero.ndim == 1 else None
    return torch.matmul(centered(a, a_zero, rows), centered(b, b_zero))


@operator("ConvInteger")
def conv_integer(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
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
    per_channel = [-1] + [1] * (w.ndim - 1)
    data, weight = centered(x, x_zero), centered(w, w_zero, per_channel)
    if all(d == 1 for d in shape.dilations):
        return convolve(node, data, weight, None, group, shape)
    # torch has no dilated integer convolution; sums of products below 2**53 are exact in float64
    wide = convolve(node, data.to(torch.float64), weight.to(torch.float64), None, group, shape)
    return wide.to(torch.int32)


@operator("QLinearMatMul")
def qlinear_matmul(
    node: OnnxNode,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    def rows(t: Tensor) -> Tensor:
        return t.unsqueeze(-1) if t.ndim == 1 and t.numel() > 1 else t

    total = torch.matmul(centered(a, rows(a_zero)), centered(b, b_zero))
    factor = rows(a_scale).to(torch.float32) * b_scale.to(torch.float32) / y_scale.to(torch.float32)
    return requantized(total, factor, y_zero)


def requantized(total: Tensor, factor: Tensor, zero: Tensor) -> Tensor:
    """An int32 accumulator times a float factor, rounded and saturated to the type of `zero`."""
    low, high = limits(zero.dtype)
    y = torch.round(total.to(torch.float32) * factor) + zero.to(torch.float32)
    return torch.clamp(y, low, high).to(zero.dtype)


@operator("QLinearConv")
def qlinear_conv(
    node: OnnxNode,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    total: Any = conv_integer(
        node,
        x,
        w,
        x_zero,
        w_zero,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    spread = [-1] + [1] * (x.ndim - 2)
    if bias is not None:
        total = total + bias.reshape(spread)
    factor = x_scale * w_scale / y_scale
    factor = factor.reshape(spread) if factor.numel() > 1 else factor.reshape(())
    return requantized(total, factor, y_zero)
