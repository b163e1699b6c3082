"""Which axis of a group's domain each dimension of a value runs along."""

from __future__ import annotations

from collections.abc import Sequence

from graphc.ir.graph import Node, Value
from graphc.ir.types import Dim, same

#: by dimension; None: the value does not vary along it
Axes = tuple[int | None, ...]


def axes_in_order(shape: Sequence[Dim]) -> Axes:
    """The axes of a value whose dimensions, but for those of one element, are the domain."""
    axes: list[int | None] = []
    count = 0
    for size in shape:
        if size == 1:
            axes.append(None)
        else:
            axes.append(count)
            count += 1
    return tuple(axes)


def axes_through_view(node: Node, source: Value, axes: Axes) -> Axes | None:
    """The axes of the result of a view of `source`, whose axes are given; None if the view does
    more than move them around."""
    shape, new = source.type.shape, node.outputs[0].type.shape
    name = node.target.split(".")[1]
    if name in ("permute", "transpose", "t"):
        rank = len(shape)
        if name == "permute":
            order = [int(d) % rank for d in node.args[1]]
        else:
            order = list(range(rank))
            if name == "t" and rank < 2:
                return axes
            a, b = (0, 1) if name == "t" else (int(node.args[1]) % rank, int(node.args[2]) % rank)
            order[a], order[b] = order[b], order[a]
        return tuple(axes[d] for d in order)
    if name == "expand":
        shift = len(new) - len(shape)
        return tuple(
            None if dim < shift or shape[dim - shift] == 1 else axes[dim - shift]
            for dim in range(len(new))
        )
    if name in ("alias", "detach", "lift_fresh_copy"):
        return axes
    if name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten"):
        old = [(size, axis) for size, axis in zip(shape, axes, strict=True) if size != 1]
        big = [size for size in new if size != 1]
        if len(old) != len(big) or not all(same(a, b) for (a, _), b in zip(old, big, strict=True)):
            return None
        rest = iter(axis for _, axis in old)
        return tuple(None if size == 1 else next(rest) for size in new)
    return None
