"""What lowering does with a node: a view, a loop-nest expression, a reduction, a template, or a
fallback to torch."""

from __future__ import annotations

from typing import Any

import sympy

from graphc.ir.graph import Node, Value, map_tree
from graphc.ir.types import TensorType
from graphc.lowering import pointwise
from graphc.lowering.context import RULES

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "transpose.int",
        "t.default", "expand.default", "slice.Tensor", "select.int", "alias.default",
        "detach.default", "unfold.default", "diagonal.default", "as_strided.default",
        "flatten.using_ints", "lift_fresh_copy.default", "_reshape_alias.default",
        "view_as.default", "expand_as.default", "broadcast_to.default", "movedim.int",
        "swapaxes.default", "unflatten.int", "narrow.default",
    )
)  # fmt: skip
CREATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "full.default", "full_like.default", "scalar_tensor.default", "zeros.default",
        "ones.default", "zeros_like.default", "ones_like.default", "empty.memory_format",
        "arange.start_step", "arange.default", "arange.start", "new_full.default",
        "new_zeros.default", "new_ones.default",
    )
) | {"prims.iota.default"}  # fmt: skip
#: operator -> reduction kind; the kept results in order
REDUCTIONS = {
    "aten.sum.dim_IntList": "sum", "aten.sum.default": "sum", "aten.mean.dim": "mean",
    "aten.mean.default": "mean", "aten.amax.default": "max", "aten.amin.default": "min",
    "aten.max.default": "max", "aten.min.default": "min", "aten.prod.dim_int": "prod",
    "aten.prod.default": "prod", "aten.any.default": "any", "aten.any.dim": "any",
    "aten.any.dims": "any", "aten.all.default": "all", "aten.all.dim": "all",
    "aten.all.dims": "all", "aten.argmax.default": "argmax", "aten.argmin.default": "argmin",
    "aten.max.dim": "max", "aten.min.dim": "min",
}  # fmt: skip
#: handled by graphc.lowering.lower itself
COPIES = frozenset(("aten.cat.default", "aten.constant_pad_nd.default"))


def native_operators() -> frozenset[str]:
    """Operators that must reach lowering undecomposed."""
    from graphc.lowering.expand import EXPANSIONS
    from graphc.lowering.templates import load_rules

    load_rules()
    return (
        frozenset(pointwise.ROWS) | VIEWS | CREATIONS | frozenset(REDUCTIONS) | COPIES
        | frozenset(RULES) | frozenset(EXPANSIONS)
    )  # fmt: skip


def kind(node: Node) -> tuple[str, str]:
    """(kind, reason): kind is "view", "create", "pointwise", "reduce", "copy", "template" or
    "fallback" (with the reason)."""
    reason = _dtypes(node) or _data_sizes(node)
    name = node.target
    if reason:
        return "fallback", reason
    if name in VIEWS:
        return "view", ""
    if name in CREATIONS:
        return "create", ""
    if name in pointwise.ROWS:
        reason = pointwise.supports(node)
        return ("pointwise", "") if not reason else ("fallback", reason)
    if name in REDUCTIONS:
        reason = _reduction(node)
        return ("reduce", "") if not reason else ("fallback", reason)
    if name in COPIES:
        return "copy", ""
    if name in RULES:
        return "template", ""
    return "fallback", "no native kernel for this operator"


def _dtypes(node: Node) -> str:
    for value in (*node.inputs(), *node.outputs):
        if not isinstance(value.type, TensorType):
            return "a number read from data takes part"
        if value.type.dtype not in pointwise.STORAGE:
            return f"no kernels for {value.type.dtype}"
    return ""


def _data_sizes(node: Node) -> str:
    """A result size that no operand or argument tells is read off torch's result."""
    made = {s for v in node.outputs for d in v.type.shape for s in getattr(d, "free_symbols", ())}
    if not made:
        return ""
    known: set[sympy.Basic] = set()
    for value in node.inputs():
        for size in value.type.shape:
            known |= getattr(size, "free_symbols", set())

    def collect(item: Any) -> Any:
        if isinstance(item, sympy.Expr):
            known.update(item.free_symbols)
        return item

    map_tree(collect, (node.args, dict(node.kwargs)))
    return "" if made <= known else "the size of its result depends on data"


def _reduction(node: Node) -> str:
    source = node.args[0]
    assert isinstance(source, Value)
    if node.target in ("aten.argmax.default", "aten.argmin.default"):
        if node.argument("dim") is None and len(source.type.shape) != 1:
            return ""
    if any(isinstance(d, int) and d == 0 for d in source.type.shape):
        return "" if REDUCTIONS[node.target] in ("sum", "prod", "any", "all") else "empty input"
    return ""


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dimensions of its operand that a reduction removes."""
    rank = len(node.args[0].type.shape)
    try:
        dims = node.argument("dim")
    except KeyError:
        dims = None
    if dims is None or dims == () or dims == []:
        return tuple(range(rank))
    if isinstance(dims, (int, sympy.Integer)):
        dims = (int(dims),)
    return tuple(sorted({int(d) % max(rank, 1) for d in dims})) if rank else ()
