"""Lowering of aten.linear: rows of activations times a weight stored [out, in]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Refuse, rule
from graphc.lowering.templates.matmul import times_vector
from graphc.lowering.templates.operand import Operand, Product, merge_dims
from graphc.lowering.templates.product import emit_product


@rule("aten.linear.default")
def linear(ctx: LoweringContext, node: Any) -> None:
    """input [*, k], weight [n, k] (or [k]), bias [n] or None -> [*, n].

    A constant weight is packed at build time. Leading dimensions of the input become rows where
    strides allow, else batches; no copy is made.
    """
    x, w = ctx.view(node.args[0]), ctx.view(node.args[1])
    if x.dtype != w.dtype:
        raise Refuse(f"linear of {x.dtype} with a weight of {w.dtype}")
    weight = ctx.weight(node.args[1])
    if len(w.shape) == 1:
        if node.argument("bias") is not None:
            raise Refuse("linear of a weight vector with a bias")
        times_vector(ctx, node, x, w, (1, product_of(node.outputs[0].type.shape[:-1])))
        return
    n, n_stride, k_stride = w.shape[0], w.strides[0], w.strides[1]
    b = None if weight is not None else Operand(w, k_stride, n_stride)
    product = rows_product(ctx, node, n, b)
    emit_product(ctx, node, replace(product, weight=weight, operands=(node.args[0], node.args[1])))


def rows_product(ctx: LoweringContext, node: Any, n: Dim, b: Operand | None = None) -> Product:
    """The product of the rows of `node`'s first argument [*, k] with some right operand [k, n] (one
    without batches), its argument `bias` added."""
    x = ctx.view(node.args[0])
    size, (steps,) = merge_dims(x.shape[:-1], [x.strides[:-1]])
    *batch_size, m = size or [1]
    *batch, row = steps or [0]
    none = tuple(0 for _ in batch)
    bias = node.argument("bias")
    addend = None
    if bias is not None:
        view = ctx.view(bias)
        addend = Operand(view, 0, view.strides[0] if view.shape else 0, none)
    return Product(
        dtype=x.dtype,
        m=m,
        n=n,
        k=x.shape[-1],
        a=Operand(x, row, x.strides[-1], tuple(batch)),
        b=None if b is None else replace(b, batch=none),
        c=addend,
        size=tuple(batch_size),
        result=(1, product_of(node.outputs[0].type.shape[:-1])),
    )
