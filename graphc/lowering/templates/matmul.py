"""Lowering of matrix products to the GEMM kernels of graphc/kernels/gemm.h.

`Product` is one batched product with strided operands, whatever operator it came from;
`emit_product` chooses kernel, packing and work range. This module's rules cover products of two
run-time operands; a constant right operand is packed at build time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.pack import PANEL, pack_weight

#: rows of one unit of work: GC_GEMM_ROWS in gemm.h
BLOCK_ROWS = 84
#: batch dimensions a kernel can address: GC_BATCH_DIMS in gemm.h
BATCH_DIMS = 4
#: steps of K between partial sums: GEMM_KC in gemm_driver.h
K_CHUNK = 128
#: up to this many rows a run-time right operand with adjacent columns is read in place
DIRECT_ROWS = 28
#: multiply-adds worth handing to another thread (a few microseconds)
GRAIN_WORK = 1 << 17

FAST = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SIMPLE = {
    "float64": "f64", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
ADDEND_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


@dataclass(frozen=True)
class Operand:
    """A matrix per batch in memory: element (z, row, column) lies at
    z . batch + row * row_stride + column * column_stride of the view."""

    view: View
    row: Dim
    column: Dim
    batch: tuple[Dim, ...] = ()


@dataclass(frozen=True)
class Product:
    """out[z] = alpha * a[z] [m, k] x b[z] [k, n] + beta * c[z] [m, n], batches of shape `size`.

    `packed` replaces b by a constant in panels; `weight` is a constant b as [n, k] tensor.
    """

    dtype: str
    m: Dim
    n: Dim
    k: Dim
    a: Operand
    b: Operand | None
    c: Operand | None = None
    size: tuple[Dim, ...] = ()
    weight: Any = None
    alpha: float = 1.0
    beta: float = 1.0


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for all values of their symbols (as far as algebra shows)."""
    return bool(sympy.expand(a - b) == 0)


