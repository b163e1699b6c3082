"""Steps of one batched matrix product: kernel, packing and work range are chosen here, whatever
operator the product came from. Kernels: graphc/kernels/gemm.h, gemm_i16.h and gemm_simple.h."""

from __future__ import annotations

from typing import Any

import torch

from graphc.ir.types import product as product_of
from graphc.ir.types import row_major
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv
from graphc.lowering.templates.integer_product import emit_narrow, is_narrow
from graphc.lowering.templates.operand import (
    ADDEND_TYPES,
    BATCH_DIMS,
    BLOCK_ROWS,
    DIRECT_ROWS,
    FAST,
    PANEL,
    SIMPLE,
    Operand,
    Product,
    entry_unit,
    float_literal,
    gemm_scratch,
    grain_for,
    padded,
    plain_store,
)
from graphc.lowering.templates.pack import pack_weight
from graphc.lowering.tuning import Choice


def emit_product(ctx: LoweringContext, node: Any, product: Product) -> None:
    """Emits the Steps of one product, its fused epilogue included.

    Raises Refuse for a dtype or a batch structure that no kernel covers.
    """
    if is_narrow(ctx, product, product.dtype):
        emit_narrow(ctx, node, product, product.dtype)
        return
    if product.dtype in SIMPLE:
        emit_simple(ctx, node, product)
        return
    if product.dtype not in FAST:
        raise Refuse(f"no matrix product kernel for {product.dtype}")
    own, kind = product.library, FAST[product.dtype]
    library = Unit(f"gemm_{kind}", ctx.header(f"gemm_{kind}.cpp"))
    if own is not None:
        kind, library = own.kind, own.unit
    if len(product.size) > BATCH_DIMS:
        raise Refuse(f"{len(product.size)} batch dimensions that cannot be merged")
    panels = ceildiv(product.n, PANEL)
    b, ldb, b_batch = right_operand(ctx, node, product, kind, library)
    pointers = [product.a.view, b]
    addend: list[Dim] = [0, 0, 0, *padded((), 0)]
    if product.c is not None:
        if product.c.view.dtype not in ADDEND_TYPES:
            raise Refuse(f"addend of dtype {product.c.view.dtype}")
        pointers.append(product.c.view)
        addend = [ADDEND_TYPES[product.c.view.dtype], product.c.row, product.c.column,
                  *padded(product.c.batch, 0)]  # fmt: skip
    immediates: list[Dim] = [
        product.m, product.n, product.k, *padded(product.size, 1),
        product.a.row, product.a.column, *padded(product.a.batch, 0),
        ldb, *padded(b_batch, 0), *addend,
    ]  # fmt: skip
    z = product_of(product.size)
    rows = product.m if product.result is None else product.result[1]
    immediates.append(rows)
    where = (len(pointers), len(immediates))
    if product.result is None:
        (out,) = ctx.outputs(node)
        batch = row_major([*product.size, product.m * product.n])[:-1]
        epilogue = plain_store(Operand(out, product.n, 1, batch), product.size, *where)
    else:
        epilogue = ctx.epilogue(node, (*product.result, product.n), *where)
    text = f"""#include "gemm.h"
{epilogue.source}
extern "C" gc_gemm_function_type gc_gemm_{kind};
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_gemm_entry(gc_gemm_{kind}, args, {epilogue.name}, {str(product.c is not None).lower()},
                {float_literal(product.alpha)}, {float_literal(product.beta)}, begin, end,
                args->imm[{len(immediates) - 1}]);
}}
"""
    unit, symbol = entry_unit(f"gemm_{kind}", text)
    static_m = ctx.static(product.m)
    block = BLOCK_ROWS if static_m is None else min(BLOCK_ROWS, static_m)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=z * ceildiv(product.m, BLOCK_ROWS) * panels,
        grain=max(grain_for(ctx, block * PANEL * product.k, 8), shared_panels(ctx, product)),
        scratch=gemm_scratch(product.k, block) + (0 if own is None else own.chunk),
        label=node.name,
        flops=2 * z * product.m * product.n * product.k,
        units=[library],
    )


