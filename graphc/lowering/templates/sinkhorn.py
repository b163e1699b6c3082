"""Doubly stochastic matrices (kernels/sinkhorn.cpp): all rounds are one Step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import product
from graphc.lowering.context import LoweringContext, Refuse, Unit, rule
from graphc.lowering.templates.operand import grain_for
from graphc.lowering.templates.strided import float_bits

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: rows of a matrix that registers hold
WIDEST = 8


@rule("graphc.sinkhorn.default")
def sinkhorn(ctx: LoweringContext, node: Node) -> None:
    """x [..., N, N] -> the same. Refuses other types than fp32, and more than eight rows."""
    x = ctx.contiguous(node.argument("x"))
    side = ctx.static(x.shape[-1])
    if x.dtype != "float32":
        raise Refuse(f"sinkhorn of {x.dtype}")
    if side is None or not 1 <= side <= WIDEST or ctx.static(x.shape[-2]) != side:
        raise Refuse(f"sinkhorn of matrices [{x.shape[-2]}, {x.shape[-1]}]")
    rounds, (out,) = int(node.argument("rounds")), ctx.outputs(node)
    matrices = product(x.shape[:-2])
    ctx.kernel(
        Unit(f"sinkhorn_{side}", f"#define GC_SIDE {side}\n{ctx.header('sinkhorn.cpp')}"),
        f"gc_sinkhorn_{side}",
        pointers=[x, out],
        immediates=[rounds, float_bits(float(node.argument("eps")))],
        reads=[x],
        writes=[out],
        range=matrices,
        grain=grain_for(ctx, 8 * rounds * side * side, 64),
        label=node.name,
        flops=4 * rounds * matrices * side * side,
    )
