"""View operators as arithmetic on (offset, strides); a copy only where a reshape needs it."""

from __future__ import annotations

from collections.abc import Sequence

from graphc.ir.graph import Node
from graphc.ir.types import Dim, as_dim, is_row_major, product, row_major, same
from graphc.lowering.context import View


def apply(node: Node, base: View) -> View | None:
    """The view that `node` makes of `base`; None if its elements are not strided in memory (a
    reshape across a transposition), in which case a row-major copy of `base` must be taken."""
    name = node.target.split(".")[1]
    shape = node.outputs[0].type.shape
    rank = len(base.shape)
    if name in ("alias", "detach", "lift_fresh_copy"):
        return base
    if name in ("permute", "transpose", "t", "swapaxes"):
        order = list(range(rank))
        if name == "permute":
            order = [int(d) % rank for d in node.args[1]]
        elif rank >= 2:
            a, b = (0, 1) if name == "t" else (int(node.args[1]) % rank, int(node.args[2]) % rank)
            order[a], order[b] = order[b], order[a]
        return base.with_(
            shape=tuple(base.shape[d] for d in order), strides=tuple(base.strides[d] for d in order)
        )
    if name in ("expand", "expand_as", "broadcast_to"):
        shift = len(shape) - rank
        strides = tuple(
            0
            if dim < shift or (base.shape[dim - shift] == 1 and shape[dim] != 1)
            else base.strides[dim - shift]
            for dim in range(len(shape))
        )
        return base.with_(shape=shape, strides=strides)
    if name == "slice":
        dim = int(node.argument("dim")) % rank
        start, step = node.argument("start"), node.argument("step")
        size = base.shape[dim]
        first = _clip(0 if start is None else start, size, shape[dim], step)
        return _replace(base, dim, shape[dim], as_dim(base.strides[dim] * step)).with_(
            offset=as_dim(base.offset + first * base.strides[dim])
        )
    if name == "narrow":
        dim = int(node.args[1]) % rank
        start = _clip(node.args[2], base.shape[dim], shape[dim], 1)
        return _replace(base, dim, shape[dim], base.strides[dim]).with_(
            offset=as_dim(base.offset + start * base.strides[dim])
        )
    if name == "select":
        dim = int(node.args[1]) % rank
        index = node.args[2]
        if isinstance(index, int) and index < 0 or not isinstance(index, int) and index.is_negative:
            index = as_dim(base.shape[dim] + index)
        keep = [d for d in range(rank) if d != dim]
        return base.with_(
            shape=tuple(base.shape[d] for d in keep),
            strides=tuple(base.strides[d] for d in keep),
            offset=as_dim(base.offset + index * base.strides[dim]),
        )
    if name == "unfold":
        dim = int(node.args[1]) % max(rank, 1)
        step = node.args[3]
        moved = [*base.strides, base.strides[dim] if rank else 1]
        if rank:
            moved[dim] = as_dim(base.strides[dim] * step)
        return base.with_(shape=shape, strides=tuple(moved))
    if name == "diagonal":
        offset = int(node.argument("offset"))
        a, b = (int(node.argument(n)) % rank for n in ("dim1", "dim2"))
        keep = [d for d in range(rank) if d not in (a, b)]
        start = (
            as_dim(offset * base.strides[b]) if offset >= 0 else as_dim(-offset * base.strides[a])
        )
        return base.with_(
            shape=shape,
            strides=(*(base.strides[d] for d in keep), as_dim(base.strides[a] + base.strides[b])),
            offset=as_dim(base.offset + start),
        )
    if name == "as_strided":
        if not is_row_major(base.shape, base.strides):
            return None
        offset = node.argument("storage_offset")
        return base.with_(
            shape=shape, strides=tuple(node.args[2]), offset=as_dim(base.offset + (offset or 0))
        )
    return reshape(base, shape)


def _replace(base: View, dim: int, size: Dim, stride: Dim) -> View:
    shape, strides = list(base.shape), list(base.strides)
    shape[dim], strides[dim] = size, stride
    return base.with_(shape=tuple(shape), strides=tuple(strides))


def _clip(start: Dim, size: Dim, length: Dim, step: int) -> Dim:
    """torch's meaning of a slice start: negative counts from the end, then clipped to [0, size].

    Symbolic starts: a start that yields a result of the known length can be worked out from it.
    """
    if isinstance(length, int) and length == 0:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        if start < 0:
            start += size
        return min(max(start, 0), size)
    if isinstance(start, int):
        if start >= 0:
            return start
        # from the end: if the slice runs to the end, size - length * step is the clipped start
        if step == 1 and same(length, -start):
            return as_dim(size + start)
        from torch.utils._sympy.functions import Max

        return as_dim(Max(size + start, 0))
    if start.is_negative:
        return as_dim(size + start)
    from torch.utils._sympy.functions import Min

    return start if same(start, 0) else as_dim(Min(start, size))


def reshape(base: View, shape: Sequence[Dim]) -> View | None:
    """`base` seen with another shape, or None if that is not strided."""
    shape = tuple(shape)
    if is_row_major(base.shape, base.strides):
        return base.with_(shape=shape, strides=row_major(shape))
    if same(product(base.shape), 0):
        return base.with_(shape=shape, strides=row_major(shape))
    old = [(d, s) for d, s in zip(base.shape, base.strides, strict=True) if d != 1]
    if not old:
        return base.with_(shape=shape, strides=row_major(shape))
    # chunks of old dims that are one line in memory: [(numel, stride of its last element)]
    chunks: list[tuple[Dim, Dim]] = []
    for size, stride in old:
        if chunks and same(chunks[-1][1], as_dim(stride * size)):
            chunks[-1] = (as_dim(chunks[-1][0] * size), stride)
        else:
            chunks.append((size, stride))
    strides: list[Dim] = [0] * len(shape)
    position = len(shape) - 1
    for numel, stride in reversed(chunks):
        covered: Dim = 1
        step = stride
        while position >= 0 and (not same(covered, numel) or shape[position] == 1):
            if shape[position] != 1 and same(covered, numel):
                break
            strides[position] = step
            covered = as_dim(covered * shape[position])
            step = as_dim(step * shape[position])
            position -= 1
        if not same(covered, numel):
            return None
    while position >= 0:
        if shape[position] != 1:
            return None
        position -= 1
    return base.with_(shape=shape, strides=tuple(strides))
