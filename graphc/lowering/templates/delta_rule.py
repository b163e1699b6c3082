"""Linear attention with the delta rule (kernels/delta_rule.cpp).

Up to eight tokens work on the state in place; more go in chunks of sixteen, with the state in
panels of 32 columns. Panels do not depend on each other: a few heads still occupy several threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import Dim, LoweringContext, Refuse, View, ceildiv, rule
from graphc.lowering.templates import slots
from graphc.lowering.templates.operand import ADDEND_TYPES, FAST
from graphc.lowering.templates.pack import PANEL
from graphc.lowering.templates.strided import convert, float_bits, unit

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: heads that keep some threads busy without cutting any of them; a cut costs what its parts share,
#: an eighth of a head or so
HEADS = 8


@rule("graphc.delta_rule.default")
def delta_rule(ctx: LoweringContext, node: Node) -> None:
    """See graphc/ops/delta_rule.py. Operands are read with their strides over batch, tokens and
    heads. Refuses states that are not float32, and q, k, v of other or of different dtypes."""
    q, k, v = (_rows(ctx, node.argument(name)) for name in ("query", "key", "value"))
    if v.dtype not in FAST or not q.dtype == k.dtype == v.dtype:
        raise Refuse(f"a delta rule over {q.dtype}, {k.dtype}, {v.dtype}")
    beta = ctx.view(node.argument("beta"))
    if beta.dtype not in ADDEND_TYPES:
        raise Refuse(f"a delta rule with beta of {beta.dtype}")
    strength = node.argument("strength")
    if strength == 0.0:
        raise Refuse("a delta rule that writes nothing")
    out, after = ctx.outputs(node)
    if after.dtype != "float32":
        raise Refuse(f"a delta rule with states of {after.dtype}")
    decay = _decay(ctx, node)
    before, chosen = slots.states(ctx, node, after)
    batch, tokens, heads, width = v.shape
    channels = k.shape[3]
    by_head = len(decay.shape) == 3
    immediates: list[Dim] = [
        tokens, heads, _group(ctx, heads, k.shape[2]), channels, width,
        after.shape[0] if chosen is not None else 0, int(before is None), int(by_head),
        int(bool(node.argument("normalize"))), ADDEND_TYPES[beta.dtype],
        float_bits(float(node.argument("scale"))), float_bits(float(strength or 0.0)),
        *(stride for view in (q, k, v, decay, beta, out) for stride in view.strides[:3]),
    ]  # fmt: skip
    reads = [view for view in (q, k, v, decay, beta, before, chosen) if view is not None]
    panels = ceildiv(width, PANEL)
    ctx.kernel(
        unit(ctx, "delta_rule", FAST[v.dtype]),
        f"gc_delta_rule_{FAST[v.dtype]}",
        pointers=[q, k, v, decay, beta, out, before or after, after, chosen or after],
        immediates=immediates,
        reads=reads,
        writes=[out, after],
        range=batch * heads * panels,
        grain=_grain(ctx, heads, panels),
        scratch=scratch(channels, width),
        label=node.name,
        flops=8 * batch * tokens * heads * channels * width,
    )


def scratch(channels: Dim, width: Dim) -> Dim:
    """Bytes: what delta_rule_chunk.h takes, which is more than delta_rule_few.h does."""
    row = 16 * ceildiv(channels, 16)
    panels = ceildiv(width, PANEL)
    return 4 * (145 * row + 5 * 1024 + panels * 48 * row)


def _rows(ctx: LoweringContext, value: object) -> View:
    """[B, T, heads, channels] with adjacent channels."""
    view = ctx.view(value)
    return view if ctx.static(view.strides[-1]) == 1 else ctx.contiguous(value)


def _decay(ctx: LoweringContext, node: Node) -> View:
    value = node.argument("decay")
    view = ctx.view(value) if len(value.type.shape) == 3 else _rows(ctx, value)
    if view.dtype == "float32":
        return view
    wide = ctx.workspace(view.shape, "float32")
    convert(ctx, ctx.contiguous(value), wide, "delta_rule.decay")
    return wide


def _group(ctx: LoweringContext, heads: Dim, key_heads: Dim) -> int:
    some, all_ = ctx.static(key_heads), ctx.static(heads)
    if some is None or all_ is None or some == 0 or all_ % some:
        raise Refuse(f"a delta rule with {heads} value heads over {key_heads} key heads")
    return all_ // some


def _grain(ctx: LoweringContext, heads: Dim, panels: Dim) -> int:
    """Whole heads, or parts of them of two panels at least."""
    count, parts = ctx.static(heads), ctx.static(panels)
    if count is None or parts is None:
        return 1
    return max(1, min(parts, max(2, -(-parts * count // HEADS))))
