"""Lowering of graphc.quantized_linear: rows times a weight of 8 or 4 bits. Kernels:
graphc/kernels/gemm_quantized.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphc.lowering.context import LoweringContext, Refuse, Unit, rule
from graphc.lowering.templates.linear import rows_product
from graphc.lowering.templates.operand import FAST, PANEL, Library
from graphc.lowering.templates.product import emit_product

if TYPE_CHECKING:
    from graphc.ir.graph import Node

_ROWS = {"f32": "Float", "bf16": "Brain", "f16": "Half"}
#: the most of Quantized::expand_bytes in gemm_quantized.cpp: pairs of bf16 for 2048 steps
_CHUNK = 2048 * PANEL * 2


def quantized_library(ctx: LoweringContext, dtype: str, form: str) -> Library:
    """Products of rows of `dtype` with weights in `form`.

    Raises Refuse for another dtype than float32, float16 and bfloat16.
    """
    if dtype not in FAST:
        raise Refuse(f"a weight of {form} with {dtype}")
    rows = FAST[dtype]
    kind = f"{form}_{rows}"
    text = f"""#include "gemm_{rows}.h"
#define GC_QUANTIZED {kind}, {_ROWS[rows]}, {form}_form
{ctx.header("gemm_quantized.cpp")}"""
    return Library(kind, Unit(f"gemm_{kind}", text), f"{form}_panels{PANEL}", _CHUNK)


@rule("graphc.quantized_linear.default")
def quantized_linear(ctx: LoweringContext, node: Node) -> None:
    """input [*, k], weight uint8 [bytes], form, features n, bias [n] or None -> [*, n]."""
    coded = ctx.weight(node.args[1])
    if coded is None:
        raise Refuse("the weight is not constant")
    product = rows_product(ctx, node, node.argument("features"))
    library = quantized_library(ctx, product.dtype, str(node.argument("form")))
    emit_product(ctx, node, replace(product, coded=coded, library=library))
