"""Rows as records in pages, written and read (kernels/records.cpp).

See graphc/ops/record_pages.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, rule
from graphc.lowering.templates.attention_operands import MASK_TYPES
from graphc.lowering.templates.operand import FAST
from graphc.lowering.templates.pages import integers, paging
from graphc.lowering.templates.strided import grain, start_from
from graphc.ops.records import GROUP, record_format

if TYPE_CHECKING:
    from graphc.ir.graph import Node
    from graphc.ops.records import RecordFormat

#: RecordKind of records.h
KINDS = {
    "mxfp8_floor": 1, "mxfp8_ceil": 2, "mxfp8_even": 3, "fp8": 4, "fp8_pow2": 5, "f32": 6,
    "bf16": 7, "f16": 8,
}  # fmt: skip
MOST_SEGMENTS = 4


def format_immediates(form: RecordFormat) -> list[Dim]:
    """gc_record_format (kernels/records.h)."""
    if len(form.segments) > MOST_SEGMENTS:
        raise Refuse(f"records of more than {MOST_SEGMENTS} segments")
    made: list[Dim] = [len(form.segments), form.width, form.bytes, GROUP if form.together else 1]
    for part in form.segments:
        made += [KINDS[part.kind], part.width]
    return made + [0, 0] * (MOST_SEGMENTS - len(form.segments))


def record_rows(ctx: LoweringContext, pages: View, table: View, form: RecordFormat) -> list[Dim]:
    """RowShape of records.cpp."""
    if pages.dtype != "uint8" or ctx.static(pages.shape[-1]) != form.bytes:
        raise Refuse(f"records {form} in pages of {pages.dtype}, {pages.shape[-1]} wide")
    rows = ctx.static(pages.shape[-2])
    if form.together and (rows is None or rows % GROUP):
        raise Refuse(f"records of {GROUP} rows together in pages of {pages.shape[-2]}")
    parts, plane = (pages.shape[1], pages.strides[1]) if len(pages.shape) == 4 else (1, 0)
    return [
        *paging(ctx, pages, table), parts, plane, pages.strides[0], pages.strides[-2],
        *format_immediates(form),
    ]  # fmt: skip


@rule("graphc.append_records.default")
def append_records(ctx: LoweringContext, node: Node) -> None:
    """The pages with new records behind each sequence's own; in place where the context says so."""
    base = ctx.contiguous(node.argument("pages"))
    parts = [ctx.view(value) for value in node.argument("rows")]
    table, start = integers(ctx, node, "table"), integers(ctx, node, "start")
    form = record_format(node.argument("format"))
    if any(part.dtype not in FAST for part in parts):
        raise Refuse(f"records of {', '.join(part.dtype for part in parts)}")
    (out,) = ctx.outputs(node)
    start_from(ctx, base, out, "append_records")
    new_rows = parts[0].shape[1]
    terms = int(node.argument("terms"))
    immediates = [*record_rows(ctx, out, table, form), terms, new_rows, len(parts)]
    for part in parts:
        immediates += [MASK_TYPES[part.dtype], part.shape[2], *part.strides]
    width = product([*out.shape[1:-2], form.width])
    pointers = [out, table, start, *parts]
    ctx.kernel(
        Unit("records", ctx.header("records.cpp")),
        "gc_append_records",
        pointers=pointers,
        immediates=immediates,
        reads=pointers,
        writes=[out],
        range=product(table.shape[:1]) * new_rows,
        grain=grain(ctx, 8 * width),
        scratch=8 * width + form.bytes,
        label="append_records",
    )


@rule("graphc.read_records.default")
def read_records(ctx: LoweringContext, node: Node) -> None:
    """Columns of the numbers of all rows of each sequence, one after the other."""
    pages = ctx.view(node.argument("pages"))
    table = integers(ctx, node, "table")
    form = record_format(node.argument("format"))
    offset, width = node.argument("offset"), node.argument("width")
    (out,) = ctx.outputs(node)
    if out.dtype not in FAST:
        raise Refuse(f"records read as {out.dtype}")
    rows = record_rows(ctx, pages, table, form)
    ctx.kernel(
        Unit("records", ctx.header("records.cpp")),
        "gc_read_records",
        pointers=[pages, table, out],
        immediates=[*rows, MASK_TYPES[out.dtype], offset, width],
        reads=[pages, table],
        writes=[out],
        range=product(table.shape),
        grain=grain(ctx, product([pages.shape[-2], width])),
        scratch=4 * product([*pages.shape[1:-2], form.width]) + form.bytes,
        label="read_records",
    )
