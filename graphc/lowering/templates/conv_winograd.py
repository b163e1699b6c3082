"""Sizes of convolutions by tiles of 2 x 2 pixels, see graphc/kernels/conv_winograd.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import Dim, LoweringContext, ceildiv

if TYPE_CHECKING:
    import torch

#: GC_CONV_PANEL in conv.h
PANEL = 32
#: transformed pixels, and weights, of a tile
POINTS = 16
#: fewest input and output channels of a group for which tiles cost less than windows; of input
#: channels also GC_WINOGRAD_CHANNELS in conv.h
CHANNELS = {"avx512": 16, "avx2": 24, "portable": 24}
#: bytes of transformed input of one unit, and its fewest and most tiles
BYTES, LEAST, MOST = 1 << 19, 7, 56
#: grains wanted of one Step: several threads find work
GRAINS = 8


def winograd_weight(weight: torch.Tensor) -> torch.Tensor:
    """[OC, C, 9] -> [OC, C, 16]: G g G' for windows g of 3 x 3, in double precision."""
    import torch

    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
    windows = weight.reshape(*weight.shape[:2], 3, 3).double()
    return (g @ windows @ g.t()).to(weight.dtype).reshape(*weight.shape[:2], POINTS)


def unit_tiles(ctx: LoweringContext, tiles: Dim, c: int) -> int:
    """Tiles of one unit; an even split where their number is known."""
    most = max(LEAST, min(MOST, BYTES // (POINTS * 4 * c)))
    known = ctx.static(tiles)
    if known is None or known <= 0:
        return most
    return ceildiv(known, ceildiv(known, most))


def winograd_grain(ctx: LoweringContext, blocks: Dim, panels: int) -> int:
    """Units of one grain: panels of a block share its transformed input, but a few blocks alone
    are work for all threads."""
    known = ctx.static(blocks)
    return panels if known is None else min(panels, max(1, panels * known // GRAINS))


def winograd_scratch(c: int, block: int) -> int:
    """Bytes of `Winograd` in conv_winograd.cpp."""
    length = ceildiv(c, 16) * 16 + 16
    return 4 * (PANEL + length + block * (4 * PANEL + POINTS * (PANEL + length)))
