"""Rows that sequences keep, dense or in pages (kernels/row_source.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from graphc.ir.types import dim_max, same
from graphc.lowering.context import Dim, LoweringContext, Refuse, View
from graphc.lowering.templates.operand import FAST
from graphc.lowering.work import smaller
from graphc.ops.records import GROUP

if TYPE_CHECKING:
    from graphc.ops.records import RecordFormat

#: up to this many queries (known at build time) the rows are cut into chunks, for several threads
FEW, MOST_CHUNKS = 8, 32


@dataclass(frozen=True)
class RowSource:
    """Rows of `width` numbers (or bytes of records) of every sequence, the table of their pages if
    they have any, and the positions at which the sequences' new tokens begin (None: 0). `second`:
    from a record to that of its second term, where pages hold two."""

    rows: View
    table: View | None
    start: View | None
    second: Dim = 0

    @property
    def width(self) -> Dim:
        return self.rows.shape[-1]

    @property
    def capacity(self) -> Dim:
        """Rows that a sequence has room for."""
        pages = 1 if self.table is None else self.table.shape[1]
        return pages * self.rows.shape[-2]

    def pointers(self) -> list[View]:
        """Rows, table, start; what there is none of is not read."""
        return [self.rows, self.table or self.rows, self.start or self.rows]

    def immediates(self) -> list[Dim]:
        """gc_row_source."""
        outer, row = self.rows.strides[0], self.rows.strides[-2]
        if self.table is None:
            return [self.capacity, outer, row, 0, 0]
        return [self.capacity, outer, row, self.rows.shape[-2], self.table.strides[0]]


def row_source(
    ctx: LoweringContext, rows: Any, table: Any, start: Any, *, records: RecordFormat | None = None
) -> RowSource:
    """The rows behind graph values [B, S, W], None; or pages [N, P, W], table [B, M].

    records: of pages uint8 [N, P, bytes], or of two terms [N, 2, P, bytes].
    """
    found = with_adjacent_items(ctx, rows)
    second: Dim = 0
    if records is None and found.dtype not in FAST:
        raise Refuse(f"rows of {found.dtype}")
    if records is not None:
        if found.dtype != "uint8" or ctx.static(found.shape[-1]) != records.bytes:
            raise Refuse(f"records {records} in rows of {found.shape[-1]} {found.dtype}")
        rows = ctx.static(found.shape[-2])
        if records.together and (table is None or rows is None or rows % GROUP):
            raise Refuse(f"records of {GROUP} rows together in pages of {found.shape[-2]}")
        if len(found.shape) == 4:
            if ctx.static(found.shape[1]) != 2:
                raise Refuse(f"records of {found.shape[1]} terms")
            second = found.strides[1]
    places = [None if x is None else ctx.contiguous(x) for x in (table, start)]
    if any(x is not None and x.dtype != "int32" for x in places):
        raise Refuse("tables and starts that are not int32")
    return RowSource(found, places[0], places[1], second)


def with_adjacent_items(ctx: LoweringContext, value: Any) -> View:
    """A view whose last dimension lies in one piece."""
    view = ctx.view(value)
    return view if ctx.static(view.strides[-1]) == 1 else ctx.contiguous(value)


def one_dtype(what: str, *views: View) -> str:
    """The suffix of the kernels for operands of one floating type."""
    dtypes = sorted({view.dtype for view in views})
    if len(dtypes) != 1 or dtypes[0] not in FAST:
        raise Refuse(f"{what} over {', '.join(dtypes)}")
    return FAST[dtypes[0]]


def same_width(what: str, a: Dim, b: Dim) -> None:
    """Refuses operands whose widths are not known to be the same."""
    if not same(a, b):
        raise Refuse(f"{what}: widths {a} and {b}")


def chunks_of(ctx: LoweringContext, queries: Dim, rows: Dim, size: int) -> Dim:
    """Chunks of about `size` of the rows that are worked on side by side: more than one only where
    queries are few."""
    known = ctx.static(queries)
    if known is None or known > FEW:
        return 1
    if isinstance(rows, int):
        return max(1, min(MOST_CHUNKS, rows // size))
    return sympy.Max(1, sympy.Min(MOST_CHUNKS, FloorDiv(rows, size)))


def seen_pairs(capacity: Dim, queries: Dim, most: Dim | None = None) -> Dim:
    """Pairs of a query and a row it reads, `most` rows a query (None: all up to its own), for
    sequences that end where their room does: how long they are is known only at run time."""
    before = dim_max(capacity - queries, 0)
    if most is None:
        return _triangle(capacity) - _triangle(before)
    short = dim_max(before, smaller(most, capacity))
    return _triangle(short) - _triangle(before) + (capacity - short) * most


def _triangle(n: Dim) -> Dim:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2 if isinstance(n, int) else FloorDiv(n * (n + 1), 2)
