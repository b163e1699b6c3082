"""Routing of tokens to experts (kernels/route.cpp): one Step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import LoweringContext, Refuse, Unit, ceildiv, rule
from graphc.lowering.templates.operand import FAST, STORAGE, grain_for
from graphc.lowering.templates.strided import float_bits

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: ROUTE_PAD
_PAD = 64


@rule("graphc.route.default")
def route(ctx: LoweringContext, node: Node) -> None:
    """logits [T, E], bias [E] or None -> experts and weights [T, count]."""
    logits = ctx.view(node.argument("logits"))
    if ctx.static(logits.strides[1]) != 1:
        logits = ctx.contiguous(node.argument("logits"))
    bias = logits if node.argument("bias") is None else ctx.contiguous(node.argument("bias"))
    experts, count, groups = logits.shape[1], node.argument("count"), node.argument("groups")
    if logits.dtype not in FAST:
        raise Refuse(f"routing by logits of {logits.dtype}")
    if bias is not logits and bias.dtype != "float32":
        raise Refuse(f"a bias of {bias.dtype}")
    if node.argument("score") not in ("sigmoid", "softmax"):
        raise Refuse(f"scores that are the {node.argument('score')} of logits")
    known = ctx.static(experts)
    if known is None or not 1 <= count <= known or known % groups or known < 2 * groups > 2:
        raise Refuse(f"{count} of {experts} experts in {groups} groups")
    index, weight = ctx.outputs(node)
    kind, eps = FAST[logits.dtype], node.argument("eps")
    ctx.kernel(
        Unit(
            f"route_{kind}",
            f"#define GC_ROUTE {kind}, {STORAGE[logits.dtype]}\n{ctx.header('route.cpp')}",
        ),
        f"gc_route_{kind}",
        pointers=[logits, bias, index, weight],
        immediates=[
            known, count, groups, min(node.argument("kept"), groups), int(bias is not logits),
            logits.strides[0], int(node.argument("score") == "softmax"), int(eps is not None),
            float_bits(float(eps or 0.0)), float_bits(float(node.argument("scale"))),
        ],
        reads=[logits, bias],
        writes=[index, weight],
        range=logits.shape[0],
        grain=grain_for(ctx, known * (16 + count), 64),
        scratch=(12 * _PAD + 4) * ceildiv(known, _PAD),
        label="route",
        flops=logits.shape[0] * known * 20,
    )  # fmt: skip