def product_of(dims: Sequence[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def merge_dims(
    shape: Sequence[Dim], strides: Sequence[Sequence[Dim]]
) -> tuple[list[Dim], list[list[Dim]]]:
    """Joins neighbouring dimensions that every operand walks with one stride; drops ones.

    `strides` has one list per operand. Gives the merged shape and strides.
    """
    sizes: list[Dim] = []
    merged: list[list[Dim]] = [[] for _ in strides]
    for i in reversed(range(len(shape))):
        if isinstance(shape[i], int) and shape[i] == 1:
            continue
        if sizes and all(
            same(row[i], out[0] * sizes[0]) for row, out in zip(strides, merged, strict=True)
        ):
            sizes[0] = sizes[0] * shape[i]
            continue
        sizes.insert(0, shape[i])
        for row, out in zip(strides, merged, strict=True):
            out.insert(0, row[i])
    return sizes, merged


def padded(values: Sequence[Dim], fill: int) -> list[Dim]:
    return [*[fill] * (BATCH_DIMS - len(values)), *values]


def content_symbol(prefix: str, text: str) -> str:
    """A kernel name that equal texts share, so that equal layers share one translation unit."""
    return f"{prefix}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def entry_unit(prefix: str, text: str) -> tuple[Unit, str]:
    """Names the entry point (written as SYMBOL in the text) after its content."""
    symbol = content_symbol(prefix, text)
    return Unit(symbol, text.replace("SYMBOL", symbol)), symbol


def grain_for(ctx: LoweringContext, work: Dim, most: int) -> int:
    """Units of range per grain so that one grain is worth a thread; `work` is multiply-adds a
    unit, symbolic lengths count as small."""
    static = ctx.static(work)
    if static is None or static <= 0:
        return 1
    return max(1, min(most, GRAIN_WORK // static))


def gemm_scratch(k: Dim, rows: Dim = BLOCK_ROWS) -> Dim:
    """Bytes per thread: accumulator tile, expanded panel, packed rows (fp32 or bf16 pairs)."""
    return 4 * (BLOCK_ROWS * PANEL + K_CHUNK * PANEL) + 4 * rows * (k + 1)


def float_literal(value: float) -> str:
    return f"{float(value).hex()}f"


def emit_product(ctx: LoweringContext, node: Any, product: Product) -> None:
    """Emits the Steps of one product, its fused epilogue included.

    Raises Refuse for a dtype or a batch structure that no kernel covers.
    """
    if product.dtype in SIMPLE:
        emit_simple(ctx, node, product)
        return
    if product.dtype not in FAST:
        raise Refuse(f"no matrix product kernel for {product.dtype}")
    kind = FAST[product.dtype]
    library = Unit(f"gemm_{kind}", ctx.header(f"gemm_{kind}.cpp"))
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
    epilogue = ctx.epilogue(node, (z, product.m, product.n), len(pointers), len(immediates))
    text = f"""#include "gemm.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_gemm_entry(gc_gemm_{kind}, args, {epilogue.name}, {str(product.c is not None).lower()},
                {float_literal(product.alpha)}, {float_literal(product.beta)}, begin, end);
}}
"""
    unit, symbol = entry_unit(f"gemm_{kind}", text)
    static_m = ctx.static(product.m)
    rows = BLOCK_ROWS if static_m is None else min(BLOCK_ROWS, static_m)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=z * ceildiv(product.m, BLOCK_ROWS) * panels,
        grain=grain_for(ctx, rows * PANEL * product.k, 8),
        scratch=gemm_scratch(product.k, rows),
        label=node.name,
        flops=2 * z * product.m * product.n * product.k,
        units=[library],
    )


def right_operand(
    ctx: LoweringContext, node: Any, product: Product, kind: str, library: Unit
) -> tuple[View, Dim, tuple[Dim, ...]]:
    """The right operand as the kernel reads it: view, row length (0: panels), batch strides."""
    if product.weight is not None:
        data, layout = pack_weight(product.weight)
        return ctx.constant(f"{node.name}.weight", data, layout=layout), 0, ()
    b = product.b
    assert b is not None
    rows, step = ctx.static(product.m), ctx.static(b.row)
    in_place = (
        kind == "f32" and ctx.static(b.column) == 1 and step != 0
        and rows is not None and rows <= DIRECT_ROWS
    )  # fmt: skip
    if in_place:
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


def matrix(view: View) -> Operand:
    """The last two dimensions as a matrix, the others as its batches."""
    return Operand(view, view.strides[-2], view.strides[-1], view.strides[:-2])


def transposed_constant(ctx: LoweringContext, value: Any) -> Any:
    """A constant [k, n] right operand as [n, k] tensor, else None."""
    weight = ctx.weight(value)
    return None if weight is None or weight.dim() != 2 else weight.t()


def batched(ctx: LoweringContext, node: Any, left: Any, right: Any, **changes: Any) -> None:
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
    emit_product(ctx, node, replace(product, **changes))


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
    if len(b.shape) == 1:  # rows of a times one column
        size, (steps,) = merge_dims(a.shape[:-1], [a.strides[:-1]])
        *batch, m = size or [1]
        *a_batch, row = steps or [0]
        column = Operand(b, b.strides[0], 0, tuple(0 for _ in batch))
        rows = Operand(a, row, a.strides[-1], tuple(a_batch))
        emit_product(ctx, node, Product(a.dtype, m, 1, a.shape[0 - 1], rows, column,
                                        size=tuple(batch)))  # fmt: skip
        return
    size, (steps,) = merge_dims(b.shape[:-2], [b.strides[:-2]])
    row_vector = Operand(a, 0, a.strides[0], tuple(0 for _ in size))
    emit_product(ctx, node, Product(a.dtype, 1, b.shape[-1], a.shape[0], row_vector,
                                    Operand(b, b.strides[-2], b.strides[-1], tuple(steps)),
                                    size=tuple(size)))  # fmt: skip


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
    emit_product(ctx, node, replace(product, weight=weight, alpha=alpha, beta=beta))
