"""The short causal convolution of linear attention (kernels/short_convolution.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import dim_max
from graphc.lowering.context import LoweringContext, Refuse, View, ceildiv, rule
from graphc.lowering.templates import slots
from graphc.lowering.templates.operand import ADDEND_TYPES, FAST
from graphc.lowering.templates.strided import convert, unit

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: tokens and channels of a unit of work, and the widest window: TOKENS, CHANNELS, WIDEST in C++
BLOCK = (32, 512)
WIDEST = 8


@rule("graphc.short_convolution.default")
def short_convolution(ctx: LoweringContext, node: Node) -> None:
    """See graphc/ops/short_convolution.py. Refuses dtypes other than float32, bfloat16 and float16,
    states that have neither x's dtype nor float32, and windows of more than eight tokens."""
    value = node.argument("x")
    x = ctx.view(value)
    if ctx.static(x.strides[-1]) != 1:
        x = ctx.contiguous(value)
    if x.dtype not in FAST:
        raise Refuse(f"a short convolution of {x.dtype}")
    weight = node.argument("weight")
    width = ctx.static(weight.type.shape[1])
    if width is None or not 1 <= width <= WIDEST:
        raise Refuse(f"a short convolution over {weight.type.shape[1]} tokens")
    y, after = ctx.outputs(node)
    if after.dtype not in (x.dtype, "float32"):
        raise Refuse(f"a short convolution of {x.dtype} with states of {after.dtype}")
    before, chosen = slots.states(ctx, node, after)
    taps, bias = _taps(ctx, node), _bias(ctx, node)
    batch, tokens, channels = x.shape
    reads = [view for view in (x, taps, bias, before, chosen) if view is not None]
    kind = FAST[x.dtype]
    ctx.kernel(
        unit(ctx, "short_convolution", kind),
        f"gc_short_convolution_{kind}",
        pointers=[x, taps, bias or taps, y, before or after, after, chosen or after],
        immediates=[
            tokens, channels, width, after.shape[0] if chosen is not None else 0,
            int(before is None), int(bias is not None), int(bool(node.argument("silu"))),
            ADDEND_TYPES[after.dtype], x.strides[0], x.strides[1], y.strides[0], y.strides[1],
        ],
        reads=reads,
        writes=[y, after],
        range=batch * dim_max(1, ceildiv(tokens, BLOCK[0])) * ceildiv(channels, BLOCK[1]),
        scratch=4 * WIDEST * BLOCK[1],
        label=node.name,
        flops=2 * batch * tokens * channels * width,
    )  # fmt: skip


def _taps(ctx: LoweringContext, node: Node) -> View:
    """float32 [W, C]."""
    value = node.argument("weight")
    known = ctx.weight(value)
    if known is not None:
        return ctx.constant(f"{node.name}.taps", known.float().t().contiguous(), layout="[W][C]")
    view = ctx.view(value)
    if view.dtype not in FAST:
        raise Refuse(f"a short convolution with weights of {view.dtype}")
    channels, width = view.shape
    taps = ctx.workspace([width, channels], "float32")
    kind = FAST[view.dtype]
    ctx.kernel(
        unit(ctx, "short_convolution", kind),
        f"gc_short_convolution_pack_{kind}",
        pointers=[view, taps],
        immediates=[channels, *view.strides],
        reads=[view],
        writes=[taps],
        range=width,
        label=f"{node.name}.pack",
    )
    return taps


def _bias(ctx: LoweringContext, node: Node) -> View | None:
    """float32 [C]."""
    value = node.argument("bias")
    if value is None:
        return None
    known = ctx.weight(value)
    if known is not None:
        return ctx.constant(f"{node.name}.bias", known.float())
    view = ctx.contiguous(value)
    if view.dtype == "float32":
        return view
    wide: View = ctx.workspace(view.shape, "float32")
    convert(ctx, view, wide, f"{node.name}.bias")
    return wide
