"""Strided operands of product-like kernels, and the small arithmetic their rules share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.types import same
from graphc.lowering.context import Dim, Epilogue, LoweringContext, Unit, View
from graphc.lowering.templates.pack import PANEL as PANEL

#: rows of one unit of work: GC_GEMM_ROWS in gemm.h
BLOCK_ROWS = 84
#: batch dimensions a kernel can address: GC_BATCH_DIMS in gemm.h
BATCH_DIMS = 4
#: most steps of K between partial sums: GEMM_KC in gemm_driver.h
K_CHUNK = 192
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
class Library:
    """Products with weights in an encoding of its own: `gc_gemm_<kind>` in `unit`, the layout's
    name, and the bytes of scratch for a chunk of a panel that is spelled out."""

    kind: str
    unit: Unit
    layout: str
    chunk: int


@dataclass(frozen=True)
class Product:
    """out[z] = alpha * a[z] [m, k] x b[z] [k, n] + beta * c[z] [m, n], batches of shape `size`.

    `weight` is a constant b as [n, k] tensor; `coded` is one in an encoding of its own, which the
    kernels of `library` read.
    `operands` are the graph values of a and b, which
    integer products ask for their range. `result` is (Z, M) as the operator's epilogue
    counts them, whatever was merged here (None: the operator takes no epilogue).
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
    coded: Any = None
    library: Library | None = None
    operands: tuple[Any, Any] | None = None
    result: tuple[Dim, Dim] | None = None
    alpha: float = 1.0
    beta: float = 1.0


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


STORAGE = {"float32": "float", "bfloat16": "gc::bf16", "float16": "gc::f16"}


def plain_store(out: Operand, size: Sequence[Dim], pointers: int, immediates: int) -> Epilogue:
    """An epilogue that converts and stores its tiles in `out`, whose batches are `size`, and does
    nothing else: for operators that take no fused followers."""
    kind = STORAGE[out.view.dtype]
    source = f"""#include "num.h"
static void store_tile(const gc_args* args, const float* acc, int64_t ld, int64_t z, int64_t m0,
                       int64_t mr, int64_t n0, int64_t nr) {{
  const int64_t *size = args->imm + {immediates}, *steps = size + GC_BATCH_DIMS;
  const int64_t row = steps[GC_BATCH_DIMS], column = steps[GC_BATCH_DIMS + 1];
  {kind}* out = ({kind}*)args->ptr[{pointers}] + gc_batch_offset(size, steps, z) + m0 * row +
      n0 * column;
  for (int64_t r = 0; r < mr; r++, out += row, acc += ld) {{
    if (column == 1) {{
      for (int64_t i = 0; i < nr; i++) out[i] = ({kind})acc[i];
    }} else {{
      for (int64_t i = 0; i < nr; i++) out[i * column] = ({kind})acc[i];
    }}
  }}
}}
"""
    values = (*padded(size, 1), *padded(out.batch, 0), out.row, out.column)
    return Epilogue("store_tile", source, (out.view,), values, (), (out.view,))
