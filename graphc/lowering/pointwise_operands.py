"""Which arguments of an elementwise operator are operands of its expression, and their dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from graphc.ir.graph import Node, Value
from graphc.ir.types import dtype_name, torch_dtype
from graphc.lowering.pointwise import OPERANDS, ROWS


def operands(node: Node) -> tuple[Any, ...]:
    """The arguments of an elementwise node that become scalars of its expression."""
    count = OPERANDS.get(node.target, len(node.args))
    given: list[Any] = list(node.args[:count])
    names = [a.name for a in node.op._schema.arguments]
    for position in range(len(given), min(count, len(names))):
        if names[position] in node.kwargs:
            given.append(node.kwargs[names[position]])
    return tuple(item for item in given if item is not None)


def common_dtype(items: Sequence[Any]) -> str:
    """The promoted dtype of tensors and Python scalars (0-d tensors count less, as in torch)."""
    probe: list[Any] = []
    for item in items:
        if isinstance(item, Value):
            rank = min(len(item.type.shape), 1)
            probe.append(
                torch.empty((1,) * rank, dtype=torch_dtype(item.type.dtype), device="meta")
            )
        elif isinstance(item, sympy.Expr):
            probe.append(1)
        else:
            probe.append(item)
    if len(probe) == 1:
        return dtype_name(probe[0].dtype)
    tensors = [p for p in probe if isinstance(p, torch.Tensor)]
    scalars = [p for p in probe if not isinstance(p, torch.Tensor)]
    result: Any = tensors[0]
    for other in (*tensors[1:], *scalars):
        rank = max(result.dim(), other.dim() if isinstance(other, torch.Tensor) else 0)
        dtype = torch.result_type(result, other)
        result = torch.empty((1,) * rank, dtype=dtype, device="meta")
    return dtype_name(result.dtype)


def operand_dtypes(node: Node, items: Sequence[Any]) -> list[str]:
    """The dtype each operand is converted to before the expression."""
    row = ROWS[node.target]
    result = node.outputs[0].type.dtype
    if row.operands == "result":
        return [result] * len(items)
    if row.operands == "bool":
        return ["bool"] * len(items)
    if row.operands == "select":
        return ["bool", *[result] * (len(items) - 1)]
    if row.operands == "mask":
        return [result, "bool", *[result] * (len(items) - 2)]
    return [common_dtype(items)] * len(items)  # "common" or "own"
