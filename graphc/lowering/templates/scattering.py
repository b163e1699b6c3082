"""Writing through index tensors (kernels/scatter.cpp).

Duplicates are applied in the order of the index tensor, so results are the same for every
thread count: sums add in order, and of plain writes the last one stays. Reduced bf16 and fp16
destinations are kept in fp32 until the end. Indices outside are clamped (see indexing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.indexing import MAX_INDICES, Index, IndexBox, optional_views
from graphc.lowering.templates.strided import (
    ITEMS_PER_GRAIN,
    SIZES,
    Axis,
    bytes_tag,
    convert,
    fill,
    grain,
    is_static_one,
    mapped_copy,
    normal_dim,
    scalar,
    start_from,
    tag,
    unit,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: columns taken together: a cache line of fp32, and then some
RUN = 1024


@dataclass(frozen=True)
class Box:
    """The written items: sequence sizes and source strides, column sizes with destination and
    source strides; `Index.strides` run over the sequence, then the columns."""

    sequence: Sequence[tuple[Dim, Dim]]
    columns: Sequence[tuple[Dim, Dim, Dim]]
    indices: Sequence[Index]
    run: int = RUN


def emit(
    ctx: LoweringContext, op: str, dst: View, src: View, alpha: View, box: Box, label: str
) -> None:
    """Emits one scatter Step. `op` is set, sum, prod, amax or amin."""
    if len(box.indices) > MAX_INDICES:
        raise Refuse(f"{len(box.indices)} index tensors; at most {MAX_INDICES} are supported")
    columns = list(box.columns)
    strides = [list(index.strides) for index in box.indices]
    if not columns:
        columns = [(1, 0, 0)]
        for own in strides:
            own.append(0)
    immediates: list[Dim] = [len(box.sequence), len(columns), len(box.indices), box.run]
    for pair in box.sequence:
        immediates += pair
    for triple in columns:
        immediates += triple
    for index, own in zip(box.indices, strides, strict=True):
        immediates += [SIZES[index.view.dtype], index.stride, index.size, *own]
    suffix = bytes_tag(dst.dtype) if op == "set" else tag(src.dtype)
    views = [index.view for index in box.indices]
    work = product([size for size, _ in box.sequence])
    ctx.kernel(
        unit(ctx, "scatter", suffix),
        f"gc_scatter_{op}_{suffix}",
        pointers=[dst, src, alpha, *views],
        immediates=immediates,
        reads=[dst, src, alpha, *views],
        writes=[dst],
        range=product([size for size, _, _ in columns]),
        grain=max(16, grain(ctx, 4 * work)),
        label=label,
    )


def _identity(op: str, dtype: str) -> Any:
    """The value that leaves the reduction as it is."""
    if op in ("sum", "mean"):
        return 0
    if op == "prod":
        return 1
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return float("-inf") if op == "amax" else float("inf")
    limits = torch.iinfo(kind)
    return limits.min if op == "amax" else limits.max


def reduce_into(
    ctx: LoweringContext,
    node: Node,
    base: View,
    out: View,
    src: View,
    box: Box,
    op: str,
    *,
    include_self: bool = True,
    alpha: Any = 1,
) -> None:
    """out = base, then out[index] op= alpha * src. `base` is contiguous; op as torch's `reduce`
    ("set" for plain writes)."""
    label = f"scatter_{op}"
    one_like = scalar(ctx, node, "alpha", alpha if op == "sum" else 1, out.dtype)
    if op == "set":
        start_from(ctx, base, out, label)
        emit(ctx, "set", out, src, one_like, box, label)
        return
    if out.dtype == "bool":
        raise Refuse("a reducing scatter of booleans")
    half = out.dtype in ("bfloat16", "float16")
    mean = op == "mean"
    sums = out
    if half or mean:
        sums = ctx.workspace(out.shape, "float32" if half else out.dtype)
    factor = one_like if sums.dtype == out.dtype else scalar(ctx, node, "alpha", alpha, "float32")
    start_from(ctx, base, sums, label)
    still: list[tuple[Dim, Dim]] = [(size, 0) for size, _ in box.sequence]
    quiet = [(size, to, 0) for size, to, _ in box.columns]
    constant = Box(still, quiet, box.indices, box.run)
    if not include_self:
        start = scalar(ctx, node, "identity", _identity(op, sums.dtype), sums.dtype)
        emit(ctx, "set", sums, start, factor, constant, label)
    emit(ctx, "sum" if mean else op, sums, src, factor, box, label)
    if mean:
        counts = ctx.workspace(out.shape, "int64")
        one = scalar(ctx, node, "one", 1, "int64")
        fill(ctx, one if include_self else scalar(ctx, node, "zero", 0, "int64"), counts, label)
        emit(ctx, "sum", counts, one, one, constant, label)
        ctx.kernel(
            unit(ctx, "scatter", tag(out.dtype)),
            f"gc_scatter_mean_{tag(out.dtype)}",
            pointers=[sums, counts, out],
            reads=[sums, counts],
            writes=[out],
            range=product(out.shape),
            grain=ITEMS_PER_GRAIN,
            label=label,
        )
    elif half:
        convert(ctx, sums, out, label)


def _along(out: View, index: View, src_strides: Sequence[Dim], dim: int) -> Box:
    """The box of scatter along `dim` with an index tensor of its own shape."""
    if not index.shape:
        return Box([(1, 0)], [], [Index(index, 1, product(out.shape), [0])])
    rank = len(index.shape)
    others = [i for i in range(rank) if i != dim]
    to = out.strides if out.shape else (1,) * rank
    size = out.shape[dim] if out.shape else 1
    # along the last dimension whole columns lie in one piece: one at a time
    run = 1 if dim == rank - 1 else RUN
    return Box(
        [(index.shape[dim], src_strides[dim])],
        [(index.shape[i], to[i], src_strides[i]) for i in others],
        [Index(index, to[dim], size, [index.strides[dim], *(index.strides[i] for i in others)])],
        run,
    )


_REDUCTIONS = {"add": "sum", "multiply": "prod"}


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def scatter(ctx: LoweringContext, node: Node) -> None:
    """self with self[..index..] (op)= src along `dim`."""
    base = ctx.contiguous(node.argument("self"))
    index = ctx.view(node.argument("index"))
    overload = str(node.op)
    op, include_self = "set", True
    if "scatter_add" in overload:
        op = "sum"
    elif "scatter_reduce" in overload:
        op, include_self = node.argument("reduce"), bool(node.argument("include_self"))
    elif "reduce" in overload:
        op = _REDUCTIONS[node.argument("reduce")]
    if op == "mean" and base.dtype == "bool":
        raise Refuse("a mean of booleans")
    if ".value" in overload:
        value = node.argument("value")
        if not isinstance(value, bool | int | float):
            raise Refuse("a scatter value that is not a plain number")
        src = scalar(ctx, node, "value", value, base.dtype)
        strides: tuple[Dim, ...] = (0,) * len(index.shape)
    else:
        src = ctx.view(node.argument("src"))
        strides = src.strides if src.shape else (0,) * len(index.shape)
    (out,) = ctx.outputs(node)
    dim = normal_dim(node.argument("dim"), len(base.shape))
    box = _along(out, index, strides, dim)
    reduce_into(ctx, node, base, out, src, box, op, include_self=include_self)


def _by_slices(out: View, index: View, src_strides: Sequence[Dim], dim: int) -> Box:
    """The box of index_copy and index_add: a 1-d index picks whole slices."""
    if not out.shape:
        return Box([(1, 0)], [], [Index(index, 1, 1, [0])])
    others = [i for i in range(len(out.shape)) if i != dim]
    length = index.shape[0] if index.shape else 1
    step = index.strides[0] if index.shape else 0
    return Box(
        [(length, src_strides[dim])],
        [(out.shape[i], out.strides[i], src_strides[i]) for i in others],
        [Index(index, out.strides[dim], out.shape[dim], [step, *(0 for _ in others)])],
        1 if dim == len(out.shape) - 1 else RUN,
    )


@rule(
    "aten.index_copy.default",
    "aten.index_add.default",
    "aten.index_fill.int_Scalar",
    "aten.index_reduce.default",
)
def index_copy(ctx: LoweringContext, node: Node) -> None:
    """self with the slices `index` [n] of dimension `dim` overwritten, added to, filled."""
    base = ctx.contiguous(node.argument("self"))
    index = ctx.view(node.argument("index"))
    name = str(node.op)
    op, alpha, include_self = "set", 1, True
    if "index_add" in name:
        op, alpha = "sum", node.argument("alpha")
    if "index_reduce" in name:
        op, include_self = node.argument("reduce"), bool(node.argument("include_self"))
    if "index_fill" in name:
        src = scalar(ctx, node, "value", node.argument("value"), base.dtype)
        strides: tuple[Dim, ...] = (0,) * len(base.shape)
    else:
        src = ctx.view(node.argument("source"))
        strides = src.strides if src.shape else (0,) * len(base.shape)
    (out,) = ctx.outputs(node)
    dim = normal_dim(node.argument("dim"), len(base.shape))
    box = _by_slices(out, index, strides, dim)
    reduce_into(ctx, node, base, out, src, box, op, include_self=include_self, alpha=alpha)


def _put_masked(ctx: LoweringContext, node: Node, base: View, views: list[View | None]) -> None:
    """self[mask] = value, the one use of a mask whose sizes do not depend on data: the value is
    one item, or one row for all picked positions."""
    first = next(i for i, view in enumerate(views) if view is not None)
    mask = views[first]
    if mask is None or any(view is not None for view in views[first + 1 :]):
        raise Refuse("a mask among other indices: sizes depend on data")
    if mask.dtype != "bool" or node.argument("accumulate"):
        raise Refuse("a mask of bytes, or adding through a mask")
    value = ctx.contiguous(node.argument("values"))
    trailing = base.shape[first + len(mask.shape) :]
    own = list(value.shape)
    single = all(is_static_one(size) for size in own)
    row = list(own[-len(trailing) :]) == list(trailing) if trailing else False
    if not single and not (row and all(is_static_one(n) for n in own[: -len(trailing)])):
        raise Refuse("a value per picked position: sizes depend on data")
    mask = ctx.contiguous(node.argument("indices")[first])
    masked, inner = product(mask.shape), product(trailing)
    (out,) = ctx.outputs(node)
    ctx.kernel(
        unit(ctx, "mapped_copy"),
        f"gc_mask_fill_{bytes_tag(out.dtype)}",
        pointers=[base, mask, value, out],
        immediates=[masked, inner, 0 if single else 1],
        reads=[base, mask, value],
        writes=[out],
        range=product(base.shape[:first]) * masked,
        grain=grain(ctx, inner),
        label="index_put",
    )


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(ctx: LoweringContext, node: Node) -> None:
    """self with self[indices] = values, or += with accumulate; values broadcast."""
    base = ctx.contiguous(node.argument("self"))
    values = ctx.view(node.argument("values"))
    views = optional_views(ctx, node.argument("indices"))
    if any(view is not None and view.dtype in ("bool", "uint8") for view in views):
        _put_masked(ctx, node, base, views)
        return
    box = IndexBox(len(base.shape), views)
    (out,) = ctx.outputs(node)
    pad = len(box.entries) - len(values.shape)
    spread: list[Dim] = [0] * pad + [
        0 if is_static_one(size) else stride
        for size, stride in zip(values.shape, values.strides, strict=True)
    ]
    sequence: list[tuple[Dim, Dim]] = []
    columns: list[tuple[Dim, Dim, Dim]] = []
    for (kind, i), from_ in zip(box.entries, spread, strict=True):
        if kind == "index":
            sequence.append((box.shape[i], from_))
        else:
            columns.append((out.shape[i], out.strides[i], from_))
    indices = []
    for position, view in zip(box.used, box.views, strict=True):
        strides = [*box.strides_of(view), *([0] * len(columns))]
        indices.append(Index(view, out.strides[position], out.shape[position], strides))
    op = "sum" if node.argument("accumulate") else "set"
    reduce_into(ctx, node, base, out, values, Box(sequence, columns, indices), op)


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def slice_scatter(ctx: LoweringContext, node: Node) -> None:
    """self with a slice (or one entry) of dimension `dim` replaced by src."""
    base = ctx.contiguous(node.argument("self"))
    src = ctx.view(node.argument("src"))
    (out,) = ctx.outputs(node)
    dim = normal_dim(node.argument("dim"), len(base.shape))
    length = base.shape[dim]
    known = ctx.static(length)
    sizes, strides = list(src.shape), list(src.strides)
    step = 1
    if "select" in str(node.op):
        start = node.argument("index")
        sizes.insert(dim, 1)
        strides.insert(dim, 0)
    else:
        start = node.argument("start")
        start = 0 if start is None else start
        step = node.argument("step")
    if isinstance(start, int) and start < 0:
        start = start + length if known is None else max(0, start + known)
    elif isinstance(start, int) and known is not None:
        start = min(start, known)
    elif not isinstance(start, int) and not hasattr(start, "free_symbols"):
        raise Refuse("a start that is not a size")
    start_from(ctx, base, out, "slice_scatter")
    if any(size == 0 for size in sizes):
        return
    part = out.with_(offset=out.offset + start * out.strides[dim])
    axes = [
        Axis(size, to * step if i == dim else to, from_)
        for i, (size, to, from_) in enumerate(zip(sizes, out.strides, strides, strict=True))
    ]
    mapped_copy(ctx, src, part, axes, "slice_scatter")
