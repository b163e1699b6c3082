"""Sorting and selection along a dimension (kernels/sort.cpp).

Values come in torch's order (NaN greatest). Every sort is stable; `topk` resolves ties
as eager torch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.strided import (
    FLOATS,
    around,
    floordiv,
    grain,
    normal_dim,
    scalar,
    tag,
    unit,
)

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: bytes of a key with its index
WORD = 16


def emit_sort(
    ctx: LoweringContext, src: View, values: View, indices: View, dim: int, descending: bool
) -> None:
    """values, indices = the stable sort of contiguous `src` along `dim`."""
    outer, n, inner = around(src.shape, dim)
    ctx.kernel(
        unit(ctx, "sort", tag(src.dtype)),
        f"gc_sort_{tag(src.dtype)}",
        pointers=[src, values, indices],
        immediates=[n, inner, int(descending)],
        reads=[src],
        writes=[values, indices],
        range=outer * inner,
        grain=grain(ctx, n, 2048),
        scratch=2 * WORD * n,
        label="sort",
    )


@rule(
    "aten.sort.default",
    "aten.sort.stable",
    "aten.argsort.default",
    "aten.argsort.stable",
    "aten.msort.default",
)
def sort(ctx: LoweringContext, node: Node) -> None:
    """(values, indices), or the one of the two that the operator gives."""
    src = ctx.contiguous(node.argument("self"))
    name = str(node.op)
    dim, descending = 0, False
    if "msort" not in name:
        dim = normal_dim(node.argument("dim"), len(src.shape))
        descending = bool(node.argument("descending"))
        if src.dtype not in FLOATS and not (name.endswith(".stable") and node.argument("stable")):
            # integers tie, and the indices of an unstable sort are those of torch's own algorithm
            raise Refuse("the order of equal integers in an unstable sort")
    made = ctx.outputs(node)
    if "argsort" in name:
        values, indices = ctx.workspace(src.shape, src.dtype), made[0]
    elif "msort" in name:
        values, indices = made[0], ctx.workspace(src.shape, "int64")
    else:
        values, indices = made
    emit_sort(ctx, src, values, indices, dim, descending)


@rule("aten.topk.default")
def topk(ctx: LoweringContext, node: Node) -> None:
    """The k largest or smallest; order and ties as in eager torch."""
    src = ctx.contiguous(node.argument("self"))
    dim = normal_dim(node.argument("dim"), len(src.shape))
    values, indices = ctx.outputs(node)
    outer, n, inner = around(src.shape, dim)
    k: Dim = values.shape[dim] if values.shape else 1
    ctx.kernel(
        unit(ctx, "sort", tag(src.dtype)),
        f"gc_topk_{tag(src.dtype)}",
        pointers=[src, values, indices],
        immediates=[
            n,
            inner,
            k,
            int(bool(node.argument("largest"))),
            int(bool(node.argument("sorted"))),
        ],
        reads=[src],
        writes=[values, indices],
        range=outer * inner,
        grain=grain(ctx, n, 16384),
        scratch=WORD * n,
        label="topk",
    )


def _emit_kth(
    ctx: LoweringContext, node: Node, src: View, box: tuple[Dim, Dim, Dim], k: Dim, median: bool
) -> None:
    outer, n, inner = box
    made = ctx.outputs(node)
    values = made[0]
    indices = made[1] if len(made) > 1 else ctx.workspace([outer, inner], "int64")
    ctx.kernel(
        unit(ctx, "sort", tag(src.dtype)),
        f"gc_kth_{tag(src.dtype)}",
        pointers=[src, values, indices],
        immediates=[n, inner, k, int(median)],
        reads=[src],
        writes=[values, indices],
        range=outer * inner,
        grain=grain(ctx, n, 4096),
        scratch=WORD * n,
        label="median" if median else "kthvalue",
    )


@rule("aten.median.dim", "aten.median.default")
def median(ctx: LoweringContext, node: Node) -> None:
    """The lower median; NaN if there is one."""
    src = ctx.contiguous(node.argument("self"))
    box: tuple[Dim, Dim, Dim] = (1, product(src.shape), 1)
    if "dim" in str(node.op):
        box = around(src.shape, normal_dim(node.argument("dim"), len(src.shape)))
    n = box[1]
    if n == 0:
        if "dim" in str(node.op):
            ctx.outputs(node)
            return
        raise Refuse("the median of nothing")
    _emit_kth(ctx, node, src, box, floordiv(n - 1, 2), True)


def _search(
    ctx: LoweringContext, node: Node, sequence: View, values: View, sorter: View | None, right: bool
) -> None:
    (out,) = ctx.outputs(node)
    if tag(sequence.dtype) != tag(values.dtype):
        raise Refuse(f"boundaries {sequence.dtype} and values {values.dtype} differ in dtype")
    n: Dim = sequence.shape[-1]
    per_row: Dim = values.shape[-1] if values.shape else 1
    shared = len(sequence.shape) == 1
    pointers = [sequence, values, out, sorter or sequence]
    ctx.kernel(
        unit(ctx, "sort", tag(values.dtype)),
        f"gc_search_{tag(values.dtype)}",
        pointers=pointers,
        immediates=[
            n, per_row, int(shared), int(right), int(out.dtype == "int32"), int(sorter is not None)
        ],
        reads=[sequence, values, *([sorter] if sorter else [])],
        writes=[out],
        range=product(values.shape),
        grain=512,
        label="searchsorted",
    )  # fmt: skip


@rule(
    "aten.searchsorted.Tensor",
    "aten.searchsorted.Scalar",
    "aten.bucketize.Tensor",
    "aten.bucketize.Scalar",
)
def searchsorted(ctx: LoweringContext, node: Node) -> None:
    """Positions at which values go into a sorted sequence."""
    name = str(node.op)
    right = bool(node.argument("right"))
    sorter = None
    if "bucketize" in name:
        sequence = ctx.contiguous(node.argument("boundaries"))
    else:
        sequence = ctx.contiguous(node.argument("sorted_sequence"))
        side = node.argument("side")
        right = right or side == "right"
        if node.argument("sorter") is not None:
            sorter = ctx.contiguous(node.argument("sorter"))
    value = node.argument("self")
    if isinstance(value, int | float):
        if sequence.dtype not in FLOATS and isinstance(value, float):
            raise Refuse("a fractional value among integer boundaries")
        values = scalar(ctx, node, "value", value, sequence.dtype).with_(shape=(), strides=())
    else:
        values = ctx.contiguous(value)
    _search(ctx, node, sequence, values, sorter, right)
