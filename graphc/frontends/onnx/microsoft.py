"""Operators of onnxruntime's own domain, which its optimizer writes into saved models."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.convolution import conv
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.normalization import layer_normalization, rms_normalization
from graphc.frontends.onnx.quantization import centered, dynamic_quantize_linear
from graphc.frontends.onnx.recurrent import (
    is_native,
    packed_weights,
    recurrence,
    torch_weights,
)
from graphc.frontends.onnx.registry import operator, prepare
from graphc.frontends.onnx.values import Tensor

F = torch.nn.functional
MS = "com.microsoft"


@operator("Gelu", domain=MS)
def gelu(node: OnnxNode, x: Tensor) -> Tensor:
    return F.gelu(x)


@operator("BiasGelu", domain=MS)
def bias_gelu(node: OnnxNode, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("FastGelu", domain=MS)
def fast_gelu(node: OnnxNode, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain=MS)
def quick_gelu(node: OnnxNode, x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("SkipLayerNormalization", domain=MS)
def skip_layer_normalization(
    node: OnnxNode,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Any:
    total = _skipped(x, skip, bias)
    if node.wants(1) or node.wants(2):
        y, mean, deviation = torch.native_layer_norm(total, [x.shape[-1]], gamma, beta, epsilon)
        return y, mean, deviation, total
    y = F.layer_norm(total, [x.shape[-1]], gamma, beta, epsilon)
    return (y, None, None, total) if node.wants(3) else y


@operator("SkipSimplifiedLayerNormalization", domain=MS)
def skip_rms_normalization(
    node: OnnxNode,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Any:
    total = _skipped(x, skip, bias)
    if node.wants(1) or node.wants(2):
        raise node.refuse("the statistics of SkipSimplifiedLayerNormalization are not supported")
    y = F.rms_norm(total, [x.shape[-1]], gamma, epsilon)
    return (y, None, None, total) if node.wants(3) else y


def _skipped(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    total = x + skip
    return total if bias is None else total + bias


@operator("SimplifiedLayerNormalization")  # onnxruntime puts it into the default domain
@operator("SimplifiedLayerNormalization", domain=MS)
def simplified_layer_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    if node.wants(1):
        raise node.refuse("the statistics of SimplifiedLayerNormalization are not supported")
    return rms_normalization(node, x, scale, axis=axis, epsilon=epsilon)


@operator("LayerNormalization", domain=MS)
def ms_layer_normalization(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    return layer_normalization(node, x, scale, bias, axis=axis, epsilon=epsilon)


@operator("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(
    node: OnnxNode,
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> Any:
    if node.wants(1) and mask is not None:
        raise node.refuse("the mask index of EmbedLayerNormalization is not supported")
    places = torch.arange(ids.shape[1]) if position_ids is None else position_ids
    total = words[ids] + positions[places]
    if segments is not None and segment_table is not None:
        total = total + segment_table[segments]
    y = F.layer_norm(total, [total.shape[-1]], gamma, beta, epsilon)
    index = torch.zeros([ids.shape[0]], dtype=torch.int32)
    return (y, index, total) if node.wants(1) or node.wants(2) else y


@prepare("FusedMatMul", domain=MS)
def pack_fused_matmul(node: OnnxNode, constants: list[Tensor | None]) -> dict[str, Tensor]:
    weight, attributes = constants[1], node.attributes
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return {}
    if attributes.get("transA", 0) or attributes.get("transBatchA", 0):
        return {}
    node.consumed = {1}
    packed = weight if attributes.get("transB", 0) else weight.t()
    return {"weight": packed.contiguous()}


@operator("FusedMatMul", domain=MS)
def fused_matmul(
    node: OnnxNode,
    a: Tensor,
    b: Tensor | None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    if transBatchA or transBatchB:
        raise node.refuse("FusedMatMul with transposed batch axes is not supported")
    weight = node.packed("weight")
    if weight is not None:
        product = F.linear(a, weight)
    else:
        assert b is not None
        a = a.transpose(-1, -2) if transA and a.ndim > 1 else a
        b = b.transpose(-1, -2) if transB and b.ndim > 1 else b
        product = torch.matmul(a, b)
    return product if alpha == 1.0 else product * alpha


@operator("FusedConv", domain=MS)
def fused_conv(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: list[float] | None = None,
    **attributes: Any,
) -> Tensor:
    y = conv(node, x, w, b, **attributes)
    y = y if z is None else y + z
    parameters = activation_params or []
    if activation == "":
        return y
    functions: dict[str, Any] = {
        "Relu": torch.relu,
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "LeakyRelu": lambda t: F.leaky_relu(t, parameters[0]),
        "Clip": lambda t: torch.clamp(t, parameters[0], parameters[1]),
        "HardSigmoid": lambda t: torch.clamp(parameters[0] * t + parameters[1], 0.0, 1.0),
    }
    if activation not in functions:
        raise node.refuse(f"the fused activation {activation} is not supported")
    return functions[activation](y)  # type: ignore[no-any-return]


@operator("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(
    node: OnnxNode,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    total = torch.matmul(centered(a, a_zero), centered(b, b_zero)).to(a_scale.dtype)
    y = total * (a_scale * b_scale)
    return y if bias is None else y + bias


@operator("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(
    node: OnnxNode,
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    rows, scale, zero = dynamic_quantize_linear(node, a)
    return matmul_integer_to_float(node, rows, b, scale, b_scale, zero, b_zero, bias)


def _dequantized(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """[D, K, gates * H] in 8 bits, scaled per direction or column, as float [D, gates * H, K]."""
    count = w.shape[0]
    offset = zero.to(torch.float32).reshape(count, 1, -1)
    wide = (w.to(torch.float32) - offset) * scale.reshape(count, 1, -1)
    return wide.transpose(1, 2)


@prepare("DynamicQuantizeLSTM", domain=MS)
def pack_dynamic_quantize_lstm(node: OnnxNode, constants: list[Tensor | None]) -> dict[str, Tensor]:
    if len(constants) < 12 or not is_native(node, bool(node.inputs[4]), bool(node.inputs[7])):
        return {}
    w, r, b = constants[1:4]
    w_scale, w_zero, r_scale, r_zero = constants[8:12]
    if w is None or r is None or w_scale is None or r_scale is None:
        return {}
    if w_zero is None or r_zero is None or (b is None and node.inputs[3]):
        return {}
    node.consumed = {1, 2, 3, 8, 9, 10, 11}
    return torch_weights(
        "LSTM", _dequantized(w, w_scale, w_zero), _dequantized(r, r_scale, r_zero), b
    )


@operator("DynamicQuantizeLSTM", domain=MS)
def dynamic_quantize_lstm(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
    w_scale: Tensor | None = None,
    w_zero: Tensor | None = None,
    r_scale: Tensor | None = None,
    r_zero: Tensor | None = None,
    *,
    direction: str = "forward",
    hidden_size: int = 0,
    activations: list[str] | None = None,
    clip: float = 0.0,
    input_forget: int = 0,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
) -> tuple[Tensor, ...]:
    """An LSTM whose weights are stored in 8 bits.

    The input is rounded to 8 bits as onnxruntime does. It rounds the hidden state too, anew in
    each step, which the operator's text leaves open: here the state stays float32, so a sequence
    of any length is one recurrence. The outputs differ by the rounding of the state, by about 1% of
    the largest value on the int8 recognition and speech models this was measured with.
    """
    packed = packed_weights(node)
    if not packed:
        raise node.refuse("DynamicQuantizeLSTM needs constant weights and standard options")
    count = 2 if direction == "bidirectional" else 1
    zeros = torch.zeros([count, x.shape[1], packed["hh0"].shape[1]], dtype=x.dtype)
    states = [zeros if s is None else s for s in (h, c)]
    levels, scale, zero = dynamic_quantize_linear(node, x)
    x = centered(levels, zero).to(scale.dtype) * scale
    y, last = recurrence("LSTM", x, packed, states, direction)
    return (y, *last)
