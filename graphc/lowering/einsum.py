"""einsum of two operands as one batched product: permute, reshape, bmm, reshape back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ir.graph import Builder, Node, Value
from graphc.ir.types import Dim, product

aten = torch.ops.aten


def einsum(b: Builder, node: Node) -> Sequence[Value] | None:
    """None (the node stays) for forms that are not one product of two operands without repeated
    or summed-away letters."""
    equation, operands = node.args[0].replace(" ", ""), [b.of(v) for v in node.args[1]]
    if "->" not in equation or "." in equation or len(operands) != 2:
        return None
    left, out = equation.split("->")
    first, second = left.split(",")
    if any(len(set(part)) != len(part) for part in (first, second, out)):
        return None
    sizes: dict[str, Dim] = {}
    for letters, value in ((first, operands[0]), (second, operands[1])):
        for letter, size in zip(letters, value.type.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None  # broadcasting of size-1 letters
    batch = [c for c in out if c in first and c in second]
    rows = [c for c in out if c in first and c not in second]
    columns = [c for c in out if c in second and c not in first]
    inner = [c for c in first if c in second and c not in out]
    known = set(batch) | set(rows) | set(columns) | set(inner)
    if known != set(first) | set(second) or set(out) - known:
        return None
    if operands[0].type.dtype not in ("float32", "float64", "bfloat16", "float16"):
        return None

    def matrix(value: Value, letters: str, order: Sequence[Sequence[str]]) -> Value:
        flat = [letters.index(c) for group in order for c in group]
        if flat != list(range(len(flat))):
            value = b.call1(aten.permute.default, value, tuple(flat))
        shape = tuple(product([sizes[c] for c in group]) for group in order)
        # a reshape of a permuted tensor may need a copy: "view" would refuse it
        if not _viewable(letters, order):
            value = b.call1(aten.clone.default, value, memory_format=torch.contiguous_format)
        return b.call1(aten.view.default, value, shape)

    x = matrix(operands[0], first, (batch, rows, inner))
    y = matrix(operands[1], second, (batch, inner, columns))
    z = b.call1(aten.bmm.default, x, y)
    letters = [*batch, *rows, *columns]
    z = b.call1(aten.view.default, z, tuple(sizes[c] for c in letters))
    order = tuple(letters.index(c) for c in out)
    if order != tuple(range(len(order))):
        z = b.call1(aten.permute.default, z, order)
        z = b.call1(aten.clone.default, z, memory_format=torch.contiguous_format)
    return [z]


def _viewable(letters: str, order: Sequence[Sequence[str]]) -> bool:
    """Whether each merged group of letters stands together, in order, in the operand."""
    return all("".join(group) in letters for group in order)
