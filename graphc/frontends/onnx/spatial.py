"""What convolutions and poolings share: padding rules and output sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.values import Tensor


@dataclass(frozen=True)
class Window:
    """A sliding window over the last axes: one entry per spatial axis.

    Args:
        begin, end: padding before and after; symbolic if it depends on a symbolic length.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    begin: list[Any]
    end: list[Any]

    @property
    def symmetric(self) -> bool:
        return all(
            isinstance(b, int) and isinstance(e, int) and b == e and b >= 0
            for b, e in zip(self.begin, self.end, strict=True)
        )

    def extent(self, axis: int) -> int:
        """How many positions the dilated kernel spans."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


def window(
    node: OnnxNode,
    sizes: list[Any],
    kernel: list[int],
    strides: list[int] | None,
    dilations: list[int] | None,
    pads: list[int] | None,
    auto_pad: str,
) -> Window:
    """The window of a convolution or pooling over an input of spatial `sizes`."""
    rank = len(kernel)
    strides = strides or [1] * rank
    dilations = dilations or [1] * rank
    if len(sizes) != rank or len(strides) != rank or len(dilations) != rank:
        raise node.invalid(f"{rank} spatial axes expected, found {len(sizes)}")
    if auto_pad in ("NOTSET", ""):
        pads = pads or [0] * (2 * rank)
        if len(pads) != 2 * rank:
            raise node.invalid(f"{2 * rank} pads expected, found {len(pads)}")
        return Window(kernel, strides, dilations, pads[:rank], pads[rank:])
    if auto_pad == "VALID":
        return Window(kernel, strides, dilations, [0] * rank, [0] * rank)
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise node.invalid(f"unknown auto_pad {auto_pad!r}")
    begin: list[Any] = []
    end: list[Any] = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        if s == 1:
            total: Any = (k - 1) * d
        else:
            out = (size + s - 1) // s
            total = torch.sym_max((out - 1) * s + (k - 1) * d + 1 - size, 0)
        small = total // 2
        begin.append(small if auto_pad == "SAME_UPPER" else total - small)
        end.append(total - small if auto_pad == "SAME_UPPER" else small)
    return Window(kernel, strides, dilations, begin, end)


def pad_spatial(x: Tensor, begin: list[Any], end: list[Any], value: float = 0.0) -> Tensor:
    """`x` padded on its last axes; unchanged if all amounts are 0."""
    if all(isinstance(p, int) and p == 0 for p in [*begin, *end]):
        return x
    flat: list[Any] = []
    for b, e in zip(reversed(begin), reversed(end), strict=True):
        flat.extend((b, e))
    return torch.nn.functional.pad(x, flat, "constant", value)
