"""Keys of pools of tokens and the choice among them (kernels/pool_keys.cpp, pooled_indexer.cpp, and
the Lightning Indexer's own); see graphc/ops/pooled_indexer.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import as_dim, same
from graphc.lowering.context import LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.lightning_indexer import choose
from graphc.lowering.templates.operand import STORAGE
from graphc.lowering.templates.pages import integers, paging
from graphc.lowering.templates.records import format_immediates
from graphc.lowering.templates.row_source import (
    one_dtype,
    row_source,
    same_width,
    with_adjacent_items,
)
from graphc.lowering.templates.strided import grain, start_from
from graphc.lowering.work import smaller
from graphc.ops.records import record_format

if TYPE_CHECKING:
    from graphc.ir.graph import Node


@rule("graphc.pool_keys.default")
def pool_keys(ctx: LoweringContext, node: Node) -> None:
    """The pages with the keys of new pools; in place where the context says so.

    Refuses operands of other types than fp32, bf16 and fp16, or of mixed ones.
    """
    base, ring = ctx.contiguous(node.argument("pages")), ctx.contiguous(node.argument("ring"))
    key, gate = (with_adjacent_items(ctx, node.argument(name)) for name in ("key", "gate"))
    text = node.argument("format")
    form = record_format(text) if text else None
    kind = one_dtype("pooled keys", *(() if form else (base,)), ring, key, gate)
    if form and (base.dtype != "uint8" or not same(base.shape[2], form.bytes) or form.together):
        raise Refuse(f"records {form} in pages of {base.dtype}, {base.shape[2]} wide")
    bias = _bias(ctx, node)
    table, start, slots = (integers(ctx, node, name) for name in ("table", "start", "slots"))
    for width in (gate.shape[2], bias.shape[1], form.width if form else base.shape[2]):
        same_width("pooled keys", key.shape[2], width)
    (out,) = ctx.outputs(node)
    start_from(ctx, base, out, node.name)
    pool = bias.shape[0]
    operands = [ring, key, gate, bias, table, start, slots]
    ctx.kernel(
        _unit(ctx, kind, key),
        f"gc_pool_{'records' if form else 'keys'}_{kind}",
        pointers=[out, *operands],
        immediates=[
            pool, key.shape[2], key.shape[1], *key.strides[:2], *gate.strides[:2], ring.shape[0],
            *paging(ctx, out, table), *out.strides[:2], *(format_immediates(form) if form else []),
        ],
        reads=operands,
        writes=[out],
        scratch=4 * key.shape[2] if form else 0,
        range=key.shape[0] * ceildiv(key.shape[1], pool),
        grain=grain(ctx, 8 * pool * key.shape[2]),
        label=node.name,
        flops=8 * key.shape[0] * key.shape[1] * key.shape[2],
    )  # fmt: skip


@rule("graphc.append_ring.default")
def append_ring(ctx: LoweringContext, node: Node) -> None:
    """The ring with the rows of the last tokens; in place where the context says so.

    Refuses rows that are not two parts of half the ring's width, in its floating type.
    """
    base = ctx.contiguous(node.argument("ring"))
    rows = [with_adjacent_items(ctx, part) for part in node.argument("rows")]
    if len(rows) != 2:
        raise Refuse(f"a ring of {len(rows)} parts")
    key, gate = rows
    kind = one_dtype("a ring", base, key, gate)
    same_width("a ring", key.shape[2], gate.shape[2])
    start, slots = (integers(ctx, node, name) for name in ("start", "slots"))
    (out,) = ctx.outputs(node)
    start_from(ctx, base, out, node.name)
    pool = out.shape[1]
    ctx.kernel(
        _unit(ctx, kind, key),
        f"gc_append_ring_{kind}",
        pointers=[out, key, gate, start, slots],
        immediates=[
            pool, key.shape[2], key.shape[1], *key.strides[:2], *gate.strides[:2], out.shape[0],
        ],
        reads=[key, gate, start, slots],
        writes=[out],
        range=key.shape[0] * smaller(key.shape[1], pool),
        grain=grain(ctx, out.shape[2]),
        label=node.name,
    )  # fmt: skip


@rule("graphc.pooled_indexer.default")
def pooled_indexer(ctx: LoweringContext, node: Node) -> None:
    """query [B, T, Hi, D], weights [B, T, Hi], pages [N, R, D] -> int32 [B, T, K]."""
    text = node.argument("format")
    form = record_format(text) if text else None
    places = (node.argument(name) for name in ("pages", "table", "start"))
    source = row_source(ctx, *places, records=form)
    count, pool = int(node.argument("count")), int(node.argument("pool"))
    (out,) = ctx.outputs(node)
    batch, queries, width = out.shape
    chosen = ctx.workspace([batch, queries, count], "int32")
    choose(ctx, node, source, chosen, pool=pool, form=form)
    assert source.start is not None
    ctx.kernel(
        Unit("pooled_indexer", ctx.header("pooled_indexer.cpp")),
        "gc_pooled_positions",
        pointers=[chosen, source.start, out],
        immediates=[queries, count, pool],
        reads=[chosen, source.start],
        writes=[out],
        range=as_dim(batch * queries),
        grain=grain(ctx, width),
        label=f"{node.name}.positions",
    )


def _unit(ctx: LoweringContext, kind: str, key: View) -> Unit:
    defines = f"#define GC_POOL_KEYS {kind}, {STORAGE[key.dtype]}\n"
    return Unit(f"pool_keys_{kind}", defines + ctx.header("pool_keys.cpp"))


def _bias(ctx: LoweringContext, node: Node) -> View:
    """float32 [P, D]."""
    value = node.argument("bias")
    known = ctx.weight(value)
    if known is not None:
        return ctx.constant(f"{node.name}.bias", known.float().contiguous(), layout="[P][D]")
    view = ctx.contiguous(value)
    if view.dtype != "float32":
        raise Refuse(f"pooled keys with a bias of {view.dtype}, which is no constant")
    return view
