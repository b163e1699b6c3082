"""Normalization layers."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Tensor

F = torch.nn.functional


@operator("BatchNormalization")
def batch_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    spatial: int = 1,
    is_test: int = 1,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    """Inference only: statistics are inputs."""
    if training_mode or not is_test or any(node.wants(i) for i in range(1, 5)):
        raise node.refuse("BatchNormalization in training mode", "export the model for inference")
    if not spatial:
        raise node.refuse("BatchNormalization with spatial=0 is not supported")
    if x.dtype == scale.dtype == mean.dtype:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    mean, variance, scale, bias = (t.to(torch.float32) for t in (mean, variance, scale, bias))
    wide = F.batch_norm(x.to(torch.float32), mean, variance, scale, bias, False, 0.0, epsilon)
    return wide.to(x.dtype)


@operator("InstanceNormalization")
def instance_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 1e-5,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    return torch.group_norm(x, int(scale.shape[0]), scale, bias, epsilon)


@operator("LayerNormalization")
def layer_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    axis = axis % x.ndim
    shape = list(x.shape[axis:])
    fits = all(t is None or _same_sizes(t, shape) for t in (scale, bias))
    inner_scale, inner_bias = (scale, bias) if fits else (None, None)
    if node.wants(1) or node.wants(2):
        y, mean, deviation = torch.native_layer_norm(x, shape, inner_scale, inner_bias, epsilon)
        stats = (mean.to(torch.float32), deviation.to(torch.float32))
        stats = stats if x.dtype != torch.float64 else (mean, deviation)
    else:
        y = F.layer_norm(x, shape, inner_scale, inner_bias, epsilon)
        stats = None
    if not fits:
        y = y if scale is None else y * scale
        y = y if bias is None else y + bias
    return y if stats is None else (y, *stats)


def _same_sizes(t: Tensor, shape: list[Any]) -> bool:
    return t.ndim == len(shape) and all(
        isinstance(a, int) and isinstance(b, int) and a == b
        for a, b in zip(t.shape, shape, strict=True)
    )


@operator("RMSNormalization")
def rms_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    shape = list(x.shape[axis % x.ndim :])
    if _same_sizes(scale, shape):
        return F.rms_norm(x, shape, scale, epsilon)
    return F.rms_norm(x, shape, None, epsilon) * scale


@operator("GroupNormalization", since=18)
def group_normalization_of_groups(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
) -> Tensor:
    """Version 18 has one scale and bias for a whole group."""
    each = x.shape[1] // num_groups
    wide = [torch.repeat_interleave(t, each) for t in (scale, bias)]
    return torch.group_norm(x, num_groups, wide[0], wide[1], epsilon)


@operator("GroupNormalization", since=21)
def group_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Tensor:
    return torch.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LpNormalization")
def lp_normalization(node: OnnxNode, x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    if p not in (1, 2):
        raise node.invalid(f"p must be 1 or 2, found {p}")
    norm = (
        torch.sum(torch.abs(x), axis, keepdim=True)
        if p == 1
        else torch.sqrt(torch.sum(x * x, axis, keepdim=True))
    )
    return torch.where(norm == 0, 0, x / norm)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(
    node: OnnxNode, x: Tensor, *, axes: list[int] | None = None
) -> Tensor:
    over = [0, 2, 3] if axes is None else axes
    mean = torch.mean(x, over, keepdim=True)
    variance = torch.mean(x * x, over, keepdim=True) - mean * mean
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


@operator("LRN")
def local_response_normalization(
    node: OnnxNode,
    x: Tensor,
    *,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    bias: float = 1.0,
) -> Tensor:
    if size % 2:
        return F.local_response_norm(x, size, alpha, beta, bias)
    before = (size - 1) // 2
    channels = x.shape[1]
    pads = [0, 0] * (x.ndim - 2) + [before, size - 1 - before]
    squares = F.pad(x * x, pads)
    total = sum(
        (torch.narrow(squares, 1, i, channels) for i in range(1, size)),
        torch.narrow(squares, 1, 0, channels),
    )
    return x / torch.pow(bias + alpha / size * total, beta)