def shared_panels(ctx: LoweringContext, product: Product) -> int:
    """Panels a thread should do in one go, as it packs the rows of `a` for each piece of work; yet
    a row of panels is worth four pieces."""
    panels = ctx.static(ceildiv(product.n, PANEL))
    single = ctx.static(product.m) == 1
    return 1 if single else 4 if panels is None else max(1, min(4, panels // 4))


def right_operand(
    ctx: LoweringContext, node: Any, product: Product, kind: str, library: Unit
) -> tuple[View, Dim, tuple[Dim, ...]]:
    """The right operand as the kernel reads it: view, row length (0: panels), batch strides."""
    if product.coded is not None:
        assert product.library is not None
        return (
            ctx.constant(f"{node.name}.weight", product.coded, layout=product.library.layout),
            0,
            (),
        )
    if product.weight is not None:
        data, layout = pack_weight(product.weight)
        return ctx.constant(f"{node.name}.weight", data, layout=layout), 0, ()
    b = product.b
    assert b is not None
    packed = _packed_batches(ctx, node, product, b)
    if packed is not None:
        return packed
    if kind == "f32" and ctx.static(b.column) == 1 and ctx.static(b.row) != 0:
        rows = ctx.static(product.m)
        few = rows is not None and rows <= DIRECT_ROWS
        choice = Choice("product.right", ("in place", "packed"), "in place" if few else "packed")
        sizes = (product_of(product.size), product.m, product.n, product.k)
        if ctx.choose(choice, *sizes) == "in place":
            return b.view, b.row, b.batch
    size = [1 if ctx.static(s) == 0 else n for n, s in zip(product.size, b.batch, strict=True)]
    panels = ceildiv(product.n, PANEL)
    depth = 2 * ceildiv(product.k, 2) if kind == "bf16" else product.k
    workspace = ctx.workspace([*size, panels, depth, PANEL], product.dtype)
    batch: list[Dim] = []
    running: Dim = panels * depth * PANEL
    for n, stride in zip(reversed(size), reversed(b.batch), strict=True):
        batch.insert(0, 0 if ctx.static(stride) == 0 else running)
        running = running * n
    ctx.kernel(
        library,
        f"gc_pack_panels_{kind}",
        pointers=[b.view, workspace],
        immediates=[product.n, product.k, b.column, b.row, *padded(size, 1), *padded(b.batch, 0)],
        reads=[b.view],
        writes=[workspace],
        range=product_of(size) * panels,
        grain=grain_for(ctx, depth * PANEL * 8, 64),
        label=f"{node.name}.pack",
    )
    return workspace, 0, tuple(batch)


def _packed_batches(
    ctx: LoweringContext, node: Any, product: Product, b: Operand
) -> tuple[View, Dim, tuple[Dim, ...]] | None:
    """A constant [Z, K, N], a matrix for each batch, packed at build time."""
    weight = None if product.operands is None else ctx.weight(product.operands[1])
    if weight is None or weight.dim() != 3 or not weight.is_contiguous():
        return None
    count, k, n = weight.shape
    steps = [ctx.static(d) for d in (*product.size, *b.batch, b.row, b.column)]
    if steps != [count, k * n, n, 1]:
        return None
    packed = [pack_weight(weight[i].t()) for i in range(count)]
    layout, stride = packed[0][1], packed[0][0].numel()
    data = torch.stack([matrix for matrix, _ in packed])
    return ctx.constant(f"{node.name}.weight", data, layout=layout), 0, (stride,)


def emit_simple(ctx: LoweringContext, node: Any, product: Product) -> None:
    """float64 and integer products: a blocked loop that writes the result itself."""
    kind = SIMPLE[product.dtype]
    if len(product.size) > BATCH_DIMS:
        raise Refuse(f"{len(product.size)} batch dimensions that cannot be merged")
    b = product.b
    if product.weight is not None:
        constant = ctx.constant(f"{node.name}.weight", product.weight.contiguous())
        b = Operand(constant, 1, product.k, tuple(0 for _ in product.size))
    assert b is not None
    (out,) = ctx.outputs(node)
    pointers = [product.a.view, b.view]
    addend: list[Dim] = [0, 0, *padded((), 0)]
    c = product.c
    if c is not None:
        if c.view.dtype != product.dtype:
            raise Refuse(f"addend of dtype {c.view.dtype} to a product of {product.dtype}")
        pointers.append(c.view)
        addend = [c.row, c.column, *padded(c.batch, 0)]
    if product.dtype != "float64" and (product.alpha, product.beta) != (1.0, 1.0):
        raise Refuse("integer product with alpha or beta other than 1")
    text = f"""#include "gemm_simple.h"
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_product_{kind}(args, {str(c is not None).lower()}, {float(product.alpha).hex()},
                    {float(product.beta).hex()}, begin, end);
}}
"""
    unit, symbol = entry_unit(f"product_{kind}", text)
    z = product_of(product.size)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, out],
        immediates=[
            product.m, product.n, product.k, *padded(product.size, 1),
            product.a.row, product.a.column, *padded(product.a.batch, 0),
            b.row, b.column, *padded(b.batch, 0), *addend,
        ],
        reads=pointers,
        writes=[out],
        range=z * ceildiv(product.m, 8),
        grain=grain_for(ctx, 32 * product.n * product.k, 64),
        scratch=8 * (64 * 64 + 8 * 64),
        label=node.name,
        flops=2 * z * product.m * product.n * product.k,
        units=[Unit("gemm_simple", ctx.header("gemm_simple.cpp"))],
    )  # fmt: skip
