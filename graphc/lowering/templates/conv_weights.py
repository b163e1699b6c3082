"""Weights of convolutions in the layouts of graphc/kernels/conv.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphc.ir.types import product as product_of
from graphc.lowering.context import LoweringContext, Unit, View
from graphc.lowering.templates.conv_winograd import winograd_weight
from graphc.lowering.templates.operand import FAST

if TYPE_CHECKING:
    import torch

#: GC_CONV_PANEL in conv.h, and what the width of a group's last panel is a multiple of
PANEL, NARROW = 32, 8


def panel_columns(oc: int) -> int:
    """Columns of all panels of a group with `oc` output channels."""
    return -(-oc // NARROW) * NARROW


def pack_conv_weight(weight: torch.Tensor, groups: int, *, pairs: bool) -> torch.Tensor:
    """[groups * OC, C, taps] -> flat, [group][panel][tap][channel][width], of the same dtype; with
    pairs [group][panel][tap][ceil(C / 2)][width][2]. Zeros fill what is not there."""
    import torch

    total, c, taps = weight.shape
    oc, each = total // groups, 2 if pairs else 1
    columns = panel_columns(oc)
    w = weight.reshape(groups, oc, c, taps)
    w = torch.nn.functional.pad(w, (0, 0, 0, -c % each, 0, columns - oc))
    parts = []
    for first in range(0, columns, PANEL):
        part = w[:, first : first + PANEL]  # [group, width, channel, tap]
        part = part.permute(0, 3, 2, 1)
        part = part.reshape(groups, taps, -1, each, part.shape[3]).transpose(3, 4)
        parts.append(part.reshape(groups, -1))
    return torch.cat(parts, dim=1).reshape(-1).contiguous()


def weight_steps(groups: int, transposed: bool, sizes: Sequence[int]) -> list[int]:
    """Strides of contiguous weights over (group, output channel, channel, tap)."""
    taps = int(product_of(sizes[2:]))
    if transposed:  # [groups * C, OC, *kernel]
        c = sizes[0] // groups
        return [c * sizes[1] * taps, taps, sizes[1] * taps, 1]
    return [sizes[0] // groups * sizes[1] * taps, sizes[1] * taps, taps, 1]


def packed_weights(
    ctx: LoweringContext,
    node: Any,
    storage: str,
    kind: str,
    groups: int,
    transposed: bool,
    sizes: Sequence[int],
    order: str,
) -> View:
    """The weights in the kernel's layout: packed now if constant, else by a Step. `storage` is
    their dtype in the graph, `kind` that of the kernel. order: "taps" (depthwise, [tap][channel]),
    or, for constants, "merged" (the taps of a row are channels), "expanded" (the taps of a row
    are output channels, its rows groups) or "winograd" (of tiles instead of pixels)."""
    import torch

    constant = ctx.weight(node.args[1])
    depthwise = order == "taps"
    taps = int(product_of(sizes[2:]))
    c, oc = (sizes[0] // groups, sizes[1]) if transposed else (sizes[1], sizes[0] // groups)
    if constant is not None:
        dtype = torch.bfloat16 if kind == "bf16" and not depthwise else torch.float32
        w = constant.to(dtype)
        if transposed:
            w = w.reshape(groups, c, oc, taps).transpose(1, 2)
        w = w.reshape(groups * oc, c, taps)
        if depthwise:
            return ctx.constant(f"{node.name}.weight", w.view(-1, taps).t(), layout="conv_taps")
        row = sizes[-1]
        if order == "merged":
            w = w.reshape(oc, c, taps // row, row).permute(0, 3, 1, 2)
            w = w.reshape(oc, row * c, taps // row)
        elif order == "expanded":
            w = w.reshape(oc, c, taps // row, row).permute(2, 3, 0, 1)
            groups, w = taps // row, w.reshape(-1, c, 1)
        elif order == "winograd":
            w = winograd_weight(w)
        data = pack_conv_weight(w, groups, pairs=kind == "bf16")
        return ctx.constant(f"{node.name}.weight", data, layout=f"conv_panels_{kind}")
    source = ctx.contiguous(node.args[1])
    if depthwise:
        workspace, prefix, range_ = ctx.workspace([taps * groups], "float32"), "depthwise_", taps
    else:
        each = 2 if kind == "bf16" else 1
        count = groups * panel_columns(oc) * -(-c // each) * each * taps
        workspace = ctx.workspace([count], "bfloat16" if kind == "bf16" else "float32")
        prefix, range_ = "", groups * -(-oc // PANEL)
    unit = "conv_depthwise" if depthwise else "conv_pack"
    ctx.kernel(
        Unit(unit, ctx.header(f"{unit}.cpp")),
        f"gc_conv_pack_{prefix}{FAST[storage]}",
        pointers=[source, workspace],
        immediates=[groups, oc, c, taps, *weight_steps(groups, transposed, sizes)],
        reads=[source],
        writes=[workspace],
        range=range_,
        label=f"{node.name}.pack",
    )
    return workspace
