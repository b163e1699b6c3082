"""Composite operators spelled out in primitive ones, just before grouping.

The passes see `aten.layer_norm`; the loop generator wants its parts, which it fuses with whatever
stands around them. Statistics are computed in float32 (or float64), as torch does.
Each expansion is ordinary graph rewriting, so it runs in eager torch and is tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import Dim, as_dim, product

aten = torch.ops.aten
_PACKED = (torch.float32, torch.float16, torch.bfloat16)
Expansion = Callable[[Builder, Node], Sequence[Value] | None]
EXPANSIONS: dict[str, Expansion] = {}


def expansion(*names: str) -> Callable[[Expansion], Expansion]:
    """Registers an expansion; it returns one new Value per result, or None to leave the node."""

    def register(function: Expansion) -> Expansion:
        for name in names:
            EXPANSIONS[f"aten.{name}"] = function
        return function

    return register


def expand(graph: Graph) -> Graph:
    """Replaces every composite node that has an expansion."""
    builder = Builder(graph)
    for node in graph.nodes:
        builder.location, builder.module = node.location, node.module
        rule = EXPANSIONS.get(node.target)
        made = rule(builder, node) if rule else None
        if made is None:
            builder.copy(node)
            continue
        for old, new in zip(node.outputs, made, strict=True):
            assert old.type.dtype == new.type.dtype, (node, old.type, new.type)
            builder.replace(old, new)
    return builder.finish()


def _wide(builder: Builder, value: Value) -> Value:
    """float16/bfloat16 as float32; wider floats unchanged."""
    value = builder.of(value)
    if value.type.dtype in ("float16", "bfloat16"):
        return _cast(builder, value, torch.float32)
    return value


def _cast(builder: Builder, value: Value, dtype: torch.dtype) -> Value:
    value = builder.of(value)
    if value.type.dtype == str(dtype).removeprefix("torch."):
        return value
    return builder.call1(aten._to_copy.default, value, dtype=dtype)


def _like(builder: Builder, value: Value, node: Node, index: int = 0) -> Value:
    return _cast(builder, value, getattr(torch, node.outputs[index].type.dtype))


def _tail(rank: int, count: int) -> tuple[int, ...]:
    return tuple(range(rank - count, rank))


def _normalise(
    b: Builder, x: Value, dims: Sequence[int], eps: float, *, centre: bool
) -> tuple[Value, Value | None, Value]:
    """((x - mean) * rstd, mean, rstd) over dims, all kept; without centring: x * rms^-1."""
    mean = None
    if centre:
        mean = b.call1(aten.mean.dim, x, tuple(dims), True)
        x = b.call1(aten.sub.Tensor, x, mean)
    square = b.call1(aten.mul.Tensor, x, x)
    variance = b.call1(aten.mean.dim, square, tuple(dims), True)
    rstd = b.call1(aten.rsqrt.default, b.call1(aten.add.Scalar, variance, eps))
    return b.call1(aten.mul.Tensor, x, rstd), mean, rstd


def _affine(b: Builder, x: Value, weight: Value | None, bias: Value | None) -> Value:
    if weight is not None:
        x = b.call1(aten.mul.Tensor, x, _wide(b, weight))
    if bias is not None:
        x = b.call1(aten.add.Tensor, x, _wide(b, bias))
    return x


@expansion("layer_norm.default")
def _layer_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x = _wide(b, node.args[0])
    dims = _tail(len(x.type.shape), len(node.args[1]))
    y, _, _ = _normalise(b, x, dims, float(node.argument("eps")), centre=True)
    y = _affine(b, y, node.argument("weight"), node.argument("bias"))
    return [_like(b, y, node)]


@expansion("native_layer_norm.default")
def _native_layer_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x = _wide(b, node.args[0])
    dims = _tail(len(x.type.shape), len(node.args[1]))
    y, mean, rstd = _normalise(b, x, dims, float(node.argument("eps")), centre=True)
    assert mean is not None
    y = _affine(b, y, node.argument("weight"), node.argument("bias"))
    return [_like(b, y, node), _like(b, mean, node, 1), _like(b, rstd, node, 2)]


@expansion("rms_norm.default")
def _rms_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x = _wide(b, node.args[0])
    dims = _tail(len(x.type.shape), len(node.args[1]))
    eps = node.argument("eps")
    if eps is None:
        eps = torch.finfo(getattr(torch, node.outputs[0].type.dtype)).eps
    y, _, _ = _normalise(b, x, dims, float(eps), centre=False)
    return [_like(b, _affine(b, y, node.argument("weight"), None), node)]


@expansion("_native_batch_norm_legit_no_training.default")
def _batch_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x, weight, bias, mean, var = (b.of(a) for a in node.args[:5])
    rank = len(x.type.shape)
    shape = (1, -1, *[1] * (rank - 2)) if rank > 1 else (-1,)

    def channels(value: Value) -> Value:
        return b.call1(aten.view.default, value, shape)

    wide = _wide(b, x)
    rstd = b.call1(
        aten.rsqrt.default, b.call1(aten.add.Scalar, _wide(b, var), float(node.argument("eps")))
    )
    scale = rstd if weight is None else b.call1(aten.mul.Tensor, _wide(b, weight), rstd)
    shift = b.call1(aten.neg.default, b.call1(aten.mul.Tensor, _wide(b, mean), scale))
    if bias is not None:
        shift = b.call1(aten.add.Tensor, shift, _wide(b, bias))
    y = b.call1(aten.add.Tensor, b.call1(aten.mul.Tensor, wide, channels(scale)), channels(shift))
    empty = b.call1(aten.full.default, (0,), 0.0, dtype=getattr(torch, node.outputs[1].type.dtype))
    return [_like(b, y, node), empty, empty]


@expansion("_native_batch_norm_legit.no_stats")
def _batch_statistics(b: Builder, node: Node) -> Sequence[Value] | None:
    """Normalised by the batch's own statistics: what instance_norm is made of."""
    x, weight, bias = node.args[:3]
    if not node.argument("training") or _empty(node):
        return None
    x = _wide(b, x)
    rank = len(x.type.shape)
    shape = (-1, *[1] * (rank - 2))
    weight, bias = (
        None if v is None else b.call1(aten.view.default, b.of(v), shape) for v in (weight, bias)
    )
    dims = (0, *range(2, rank))
    y, mean, rstd = _normalise(b, x, dims, float(node.argument("eps")), centre=True)
    y = _affine(b, y, weight, bias)
    assert mean is not None
    saved = [b.call1(aten.view.default, v, (-1,)) for v in (mean, rstd)]
    return [_like(b, v, node, k) for k, v in enumerate((y, *saved))]


