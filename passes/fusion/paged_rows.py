"""How rules recognise rows that come from pages, whatever views lie in between.

Views that only permute and split dimensions keep every element of their base reachable by strides;
so the shape and the strides say what such a view is, and which chain of calls made it does not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.graph import Node, Value
from graphc.ir.types import Dim, as_dim, same
from graphc.ops.records import record_format
from graphc.rewrite.facts import operand, packet_of

#: views that begin where their operand begins and hold all of it
_WHOLE = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze")
)


@dataclass(frozen=True)
class Rows:
    """Columns [offset, offset + width) of the rows of pages: the result of read_pages, or of
    read_records of a format."""

    base: Value
    pages: Value
    table: Value
    offset: int
    width: int
    format: str = ""

    @property
    def whole(self) -> Dim:
        """Numbers in a row of pages [N, P, W], or [N, G, P, D] whose parts lie apart."""
        shape = self.pages.type.shape
        part = record_format(self.format).width if self.format else shape[-1]
        return part if len(shape) == 3 else as_dim(shape[1] * part)

    @property
    def keywords(self) -> dict[str, str]:
        """What operators that read the pages are told besides."""
        return {"format": self.format} if self.format else {}


def base_of(value: Any) -> Any:
    """The value that a chain of whole views looks at."""
    while isinstance(value, Value) and packet_of(value) in _WHOLE:
        value = operand(value)
    return value


def read_rows(value: Any) -> Rows | None:
    """The read_pages or read_records that made the value itself."""
    if packet_of(value) not in ("graphc.read_pages", "graphc.read_records"):
        return None
    node: Node = value.producer
    pages, table, offset, width = node.args
    return Rows(value, pages, table, int(offset), int(width), node.kwargs.get("format", ""))


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
