"""Rows in pages as records of bytes (`graphc.ops.records`), in place of numbers of one type.

pages uint8 [N, P, bytes] or, of rows of G parts that lie apart, [N, G, P, bytes]: a record a part.
Table and start are those of `graphc.ops.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define
from graphc.ops.pages import put_rows
from graphc.ops.records import record_format


def _append_meta(
    pages: torch.Tensor, rows: Sequence[torch.Tensor], table: torch.Tensor, start: torch.Tensor,
    *, format: str, terms: int = 1,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(pages)


@define("append_records(Tensor pages, Tensor[] rows, Tensor table, Tensor start, *, str format, "
        "int terms=1) -> Tensor", _append_meta)  # fmt: skip
def append_records(
    pages: torch.Tensor, rows: Sequence[torch.Tensor], table: torch.Tensor, start: torch.Tensor,
    *, format: str, terms: int = 1,
) -> torch.Tensor:  # fmt: skip
    """`graphc::append_pages` into records: rows [B, T, Wi] of any floating type, side by side as
    wide as the numbers of a record, or of all G of a row.

    terms: 2: pages are [N, 2, P, bytes], the second records being of what the first leave of the
    rows.
    """
    form = record_format(format)
    kind = torch.promote_types(rows[0].dtype, torch.float32)
    new = torch.cat([part.to(kind) for part in rows], -1)
    records = form.encode(new.unflatten(-1, (-1, form.width)))
    if terms == 2:
        left = new.unflatten(-1, (1, form.width)) - form.decode(records, kind)
        records = torch.cat([records, form.encode(left)], 2)
    return form.spread(put_rows(form.gathered(pages), records, table, start))


def _read_meta(
    pages: torch.Tensor, table: torch.Tensor, offset: int, width: int, *, dtype: torch.dtype,
    format: str,
) -> torch.Tensor:  # fmt: skip
    rows = table.shape[1] * pages.shape[-2]
    return pages.new_empty([table.shape[0], rows, width], dtype=dtype)


@define("read_records(Tensor pages, Tensor table, int offset, int width, *, ScalarType dtype, "
        "str format) -> Tensor", _read_meta)  # fmt: skip
def read_records(
    pages: torch.Tensor, table: torch.Tensor, offset: int, width: int, *, dtype: torch.dtype,
    format: str,
) -> torch.Tensor:  # fmt: skip
    """`graphc::read_pages` out of records: columns [offset, offset + width) of the numbers of every
    row, [B, M P, width] in `dtype`; those of missing pages are zero."""
    form = record_format(format)
    parts = pages.shape[1] if pages.dim() == 4 else 1
    records = torch.ops.graphc.read_pages(form.gathered(pages), table, 0, parts * form.bytes)
    rows = form.decode(records.unflatten(-1, (parts, form.bytes)), dtype).flatten(-2)
    return rows[..., offset : offset + width].contiguous()


def read_rows(
    pages: torch.Tensor, table: torch.Tensor, dtype: torch.dtype, format: str
) -> torch.Tensor:
    """Whole rows, of pages that hold numbers (no format) or records."""
    if format:
        parts = pages.shape[1] if pages.dim() == 4 else 1
        width = parts * record_format(format).width
        made: torch.Tensor = torch.ops.graphc.read_records(
            pages, table, 0, width, dtype=dtype, format=format
        )
        return made
    width = pages.shape[-1] * (pages.shape[1] if pages.dim() == 4 else 1)
    made = torch.ops.graphc.read_pages(pages, table, 0, width)
    return made


def narrowed(rows: torch.Tensor, format: str) -> torch.Tensor:
    """The rows [..., width] as records keep them."""
    form = record_format(format)
    return form.decode(form.encode(rows), rows.dtype)
