"""Integer products whose factors surely fit 16 bits, as quantised models have them: 8-bit values
cast to int32 or int64, minus a zero point. Kernel: graphc/kernels/gemm_i16.h."""

from __future__ import annotations

from typing import Any

import torch

from graphc.ir.integers import Range, integer_range
from graphc.ir.types import product as product_of
from graphc.lowering.context import Dim, LoweringContext, Unit, View, ceildiv
from graphc.lowering.templates.operand import (
    BATCH_DIMS,
    BLOCK_ROWS,
    PANEL,
    Operand,
    Product,
    entry_unit,
    gemm_scratch,
    grain_for,
    padded,
)
from graphc.lowering.templates.pack import pair_panels

#: storage type codes of gemm_i16.h
TYPES = {"int8": 0, "uint8": 1, "int16": 2, "int32": 3, "int64": 4}


def fits_16_bits(bounds: Range | None) -> bool:
    """Strictly above the lowest int16, so that a pair of products never overflows int32."""
    return bounds is not None and bounds[0] > -(1 << 15) and bounds[1] < 1 << 15


def largest(bounds: Range) -> int:
    return max(abs(bounds[0]), abs(bounds[1]))


def is_narrow(ctx: LoweringContext, product: Product, result: str) -> bool:
    """Whether the 16-bit kernel gives exactly the wrapped result of the wide one."""
    if result not in ("int32", "int64") or product.c is not None or product.operands is None:
        return False
    if len(product.size) > BATCH_DIMS:
        return False
    left, right = (integer_range(value, ctx.weight) for value in product.operands)
    if left is None or right is None or not fits_16_bits(left) or not fits_16_bits(right):
        return False
    if result == "int32":
        return True  # both wrap at 32 bits
    depth = ctx.static(product.k)
    return depth is not None and depth * largest(left) * largest(right) < 1 << 31


def emit_narrow(ctx: LoweringContext, node: Any, product: Product, result: str) -> None:
    """Steps of a product for which `is_narrow` holds; `result` is the dtype it is stored in."""
    library = Unit("gemm_i16", ctx.header("gemm_i16.cpp"))
    b, b_batch = packed_operand(ctx, node, product, library)
    (out,) = ctx.outputs(node)
    a = product.a
    wide = str(result == "int64").lower()
    text = f"""#include "gemm_i16.h"
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_gemm_i16(args, {TYPES[a.view.dtype]}, {wide}, begin, end);
}}
"""
    unit, symbol = entry_unit("gemm_i16", text)
    z = product_of(product.size)
    ctx.kernel(
        unit,
        symbol,
        pointers=[a.view, b, out],
        immediates=[
            product.m, product.n, product.k, *padded(product.size, 1),
            a.row, a.column, *padded(a.batch, 0), 0, *padded(b_batch, 0),
            0, 0, 0, *padded((), 0),
        ],
        reads=[a.view, b],
        writes=[out],
        range=z * ceildiv(product.m, BLOCK_ROWS) * ceildiv(product.n, PANEL),
        grain=grain_for(ctx, BLOCK_ROWS * PANEL * product.k, 8),
        scratch=gemm_scratch(product.k),
        label=node.name,
        flops=2 * z * product.m * product.n * product.k,
        units=[library],
    )  # fmt: skip


def packed_operand(
    ctx: LoweringContext, node: Any, product: Product, library: Unit
) -> tuple[View, tuple[Dim, ...]]:
    """The right operand as int16 pair panels and its batch strides in int16 elements."""
    if product.weight is not None:
        data = pair_panels(product.weight.to(torch.int16))
        return ctx.constant(f"{node.name}.weight", data, layout="pair_panels32"), ()
    b = product.b
    assert isinstance(b, Operand)
    size = [1 if ctx.static(s) == 0 else n for n, s in zip(product.size, b.batch, strict=True)]
    panels, depth = ceildiv(product.n, PANEL), 2 * ceildiv(product.k, 2)
    workspace = ctx.workspace([*size, panels, depth, PANEL], "int16")
    batch: list[Dim] = []
    running: Dim = panels * depth * PANEL
    for n, stride in zip(reversed(size), reversed(b.batch), strict=True):
        batch.insert(0, 0 if ctx.static(stride) == 0 else running)
        running = running * n
    text = f"""#include "gemm_i16.h"
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_gemm_i16_pack(args, {TYPES[b.view.dtype]}, begin, end);
}}
"""
    unit, symbol = entry_unit("pack_i16", text)
    ctx.kernel(
        unit,
        symbol,
        pointers=[b.view, workspace],
        immediates=[product.n, product.k, b.column, b.row, *padded(size, 1), *padded(b.batch, 0)],
        reads=[b.view],
        writes=[workspace],
        range=product_of(size) * panels,
        grain=grain_for(ctx, depth * PANEL * 8, 64),
        label=f"{node.name}.pack",
        units=[library],
    )
    return workspace, tuple(batch)
