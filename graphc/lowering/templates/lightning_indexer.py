"""The Lightning Indexer (kernels/lightning_indexer.h): scores and choice in one kernel.

Keys are dense or in pages. Neither the scores of all keys nor those of single heads come into
memory. Of one dtype and instruction set, a query chooses the same keys in a prefill in one piece,
in chunks of any size and in decoding, however its sequence is stored: its scores are summed up in
the same order, and ties go to the earlier position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from graphc.ir.types import dim_max
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
from graphc.lowering.work import smaller
from graphc.ops.records import MX, record_format

if TYPE_CHECKING:
    from graphc.ir.graph import Node
    from graphc.ops.records import RecordFormat

#: BEST_BLOCK of best_positions.h, and keys of a panel at most
BLOCK, PANEL = 480, 48
CHUNK = 4096  # keys of a full cache, about, that a chunk has
WEIGHT_TYPES = {"float32": 1, "bfloat16": 2, "float16": 3}


@rule("graphc.lightning_indexer.default")
def dense(ctx: LoweringContext, node: Node) -> None:
    """query [B, T, Hi, D], weights [B, T, Hi], key [B, S, D] -> int32 [B, T, count].

    Refuses operands of other types than fp32, bf16 and fp16, or of mixed ones.
    """
    source = row_source(ctx, node.argument("key"), None, node.argument("start"))
    choose(ctx, node, source, *ctx.outputs(node))


@rule("graphc.paged_lightning_indexer.default")
def paged(ctx: LoweringContext, node: Node) -> None:
    """The same over keys in pages, as numbers or records; over candidates again, if told so."""
    text, candidates = node.argument("format"), int(node.argument("candidates"))
    places = (node.argument(name) for name in ("pages", "table", "start"))
    form = record_format(text) if text else None
    source = row_source(ctx, *places, records=form)
    (out,) = ctx.outputs(node)
    if not candidates:
        choose(ctx, node, source, out, form=form)
        return
    batch, queries = out.shape[:2]
    chosen = ctx.workspace([batch, queries, candidates], "int32")
    choose(ctx, node, source, chosen, form=form)
    _again(ctx, node, source, chosen, out, form)


def choose(
    ctx: LoweringContext, node: Any, source: RowSource, out: View, *, pool: int = 1,
    form: RecordFormat | None = None,
) -> None:  # fmt: skip
    """Emits the choice of the rows, each of which stands for `pool` tokens, into `out`: int32
    [B, T, count]. form: of rows that are records."""
    query, weights, kind = _operands(ctx, node, source, form)
    batch, queries, heads, d = query.shape
    count = ctx.static(out.shape[2])
    assert count is not None
    block, most = _block(ctx, queries, heads)
    chunks = chunks_of(ctx, queries, source.capacity, CHUNK)
    partial = out
    if ctx.static(chunks) != 1:
        partial = ctx.workspace([batch, queries, chunks, 1 + 2 * count], "int32")
    pointers: list[View] = [query, weights, *source.pointers(), out, partial]
    immediates: list[Dim] = [
        queries, heads, d, count, chunks, block, int(source.start is not None), pool,
        *query.strides[:3], *weights.strides, WEIGHT_TYPES[weights.dtype], *source.immediates(),
        *_records(source, form, 0),
    ]  # fmt: skip
    room = _room(count)
    unit, name = _unit(ctx, kind, form)
    ctx.kernel(
        unit,
        f"lightning_indexer_{name}",
        pointers=pointers,
        immediates=immediates,
        reads=pointers[:5],
        writes=[out] if partial is out else [out, partial],
        range=batch * chunks * ceildiv(queries, block),
        grain=1,
        scratch=4 * ((PANEL + 1) * d + most * (heads * (d + 1) + BLOCK + room))
        + (0 if form is None else 4 * (35 + heads) * d),
        label=node.name,
        flops=2 * batch * heads * (d + 1) * _pairs(source.capacity, queries, count, pool),
    )
    if partial is not out:
        ctx.kernel(
            unit,
            f"lightning_indexer_merge_{name}",
            pointers=pointers,
            immediates=immediates,
            reads=[*pointers[:5], partial],
            writes=[out],
            range=batch * queries,
            grain=1,
            scratch=4 * room,
            label=f"{node.name}.merge",
        )


def _again(
    ctx: LoweringContext, node: Any, source: RowSource, chosen: View, out: View,
    form: RecordFormat | None,
) -> None:  # fmt: skip
    """Emits the choice among candidates [B, T, C] by both terms of their keys."""
    query, weights, kind = _operands(ctx, node, source, form)
    batch, queries, heads, d = query.shape
    count, candidates = int(node.argument("count")), chosen.shape[2]
    unit, _ = _unit(ctx, kind, form)
    room = _room(count)
    ctx.kernel(
        unit,
        f"lightning_indexer_again_{kind}",
        pointers=[query, weights, source.rows, source.table or source.rows, chosen, out],
        immediates=[
            queries, heads, d, count, 1, 1, 0, 1, *query.strides[:3], *weights.strides,
            WEIGHT_TYPES[weights.dtype], *source.immediates(), *_records(source, form, candidates),
        ],
        reads=[query, weights, source.rows, source.table or source.rows, chosen],
        writes=[out],
        range=batch * queries,
        grain=1,
        scratch=4 * ((PANEL + 36 + 2 * heads) * d + heads + BLOCK + room),
        label=f"{node.name}.again",
        flops=2 * batch * heads * (d + 1) * queries * candidates,
    )  # fmt: skip


def _operands(
    ctx: LoweringContext, node: Any, source: RowSource, form: RecordFormat | None
) -> tuple[View, View, str]:
    """Query, weights, and the tag of the query's type."""
    query = with_adjacent_items(ctx, node.argument("query"))
    weights = ctx.view(node.argument("weights"))
    if form is None:
        kind = one_dtype("an indexer", query, source.rows)
    else:
        kind = one_dtype("an indexer", query)
        if len(form.segments) > 1 or form.segments[0].kind not in MX:
            raise Refuse(f"an indexer over records {form}")
    if weights.dtype not in WEIGHT_TYPES:
        raise Refuse(f"an indexer with weights of {weights.dtype}")
    same_width("an indexer", query.shape[3], source.width if form is None else form.width)
    return query, weights, kind


