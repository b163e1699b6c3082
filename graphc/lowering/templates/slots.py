"""States that operators read and update by slot: recurrent states and windows of convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import LoweringContext, Refuse, View
from graphc.lowering.templates.strided import start_from

if TYPE_CHECKING:
    from graphc.ir.graph import Node


def states(ctx: LoweringContext, node: Node, after: View) -> tuple[View | None, View | None]:
    """(the states before, slots) of an operator with the operands `state` and `slots`, None for
    one it has not. With slots the states before are found in `after`: what no slot names stays."""
    if node.argument("state") is None:
        return None, None
    before = ctx.contiguous(node.argument("state"))
    if node.argument("slots") is None:
        return before, None
    slots = ctx.contiguous(node.argument("slots"))
    if slots.dtype != "int32":
        raise Refuse(f"slots of {slots.dtype}")
    start_from(ctx, before, after, f"{node.name}.states")
    return after, slots
