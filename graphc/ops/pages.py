"""Paged states: rows of many sequences in one pool of pages, found through block tables.

pages [N, P, W]: N pages of P rows of W numbers. table int32 [B, M]: the page that holds the rows
[j P, (j + 1) P) of sequence b is table[b, j]; -1 where there is none. start int32 [B]: the rows a
sequence had before this call. Row s of sequence b is pages[table[b, s // P], s % P].

Rows of G parts of D numbers, such as heads, may lie apart by part: pages [N, G, P, D], row s of
sequence b being pages[table[b, s // P], :, s % P]. Attention over few queries reads each head's
rows together: that is where memory delivers most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define


def _append_meta(
    pages: torch.Tensor, rows: Sequence[torch.Tensor], table: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(pages)


@define("append_pages(Tensor pages, Tensor[] rows, Tensor table, Tensor start) -> Tensor",
        _append_meta)  # fmt: skip
def append_pages(
    pages: torch.Tensor, rows: Sequence[torch.Tensor], table: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The pages with row start[b] + t of sequence b set to rows[...][b, t], side by side.

    rows: [B, T, Wi] each, the sum of Wi is W; converted to the pages' dtype. A row whose page is
    -1 is not written. Two sequences of one call never share a page they write.
    """
    new = torch.cat([part.to(pages.dtype) for part in rows], -1)
    return put_rows(pages, new, table, start)


def put_rows(
    pages: torch.Tensor, new: torch.Tensor, table: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The pages with rows [B, T, ...] of theirs behind those of each sequence."""
    out = pages.clone()
    held = out.transpose(1, -2) if out.dim() == 4 else out
    new = new.reshape(*new.shape[:2], *held.shape[2:])
    size = held.shape[1]
    for b in range(new.shape[0]):
        for t in range(new.shape[1]):
            position = int(start[b]) + t
            page = int(table[b, position // size])
            if page >= 0:
                held[page, position % size] = new[b, t]
    return out


def _read_meta(pages: torch.Tensor, table: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    return pages.new_empty([table.shape[0], table.shape[1] * pages.shape[-2], width])


@define("read_pages(Tensor pages, Tensor table, int offset, int width) -> Tensor", _read_meta)
def read_pages(pages: torch.Tensor, table: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """Every sequence's rows one after the other, columns [offset, offset + width): [B, M P, width].

    Rows of missing pages (-1) are zero; rows past a sequence's length are what the pages hold.
    """
    rows = pages.transpose(1, -2).flatten(2) if pages.dim() == 4 else pages
    found = rows[table.clamp(min=0).long(), :, offset : offset + width]
    found = found * (table >= 0)[:, :, None, None].to(pages.dtype)
    return found.reshape(table.shape[0], table.shape[1] * rows.shape[1], width)
