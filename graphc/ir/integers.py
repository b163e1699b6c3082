"""Bounds of integers in a graph, as far as their dtypes and the arithmetic before them show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphc.ir.graph import Value

#: lowest and highest value, both included
Range = tuple[int, int]
_DTYPES: dict[str, Range] = {
    "bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(1 << 15), (1 << 15) - 1),
}  # fmt: skip
_WIDE = ("int32", "int64")
_SAME = frozenset({  # values as they are: casts and views
    "aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default",
    "aten.view.default", "aten.reshape.default", "aten.permute.default", "aten.transpose.int",
    "aten.t.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.squeeze.default", "aten.expand.default", "aten.slice.Tensor", "aten.select.int",
    "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
})  # fmt: skip
_DEPTH = 12  # nodes looked through; sums of so many narrow integers fit 32 bits


def integer_range(
    value: Any, constant: Callable[[Value], torch.Tensor | None] | None = None, depth: int = _DEPTH
) -> Range | None:
    """Bounds of an integer, or of all elements of a tensor: its dtype's if that is narrow, else
    what casts, views, padding with zeros and zero points leave of its operand's. `constant` gives
    the contents of a weight. None if nothing bounds it."""
    if isinstance(value, int):
        return (value, value)
    dtype = getattr(getattr(value, "type", None), "dtype", "")  # scalars have none
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype not in _WIDE or depth == 0:
        return None
    known = constant(value) if constant is not None else None
    if known is not None:
        return (int(known.min()), int(known.max())) if known.numel() else (0, 0)
    producer = getattr(value, "producer", None)
    if producer is None:
        return None

    def operand(position: int) -> Range | None:
        return integer_range(producer.args[position], constant, depth - 1)

    if producer.target in _SAME:
        return operand(0)
    if producer.target == "aten.constant_pad_nd.default":
        inner = operand(0)
        filled = producer.argument("value") or 0
        if inner is None or not isinstance(filled, int | float) or not float(filled).is_integer():
            return None
        return (min(inner[0], int(filled)), max(inner[1], int(filled)))
    if producer.target in ("aten.sub.Tensor", "aten.add.Tensor"):
        left, right = operand(0), operand(1)
        if left is not None and right is not None and producer.argument("alpha") == 1:
            if producer.target == "aten.add.Tensor":
                return (left[0] + right[0], left[1] + right[1])
            return (left[0] - right[1], left[1] - right[0])
    return None
