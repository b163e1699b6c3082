"""Attention of new tokens over sequences with a past of their own length, in pages or in one buffer
per sequence (kernels/attention_cached.h); see graphc/ops/cached_attention.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphc.ir.types import product, same
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, ceildiv, rule
from graphc.lowering.templates.attention import FAR, KEYS
from graphc.lowering.templates.attention_decode import QUERIES
from graphc.lowering.templates.attention_operands import MASK_TYPES
from graphc.lowering.templates.operand import FAST, grain_for
from graphc.lowering.templates.pack import PANEL
from graphc.lowering.templates.pages import integers, paging
from graphc.lowering.templates.records import format_immediates
from graphc.lowering.templates.strided import float_bits
from graphc.lowering.templates.strided import unit as constant_unit
from graphc.ops.records import record_format

if TYPE_CHECKING:
    from graphc.ir.graph import Node
    from graphc.ops.records import RecordFormat

#: queries of a head of keys up to which rows of keys are read as they lie, and of all heads of a
#: unit about
MOST_ROWS, UNIT_ROWS = 64, 256
#: of few queries: pieces of a sequence's keys at most, and keys of one at least, where reading is
#: the work and where arithmetic is
PIECES, PIECE, LONG_PIECE, FEW_ROWS = 32, 256, 512, 8
#: of few queries, keys between rescalings: of pages that hold rows, of pages that hold heads at
#: most, of sequences
ROW_BLOCK, PAGE_BLOCK, BLOCK = 16, 128, 512
#: TURN of attention_cached_rows.h
TURN = 64
#: SPAN of attention_cached_many.h; panels of a unit with four heads of keys or more, two, one
SPAN, PANELS = 4 * KEYS, (32, 16, 8)


@dataclass(frozen=True)
class Rows:
    """Where keys and values lie: `paging` as in kernels/paging.h, steps of a page (without a table:
    of a sequence), a row and a head; `block` keys are best read together, of all heads if so."""

    key: View
    value: View
    paging: list[Dim]
    table: View | None
    key_steps: tuple[Dim, Dim, Dim]
    value_steps: tuple[Dim, Dim, Dim]
    block: int
    together: bool
    form: RecordFormat | None = None  # of rows in records, whose steps are bytes
    columns: tuple[int, ...] = ()  # of a record: k_at, k_next, v_at, v_next of gc_cached_shape

    def immediates(self) -> list[Dim]:
        """The end of gc_cached_shape."""
        return [] if self.form is None else [*format_immediates(self.form), *self.columns]


@rule("graphc.paged_attention.default")
def paged_attention(ctx: LoweringContext, node: Node) -> None:
    """Over rows of keys and values in pages, as numbers or in records."""
    pages, table = ctx.view(node.argument("pages")), integers(ctx, node, "table")
    heads, width = int(node.argument("heads")), int(node.argument("width"))
    size = ctx.static(node.argument("query").type.shape[3])
    if size is None or ctx.static(pages.strides[-1]) != 1:
        raise Refuse("an unknown head size, or pages whose rows do not lie in one piece")
    form = record_format(node.argument("format")) if node.argument("format") else None
    if form is not None and (pages.dtype != "uint8" or not same(pages.shape[-1], form.bytes)):
        raise Refuse(f"records {form} in rows of {pages.shape[-1]} {pages.dtype}")
    numbers = pages.shape[-1] if form is None else form.width
    step: Dim
    columns: tuple[int, ...] = (0, 0, 0, 0)
    if len(pages.shape) == 4:  # each head's rows together: [N, 2 * heads, P, D]
        page, step, row = pages.strides[:3]
        known = ctx.static(pages.shape[2])
        block = (
            PAGE_BLOCK
            if known is None
            else min(PAGE_BLOCK, PANEL // 2 * ceildiv(known, PANEL // 2))
        )
        second, behind = step, heads * step
        whole = same(pages.shape[1], 2 * heads) and same(numbers, size) and size == width
    else:
        page, row = pages.strides[:2]
        step, second, behind, block = size, width, heads * size, ROW_BLOCK
        whole = same(numbers, heads * (size + width))
        if form is not None:
            step = second = behind = 0
            columns = (0, size, heads * size, width)
    if not whole:
        raise Refuse("rows that are not keys and values of all heads")
    value = pages.with_(offset=pages.offset + behind)
    held = paging(ctx, pages, table)
    steps = (page, row, step), (page, row, second)
    found = Rows(pages, value, held, table, *steps, block, True, form, columns)
    _emit(ctx, node, found, heads, width)


@rule("graphc.cached_attention.default")
def cached_attention(ctx: LoweringContext, node: Node) -> None:
    """Over keys [B, Hk, S, D] and values [B, Hk, S, Dv], read with their strides."""
    key, value = _rows(ctx, node, "key"), _rows(ctx, node, "value")
    heads, width = ctx.static(key.shape[1]), ctx.static(value.shape[3])
    if heads is None or width is None:
        raise Refuse("an unknown number of heads, or unknown head sizes")
    found = Rows(
        key, value, [key.shape[2], key.shape[0], 0], None,
        (key.strides[0], key.strides[2], key.strides[1]),
        (value.strides[0], value.strides[2], value.strides[1]),
        BLOCK, False,
    )  # fmt: skip
    _emit(ctx, node, found, heads, width)


def _rows(ctx: LoweringContext, node: Node, name: str) -> View:
    view = ctx.view(node.argument(name))
    return view if ctx.static(view.strides[-1]) == 1 else ctx.contiguous(node.argument(name))


def _sinks(ctx: LoweringContext, node: Node) -> tuple[View | None, Dim]:
    """The sinks, one per head or one for all, and the step between heads."""
    value = node.argument("sinks")
    if value is None:
        return None, 0
    view = ctx.view(value)
    if view.dtype not in MASK_TYPES or view.dtype == "bool":
        raise Refuse(f"attention with sinks of {view.dtype}")
    per_head = len(view.shape) >= 3 and ctx.static(view.shape[-3]) != 1
    others = [n for i, n in enumerate(view.shape) if i != len(view.shape) - 3]
    if any(ctx.static(n) != 1 for n in others):
        raise Refuse("sinks other than one per head")
    return view, view.strides[-3] if per_head else 0


def _emit(ctx: LoweringContext, node: Node, found: Rows, heads: int, width: int) -> None:
    q = ctx.view(node.argument("query"))
    stored = q.dtype if found.form is None else "uint8"
    if q.dtype not in FAST or found.key.dtype != stored or found.value.dtype != stored:
        raise Refuse(f"attention over {q.dtype}, {found.key.dtype}, {found.value.dtype}")
    batch, all_heads, tq = q.shape[:3]
    known, size = ctx.static(all_heads), ctx.static(q.shape[3])
    if known is None or size is None or known % heads:
        raise Refuse("an unknown or uneven number of heads, or an unknown head size")
    group = known // heads
    start = integers(ctx, node, "start")
    sinks, sink_step = _sinks(ctx, node)
    back = node.argument("back")
    (out,) = ctx.outputs(node)
    sunk: list[Dim] = [0, 0] if sinks is None else [MASK_TYPES[sinks.dtype], sink_step]
    immediates: list[Dim] = [
        *found.paging, tq, heads, group, size, width, float_bits(float(node.argument("scale"))),
        float_bits(float(node.argument("soft_cap"))), FAR if back is None else back, *sunk,
        q.strides[0], q.strides[1], q.strides[2], q.strides[3],
        *found.key_steps, *found.value_steps,
    ]  # fmt: skip
    inputs = [q, start, found.table or start, found.key, found.value, sinks or start]
    work = _Work(node.name, batch, tq, heads, group, size, width, inputs, out, immediates)
    queries = ctx.static(tq)
    if queries is not None and queries <= QUERIES and group * queries <= MOST_ROWS:
        _few(ctx, work, found, group * queries)
    else:
        _many(ctx, work, found)


@dataclass(frozen=True)
class _Work:
    """The operands of both kernels; inputs: q, start, table, keys, values, sinks."""

    label: str
    batch: Dim
    tq: Dim
    heads: int
    group: int
    size: int
    width: int
    inputs: list[View]
    out: View
    immediates: list[Dim]

    def pointers(self, partial: View) -> list[View]:
        q, start, table, key, value, sinks = self.inputs
        return [q, self.out, start, table, key, value, partial, sinks]


def _few(ctx: LoweringContext, work: _Work, found: Rows, rows: int) -> None:
    """Two Steps: pieces of each sequence's keys, then their sum."""
    q, out, size, width = work.inputs[0], work.out, work.size, work.width
    kind, heads = FAST[q.dtype], work.heads
    unit = min(heads, max(1, UNIT_ROWS // rows)) if found.together else 1
    piece = PIECE if rows <= FEW_ROWS else LONG_PIECE
    most = ctx.static(product([found.paging[0], _entries(found.paging[2])]))
    pieces = PIECES if most is None else min(PIECES, max(1, most // piece))
    record = 16 + PANEL * ceildiv(width, PANEL)
    partial = out
    if pieces > 1:
        partial = ctx.workspace(
            [work.batch * work.tq * heads * work.group, pieces, record], "float32"
        )
    deep, wide = (PANEL * ceildiv(n, PANEL) for n in (size, width))
    floats = unit * rows * (deep + wide + 2 * found.block + 3) + wide + max(size, width)
    pointers = work.pointers(partial)
    if found.form is not None:
        floats += ceildiv(found.form.bytes, 4) + TURN * max(size, width)
    immediates = [*work.immediates, unit, pieces, piece, found.block, *found.immediates()]
    code = constant_unit(ctx, f"attention_cached_few{_records(found)}", kind)
    ctx.kernel(
        code,
        f"gc_cached_few{_records(found)}_{kind}",
        pointers=pointers,
        immediates=immediates,
        reads=work.inputs,
        writes=[out] if partial is out else [out, partial],
        range=work.batch * ceildiv(heads, unit) * pieces,
        scratch=4 * floats + 2 * (16 + 24 * found.block) + 8,
        label=work.label,
    )
    if partial is not out:
        ctx.kernel(
            code,
            f"gc_cached_merge{_records(found)}_{kind}",
            pointers=pointers,
            immediates=immediates,
            reads=[*work.inputs, partial, out],
            writes=[out],
            range=work.batch * work.tq * heads * work.group,
            grain=grain_for(ctx, 16 * record, 64),
            scratch=4 * wide,
            label=f"{work.label}.merge",
        )


def _records(found: Rows) -> str:
    """What the kernels for records are called after."""
    return "" if found.form is None else "_records"


def _entries(blocks: Dim) -> Dim:
    """Pages of a sequence; one without a table."""
    return 1 if isinstance(blocks, int) and blocks == 0 else blocks


def _many(ctx: LoweringContext, work: _Work, found: Rows) -> None:
    q, out, size, width = work.inputs[0], work.out, work.size, work.width
    kind, heads = FAST[q.dtype], work.heads
    panels = ceildiv(work.tq * work.group, PANEL)
    unit = PANELS[0 if heads >= 4 else 1 if heads >= 2 else 2]
    known = ctx.static(panels)
    if known is not None:
        unit = max(1, min(unit, known))
    columns = PANEL * ceildiv(width, PANEL)
    floats = PANEL * (KEYS + 1) + unit * (PANEL * (size + columns + 2) + 24)
    floats += max(size, width) + SPAN * (4 + size + columns) + 64
    if found.form is not None:
        floats += ceildiv(found.form.bytes, 4) + PANEL * max(size, width) + 64
    ctx.kernel(
        constant_unit(ctx, f"attention_cached_many{_records(found)}", kind),
        f"gc_cached_many{_records(found)}_{kind}",
        pointers=work.pointers(out),
        immediates=[*work.immediates, unit, 0, 0, 0, *found.immediates()],
        reads=work.inputs,
        writes=[out],
        range=work.batch * heads * ceildiv(panels, unit),
        scratch=4 * floats,
        label=work.label,
    )
