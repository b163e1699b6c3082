"""Operators over sequence state that are written in graphc.dsl: one rule for all of them.

Their kernels are generated (graphc/lowering/sequence): up to eight tokens work on the state in
place; more go in chunks of sixteen, with the state in panels of 32 columns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphc.dsl.operator import Operand, SequenceOperator
from graphc.dsl.registry import DEFINED, flags_of, on_define, wide_rows
from graphc.dsl.tiles import K, V
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.in_place import PARTIAL
from graphc.lowering.sequence.generate import generate
from graphc.lowering.templates import slots
from graphc.lowering.templates.operand import ADDEND_TYPES, FAST
from graphc.lowering.templates.pack import PANEL
from graphc.lowering.templates.strided import convert, float_bits

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: heads that keep some threads busy without cutting any of them
HEADS = 8


def lower(operator: SequenceOperator, ctx: LoweringContext, node: Node) -> None:
    """Operands are read with their strides over batch, tokens and heads. Refuses states that are
    not float32, rows of different dtypes, and expressions without routines."""
    flags = flags_of(operator, {name: node.argument(name) for name in operator.of_kind("flag")})
    out, after = ctx.outputs(node)
    if out.dtype not in FAST or after.dtype != "float32":
        raise Refuse(f"{operator.name} over {out.dtype} with states of {after.dtype}")
    generated = generate(operator, flags, FAST[out.dtype])
    operands = operator.of_kind("rows", "decay", "column")
    views = {name: _view(ctx, node, operator, name, x) for name, x in operands.items()}
    before, chosen = slots.states(ctx, node, after)
    batch, tokens, heads, width = views[wide_rows(operator, V)].shape
    channels = views[wide_rows(operator, K)].shape[-1]
    immediates: list[Dim] = [
        tokens, heads, channels, width, after.shape[0] if chosen is not None else 0,
        int(before is None), *out.strides[:3],
    ]  # fmt: skip
    for view in views.values():
        group = _group(ctx, operator, heads, view.shape[2])
        immediates += [*view.strides[:3], group, ADDEND_TYPES[view.dtype]]
    immediates += [float_bits(float(node.argument(n))) for n in operator.of_kind("number")]
    reads = [x for x in (*views.values(), before, chosen) if x is not None]
    panels = ceildiv(width, PANEL)
    ctx.kernel(
        Unit(f"{operator.name}_{FAST[out.dtype]}", generated.source),
        generated.symbol,
        pointers=[*views.values(), out, before or after, after, chosen or after],
        immediates=immediates,
        reads=reads,
        writes=[out, after],
        range=batch * heads * panels,
        grain=_grain(ctx, heads, panels),
        scratch=generated.scratch(channels, width),
        label=node.name,
        flops=8 * batch * tokens * heads * channels * width,
    )


def _view(
    ctx: LoweringContext, node: Node, operator: SequenceOperator, name: str, operand: Operand
) -> View:
    value = node.argument(name)
    view = ctx.view(value)
    if len(view.shape) == 4 and ctx.static(view.strides[-1]) != 1:
        view = ctx.contiguous(value)
    if operand.kind == "rows":
        wide = node.argument(wide_rows(operator, V)).type.dtype
        if view.dtype != wide:
            raise Refuse(f"{operator.name} with {name} of {view.dtype} beside {wide}")
    elif operand.kind == "column" and view.dtype not in ADDEND_TYPES:
        raise Refuse(f"{operator.name} with {name} of {view.dtype}")
    elif operand.kind == "decay" and view.dtype != "float32":
        made = ctx.workspace(view.shape, "float32")
        convert(ctx, ctx.contiguous(value), made, f"{node.name}.{name}")
        return made
    return view


def _group(ctx: LoweringContext, operator: SequenceOperator, heads: Dim, own: Dim) -> int:
    some, all_ = ctx.static(own), ctx.static(heads)
    if some is None or all_ is None or some == 0 or all_ % some:
        raise Refuse(f"{operator.name} with {heads} heads over {own}")
    return all_ // some


def _grain(ctx: LoweringContext, heads: Dim, panels: Dim) -> int:
    """Whole heads, or parts of them of two panels at least."""
    count, parts = ctx.static(heads), ctx.static(panels)
    if count is None or parts is None:
        return 1
    return max(1, min(parts, max(2, -(-parts * count // HEADS))))


def _register(name: str) -> None:
    rule(name)(partial(lower, DEFINED[name]))
    PARTIAL[name] = 1


on_define(_register)
