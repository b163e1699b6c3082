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

if TYPE_CHECKING:
    from graphc.ir.graph import Node

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
    """The same over keys in pages."""
    source = row_source(ctx, *(node.argument(name) for name in ("pages", "table", "start")))
    choose(ctx, node, source, *ctx.outputs(node))


def choose(ctx: LoweringContext, node: Any, source: RowSource, out: View, *, pool: int = 1) -> None:
    """Emits the choice of `count` of the rows, each of which stands for `pool` tokens, into
    `out`: int32 [B, T, count]."""
    query = with_adjacent_items(ctx, node.argument("query"))
    weights = ctx.view(node.argument("weights"))
    count = int(node.argument("count"))
    kind = one_dtype("an indexer", query, source.rows)
    if weights.dtype not in WEIGHT_TYPES:
        raise Refuse(f"an indexer with weights of {weights.dtype}")
    batch, queries, heads, d = query.shape
    same_width("an indexer", d, source.width)
    block, most = _block(ctx, queries, heads)
    chunks = chunks_of(ctx, queries, source.capacity, CHUNK)
    partial = out
    if ctx.static(chunks) != 1:
        partial = ctx.workspace([batch, queries, chunks, 1 + 2 * count], "int32")
    pointers: list[View] = [query, weights, *source.pointers(), out, partial]
    immediates: list[Dim] = [
        queries, heads, d, count, chunks, block, int(source.start is not None), pool,
        *query.strides[:3], *weights.strides, WEIGHT_TYPES[weights.dtype], *source.immediates(),
    ]  # fmt: skip
    room = 2 * (2 * count + BLOCK + 16)
    unit = Unit(f"lightning_indexer_{kind}", ctx.header(f"lightning_indexer_{kind}.cpp"))
    ctx.kernel(
        unit,
        f"lightning_indexer_{kind}",
        pointers=pointers,
        immediates=immediates,
        reads=pointers[:5],
        writes=[out] if partial is out else [out, partial],
        range=batch * chunks * ceildiv(queries, block),
        grain=1,
        scratch=4 * ((PANEL + 1) * d + most * (heads * (d + 1) + BLOCK + room)),
        label=node.name,
        flops=2 * batch * heads * (d + 1) * _pairs(source.capacity, queries, count, pool),
    )
    if partial is not out:
        ctx.kernel(
            unit,
            f"lightning_indexer_merge_{kind}",
            pointers=pointers,
            immediates=immediates,
            reads=[*pointers[:5], partial],
            writes=[out],
            range=batch * queries,
            grain=1,
            scratch=4 * room,
            label=f"{node.name}.merge",
        )


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
