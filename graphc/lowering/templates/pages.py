"""Rows written to pages and read from them (kernels/pages.cpp); see graphc/ops/pages.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.attention_operands import MASK_TYPES
from graphc.lowering.templates.operand import FAST
from graphc.lowering.templates.strided import bytes_tag, grain, start_from, unit

if TYPE_CHECKING:
    from graphc.ir.graph import Node


def paging(ctx: LoweringContext, pages: View, table: View) -> list[Dim]:
    """The immediates of gc_paging (kernels/paging.h)."""
    if ctx.static(pages.strides[-1]) != 1:
        raise Refuse("pages whose rows do not lie in one piece")
    return [pages.shape[-2], pages.shape[0], table.shape[1]]


def _strides(pages: View) -> list[Dim]:
    """Numbers of a row that lie together; the steps between such pieces, pages and rows."""
    plane = pages.strides[1] if len(pages.shape) == 4 else 0
    return [pages.shape[-1], plane, pages.strides[0], pages.strides[-2]]


def integers(ctx: LoweringContext, node: Node, name: str) -> View:
    """The block table or the starts, dense."""
    view = ctx.contiguous(node.argument(name))
    if view.dtype != "int32":
        raise Refuse(f"{name} of {view.dtype}")
    return view


@rule("graphc.append_pages.default")
def append_pages(ctx: LoweringContext, node: Node) -> None:
    """The pages with new rows behind each sequence's own; in place where the context says so."""
    base = ctx.contiguous(node.argument("pages"))
    parts = [ctx.view(value) for value in node.argument("rows")]
    table, start = integers(ctx, node, "table"), integers(ctx, node, "start")
    converted = any(part.dtype != base.dtype for part in parts)
    if converted and any(view.dtype not in FAST for view in (base, *parts)):
        raise Refuse(f"rows of {', '.join(part.dtype for part in parts)} to pages of {base.dtype}")
    (out,) = ctx.outputs(node)
    start_from(ctx, base, out, "append_pages")
    new_rows = parts[0].shape[1]
    immediates = [*paging(ctx, out, table), *_strides(out), new_rows, len(parts)]
    for part in parts:
        kind = MASK_TYPES[part.dtype] if converted else 0
        immediates += [kind, part.shape[2], *part.strides]
    kind_tag = FAST[out.dtype] if converted else bytes_tag(out.dtype)
    ctx.kernel(
        unit(ctx, "pages", kind_tag),
        f"gc_append_pages_{kind_tag}",
        pointers=[out, table, start, *parts],
        immediates=immediates,
        reads=[out, table, start, *parts],
        writes=[out],
        range=product(table.shape[:1]) * new_rows,
        grain=grain(ctx, product([*out.shape[1:-2], out.shape[-1]])),
        label="append_pages",
    )


@rule("graphc.read_pages.default")
def read_pages(ctx: LoweringContext, node: Node) -> None:
    """Columns of all rows of each sequence, one after the other."""
    pages = ctx.view(node.argument("pages"))
    table = integers(ctx, node, "table")
    offset, width = node.argument("offset"), node.argument("width")
    (out,) = ctx.outputs(node)
    kind = bytes_tag(pages.dtype)
    ctx.kernel(
        unit(ctx, "pages", kind),
        f"gc_read_pages_{kind}",
        pointers=[pages, table, out],
        immediates=[*paging(ctx, pages, table), *_strides(pages), offset, width],
        reads=[pages, table],
        writes=[out],
        range=product(table.shape),
        grain=grain(ctx, product([pages.shape[-2], width])),
        label="read_pages",
    )
