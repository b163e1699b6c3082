"""Lowering of graphc.coded_linear: rows times a bf16 weight of 12 bits each. Kernel:
graphc/kernels/gemm_coded.h."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphc.lowering.context import LoweringContext, Refuse, Unit, rule
from graphc.lowering.templates.linear import rows_product
from graphc.lowering.templates.operand import PANEL, Library
from graphc.lowering.templates.product import emit_product

#: Coded::expand_bytes in gemm_coded.cpp
_CHUNK = 2048 * PANEL * 2


@rule("graphc.coded_linear.default")
def coded_linear(ctx: LoweringContext, node: Any) -> None:
    """input bfloat16 [*, k], weight uint8 [bytes], features n, bias [n] or None -> [*, n]."""
    coded = ctx.weight(node.args[1])
    product = rows_product(ctx, node, node.args[2])
    if coded is None:
        raise Refuse("the weight is not constant")
    if product.dtype != "bfloat16":
        raise Refuse(f"a coded weight with {product.dtype}")
    unit = Unit("gemm_coded", ctx.header("gemm_coded.cpp"))
    library = Library("coded", unit, "coded_pairs32", _CHUNK)
    emit_product(ctx, node, replace(product, coded=coded, library=library))
