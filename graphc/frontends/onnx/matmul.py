"""Matrix products, einsum and determinants."""

from __future__ import annotations

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator, prepare
from graphc.frontends.onnx.values import Tensor

F = torch.nn.functional


@prepare("MatMul")
def pack_matmul(node: OnnxNode, constants: list[Tensor | None]) -> dict[str, Tensor]:
    weight = constants[1]
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return {}
    node.consumed = {1}
    return {"weight": weight.t().contiguous()}


@operator("MatMul")
def matmul(node: OnnxNode, a: Tensor, b: Tensor | None) -> Tensor:
    """A constant right operand arrives as the packed weight of a linear layer."""
    weight = node.packed("weight")
    if weight is not None:
        return F.linear(a, weight)
    assert b is not None
    if a.dtype in WIDE_UNSIGNED:
        return unsigned.narrow(torch.matmul(unsigned.widen(a), unsigned.widen(b)), a.dtype)
    return torch.matmul(a, b)


@prepare("Gemm")
def pack_gemm(node: OnnxNode, constants: list[Tensor | None]) -> dict[str, Tensor]:
    weight = constants[1]
    attributes = node.attributes
    plain = attributes.get("alpha", 1.0) == 1.0 and not attributes.get("transA", 0)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or not plain:
        return {}
    packed = weight if attributes.get("transB", 0) else weight.t()
    result = {"weight": packed.contiguous()}
    node.consumed = {1}
    if len(node.inputs) > 2 and node.inputs[2] and attributes.get("beta", 1.0) == 1.0:
        bias = constants[2]
        rows = packed.shape[0]
        if bias is not None and tuple(bias.shape) in ((rows,), (1, rows)):
            node.consumed = {1, 2}
            result["bias"] = bias.reshape(rows).contiguous()
    return result


@operator("Gemm")
def gemm(
    node: OnnxNode,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Tensor:
    weight = node.packed("weight")
    if weight is not None:
        product = F.linear(a, weight, node.packed("bias"))
    else:
        assert b is not None
        product = torch.matmul(a.t() if transA else a, b.t() if transB else b)
        product = product if alpha == 1.0 else _scaled(product, alpha)
    if c is None or node.packed("bias") is not None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else _scaled(c, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor if x.is_floating_point() else (x * factor).to(x.dtype)


@operator("Einsum")
def einsum(node: OnnxNode, *tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *tensors)


@operator("Det")
def determinant(node: OnnxNode, x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.det(x)
    return result
