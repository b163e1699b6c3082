"""Operators that write elements at computed places."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.tensor import index_tensor, wrapped
from graphc.frontends.onnx.values import Raw, Tensor, product

REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Scatter")
def scatter_legacy(
    node: OnnxNode, x: Tensor, indices: Raw, updates: Tensor, *, axis: int = 0
) -> Tensor:
    return scatter_elements(node, x, indices, updates, axis=axis)


@operator("ScatterElements")
def scatter_elements(
    node: OnnxNode,
    x: Tensor,
    indices: Raw,
    updates: Tensor,
    *,
    axis: int = 0,
    reduction: str = "none",
) -> Tensor:
    places = index_tensor(node, indices, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, places, updates)
    return torch.scatter_reduce(x, axis, places, updates, _reduce(node, reduction))


def _reduce(node: OnnxNode, reduction: str) -> str:
    if reduction not in REDUCE:
        raise node.invalid(f"unknown reduction {reduction!r}")
    return REDUCE[reduction]


@operator("ScatterND")
def scatter_nd(
    node: OnnxNode, x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none"
) -> Tensor:
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise node.refuse("the last size of ScatterND's indices must be known")
    places: list[Tensor | None] = [indices[..., i] for i in range(depth)]
    if not places:
        raise node.refuse("ScatterND with empty index tuples is not supported")
    if reduction in ("none", "add"):
        return torch.index_put(x, places, updates, accumulate=reduction == "add")
    linear: Any = 0
    for axis in range(depth):
        place = indices[..., axis]
        linear = linear * x.shape[axis] + wrapped(place, x.shape[axis])
    rows, width = product(x.shape[:depth]), product(x.shape[depth:])
    targets = linear.reshape(-1, 1).expand(-1, width)
    result = torch.scatter_reduce(
        x.reshape(rows, width), 0, targets, updates.reshape(-1, width), _reduce(node, reduction)
    )
    return result.reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(
    node: OnnxNode,
    cache: Tensor,
    update: Tensor,
    starts: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    axis = axis % cache.ndim
    size, steps = cache.shape[axis], update.shape[axis]
    positions = torch.arange(steps)
    if starts is None:
        places = positions.unsqueeze(0)
    else:
        places = starts.to(torch.int64).unsqueeze(1) + positions
    if mode == "circular":
        places = torch.remainder(places, size)
    elif mode != "linear":
        raise node.invalid(f"unknown mode {mode!r}")
    shape = [1] * cache.ndim
    shape[0], shape[axis] = places.shape[0], steps
    return torch.scatter(cache, axis, places.reshape(shape).expand(update.shape), update)
