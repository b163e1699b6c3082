"""Attention over chosen keys: heads with keys of their own (kernels/sparse_attention.cpp), and
latent rows that all heads share (kernels/latent_attention.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphc.ir.types import same
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.records import format_immediates
from graphc.lowering.templates.row_source import (
    RowSource,
    chunks_of,
    one_dtype,
    row_source,
    same_width,
    seen_pairs,
    with_adjacent_items,
)
from graphc.lowering.templates.strided import float_bits, unit
from graphc.ops.records import record_format

if TYPE_CHECKING:
    from graphc.ir.graph import Node
    from graphc.ops.records import RecordFormat

#: ROWS of latent_rows.h and HEAD of latent_attention.h; heads of a group are the lanes of a vector
ROWS, HEAD, LANES = 128, 16, {"avx512": 16, "avx2": 8, "portable": 4}
CHUNK = 512  # rows, about, of those a query may see, that a chunk has


@rule("graphc.sparse_attention.default")
def sparse(ctx: LoweringContext, node: Node) -> None:
    """query [B, H, T, D], key [B, H, S, D], value [B, H, S, Dv], indices [B, T, K] ->
    [B, T, H, Dv], all with their strides. Refuses operands of mixed types."""
    q, k, v = (with_adjacent_items(ctx, node.argument(n)) for n in ("query", "key", "value"))
    kind = one_dtype("sparse attention", q, k, v)
    same_width("sparse attention", q.shape[-1], k.shape[-1])
    indices, start = _positions(ctx, node)
    (out,) = ctx.outputs(node)
    batch, heads, queries, d = q.shape
    dv, chosen = v.shape[-1], indices.shape[-1]
    pointers = [q, k, v, indices, start or indices, out]
    ctx.kernel(
        unit(ctx, "sparse_attention", kind),
        f"gc_sparse_attention_{kind}",
        pointers=pointers,
        immediates=[
            queries, heads, k.shape[2], d, dv, chosen, float_bits(node.argument("scale")),
            int(start is not None), *(q.strides[i] for i in (0, 1, 2)), *k.strides[:3],
            *v.strides[:3], *indices.strides[:2],
        ],
        reads=pointers[:5],
        writes=[out],
        range=batch * queries * heads,
        grain=1,
        scratch=4 * (2 * (chosen + 4 + 16) + d + dv + 32),
        label=node.name,
        flops=2 * batch * heads * seen_pairs(k.shape[2], queries, chosen) * (d + dv),
    )  # fmt: skip


def _positions(ctx: LoweringContext, node: Any) -> tuple[View, View | None]:
    indices = with_adjacent_items(ctx, node.argument("indices"))
    start = node.argument("start")
    start = None if start is None else ctx.contiguous(start)
    if indices.dtype != "int32" or (start is not None and start.dtype != "int32"):
        raise Refuse("indices and starts that are not int32")
    return indices, start


@rule("graphc.latent_attention.default")
def latent(ctx: LoweringContext, node: Node) -> None:
    """query [B, T, H, W], pages [N, P, W] (, indices [B, T, K]) -> [B, T, H, latent]; with rope
    [N, P, R] pages are [N, P, W - R], with a format [N, P, bytes].

    Refuses operands of mixed types, rows of an odd number of bf16, rows in two parts of which the
    first is not a multiple of four items, and records in two parts.
    """
    query = with_adjacent_items(ctx, node.argument("query"))
    form = record_format(node.argument("format")) if node.argument("format") else None
    places = (node.argument(name) for name in ("pages", "table", "start"))
    source = row_source(ctx, *places, records=form)
    kind = one_dtype("latent attention", query, *([] if form else [source.rows]))
    rope = None
    if node.argument("rope") is not None:
        rope = with_adjacent_items(ctx, node.argument("rope"))
    width = _record_width(source, form, rope) if form else _plain_width(ctx, source, rope)
    same_width("latent attention", query.shape[-1], width)
    known = ctx.static(width)
    if kind == "bf16" and (known is None or known % 2):
        raise Refuse("rows of an odd number of bf16")
    indices = None
    if node.argument("indices") is not None:
        indices, _ = _positions(ctx, node)
    _emit_latent(ctx, node, query, source, rope, indices, kind, form)


def _plain_width(ctx: LoweringContext, source: RowSource, rope: View | None) -> Dim:
    """Numbers of a row and of what stands behind it."""
    if rope is None:
        return source.width
    one_dtype("latent attention", source.rows, rope)
    width, behind = ctx.static(source.width), ctx.static(rope.shape[-1]) or 0
    if width is None or width % 4 or behind % 2:
        raise Refuse(f"rows of {source.width} items and {rope.shape[-1]} behind them")
    if not all(map(same, rope.shape[:2], source.rows.shape[:2])):
        raise Refuse("rows in two parts that lie in other pages")
    return width + behind


def _record_width(source: RowSource, form: RecordFormat, rope: View | None) -> int:
    if rope is not None:
        raise Refuse(f"records {form} with more numbers in other pages")
    if len(source.rows.shape) != 3:
        raise Refuse(f"latent rows of {source.rows.shape[1]} records each")
    return form.width


def _emit_latent(
    ctx: LoweringContext, node: Any, query: View, source: RowSource, rope: View | None,
    indices: View | None, kind: str, form: RecordFormat | None,
) -> None:  # fmt: skip
    batch, queries, heads, width = query.shape
    columns = int(node.argument("latent"))
    (out,) = ctx.outputs(node)
    chosen: Dim = 0 if indices is None else indices.shape[-1]
    chunks = chunks_of(ctx, queries, source.capacity if indices is None else chosen, CHUNK)
    record = HEAD + 32 * ceildiv(columns, 32)
    partial = out
    if ctx.static(chunks) != 1:
        partial = ctx.workspace([batch, queries, heads, chunks, record], "float32")
    pointers = [query, *source.pointers(), indices or query, out, partial, rope or query]
    tail = (0, 0) if rope is None else rope.strides[:2]
    walks = (0, 0) if indices is None else indices.strides[:2]
    first = form.width if form else source.width
    immediates: list[Dim] = [
        queries, heads, width, columns, chunks, chosen, float_bits(node.argument("scale")),
        *query.strides[:3], *walks, *source.immediates(), first, *tail,
        *(format_immediates(form) if form else []),
    ]  # fmt: skip
    stored = "records_" if form else ""
    name = f"latent_attention_{stored}{kind}"
    unit = Unit(name, ctx.header(f"{name}.cpp"))
    pairs = seen_pairs(source.capacity, queries, None if indices is None else chosen)
    ctx.kernel(
        unit,
        f"attention_latent_{stored}{kind}",
        pointers=pointers,
        immediates=immediates,
        reads=[*pointers[:5], pointers[7]],
        writes=[out] if partial is out else [out, partial],
        range=batch * queries * chunks * ceildiv(heads, LANES[ctx.isa]),
        grain=1,
        scratch=4 * (ROWS * (16 + width) + 16 * (record + width + 32) + width + 64),
        label=node.name,
        flops=2 * batch * heads * pairs * (width + columns),
    )
    if partial is not out:
        ctx.kernel(
            unit,
            f"attention_latent_{stored}merge_{kind}",
            pointers=pointers,
            immediates=immediates,
            reads=[*pointers[:5], pointers[7], partial],
            writes=[out],
            range=batch * queries * heads,
            grain=1,
            scratch=4 * record,
            label=f"{node.name}.merge",
        )
