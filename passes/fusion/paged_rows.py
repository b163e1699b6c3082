"""How rules recognise rows that come from pages, whatever views lie in between.

Views that only permute and split dimensions keep every element of their base reachable by strides;
so the shape and the strides say what such a view is, and which chain of calls made it does not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.graph import Value
from graphc.ir.types import Dim, as_dim, same
from graphc.rewrite.facts import operand, packet_of

#: views that begin where their operand begins and hold all of it
_WHOLE = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze")
)


@dataclass(frozen=True)
class Rows:
    """Columns [offset, offset + width) of the rows of pages: the result of read_pages."""

    base: Value
    pages: Value
    table: Value
    offset: int
    width: int


def row_width(pages: Value) -> Dim:
    """Numbers in a row of pages [N, P, W], or [N, G, P, D] whose parts lie apart."""
    shape = pages.type.shape
    return shape[2] if len(shape) == 3 else as_dim(shape[1] * shape[3])


def base_of(value: Any) -> Any:
    """The value that a chain of whole views looks at."""
    while isinstance(value, Value) and packet_of(value) in _WHOLE:
        value = operand(value)
    return value


def read_rows(value: Any) -> Rows | None:
    """The read_pages that made the value itself."""
    if packet_of(value) != "graphc.read_pages":
        return None
    pages, table, offset, width = value.producer.args
    return Rows(value, pages, table, int(offset), int(width))


def laid_out(value: Value, sizes: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Whether the value has these sizes and strides (those of size 1 do not matter)."""
    type_ = value.type
    if len(type_.shape) != len(sizes):
        return False
    return all(
        same(size, want) and (same(size, 1) or same(step, stride))
        for size, want, step, stride in zip(
            type_.shape, sizes, type_.stride(), strides, strict=True
        )
    )


def heads_of_rows(value: Value, rows: Rows, heads: Dim, width: Dim) -> bool:
    """Whether the value is [B, heads, S, width] of rows [B, S, heads * width]."""
    batch, length, whole = rows.base.type.shape
    if not same(as_dim(heads * width), whole):
        return False
    return laid_out(value, (batch, heads, length, width), (as_dim(length * whole), width, whole, 1))
