"""Mixtures of experts (kernels/experts_order.cpp, experts.cpp, experts_sum.h): the pairs of tokens
and slots sorted by expert, two grouped products, the weighted sum over the slots."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from graphc.ir.types import as_dim
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.operand import (
    ADDEND_TYPES,
    BLOCK_ROWS,
    FAST,
    STORAGE,
    Library,
    entry_unit,
    gemm_scratch,
    grain_for,
)
from graphc.lowering.templates.pack import PANEL, pack_weight
from graphc.lowering.templates.quantized_linear import quantized_library
from graphc.lowering.templates.strided import SIZES, floordiv
from graphc.ops.experts import interleaved

if TYPE_CHECKING:
    import torch

    from graphc.ir.graph import Node

#: act(g) / g in C++
_GATES = {"silu": "vsigmoid(g)", "gelu": "phi(g)", "gelu_tanh": "phi_tanh(g)"}
#: columns of a piece of a row in the last step: EXPERTS_COLUMNS
_COLUMNS = 1024


@rule("graphc.experts.default")
def experts(ctx: LoweringContext, node: Node) -> None:
    """x [T, D] through `experts(x, index, weight, gate_up, down)` -> [T, D]; see graphc.ops."""
    x = ctx.view(node.argument("x"))
    gate_up, down = (ctx.weight(node.argument(name)) for name in ("gate_up", "down"))
    if gate_up is None or down is None:
        raise Refuse("the weights of the experts are not constants")
    form = str(node.argument("form"))
    kinds = {x.dtype}
    if not form:
        kinds |= {node.argument(name).type.dtype for name in ("gate_up", "down")}
    if len(kinds) != 1 or x.dtype not in FAST:
        raise Refuse(f"experts of {' and '.join(sorted(kinds))}")
    if node.argument("activation") not in _GATES:
        raise Refuse(f"the activation {node.argument('activation')}")
    index, weight = (ctx.contiguous(node.argument(name)) for name in ("index", "weight"))
    if index.dtype not in ("int32", "int64") or weight.dtype not in ADDEND_TYPES:
        raise Refuse(f"indices of {index.dtype}, weights of {weight.dtype}")
    if ctx.static(x.strides[1]) != 1:
        x = ctx.contiguous(node.argument("x"))
    order = _Order(ctx, node, index, len(gate_up))
    library = quantized_library(ctx, x.dtype, form) if form else None
    inner = int(node.argument("hidden")) if form else gate_up.shape[1] // 2
    hidden = _gate(ctx, node, x, gate_up, order, inner, library)
    parts = _down(ctx, node, hidden, down, order, x.shape[1], library)
    _sum(ctx, node, parts, index, weight, len(gate_up))


class _Order:
    """The pairs by expert, and blocks of them; emits the Step that finds them."""

    def __init__(self, ctx: LoweringContext, node: Node, index: View, experts: int) -> None:
        self.slots = index.shape[1]
        self.pairs = as_dim(index.shape[0] * self.slots)
        #: experts that can have rows, and blocks of rows that there can be
        self.chosen = _smaller(self.pairs, experts)
        self.most = as_dim(self.chosen + floordiv(self.pairs - self.chosen, BLOCK_ROWS))
        self.order = ctx.workspace([self.pairs], "int32")
        self.blocks = ctx.workspace([as_dim(self.most + 1), 3], "int32")
        ctx.kernel(
            Unit("experts_order", ctx.header("experts_order.cpp")),
            "gc_experts_order",
            pointers=[index, self.order, self.blocks],
            immediates=[self.pairs, experts, SIZES[index.dtype]],
            reads=[index],
            writes=[self.order, self.blocks],
            scratch=-(-4 * experts // 64) * 64,
            label=f"{node.name}.order",
        )


def _gate(
    ctx: LoweringContext, node: Node, x: View, gate_up: torch.Tensor, order: _Order, width: int,
    library: Library | None,
) -> View:  # fmt: skip
    """hidden [pairs, I] of x in the order's rows."""
    depth = ctx.static(x.shape[1])
    assert depth is not None
    weights, size = _packed(ctx, f"{node.name}.gate_up", gate_up, x, library, pairs=True)
    hidden = ctx.workspace([order.pairs, width], x.dtype)
    caps = [_bits(node.argument(name)) for name in ("gate_cap", "up_cap", "limit")]
    panels = ceildiv(width, PANEL // 2)
    rows = -(-BLOCK_ROWS * depth * SIZES[x.dtype] // 64) * 64
    _product(
        ctx, node, "gate", order,
        pointers=[x, weights, order.order, order.blocks, hidden],
        immediates=[depth, width, x.strides[0], order.slots, size, *caps],
        panels=panels, depth=depth, scratch=rows, library=library,
    )  # fmt: skip
    return hidden


def _down(
    ctx: LoweringContext, node: Node, hidden: View, down: torch.Tensor, order: _Order, width: Dim,
    library: Library | None,
) -> View:  # fmt: skip
    """parts [pairs, D] of hidden, back in the order of tokens and slots."""
    depth = ctx.static(hidden.shape[1])
    assert depth is not None
    weights, size = _packed(ctx, f"{node.name}.down", down, hidden, library)
    parts = ctx.workspace([order.pairs, width], hidden.dtype)
    _product(
        ctx, node, "down", order,
        pointers=[hidden, weights, order.order, order.blocks, parts],
        immediates=[depth, width, size],
        panels=ceildiv(width, PANEL), depth=depth, scratch=0, library=library,
    )  # fmt: skip
    return parts


def _product(
    ctx: LoweringContext, node: Node, what: str, order: _Order, *, pointers: list[View],
    immediates: list[Dim], panels: Dim, depth: int, scratch: int, library: Library | None,
) -> None:  # fmt: skip
    kind = FAST[pointers[0].dtype]
    unit, chunk = Unit(f"gemm_{kind}", ctx.header(f"gemm_{kind}.cpp")), 0
    if library is not None:
        kind, unit, chunk = library.kind, library.unit, library.chunk
    storage = STORAGE[pointers[0].dtype]
    activation = _GATES[node.argument("activation")]
    defines = f"#define GC_EXPERTS {kind}, {storage}\n#define GC_GATE(g) {activation}\n"
    units = as_dim(order.most * panels)
    count = ctx.static(panels) or 4
    ctx.kernel(
        Unit(f"experts_{kind}", defines + ctx.header("experts.cpp")),
        f"gc_experts_{what}_{kind}",
        pointers=pointers,
        immediates=[units, panels, *immediates],
        reads=pointers[:-1],
        writes=pointers[-1:],
        range=units,
        # a thread packs the rows of a block for each piece of work
        grain=max(1, min(4, count // 4)),
        scratch=scratch + gemm_scratch(depth) + chunk,
        label=f"{node.name}.{what}",
        flops=2 * order.pairs * panels * PANEL * depth,
        units=[unit],
    )


def _sum(
    ctx: LoweringContext, node: Node, parts: View, index: View, weight: View, experts: int
) -> None:
    """The weighted sum over the slots, with what is fused behind it."""
    tokens, slots = index.shape
    width = parts.shape[1]
    pointers = [parts, index, weight]
    immediates: list[Dim] = [
        slots, width, experts, SIZES[index.dtype], ADDEND_TYPES[weight.dtype],
    ]  # fmt: skip
    epilogue = ctx.epilogue(node, (1, tokens, width), len(pointers), len(immediates))
    unit, symbol = entry_unit(
        "experts_sum",
        f"""#include "experts_sum.h"
{epilogue.source}
GC_EXPORT void SYMBOL(const gc_args* args, int64_t begin, int64_t end) {{
  gc::experts_sum<{STORAGE[parts.dtype]}>(args, {epilogue.name}, begin, end);
}}
""",
    )
    ctx.kernel(
        unit,
        symbol,
        pointers=[*pointers, *epilogue.pointers],
        immediates=[*immediates, *epilogue.immediates],
        reads=[*pointers, *epilogue.reads],
        writes=epilogue.writes,
        range=tokens * ceildiv(width, _COLUMNS),
        grain=grain_for(ctx, slots * _smaller(width, _COLUMNS) * 4, 64),
        scratch=4 * _COLUMNS,
        label=f"{node.name}.sum",
        flops=2 * tokens * slots * width,
    )


def _packed(
    ctx: LoweringContext, name: str, weight: torch.Tensor, rows: View, library: Library | None, *,
    pairs: bool = False,
) -> tuple[View, int]:  # fmt: skip
    """Panels of every expert, and how far apart they are in items of the rows' dtype; [N, K] each
    (`pairs`: of gate and up), or as they are stored."""
    if library is not None:
        view = ctx.constant(f"{name}.weight", weight, layout=library.layout)
        return view, weight.shape[1] // SIZES[rows.dtype]
    import torch

    made: torch.Tensor | None = None
    layout = ""
    for e, matrix in enumerate(weight):
        panels, layout = pack_weight(interleaved(matrix) if pairs else matrix)
        if made is None:
            made = torch.empty((len(weight), *panels.shape), dtype=panels.dtype)
        made[e] = panels
    assert made is not None
    return ctx.constant(f"{name}.weight", made, layout=layout), made[0].numel()


def _smaller(a: Dim, b: int) -> Dim:
    if isinstance(a, int):
        return min(a, b)
    from torch.utils._sympy.functions import Min

    return as_dim(Min(a, b))


def _bits(cap: float | None) -> int:
    """A cap as the bits of a float; 0 for none."""
    if cap is None:
        return 0
    if cap <= 0:
        raise Refuse(f"a cap of {cap}")
    return int.from_bytes(struct.pack("<f", cap), "little")
