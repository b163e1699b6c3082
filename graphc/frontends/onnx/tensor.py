"""Operators that gather, create, sort or pad elements."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED, torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Int, Ints, Known, Raw, Static, Tensor, int_items

F = torch.nn.functional


def wrapped(indices: Tensor, size: Any) -> Tensor:
    """Indices with negative ones counted from the end."""
    return torch.where(indices < 0, indices + size, indices)


def index_tensor(node: OnnxNode, indices: Any, size: Any) -> Tensor:
    """Indices as int64 in [0, size), without arithmetic if they are known not to be negative."""
    tensor = node.tensor(indices).to(torch.int64)
    known = isinstance(indices, Static) and indices.concrete
    return tensor if known and all(i >= 0 for i in indices.flat) else wrapped(tensor, size)


@operator("Gather")
def gather(node: OnnxNode, x: Tensor, indices: Raw, *, axis: int = 0) -> Tensor:
    axis = axis % x.ndim
    if isinstance(indices, Static) and not indices.shape:
        return torch.select(x, axis, indices.flat[0])
    where = [slice(None)] * axis + [node.tensor(indices)]
    return unsigned.moved(x, lambda t: t[tuple(where)])


@operator("GatherElements")
def gather_elements(node: OnnxNode, x: Tensor, indices: Raw, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, index_tensor(node, indices, x.shape[axis]))


@operator("GatherND")
def gather_nd(node: OnnxNode, x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    places = [indices[..., i] for i in range(indices.shape[-1])]
    rank = indices.ndim - 1
    batch: list[Tensor] = []
    for axis in range(batch_dims):
        shape = [1] * rank
        shape[axis] = -1
        batch.append(torch.arange(x.shape[axis]).reshape(shape))
    return x[tuple(batch + places)]


@operator("ConstantOfShape")
def constant_of_shape(node: OnnxNode, shape: Ints, *, value: Tensor | None = None) -> Tensor:
    if value is None:
        return torch.full(shape, 0.0, dtype=torch.float32)
    return torch.full(shape, Static.of_tensor(value).flat[0], dtype=value.dtype)


@operator("Range")
def range_(
    node: OnnxNode, start: Known, limit: Known, delta: Known, *, stash_type: int | None = None
) -> Tensor:
    dtype = start.dtype
    if dtype.is_floating_point:
        if all(isinstance(v, Static) and v.concrete for v in (start, limit, delta)):
            first, last, step = (v.flat[0] for v in (start, limit, delta))
        elif torch.compiler.is_exporting():
            raise node.refuse("a floating point Range must be known when the model is captured")
        else:
            first, last, step = (node.tensor(v).item() for v in (start, limit, delta))
        count = max(-int(-((last - first) / step) // 1), 0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values: Tensor = first + torch.arange(count, dtype=wide) * step
        return values.to(dtype)
    first, last, step = (
        int_items(v, node.where, what)[0]
        for v, what in ((start, "start"), (limit, "limit"), (delta, "delta"))
    )
    if isinstance(first, int) and isinstance(step, int) and first == 0 and step == 1:
        if isinstance(last, int):
            last = max(last, 0)
        return torch.arange(last, dtype=dtype)
    if all(isinstance(v, int) for v in (first, last, step)) and (last - first) * step <= 0:
        return torch.empty(0, dtype=dtype)
    return torch.arange(first, last, step, dtype=dtype)


@operator("EyeLike")
def eye_like(node: OnnxNode, x: Raw, *, k: int = 0, dtype: int | None = None) -> Tensor:
    rows, columns = x.shape
    result = x.dtype if dtype is None else torch_dtype(dtype, node.where)
    mask = torch.arange(rows).unsqueeze(1) + k == torch.arange(columns)
    return mask.to(result)


@operator("OneHot")
def one_hot(
    node: OnnxNode, indices: Tensor, depth: Int, values: Tensor, *, axis: int = -1
) -> Tensor:
    axis = axis % (indices.ndim + 1)
    places = torch.unsqueeze(wrapped(unsigned.widen(indices), depth), axis)
    shape = [1] * places.ndim
    shape[axis] = depth
    mask = places == torch.arange(depth).reshape(shape)
    return torch.where(mask, values[1], values[0])


@operator("Trilu")
def trilu(node: OnnxNode, x: Tensor, k: Int | None = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else k
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@operator("NonZero")
def nonzero(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.nonzero(unsigned.as_signed(x)).transpose(0, 1)


@operator("Compress")
def compress(node: OnnxNode, x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    places = torch.nonzero(condition).reshape(-1)
    if axis is None:
        return x.reshape(-1)[places]
    return torch.index_select(x, axis, places)


@operator("Unique")
def unique(
    node: OnnxNode, x: Tensor, *, axis: int | None = None, sorted: int = 1
) -> tuple[Tensor, ...]:
    flat = x.reshape(-1) if axis is None else x
    dim = 0 if axis is None else axis
    values, inverse, counts = torch.unique(
        flat, sorted=True, return_inverse=True, return_counts=True, dim=dim
    )
    positions = torch.arange(flat.shape[dim])
    first = torch.full_like(counts, flat.shape[dim]).scatter_reduce(0, inverse, positions, "amin")
    if not sorted:
        order = torch.argsort(first)
        values = torch.index_select(values, dim, order)
        first, counts = first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts


@operator("TopK")
def top_k_attribute(node: OnnxNode, x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, ...]:
    return top_k(node, x, k, axis=axis)


@operator("TopK", since=10)
def top_k(
    node: OnnxNode, x: Tensor, k: Int, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, ...]:
    # a stable sort, since equal values come in the order of their indices
    source = unsigned.ordered(x) if x.dtype in WIDE_UNSIGNED else x
    values, indices = torch.sort(source, dim=axis, descending=bool(largest), stable=True)
    values, indices = torch.narrow(values, axis, 0, k), torch.narrow(indices, axis, 0, k)
    return (unsigned.restore(values, x.dtype) if x.dtype in WIDE_UNSIGNED else values), indices


@operator("ReverseSequence")
def reverse_sequence(
    node: OnnxNode, x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    steps = torch.arange(x.shape[time_axis]).unsqueeze(1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)  # [time, batch]
    if time_axis > batch_axis:
        source = source.transpose(0, 1)
    source = source.reshape(list(source.shape) + [1] * (x.ndim - 2))
    return torch.gather(x, time_axis, source.expand(x.shape))


@operator("Pad")
def pad_attributes(
    node: OnnxNode,
    x: Tensor,
    *,
    pads: list[int] | None = None,
    paddings: list[int] | None = None,
    mode: str = "constant",
    value: float = 0.0,
) -> Tensor:
    amounts = pads if pads is not None else paddings
    if amounts is None:
        raise node.invalid("Pad without pads")
    return padded(node, x, amounts, list(range(x.ndim)), mode, value)


@operator("Pad", since=11)
def pad(
    node: OnnxNode,
    x: Tensor,
    pads: Ints,
    value: Raw = None,
    axes: Ints | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    fill: Any = 0
    if value is not None and mode == "constant":
        if isinstance(value, Static) and value.concrete:
            fill = value.flat[0]
        else:
            fill = node.tensor(value).reshape(())
    places = list(range(x.ndim)) if axes is None else [int(a) % x.ndim for a in axes]
    return padded(node, x, pads, places, mode, fill)


def padded(
    node: OnnxNode, x: Tensor, pads: list[int], axes: list[int], mode: str, value: Any
) -> Tensor:
    """`x` padded before and after each of `axes`; negative amounts crop."""
    count = len(axes)
    if len(pads) != 2 * count:
        raise node.invalid(f"{2 * count} pads expected, found {len(pads)}")
    amounts = {a: (pads[i], pads[i + count]) for i, a in enumerate(axes)}
    amounts = {a: p for a, p in amounts.items() if not (_is(p[0], 0) and _is(p[1], 0))}
    if not amounts:
        return x
    if mode == "constant":
        flat: list[int] = []
        for axis in range(x.ndim - 1, min(amounts) - 1, -1):
            flat.extend(amounts.get(axis, (0, 0)))
        if x.dtype in WIDE_UNSIGNED:
            raise node.refuse(f"Pad of {x.dtype} is not supported")
        if isinstance(value, torch.Tensor):
            inside = F.pad(torch.ones_like(x, dtype=torch.bool), flat, "constant", False)
            return torch.where(inside, F.pad(x, flat), value)
        return F.pad(x, flat, "constant", bool(value) if x.dtype == torch.bool else value)
    if mode not in ("reflect", "edge", "wrap"):
        raise node.refuse(f"Pad mode {mode!r} is not supported")
    if _native(x, amounts, mode):
        flat = []
        for axis in range(x.ndim - 1, min(amounts) - 1, -1):
            flat.extend(amounts.get(axis, (0, 0)))
        return F.pad(x, flat, "replicate" if mode == "edge" else "reflect")
    for axis, (before, after) in amounts.items():
        size = x.shape[axis]
        places = torch.arange(-before, size + after)
        if mode == "edge":
            places = torch.clamp(places, 0, size - 1)
        elif mode == "wrap":
            places = torch.remainder(places, size)
        elif _is(size, 1):
            places = torch.zeros_like(places)
        else:
            places = torch.remainder(places, 2 * (size - 1))
            places = torch.where(places < size, places, 2 * (size - 1) - places)
        x = torch.index_select(x, axis, places)
    return x


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _native(x: Tensor, amounts: dict[int, tuple[Any, Any]], mode: str) -> bool:
    """True if F.pad does this reflection or replication."""
    first = min(amounts)
    spatial = x.ndim - first
    if mode == "wrap" or not x.is_floating_point() or first < 1 or spatial > 3 or x.ndim > 5:
        return False
    if x.ndim not in (spatial + 1, spatial + 2):
        return False
    for axis, pair in amounts.items():
        if not all(isinstance(p, int) and p >= 0 for p in pair):
            return False
        size = x.shape[axis]
        if mode == "reflect" and isinstance(size, int) and max(pair) >= size:
            return False
    return True


@operator("CenterCropPad")
def center_crop_pad(
    node: OnnxNode, x: Tensor, shape: Ints, *, axes: list[int] | None = None
) -> Tensor:
    places = list(range(x.ndim)) if axes is None else [a % x.ndim for a in axes]
    for axis, target in zip(places, shape, strict=True):
        size = x.shape[axis]
        if target <= size:
            x = torch.narrow(x, axis, (size - target) // 2, target)
        else:
            before = (target - size) // 2
            x = padded(node, x, [before, target - size - before], [axis], "constant", 0)
    return x
