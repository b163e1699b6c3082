"""Reading through index tensors (kernels/gather.cpp).

Indices may be negative. An index outside its dimension, for which torch raises, reads a valid
element of that dimension instead: a kernel never touches memory outside its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.strided import (
    SIZES,
    bytes_tag,
    grain,
    is_static_one,
    normal_dim,
    unit,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node

MAX_INDICES = 8


def check_index(view: View) -> View:
    """Refuses masks, whose result sizes depend on data, and foreign dtypes."""
    if view.dtype in ("bool", "uint8"):
        raise Refuse("a mask as index: the size of the result depends on data")
    if view.dtype not in ("int32", "int64"):
        raise Refuse(f"expected an int32 or int64 index, found {view.dtype}")
    return view


class Index:
    """An index tensor: where it applies in the source, and its strides over the output box."""

    def __init__(self, view: View, stride: Dim, size: Dim, strides: Sequence[Dim]) -> None:
        self.view = check_index(view)
        self.stride = stride
        self.size = size
        self.strides = tuple(strides)


def emit_gather(
    ctx: LoweringContext,
    src: View,
    out: View,
    box: Sequence[Dim],
    src_strides: Sequence[Dim],
    indices: Sequence[Index],
    label: str,
) -> None:
    """out (row-major over `box`) = src at box coordinates x src_strides + indices x strides."""
    if len(indices) > MAX_INDICES:
        raise Refuse(f"{len(indices)} index tensors; at most {MAX_INDICES} are supported")
    sizes, strides = list(box), list(src_strides)
    columns = [list(index.strides) for index in indices]
    d = 0
    while d < len(sizes) - 1:  # join neighbours that lie in one piece everywhere
        step = sizes[d + 1]
        if strides[d] == strides[d + 1] * step and all(c[d] == c[d + 1] * step for c in columns):
            sizes[d : d + 2] = [sizes[d] * step]
            del strides[d]
            for c in columns:
                del c[d]
        else:
            d += 1
    if not sizes:
        sizes, strides = [1], [0]
        columns = [[0] for _ in indices]
    immediates: list[Dim] = [len(sizes), len(indices)]
    for size, stride in zip(sizes, strides, strict=True):
        immediates += [size, stride]
    for index, column in zip(indices, columns, strict=True):
        immediates += [SIZES[index.view.dtype], index.stride, index.size, *column]
    ctx.kernel(
        unit(ctx, "gather", bytes_tag(out.dtype)),
        f"gc_gather_{bytes_tag(out.dtype)}",
        pointers=[src, out, *(index.view for index in indices)],
        immediates=immediates,
        reads=[src, *(index.view for index in indices)],
        writes=[out],
        range=product(sizes[:-1]) if len(sizes) > 1 else sizes[0],
        grain=grain(ctx, sizes[-1] + 16 if len(sizes) > 1 else 4),
        label=label,
    )


@rule("aten.embedding.default")
def embedding(ctx: LoweringContext, node: Node) -> None:
    """weight [V, D], indices [...] -> [..., D]."""
    weight = ctx.view(node.argument("weight"))
    index = ctx.contiguous(node.argument("indices"))
    (out,) = ctx.outputs(node)
    count = product(index.shape)
    v, d = weight.shape
    emit_gather(
        ctx,
        weight,
        out,
        [count, d],
        [0, weight.strides[1]],
        [Index(index, weight.strides[0], v, [1, 0])],
        "embedding",
    )


@rule("aten.index_select.default")
def index_select(ctx: LoweringContext, node: Node) -> None:
    """The entries `index` [n] of dimension `dim`."""
    src = ctx.view(node.argument("self"))
    index = ctx.view(node.argument("index"))
    (out,) = ctx.outputs(node)
    dim = normal_dim(node.argument("dim"), len(src.shape))
    if not src.shape:
        emit_gather(ctx, src, out, [], [], [], "index_select")
        return
    step = index.strides[0] if index.shape else 0
    box = out.shape
    strides = [0 if i == dim else s for i, s in enumerate(src.strides)]
    along = [step if i == dim else 0 for i in range(len(box))]
    emit_gather(
        ctx, src, out, box, strides,
        [Index(index, src.strides[dim], src.shape[dim], along)], "index_select",
    )  # fmt: skip


@rule("aten.gather.default")
def gather(ctx: LoweringContext, node: Node) -> None:
    """out[..i..] = self[..index[..i..]..] with `index` in place of dimension `dim`."""
    src = ctx.view(node.argument("self"))
    index = ctx.view(node.argument("index"))
    (out,) = ctx.outputs(node)
    if not src.shape:
        box: tuple[Dim, ...] = tuple(index.shape)
        zero: list[Dim] = [0] * len(box)
        emit_gather(ctx, src, out, box, zero, [Index(index, 0, 1, index.strides)], "gather")
        return
    if not index.shape:
        index = index.with_(shape=(1,), strides=(1,))
    dim = normal_dim(node.argument("dim"), len(src.shape))
    strides = [0 if i == dim else s for i, s in enumerate(src.strides)]
    emit_gather(
        ctx, src, out, index.shape, strides,
        [Index(index, src.strides[dim], src.shape[dim], index.strides)], "gather",
    )  # fmt: skip


@rule("aten.take.default")
def take(ctx: LoweringContext, node: Node) -> None:
    """The items of the flattened `self` at `index` [...]."""
    src = ctx.contiguous(node.argument("self"))
    index = ctx.view(node.argument("index"))
    (out,) = ctx.outputs(node)
    emit_gather(
        ctx, src, out, index.shape, [0] * len(index.shape),
        [Index(index, 1, product(src.shape), index.strides)], "take",
    )  # fmt: skip


class IndexBox:
    """How `self[indices]` spreads: the box of the result in order, as entries
    ("kept", dimension of self) or ("index", dimension of the broadcast index shape)."""

    def __init__(self, rank: int, views: Sequence[View | None]) -> None:
        self.used = [i for i, view in enumerate(views) if view is not None]
        self.views = [check_index(view) for view in views if view is not None]
        width = max((len(view.shape) for view in self.views), default=0)
        self.shape: list[Dim] = [1] * width
        for view in self.views:
            for back, size in enumerate(reversed(view.shape), start=1):
                if is_static_one(self.shape[-back]):
                    self.shape[-back] = size
        kept = [i for i in range(rank) if i not in self.used]
        gap = bool(self.used) and self.used != list(range(self.used[0], self.used[-1] + 1))
        front = 0 if gap or not self.used else self.used[0]
        self.entries: list[tuple[str, int]] = [
            *(("kept", i) for i in kept if i < front),
            *(("index", i) for i in range(width)),
            *(("kept", i) for i in kept if i >= front),
        ]

    def strides_of(self, view: View) -> list[Dim]:
        """Strides of one index tensor over the broadcast index shape."""
        pad = len(self.shape) - len(view.shape)
        own: list[Dim] = [
            0 if is_static_one(size) else stride
            for size, stride in zip(view.shape, view.strides, strict=True)
        ]
        return [0] * pad + own


def optional_views(ctx: LoweringContext, values: Sequence[Any]) -> list[View | None]:
    """Views of a list of optional index tensors."""
    return [None if value is None else ctx.view(value) for value in values]


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(ctx: LoweringContext, node: Node) -> None:
    """self[indices] with None for whole dimensions; index tensors broadcast together."""
    src = ctx.view(node.argument("self"))
    views = optional_views(ctx, node.argument("indices"))
    box = IndexBox(len(src.shape), views)
    (out,) = ctx.outputs(node)
    sizes = [src.shape[i] if kind == "kept" else box.shape[i] for kind, i in box.entries]
    strides = [src.strides[i] if kind == "kept" else 0 for kind, i in box.entries]
    indices = []
    for position, view in zip(box.used, box.views, strict=True):
        own = box.strides_of(view)
        spread = [own[i] if kind == "index" else 0 for kind, i in box.entries]
        indices.append(Index(view, src.strides[position], src.shape[position], spread))
    emit_gather(ctx, src, out, sizes, strides, indices, "index")