@expansion("native_group_norm.default")
def _group_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x, weight, bias, n, c, hw, groups, eps = (b.of(a) for a in node.args[:8])
    wide = _wide(b, x)
    shape = wide.type.shape
    split = b.call1(aten.view.default, wide, (n, groups, c // groups, hw))
    y, mean, rstd = _normalise(b, split, (2, 3), float(eps), centre=True)
    assert mean is not None
    y = b.call1(aten.view.default, y, tuple(shape))
    spread = (1, c, *[1] * (len(shape) - 2))

    def channels(value: Value | None) -> Value | None:
        return None if value is None else b.call1(aten.view.default, value, spread)

    y = _affine(b, y, channels(weight), channels(bias))
    flat = tuple(node.outputs[1].type.shape)
    stats = [b.call1(aten.view.default, v, flat) for v in (mean, rstd)]
    return [_like(b, y, node), _like(b, stats[0], node, 1), _like(b, stats[1], node, 2)]


@expansion("group_norm.default")
def _group_norm_composite(b: Builder, node: Node) -> Sequence[Value] | None:
    x = _wide(b, node.args[0])
    groups = int(node.args[1])
    shape = x.type.shape
    channels = shape[1]
    split = b.call1(
        aten.view.default, x, (shape[0], groups, channels // groups, product(shape[2:]))
    )
    y, _, _ = _normalise(b, split, (2, 3), float(node.argument("eps")), centre=True)
    y = b.call1(aten.view.default, y, tuple(shape))
    spread = (1, channels, *[1] * (len(shape) - 2))

    def spread_out(value: Any) -> Value | None:
        return None if value is None else b.call1(aten.view.default, b.of(value), spread)

    y = _affine(b, y, spread_out(node.argument("weight")), spread_out(node.argument("bias")))
    return [_like(b, y, node)]


def _softmax_parts(b: Builder, node: Node) -> tuple[Value, Value, Value] | None:
    x = b.of(node.args[0])
    if not x.type.shape:
        return None
    dtype = node.kwargs.get("dtype")
    if dtype is not None:
        x = _cast(b, x, dtype)
    elif x.type.dtype not in ("float32", "float64", "float16", "bfloat16"):
        x = _like(b, x, node)
    x = _wide(b, x)
    dim = int(node.args[1]) % len(x.type.shape)
    top = b.call1(aten.amax.default, x, (dim,), True)
    shifted = b.call1(aten.sub.Tensor, x, top)
    exps = b.call1(aten.exp.default, shifted)
    total = b.call1(aten.sum.dim_IntList, exps, (dim,), True)
    return shifted, exps, total


@expansion("softmax.int", "_softmax.default")
def _softmax(b: Builder, node: Node) -> Sequence[Value] | None:
    parts = None if _empty(node) else _softmax_parts(b, node)
    if parts is None:
        return None
    # one quotient a row; each element is then a product, within one ulp of the quotient
    inverse = b.call1(aten.reciprocal.default, parts[2])
    return [_like(b, b.call1(aten.mul.Tensor, parts[1], inverse), node)]


@expansion("_safe_softmax.default")
def _safe_softmax(b: Builder, node: Node) -> Sequence[Value] | None:
    """softmax that gives zeros for rows of -inf only."""
    x = b.of(node.args[0])
    parts = None if _empty(node) else _softmax_parts(b, node)
    if parts is None:
        return None
    dim = int(node.args[1]) % len(x.type.shape)
    top = b.call1(aten.amax.default, _wide(b, x), (dim,), True)
    dead = b.call1(aten.eq.Scalar, top, float("-inf"))
    y = b.call1(aten.div.Tensor, parts[1], parts[2])
    zero = b.call1(aten.scalar_tensor.default, 0.0, dtype=getattr(torch, y.type.dtype))
    return [_like(b, b.call1(aten.where.self, dead, zero, y), node)]


@expansion("log_softmax.int", "_log_softmax.default")
def _log_softmax(b: Builder, node: Node) -> Sequence[Value] | None:
    parts = None if _empty(node) else _softmax_parts(b, node)
    if parts is None:
        return None
    shifted, _, total = parts
    return [_like(b, b.call1(aten.sub.Tensor, shifted, b.call1(aten.log.default, total)), node)]


def _empty(node: Node) -> bool:
    return any(d == 0 for d in node.args[0].type.shape)


@expansion("var.correction", "std.correction")
def _var(b: Builder, node: Node) -> Sequence[Value] | None:
    x = b.of(node.args[0])
    if x.type.dtype not in ("float32", "float64", "float16", "bfloat16") or _empty(node):
        return None
    wide = _wide(b, x)
    rank = len(wide.type.shape)
    dims = node.argument("dim")
    dims = tuple(range(rank)) if dims in (None, ()) else tuple(int(d) % rank for d in dims)
    if not dims:
        return None
    correction = node.argument("correction")
    correction = 1 if correction is None else correction
    count = product([wide.type.shape[d] for d in dims])
    if not isinstance(count, int) or count - correction <= 0:
        return None
    keep = bool(node.argument("keepdim"))
    mean = b.call1(aten.mean.dim, wide, dims, True)
    centred = b.call1(aten.sub.Tensor, wide, mean)
    total = b.call1(aten.sum.dim_IntList, b.call1(aten.mul.Tensor, centred, centred), dims, keep)
    y = b.call1(aten.div.Scalar, total, float(count - correction))
    if node.target.startswith("aten.std"):
        y = b.call1(aten.sqrt.default, y)
    return [_like(b, y, node)]


@expansion("var_mean.correction")
def _var_mean(b: Builder, node: Node) -> Sequence[Value] | None:
    variance = _var(b, node)
    if variance is None:
        return None
    dims = node.argument("dim")
    dims = None if dims in (None, ()) else tuple(dims)
    mean = b.call1(aten.mean.dim, _wide(b, node.args[0]), dims, bool(node.argument("keepdim")))
    return [*variance, _like(b, mean, node, 1)]


@expansion("log_sigmoid.default")
def _log_sigmoid(b: Builder, node: Node) -> Sequence[Value] | None:
    x = b.of(node.args[0])
    negative = b.call1(aten.neg.default, x)
    return [b.call1(aten.neg.default, b.call1(aten.softplus.default, negative, 1, 50))]


@expansion("stack.default")
def _stack(b: Builder, node: Node) -> Sequence[Value] | None:
    dim = int(node.argument("dim"))
    rank = len(node.outputs[0].type.shape)
    parts = tuple(b.call1(aten.unsqueeze.default, v, dim % rank) for v in node.args[0])
    return [b.call1(aten.cat.default, parts, dim % rank)]


@expansion("split_with_sizes.default", "split.Tensor", "chunk.default", "unbind.int",
           "tensor_split.sections", "split.sizes")  # fmt: skip
def _split(b: Builder, node: Node) -> Sequence[Value] | None:
    """Parts of a tensor as slices: the sizes are those of the results."""
    x = b.of(node.args[0])
    dim = node.argument("dim") % len(x.type.shape)
    if node.target == "aten.unbind.int":
        return [b.call1(aten.select.int, x, dim, k) for k in range(len(node.outputs))]
    made: list[Value] = []
    start: Dim = 0
    for value in node.outputs:
        end = as_dim(start + value.type.shape[dim])
        made.append(b.call1(aten.slice.Tensor, x, dim, start, end))
        start = end
    return made


@expansion("pad.default")
def _pad(b: Builder, node: Node) -> Sequence[Value] | None:
    if node.argument("mode") != "constant":
        return None
    value = node.argument("value")
    fill = 0.0 if value is None else value
    return [b.call1(aten.constant_pad_nd.default, node.args[0], node.args[1], fill)]


@expansion("embedding.default")
def _tied_embedding(b: Builder, node: Node) -> Sequence[Value] | None:
    """A table that is also the weight of a product is stored once, in the product's panels
    [N/32, K, 32] (or [N/32, K/2, 32, 2]): row n is read at panel n // 32, lane n % 32."""
    from graphc.lowering.templates.pack import PANEL, pack_weight

    table = node.args[0]
    weight = b.graph.weights.get(table)
    if weight is None or weight.dim() != 2 or weight.dtype not in _PACKED:
        return None
    if not any(n.target == "aten.linear.default" and n.args[1] is table for n in b.readers(table)):
        return None
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return None
    index = b.of(node.args[1])
    packed = b.weight(table.name, pack_weight(weight)[0])
    rows = b.call1(aten.transpose.int, packed, 1, 2)
    panel = b.call1(aten.bitwise_right_shift.Tensor_Scalar, index, PANEL.bit_length() - 1)
    lane = b.call1(aten.bitwise_and.Scalar, index, PANEL - 1)
    found = b.call1(aten.index.Tensor, rows, (panel, lane))
    return [b.call1(aten.view.default, found, tuple(node.outputs[0].type.shape))]


@expansion("einsum.default")
def _einsum(b: Builder, node: Node) -> Sequence[Value] | None:
    from graphc.lowering.einsum import einsum

    return einsum(b, node)


@expansion("linalg_vector_norm.default")
def _vector_norm(b: Builder, node: Node) -> Sequence[Value] | None:
    x = b.of(node.args[0])
    order = float(node.argument("ord"))
    if order not in (1.0, 2.0) or x.type.dtype not in ("float32", "float64", "bfloat16", "float16"):
        return None
    if _empty(node) or node.argument("dtype") is not None:
        return None
    wide = _wide(b, x)
    rank = len(wide.type.shape)
    dims = node.argument("dim")
    dims = tuple(range(rank)) if dims in (None, ()) else tuple(int(d) % rank for d in dims)
    keep = bool(node.argument("keepdim"))
    if order == 2.0:
        square = b.call1(aten.mul.Tensor, wide, wide)
        total = b.call1(aten.sum.dim_IntList, square, dims, keep)
        return [_like(b, b.call1(aten.sqrt.default, total), node)]
    total = b.call1(aten.sum.dim_IntList, b.call1(aten.abs.default, wide), dims, keep)
    return [_like(b, total, node)]
