"""Activation functions and the softmax family."""

from __future__ import annotations

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Tensor, product

F = torch.nn.functional
Legacy = list[int] | None  # `consumed_inputs` of opset 1, which has no meaning


@operator("Relu")
def relu(node: OnnxNode, x: Tensor, *, consumed_inputs: Legacy = None) -> Tensor:
    return torch.relu(x)


@operator("LeakyRelu")
def leaky_relu(
    node: OnnxNode, x: Tensor, *, alpha: float = 0.01, consumed_inputs: Legacy = None
) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("Elu")
def elu(node: OnnxNode, x: Tensor, *, alpha: float = 1.0, consumed_inputs: Legacy = None) -> Tensor:
    return F.elu(x, alpha)


@operator("Celu")
def celu(node: OnnxNode, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@operator("Selu")
def selu(
    node: OnnxNode,
    x: Tensor,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
    consumed_inputs: Legacy = None,
) -> Tensor:
    return gamma * F.elu(x, alpha)


@operator("Gelu")
def gelu(node: OnnxNode, x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("Swish")
def swish(node: OnnxNode, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("SwiGLU")
def swiglu(node: OnnxNode, gate: Tensor, value: Tensor, *, alpha: float = 1.0) -> Tensor:
    return swish(node, gate, alpha=alpha) * value


@operator("Mish")
def mish(node: OnnxNode, x: Tensor) -> Tensor:
    return F.mish(x)


@operator("HardSigmoid")
def hard_sigmoid(
    node: OnnxNode,
    x: Tensor,
    *,
    alpha: float = 0.2,
    beta: float = 0.5,
    consumed_inputs: Legacy = None,
) -> Tensor:
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


@operator("HardSwish")
def hard_swish(node: OnnxNode, x: Tensor) -> Tensor:
    return F.hardswish(x)


@operator("PRelu")
def prelu_per_channel(
    node: OnnxNode, x: Tensor, slope: Tensor, *, consumed_inputs: Legacy = None
) -> Tensor:
    if slope.numel() > 1 and slope.ndim == 1:
        slope = slope.reshape([-1] + [1] * (x.ndim - 2))
    return torch.where(x < 0, slope * x, x)


@operator("PRelu", since=7)
def prelu(node: OnnxNode, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("Softplus")
def softplus(node: OnnxNode, x: Tensor) -> Tensor:
    # the shortcut of F.softplus above 20 is below half a unit in the last place of float32 only
    if x.dtype == torch.float64:
        return torch.logaddexp(x, torch.zeros_like(x))
    return F.softplus(x)


@operator("Softsign")
def softsign(node: OnnxNode, x: Tensor) -> Tensor:
    return F.softsign(x)


@operator("ThresholdedRelu")
def thresholded_relu(node: OnnxNode, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0)


@operator("Shrink")
def shrink(node: OnnxNode, x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    if not x.is_floating_point():
        raise node.refuse("Shrink of integers is not supported")
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0))


def _flattened(x: Tensor, axis: int) -> Tensor:
    """2-D view of the operators before opset 13, which normalise over all axes from `axis` on."""
    axis = axis % x.ndim if x.ndim else 0
    return x.reshape(product(x.shape[:axis]), product(x.shape[axis:]))


@operator("Softmax")
def softmax_flattened(node: OnnxNode, x: Tensor, *, axis: int = 1) -> Tensor:
    if x.ndim and axis in (-1, x.ndim - 1):
        return torch.softmax(x, -1)
    return torch.softmax(_flattened(x, axis), 1).reshape(x.shape)


@operator("Softmax", since=13)
def softmax(node: OnnxNode, x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@operator("LogSoftmax")
def log_softmax_flattened(node: OnnxNode, x: Tensor, *, axis: int = 1) -> Tensor:
    if x.ndim and axis in (-1, x.ndim - 1):
        return torch.log_softmax(x, -1)
    return torch.log_softmax(_flattened(x, axis), 1).reshape(x.shape)


@operator("LogSoftmax", since=13)
def log_softmax(node: OnnxNode, x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@operator("Hardmax")
def hardmax_flattened(node: OnnxNode, x: Tensor, *, axis: int = 1) -> Tensor:
    return hardmax(node, _flattened(x, axis), axis=1).reshape(x.shape)


@operator("Hardmax", since=13)
def hardmax(node: OnnxNode, x: Tensor, *, axis: int = -1) -> Tensor:
    first = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, first, 1.0)
