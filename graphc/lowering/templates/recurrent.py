"""Recurrent layers and cells (kernels/recurrent.cpp): LSTM, GRU, RNN with tanh or relu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View, ceildiv, rule
from graphc.lowering.templates.operand import BLOCK_ROWS, FAST, gemm_scratch, grain_for, padded
from graphc.lowering.templates.pack import PANEL, pack_weight

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: sequences of one unit of the walk over time: kRows in recurrent.cpp
ROWS = 8
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_VARIANTS = {"f32": "", "bf16": "#define GC_RECURRENT 2\n", "f16": "#define GC_RECURRENT 3\n"}


@dataclass(frozen=True)
class Layer:
    """One layer: sizes, and element strides over (time, batch) in units of one row of x."""

    kind: str
    steps: Dim
    batch: Dim
    hidden: Dim
    row_t: Dim
    row_b: Dim


@dataclass(frozen=True)
class Weights:
    """Parameters of one direction, as graph values; biases may be None."""

    input: Any
    hidden: Any
    input_bias: Any
    hidden_bias: Any


def units(ctx: LoweringContext, kind: str) -> tuple[Unit, Unit]:
    """(the recurrent kernels, the products they call) for the dtype tag `kind`."""
    text = _VARIANTS[kind] + ctx.header("recurrent.cpp")
    return Unit(f"recurrent_{kind}", text), Unit(f"gemm_{kind}", ctx.header(f"gemm_{kind}.cpp"))


def packed(ctx: LoweringContext, node: Node, name: str, value: Any) -> View:
    """A weight [N, K] in panels: at build time if it is constant, else by a Step."""
    known = ctx.weight(value)
    if known is not None:
        data, layout = pack_weight(known)
        return ctx.constant(f"{node.name}.{name}", data, layout=layout)
    view = ctx.view(value)
    kind = FAST[view.dtype]
    n, k = view.shape
    depth = 2 * ceildiv(k, 2) if kind == "bf16" else k
    panels = ceildiv(n, PANEL)
    result = ctx.workspace([panels, depth, PANEL], view.dtype)
    ctx.kernel(
        units(ctx, kind)[1],
        f"gc_pack_panels_{kind}",
        pointers=[view, result],
        immediates=[n, k, view.strides[0], view.strides[1], *padded((), 1), *padded((), 0)],
        reads=[view],
        writes=[result],
        range=panels,
        grain=grain_for(ctx, depth * PANEL * 8, 64),
        label=f"{node.name}.pack",
    )
    return result


def _bias(
    ctx: LoweringContext, node: Node, kind: str, layer: Layer, weights: Weights, dtype: str
) -> View:
    """fp32 [gates * H + H]: see recurrent.cpp."""
    import torch

    gates = GATES[layer.kind]
    values = (weights.input_bias, weights.hidden_bias)
    hidden = ctx.static(layer.hidden)
    if hidden is None:
        raise Refuse("a recurrent layer of symbolic width")
    known = [None if value is None else ctx.weight(value) for value in values]
    if all(value is None or data is not None for value, data in zip(values, known, strict=True)):
        a, b = (torch.zeros(gates * hidden) if d is None else d.float() for d in known)
        tail = torch.zeros(hidden)
        if layer.kind == "gru":
            tail = b[-hidden:]
            b = torch.cat([b[:-hidden], torch.zeros(hidden)])
        return ctx.constant(f"{node.name}.bias", torch.cat([a + b, tail]))
    zero = None
    views = []
    for value in values:
        if value is None and zero is None:
            empty = torch.zeros(gates * hidden, dtype=getattr(torch, dtype))
            zero = ctx.constant(f"{node.name}.zero", empty)
        views.append(zero if value is None else ctx.contiguous(value))
    result = ctx.workspace([(gates + 1) * hidden], "float32")
    pointers = [view for view in views if view is not None]
    ctx.kernel(
        units(ctx, kind)[0],
        f"gc_recurrent_bias_{kind}",
        pointers=[*pointers, result],
        immediates=[gates, hidden, int(layer.kind == "gru")],
        reads=pointers,
        writes=[result],
        range=1,
        label=f"{node.name}.bias",
        units=[units(ctx, kind)[1]],
    )
    return result


def _project(
    ctx: LoweringContext, node: Node, kind: str, x: View, w: View, bias: View, n: Dim, rows: Dim
) -> View:
    """fp32 [rows, n] = x [rows, I] w^T + bias."""
    k = x.shape[-1]
    out = ctx.workspace([rows, n], "float32")
    immediates: list[Dim] = [
        rows, n, k, *padded((), 1), k, 1, *padded((), 0), 0, *padded((), 0),
        0, 0, 1, *padded((), 0),
    ]  # fmt: skip
    recurrent, gemm = units(ctx, kind)
    known = ctx.static(rows)
    block = BLOCK_ROWS if known is None else min(BLOCK_ROWS, max(known, 1))
    ctx.kernel(
        recurrent,
        f"gc_recurrent_project_{kind}",
        pointers=[x, w, bias, out],
        immediates=immediates,
        reads=[x, w, bias],
        writes=[out],
        range=ceildiv(rows, BLOCK_ROWS) * ceildiv(n, PANEL),
        grain=grain_for(ctx, block * PANEL * k, 8),
        scratch=gemm_scratch(k, block),
        label=f"{node.name}.project",
        flops=2 * rows * n * k,
        units=[gemm],
    )
    return out


def emit_layer(
    ctx: LoweringContext,
    node: Node,
    layer: Layer,
    x: View,
    weights: Sequence[Weights],
    start: tuple[View, View],
    out: View,
    last: tuple[View, View],
) -> None:
    """One layer, both directions if there are two `weights`.

    x is contiguous with rows of I items; out has rows of directions * H items in the same order.
    `start` and `last` are (h, c) [directions, batch, H]; for cells without c both are h.
    """
    if x.dtype not in FAST:
        raise Refuse(f"a recurrent layer of {x.dtype}")
    kind = FAST[x.dtype]
    n = GATES[layer.kind] * layer.hidden
    rows = layer.steps * layer.batch
    pointers = [out, *start, *last]
    reads: list[View] = list(start)
    for each in weights:
        if ctx.view(each.input).dtype != x.dtype:
            raise Refuse(f"a recurrent layer of {x.dtype} with weights of another dtype")
        bias = _bias(ctx, node, kind, layer, each, x.dtype)
        w_in = packed(ctx, node, "w_ih", each.input)
        projected = _project(ctx, node, kind, x, w_in, bias, n, rows)
        w_hidden = packed(ctx, node, "w_hh", each.hidden)
        pointers += [projected, w_hidden, bias]
        reads += [projected, w_hidden, bias]
    count = len(weights)
    recurrent, gemm = units(ctx, kind)
    h = layer.hidden
    ctx.kernel(
        recurrent,
        f"gc_{layer.kind}_{kind}",
        pointers=pointers,
        immediates=[
            layer.steps, layer.batch, h, count,
            layer.row_t * n, layer.row_b * n, layer.row_t * count * h, layer.row_b * count * h,
        ],
        reads=reads,
        writes=[out, *last],
        range=count * ceildiv(layer.batch, ROWS),
        scratch=4 * ROWS * (n + 2 * h) + 64 + gemm_scratch(h, ROWS),
        label=f"{node.name}.{layer.kind}",
        flops=2 * count * rows * n * h,
        units=[gemm],
    )  # fmt: skip


def _part(view: View, layer: int, directions: int) -> View:
    """The states of one layer out of [layers * directions, batch, H]."""
    _, batch, hidden = view.shape
    return view.with_(
        shape=(directions, batch, hidden), offset=view.offset + layer * directions * batch * hidden
    )


@rule(
    "aten.lstm.input",
    "aten.gru.input",
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
    "graphc.lstm.default",
    "graphc.gru.default",
)
def recurrent(ctx: LoweringContext, node: Node) -> None:
    """input [T, B, I] (or [B, T, I]) -> (output [T, B, D*H], h_n (, c_n) [L*D, B, H])."""
    kind = str(node.op).split(".")[1]
    count, directions = node.argument("num_layers"), 1 + int(bool(node.argument("bidirectional")))
    first = bool(node.argument("batch_first"))
    if node.argument("train") and node.argument("dropout") and count > 1:
        raise Refuse("dropout between recurrent layers in training mode")
    x = ctx.contiguous(node.argument("input"))
    if len(x.shape) != 3:
        raise Refuse("a recurrent layer without a batch dimension")
    hx = node.argument("hx")
    start = [ctx.contiguous(value) for value in (hx if kind == "lstm" else [hx])]
    per = 4 if node.argument("has_biases") else 2
    params = node.argument("params")
    if kind == "lstm" and (len(params) != per * count * directions or len(start) != 2):
        raise Refuse("an LSTM with projections")
    if x.dtype not in FAST:
        raise Refuse(f"a recurrent layer of {x.dtype}")
    made = ctx.outputs(node)
    out, last = made[0], list(made[1:])
    batch, steps = (x.shape[0], x.shape[1]) if first else (x.shape[1], x.shape[0])
    hidden = start[0].shape[-1]
    row_t, row_b = (1, steps) if first else (batch, 1)
    layer = Layer(kind, steps, batch, hidden, row_t, row_b)
    for index in range(count):
        weights = []
        for d in range(directions):
            own = list(params[per * (index * directions + d) :][:per])
            weights.append(Weights(*own, *([None] * (4 - per))))
        target = out
        if index < count - 1:
            target = ctx.workspace([*x.shape[:2], directions * hidden], x.dtype)
        states = [_part(view, index, directions) for view in start]
        ends = [_part(view, index, directions) for view in last]
        emit_layer(
            ctx, node, layer, x, weights,
            (states[0], states[-1]), target, (ends[0], ends[-1]),
        )  # fmt: skip
        x = target


@rule(
    "aten.lstm_cell.default",
    "aten.gru_cell.default",
    "aten.rnn_tanh_cell.default",
    "aten.rnn_relu_cell.default",
)
def cell(ctx: LoweringContext, node: Node) -> None:
    """One step: input [B, I], h (, c) [B, H] -> h (, c)."""
    kind = str(node.op).removeprefix("aten.").removesuffix("_cell.default")
    x = ctx.contiguous(node.argument("input"))
    hx = node.argument("hx")
    start = [ctx.contiguous(value) for value in (hx if kind == "lstm" else [hx])]
    if len(x.shape) != 2:
        raise Refuse("a recurrent cell without a batch dimension")
    if x.dtype not in FAST:
        raise Refuse(f"a recurrent layer of {x.dtype}")
    batch, hidden = start[0].shape
    hidden_out, *cell_out = ctx.outputs(node)
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    weights = Weights(*(node.argument(name) for name in names))
    copy = ctx.workspace([batch, hidden], x.dtype)
    last = (copy, cell_out[0] if cell_out else copy)
    layer = Layer(kind, 1, batch, hidden, batch, 1)
    emit_layer(ctx, node, layer, x, [weights], (start[0], start[-1]), hidden_out, last)
