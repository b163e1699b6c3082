"""Lowering of matrix products whose operands are both given at run time or right one constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Refuse, View, rule
from graphc.lowering.templates.integer_product import emit_narrow
from graphc.lowering.templates.operand import Operand, Product, merge_dims
from graphc.lowering.templates.product import emit_product


def matrix(view: View) -> Operand:
    """The last two dimensions as a matrix, the others as its batches."""
    return Operand(view, view.strides[-2], view.strides[-1], view.strides[:-2])


def transposed_constant(ctx: LoweringContext, value: Any) -> Any:
    """A constant [k, n] right operand as [n, k] tensor, else None."""
    weight = ctx.weight(value)
    return None if weight is None or weight.dim() != 2 else weight.t()


def batched(ctx: LoweringContext, node: Any, left: Any, right: Any) -> None:
    """A product of [*, m, k] and [*, k, n] whose batch dimensions broadcast."""
    a, b = ctx.view(left), ctx.view(right)
    if a.dtype != b.dtype:
        raise Refuse(f"product of {a.dtype} and {b.dtype}")
    rank = max(len(a.shape), len(b.shape)) - 2
    shape: list[Dim] = []
    walks: list[list[Dim]] = [[], []]
    for i in range(-rank - 2, -2):
        sizes = [v.shape[i] if len(v.shape) >= -i else 1 for v in (a, b)]
        size = sizes[1] if ctx.static(sizes[0]) == 1 else sizes[0]
        shape.append(size)
        for view, own, walk in zip((a, b), sizes, walks, strict=True):
            broadcast = ctx.static(own) == 1 and ctx.static(size) != 1
            walk.append(0 if len(view.shape) < -i or broadcast else view.strides[i])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    weight = transposed_constant(ctx, right)
    if len(b.shape) == 2 or weight is not None:  # one matrix for all: batches are rows
        sizes_, (steps,) = merge_dims([*shape, m], [[*walks[0], a.strides[-2]]])
        *size_, m = sizes_ or [1]
        *batch, row = steps or [0]
        none: tuple[Dim, ...] = tuple(0 for _ in batch)
        shared = None if weight is not None else replace(matrix(b), batch=none)
        product = Product(
            a.dtype, m, n, k, Operand(a, row, a.strides[-1], tuple(batch)), shared,
            size=tuple(size_), weight=weight,
        )  # fmt: skip
    else:
        size_, (a_batch, b_batch) = merge_dims(shape, walks)
        product = Product(
            a.dtype, m, n, k, replace(matrix(a), batch=tuple(a_batch)),
            replace(matrix(b), batch=tuple(b_batch)), size=tuple(size_),
        )  # fmt: skip
    shape = node.outputs[0].type.shape
    result = (product_of(shape[:-2]), shape[-2])
    emit_product(ctx, node, replace(product, operands=(left, right), result=result))


@rule("aten.mm.default", "aten.bmm.default")
def mm(ctx: LoweringContext, node: Any) -> None:
    """[m, k] x [k, n], or the same per batch."""
    batched(ctx, node, node.args[0], node.args[1])


@rule("aten.matmul.default")
def matmul(ctx: LoweringContext, node: Any) -> None:
    """torch.matmul: vectors, matrices and broadcasting batches."""
    a, b = ctx.view(node.args[0]), ctx.view(node.args[1])
    if len(a.shape) == 0 or len(b.shape) == 0:
        raise Refuse("matmul of a scalar")
    if len(a.shape) > 1 and len(b.shape) > 1:
        batched(ctx, node, node.args[0], node.args[1])
        return
    if a.dtype != b.dtype:
        raise Refuse(f"product of {a.dtype} and {b.dtype}")
    shape = node.outputs[0].type.shape
    result = (product_of(shape[:-2]), shape[-2]) if len(shape) >= 2 else None
    if len(b.shape) == 1:
        times_vector(ctx, node, a, b, result)
        return
    size, (steps,) = merge_dims(b.shape[:-2], [b.strides[:-2]])
    row_vector = Operand(a, 0, a.strides[0], tuple(0 for _ in size))
    emit_product(ctx, node, Product(a.dtype, 1, b.shape[-1], a.shape[0], row_vector,
                                    Operand(b, b.strides[-2], b.strides[-1], tuple(steps)),
                                    size=tuple(size), result=result))  # fmt: skip


def times_vector(
    ctx: LoweringContext, node: Any, a: View, b: View, result: tuple[Dim, Dim] | None
) -> None:
    """[*, n, k] or [k] times [k] -> [*, n]. The vector is the left operand, so that the columns of
    the product are the last dimension of the result."""
    batch = a.shape[:-2]
    size, (steps,) = merge_dims(batch, [a.strides[: len(batch)]])
    k = a.shape[-1]
    n, n_stride = (a.shape[-2], a.strides[-2]) if len(a.shape) > 1 else (1, 0)
    vector = Operand(b, 0, b.strides[0], tuple(0 for _ in size))
    rows = Operand(a, a.strides[-1], n_stride, tuple(steps))
    emit_product(ctx, node, Product(a.dtype, 1, n, k, vector, rows, size=tuple(size),
                                    result=result))  # fmt: skip


def addend(view: View, shape: Sequence[Dim], ctx: LoweringContext) -> list[Dim]:
    """Strides of a view broadcast to `shape` (0 where it broadcasts)."""
    strides: list[Dim] = []
    for i in range(-len(shape), 0):
        own = view.shape[i] if len(view.shape) >= -i else 1
        broadcast = ctx.static(own) == 1 and ctx.static(shape[i]) != 1
        strides.append(0 if len(view.shape) < -i or broadcast else view.strides[i])
    return strides


def scaled_addend(
    ctx: LoweringContext, node: Any, value: Any, shape: Sequence[Dim]
) -> tuple[Operand | None, float, float]:
    """beta * input and alpha of the addmm family; beta 0 leaves the input unread, as in torch."""
    alpha, beta = node.argument("alpha"), node.argument("beta")
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        raise Refuse("alpha or beta is not a constant number")
    if beta == 0:
        return None, float(alpha), 0.0
    view = ctx.view(value)
    *batch, row, column = addend(view, shape, ctx)
    return Operand(view, row, column, tuple(batch)), float(alpha), float(beta)


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(ctx: LoweringContext, node: Any) -> None:
    """beta * input + alpha * (mat1 x mat2), input broadcast to the result."""
    left, right = node.args[1], node.args[2]
    a, b = ctx.view(left), ctx.view(right)
    shape = [*a.shape[:-1], b.shape[-1]]
    c, alpha, beta = scaled_addend(ctx, node, node.args[0], shape)
    if len(shape) == 3:  # keep the batch as one dimension for all three operands
        weight = None
        product = Product(a.dtype, a.shape[-2], b.shape[-1], a.shape[-1], matrix(a), matrix(b), c,
                          size=(a.shape[0],))  # fmt: skip
    else:
        weight = transposed_constant(ctx, right)
        product = Product(a.dtype, a.shape[0], b.shape[-1], a.shape[-1], matrix(a),
                          None if weight is not None else matrix(b), c)  # fmt: skip
    emit_product(
        ctx,
        node,
        replace(
            product,
            weight=weight,
            alpha=alpha,
            beta=beta,
            result=(product_of(shape[:-2]), shape[-2]),
        ),
    )


@rule("aten._int_mm.default")
def int_mm(ctx: LoweringContext, node: Any) -> None:
    """int8 [m, k] x int8 [k, n] -> int32."""
    left, right = node.args
    a, b = ctx.view(left), ctx.view(right)
    product = Product(a.dtype, a.shape[0], b.shape[1], a.shape[1], matrix(a), matrix(b),
                      weight=transposed_constant(ctx, right), operands=(left, right))  # fmt: skip
    emit_narrow(ctx, node, product, "int32")


@rule("aten.mv.default", "aten.dot.default")
def vector_products(ctx: LoweringContext, node: Any) -> None:
    """[n, k] x [k] -> [n], or [k] . [k] -> []."""
    a, b = ctx.view(node.args[0]), ctx.view(node.args[1])
    if a.dtype != b.dtype:
        raise Refuse(f"product of {a.dtype} and {b.dtype}")
    times_vector(ctx, node, a, b, None)
