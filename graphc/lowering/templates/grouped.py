"""Products of row groups with a weight per group, as mixtures of experts do (grouped.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.operand import (
    BLOCK_ROWS,
    FAST,
    STORAGE,
    Library,
    gemm_scratch,
    grain_for,
    padded,
)
from graphc.lowering.templates.pack import PANEL, pack_weight
from graphc.lowering.templates.quantized_linear import quantized_library
from graphc.lowering.templates.strided import SIZES

if TYPE_CHECKING:
    from graphc.ir.graph import Node


@rule("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(ctx: LoweringContext, node: Node) -> None:
    """x [S, K], w [E, K, N], ends of the groups [E] -> [S, N]. Rows after the last group are 0."""
    import torch

    names = ("self", "mat2") if "aten" in str(node.op) else ("input", "weight")
    x, w = (ctx.view(node.argument(name)) for name in names)
    if len(x.shape) != 2 or len(w.shape) != 3 or node.argument("offs") is None:
        raise Refuse("a grouped product other than [S, K] x [E, K, N]")
    if "aten" in str(node.op) and node.argument("bias") is not None:
        raise Refuse("a grouped product with bias")
    out_dtype = node.outputs[0].type.dtype
    if x.dtype not in FAST or x.dtype != w.dtype or out_dtype != x.dtype:
        raise Refuse(f"a grouped product of {x.dtype} and {w.dtype} to {out_dtype}")
    kind = FAST[x.dtype]
    offs = ctx.contiguous(node.argument("offs"))
    if offs.dtype not in ("int32", "int64"):
        raise Refuse(f"group ends of {offs.dtype}")
    if ctx.static(x.strides[1]) != 1:
        x = ctx.contiguous(node.argument(names[0]))
    gemm = Unit(f"gemm_{kind}", ctx.header(f"gemm_{kind}.cpp"))
    groups, k, n = w.shape
    panels = ceildiv(n, PANEL)
    depth = 2 * ceildiv(k, 2) if kind == "bf16" else k
    known = ctx.weight(node.argument(names[1]))
    if known is not None:
        parts = [pack_weight(part.t()) for part in known]
        data = torch.stack([part for part, _ in parts])
        weights = ctx.constant(f"{node.name}.weight", data, layout=parts[0][1])
    else:
        weights = ctx.workspace([groups, panels, depth, PANEL], w.dtype)
        ctx.kernel(
            gemm,
            f"gc_pack_panels_{kind}",
            pointers=[w, weights],
            immediates=[
                n, k, w.strides[2], w.strides[1],
                *padded([groups], 1), *padded([w.strides[0]], 0),
            ],
            reads=[w],
            writes=[weights],
            range=groups * panels,
            grain=grain_for(ctx, depth * PANEL * 8, 64),
            label=f"{node.name}.pack",
        )  # fmt: skip
    _product(ctx, node, x, weights, offs, Library(kind, gemm, "", 0), panels * depth * PANEL)


@rule("graphc.quantized_grouped_mm.default")
def quantized_grouped_mm(ctx: LoweringContext, node: Node) -> None:
    """x [S, K], w uint8 [E, bytes], ends of the groups [E] -> [S, N]: see graphc.ops."""
    x, offs = ctx.view(node.args[0]), ctx.contiguous(node.args[2])
    coded = ctx.weight(node.args[1])
    if coded is None:
        raise Refuse("the weights are not constant")
    library = quantized_library(ctx, x.dtype, str(node.argument("form")))
    if offs.dtype not in ("int32", "int64"):
        raise Refuse(f"group ends of {offs.dtype}")
    if ctx.static(x.strides[1]) != 1:
        x = ctx.contiguous(node.args[0])
    weights = ctx.constant(f"{node.name}.weight", coded, layout=library.layout)
    _product(ctx, node, x, weights, offs, library, coded.shape[1] // SIZES[x.dtype])


def _product(
    ctx: LoweringContext, node: Node, x: View, weights: View, offs: View, library: Library,
    size: Dim,
) -> None:  # fmt: skip
    """The Step; `size` items of x's dtype are one group's weight."""
    (out,) = ctx.outputs(node)
    rows, k, n, groups = *x.shape, out.shape[1], offs.shape[0]
    panels = ceildiv(n, PANEL)
    known_rows, known_groups = ctx.static(rows), ctx.static(groups)
    share = 1 if known_rows is None else max(1, known_rows // max(1, known_groups or 1))
    defines = f"#define GC_GROUPED {library.kind}, {STORAGE[x.dtype]}\n"
    ctx.kernel(
        Unit(f"grouped_{library.kind}", defines + ctx.header("grouped.cpp")),
        f"gc_grouped_{library.kind}",
        pointers=[x, weights, offs, out],
        immediates=[rows, n, k, groups, SIZES[offs.dtype], x.strides[0], size],
        reads=[x, weights, offs],
        writes=[out],
        range=(ceildiv(rows, BLOCK_ROWS) + groups) * panels,
        grain=grain_for(ctx, min(BLOCK_ROWS, share) * PANEL * k, 8),
        scratch=gemm_scratch(k) + library.chunk,
        label=node.name,
        flops=2 * rows * n * k,
        units=[library.unit],
    )
