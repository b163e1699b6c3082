"""Comparisons, boolean logic and selection."""

from __future__ import annotations

import operator as python
from typing import Any

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED
from graphc.frontends.onnx.elementwise import aligned, operands
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Raw, Tensor

COMPARE = {
    "Equal": python.eq,
    "Greater": python.gt,
    "Less": python.lt,
    "GreaterOrEqual": python.ge,
    "LessOrEqual": python.le,
}


@operator(*COMPARE)
def compare(
    node: OnnxNode, a: Raw, b: Raw, *, axis: int | None = None, broadcast: int = 0
) -> Tensor:
    x, y = operands(node, a, aligned(b, a, axis, broadcast, node))
    if any(isinstance(v, torch.Tensor) and v.dtype in WIDE_UNSIGNED for v in (x, y)):
        x, y = unsigned.ordered(x), unsigned.ordered(y)
    return COMPARE[node.op_type](x, y)  # type: ignore[no-any-return]


@operator("And", "Or", "Xor")
def logical(
    node: OnnxNode, a: Raw, b: Raw, *, axis: int | None = None, broadcast: int = 0
) -> Tensor:
    x, y = node.tensor(a), node.tensor(aligned(b, a, axis, broadcast, node))
    functions: dict[str, Any] = {
        "And": torch.logical_and,
        "Or": torch.logical_or,
        "Xor": torch.logical_xor,
    }
    return functions[node.op_type](x, y)  # type: ignore[no-any-return]


@operator("Not")
def logical_not(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.logical_not(x)


@operator("Where")
def where(node: OnnxNode, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in WIDE_UNSIGNED:
        chosen = torch.where(condition, unsigned.as_signed(a), unsigned.as_signed(b))
        return chosen.view(a.dtype)
    return torch.where(condition, a, b)
