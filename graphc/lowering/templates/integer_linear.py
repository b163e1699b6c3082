"""Lowering of graphc.integer_linear. Kernel: graphc/kernels/gemm_i8.h."""

from __future__ import annotations

from typing import Any

import torch

from graphc.ir.types import product
from graphc.lowering.context import LoweringContext, Refuse, Unit, ceildiv, rule
from graphc.lowering.templates.operand import (
    BATCH_DIMS,
    BLOCK_ROWS,
    PANEL,
    entry_unit,
    gemm_scratch,
    grain_for,
    merge_dims,
    padded,
)

#: C++ types a zero point may be stored in
ZEROS = {"uint8": "uint8_t", "int8": "int8_t", "int32": "int32_t", "int64": "int64_t"}


def quad_panels(weight: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> [ceil(N/32), ceil(K/4), 32, 4]: four neighbours in K side by side, as a byte
    dot product reads them; N and K are zero-padded."""
    n, k = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -k % 4, 0, -n % PANEL))
    return filled.view(-(-n // PANEL), PANEL, -(-k // 4), 4).transpose(1, 2).contiguous()


def column_sums(weight: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> int32 [32 * ceil(N/32)]: sums over K."""
    sums = weight.sum(dim=1, dtype=torch.int64).to(torch.int32)
    return torch.nn.functional.pad(sums, (0, -len(sums) % PANEL))


@rule("graphc.integer_linear.default")
def integer_linear(ctx: LoweringContext, node: Any) -> None:
    """input [*, k] 8-bit, zero of one element or None, weight int8 [n, k] -> float32 [*, n]."""
    x = ctx.view(node.argument("input"))
    weight = ctx.weight(node.argument("weight"))
    if weight is None:
        raise Refuse("the weight is not constant")
    if x.dtype not in ("uint8", "int8") or weight.dtype != torch.int8:
        raise Refuse(f"a product of {x.dtype} and {weight.dtype}")
    n, k = weight.shape
    size, (steps,) = merge_dims(x.shape[:-1], [x.strides[:-1]])
    *batch_size, m = size or [1]
    *batch, row = steps or [0]
    if len(batch_size) > BATCH_DIMS:
        raise Refuse(f"{len(batch_size)} batch dimensions that cannot be merged")
    b = ctx.constant(f"{node.name}.weight", quad_panels(weight), layout="quad_panels32")
    sums = ctx.constant(f"{node.name}.sums", column_sums(weight))
    pointers = [x, b, sums]
    signed = x.dtype == "int8"
    zero = "128" if signed else "0"
    if node.argument("zero") is not None:
        view = ctx.contiguous(node.argument("zero"))
        if view.dtype not in ZEROS:
            raise Refuse(f"a zero point of {view.dtype}")
        pointers.append(view)
        zero += f" + (int32_t)*(const {ZEROS[view.dtype]}*)args->ptr[3]"
    leading = (1, product(node.outputs[0].type.shape[:-1]))
    immediates = [
        m, n, k, *padded(batch_size, 1), row, x.strides[-1], *padded(batch, 0),
        0, *padded((), 0), 0, 0, 0, *padded((), 0), leading[1],
    ]  # fmt: skip
    epilogue = ctx.epilogue(node, (*leading, n), len(pointers), len(immediates))
    text = f"""#include "gemm_i8.h"
{epilogue.source}
static void finish(const gc_args* args, const float* acc, int64_t ld, int64_t z, int64_t m0,
                   int64_t mr, int64_t n0, int64_t nr) {{
  gc_gemm_i8_finish((float*)acc, ld, mr, n0, nr, (const int32_t*)args->ptr[2], {zero});
  {epilogue.name}(args, acc, ld, z, m0, mr, n0, nr);
}}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc_gemm_i8(args, {str(signed).lower()}, finish, begin, end, args->imm[{len(immediates) - 1}]);
}}
"""
    unit, symbol = entry_unit("gemm_i8", text)
    z = product(batch_size)
    static_m = ctx.static(m)
    block = BLOCK_ROWS if static_m is None else min(BLOCK_ROWS, static_m)
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=z * ceildiv(m, BLOCK_ROWS) * ceildiv(n, PANEL),
        grain=grain_for(ctx, block * PANEL * k, 8),
        scratch=gemm_scratch(k, block),
        label=node.name,
        flops=2 * z * m * n * k,
        units=[Unit("gemm_i8", ctx.header("gemm_i8.cpp"))],
    )
