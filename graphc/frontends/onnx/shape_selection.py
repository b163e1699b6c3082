"""Rules that select, join and reduce items of `Static` values with symbolic lengths."""

from __future__ import annotations

import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import static
from graphc.frontends.onnx.shape_arithmetic import array_of, is_whole, whole
from graphc.frontends.onnx.values import STATIC_LIMIT, Static, int_items


@static("Identity")
def identity(node: OnnxNode, x: Static) -> Static:
    return x


@static("Shape")
def shape_of(node: OnnxNode, x: Static, *, start: int = 0, end: int | None = None) -> Static:
    rank = len(x.shape)
    first, last, _ = slice(start, end).indices(rank)
    return Static.of(list(x.shape)[first:last])


@static("Size")
def size_of(node: OnnxNode, x: Static) -> Static:
    return Static.of(int(x.items.size))


@static("Gather")
def gather(node: OnnxNode, x: Static, indices: Static, *, axis: int = 0) -> Any:
    if not indices.concrete or not x.shape:
        return NotImplemented
    return Static(_as_array(np.take(x.items, indices.items.astype(np.int64), axis)), x.dtype)


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return array_of([value], ())


@static("Slice")
def slice_(node: OnnxNode, x: Static, *inputs: Any, **attributes: Any) -> Any:
    if attributes:
        inputs = tuple(
            None if attributes.get(k) is None else Static.of(attributes[k])
            for k in ("starts", "ends", "axes")
        )
    if any(v is not None and not v.concrete for v in inputs):
        return NotImplemented
    lists = [None if v is None else v.flat for v in inputs] + [None] * 4
    starts, ends = lists[0], lists[1]
    if starts is None or ends is None:
        return NotImplemented
    axes = lists[2] or list(range(len(starts)))
    steps = lists[3] or [1] * len(starts)
    places = [slice(None)] * len(x.shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = x.shape[axis]
        stop = None if step < 0 and end < -size else end
        places[axis] = slice(start, stop, step)
    return Static(x.items[tuple(places)], x.dtype)


@static("Concat")
def concat(node: OnnxNode, *values: Static, axis: int = 1) -> Static:
    return Static(np.concatenate([v.items for v in values], axis), values[0].dtype)


def _axes(node: OnnxNode, given: Any, attributes: dict[str, Any]) -> list[int] | None:
    if given is not None:
        return [int(a) for a in given.flat]
    return attributes.get("axes")


@static("Squeeze")
def squeeze(node: OnnxNode, x: Static, given: Any = None, **attributes: Any) -> Static:
    axes = _axes(node, given, attributes)
    items = np.squeeze(x.items, None if axes is None else tuple(axes))
    return Static(_as_array(items), x.dtype)


@static("Unsqueeze")
def unsqueeze(node: OnnxNode, x: Static, given: Any = None, **attributes: Any) -> Static:
    axes = _axes(node, given, attributes) or []
    return Static(np.expand_dims(x.items, tuple(axes)), x.dtype)


@static("Reshape")
def reshape(node: OnnxNode, x: Static, shape: Any = None, **attributes: Any) -> Any:
    if shape is None or not shape.concrete or attributes.get("allowzero"):
        return NotImplemented
    sizes = [x.shape[i] if s == 0 else s for i, s in enumerate(shape.flat)]
    return Static(x.items.reshape(sizes), x.dtype)


@static("Transpose")
def transpose(node: OnnxNode, x: Static, *, perm: list[int] | None = None) -> Static:
    return Static(x.items.transpose(perm), x.dtype)


@static("Flatten")
def flatten(node: OnnxNode, x: Static, *, axis: int = 1) -> Static:
    first = int(np.prod(x.shape[:axis], dtype=np.int64))
    return Static(x.items.reshape(first, -1), x.dtype)


@static("Expand")
def expand(node: OnnxNode, x: Static, shape: Static) -> Any:
    if not shape.concrete or int(np.prod(shape.flat)) > STATIC_LIMIT:
        return NotImplemented
    target = np.broadcast_shapes(x.shape, tuple(int(s) for s in shape.flat))
    return Static(np.broadcast_to(x.items, target), x.dtype)


@static("Split")
def split(node: OnnxNode, x: Static, sizes: Any = None, **attributes: Any) -> Any:
    axis = attributes.get("axis", 0)
    if sizes is None and "split" in attributes:
        sizes = Static.of(attributes["split"])
    if sizes is None:
        count = attributes.get("num_outputs") or len(node.outputs)
        each = -(-x.shape[axis] // count)
        cuts = [each * (i + 1) for i in range(count - 1)]
    elif sizes.concrete:
        cuts = list(np.cumsum(sizes.flat)[:-1])
    else:
        return NotImplemented
    return tuple(Static(part, x.dtype) for part in np.split(x.items, cuts, axis))


@static("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def reduce(node: OnnxNode, x: Static, given: Any = None, **attributes: Any) -> Any:
    if not all(is_whole(i) for i in x.flat) or len(x.shape) != 1:
        return NotImplemented
    if attributes.get("noop_with_empty_axes"):
        return NotImplemented
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "ReduceProd": python.mul,
        "ReduceSum": python.add,
        "ReduceMax": torch.sym_max,
        "ReduceMin": torch.sym_min,
    }
    items = [whole(i) for i in x.flat]
    total = items[0]
    for item in items[1:]:
        total = combine[node.op_type](total, item)
    return Static(array_of([total], (1,) if attributes.get("keepdims", 1) else ()), x.dtype)


@static("CumSum")
def cumulative_sum(node: OnnxNode, x: Static, axis: Any, **attributes: Any) -> Any:
    if any(attributes.values()) or len(x.shape) != 1:
        return NotImplemented
    items: list[Any] = []
    for item in x.flat:
        items.append(item if not items else items[-1] + item)
    return Static(array_of(items, x.shape), x.dtype)


@static("ScatterElements", "ScatterND")
def scatter(node: OnnxNode, x: Static, indices: Static, updates: Static, **attributes: Any) -> Any:
    if attributes.get("reduction", "none") != "none" or len(x.shape) != 1 or not indices.concrete:
        return NotImplemented
    items = x.items.copy()
    for place, value in zip(indices.flat, updates.flat, strict=True):
        items[int(place)] = value
    return Static(items, x.dtype)


@static("Tile")
def tile(node: OnnxNode, x: Static, repeats: Static) -> Any:
    if not repeats.concrete:
        return NotImplemented
    counts = int_items(repeats, node.where, "repeats")
    return Static(np.tile(x.items, counts), x.dtype)
