"""Epilogues that the convolution kernels do in their own registers: a second value added, nothing
left below zero, a store."""

from __future__ import annotations

from collections.abc import Sequence

from graphc.ir.types import Dim, itemsize
from graphc.lowering.context import View
from graphc.lowering.loop_axes import collapses
from graphc.lowering.loop_writer import Arguments
from graphc.lowering.loops import Accumulator, Compute, Load, Loop

RELU, SUM = "gc::vmax({0}, (float)0)", "({0} + {1})"


def generate_finish(
    loop: Loop, axes: tuple[Sequence[int], Sequence[int], Sequence[int]], arguments: Arguments
) -> str:
    """The body of a function that gives the gc_conv_finish (conv.h) of an epilogue over the axes
    Z, M and N; empty if it does anything else. `arguments` are those of the epilogue."""
    if len(loop.stores) != 1:
        return ""
    store = loop.stores[0]
    root, low = store.scalar, "-__builtin_inff()"
    if isinstance(root, Compute) and root.template == RELU:
        root, low = root.args[0], "0.0f"
    terms = list(root.args) if isinstance(root, Compute) and root.template == SUM else [root]
    loads = [t for t in terms if isinstance(t, Load) and t.view.dtype == store.view.dtype]
    if len(terms) - len(loads) != 1 or not any(isinstance(t, Accumulator) for t in terms):
        return ""

    def place(view: View, strides: tuple[Dim, ...], write: bool) -> tuple[str, str, str] | None:
        """Address, bytes between images and bytes between pixels."""
        steps: list[str] = []
        for group in axes:
            if not collapses(loop.domain, group, strides):
                return None
            steps.append(arguments.size(strides[group[-1]]) if group else "0")
        if steps[2] != "1":
            return None
        size = itemsize(view.dtype)
        return arguments.pointer(view, write), f"{steps[0]} * {size}", f"{steps[1]} * {size}"

    out = place(store.view, store.strides, True)
    add = place(loads[0].view, loads[0].strides, False) if loads else ("nullptr", "0", "0")
    if out is None or add is None:
        return ""
    return (
        f"{arguments.prologue()}  return {{(char*){out[0]}, (const char*){add[0]}, "
        f"{out[1]}, {out[2]}, {add[1]}, {add[2]}, {low}}};\n"
    )