def _room(count: int) -> int:
    """Words of a buffer of candidates: twice best_room of best_positions.h."""
    return 2 * (2 * count + BLOCK + 16)


def _unit(ctx: LoweringContext, kind: str, form: RecordFormat | None) -> tuple[Unit, str]:
    text = ctx.header(f"lightning_indexer_{kind}.cpp")
    if form is None:
        return Unit(f"lightning_indexer_{kind}", text), kind
    return (
        Unit(f"lightning_indexer_records_{kind}", f"#define GC_INDEXER_RECORDS\n{text}"),
        f"records_{kind}",
    )


def _records(source: RowSource, form: RecordFormat | None, candidates: Dim) -> list[Dim]:
    """gc_record_keys (kernels/record_keys.h)."""
    if form is None:
        return []
    return [source.second, candidates, *format_immediates(form)]


def _block(ctx: LoweringContext, queries: Dim, heads: Dim) -> tuple[Dim, int]:
    """Queries of a unit of work, and how many there may be: so many that packing a key costs
    little beside scoring it, fewer where there would be too few units for several threads."""
    known = ctx.static(heads)
    most = 8 if known is None else max(8, min(32, 256 // max(1, known)))
    if isinstance(queries, int):
        return max(8, min(most, queries // 32)), most
    return sympy.Max(8, sympy.Min(most, FloorDiv(queries, 32))), most


def _pairs(capacity: Dim, queries: Dim, count: int, pool: int) -> Dim:
    """Scores: queries that see no more keys than are wanted have none."""
    tokens = capacity * pool
    scored = dim_max(0, smaller(queries, tokens - count * pool))
    return ceildiv(seen_pairs(tokens, scored), pool)
