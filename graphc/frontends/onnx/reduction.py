"""Reductions, index reductions and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED, limits
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Int, Ints, Tensor, product

Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.dtype in WIDE_UNSIGNED:
        return unsigned.narrow(torch.sum(unsigned.widen(x), axes, keepdim=keep), x.dtype)
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    count = product([x.shape[a] for a in axes])
    wide = torch.sum(unsigned.widen(x).to(torch.int64), axes, keepdim=keep)
    return torch.div(wide, count, rounding_mode="trunc").to(x.dtype)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _largest(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if _is_empty(x, axes):
        return _constant(x, axes, keep, _bottom(x.dtype))
    if x.dtype in WIDE_UNSIGNED:
        return unsigned.restore(torch.amax(unsigned.ordered(x), axes, keepdim=keep), x.dtype)
    return torch.amax(x, axes, keepdim=keep)


def _smallest(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if _is_empty(x, axes):
        return _constant(x, axes, keep, _top(x.dtype))
    if x.dtype in WIDE_UNSIGNED:
        return unsigned.restore(torch.amin(unsigned.ordered(x), axes, keepdim=keep), x.dtype)
    return torch.amin(x, axes, keepdim=keep)


def _is_empty(x: Tensor, axes: list[int]) -> bool:
    return any(isinstance(x.shape[a], int) and x.shape[a] == 0 for a in axes)


def _constant(x: Tensor, axes: list[int], keep: bool, value: Any) -> Tensor:
    shape = [1 if a in axes else s for a, s in enumerate(x.shape) if keep or a not in axes]
    return torch.full(shape, value, dtype=x.dtype)


def _bottom(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else limits(dtype)[0]


def _top(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else limits(dtype)[1]


def _l2(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.sqrt(torch.sum(x * x, axes, keepdim=keep))
    return torch.sqrt(torch.sum(x.double() ** 2, axes, keepdim=keep)).to(x.dtype)


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if _is_empty(x, axes):
        return _constant(x, axes, keep, -math.inf)
    return torch.logsumexp(x, axes, keepdim=keep)


REDUCTIONS: dict[str, Reduce] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": _largest,
    "ReduceMin": _smallest,
    "ReduceL1": lambda x, axes, keep: _sum(torch.abs(x), axes, keep),
    "ReduceL2": _l2,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": _log_sum_exp,
}
BEFORE_INPUT = [name for name in REDUCTIONS if name != "ReduceSum"]


def _reduce(node: OnnxNode, x: Tensor, axes: list[int] | None, keepdims: int, noop: int) -> Tensor:
    if not axes:
        if noop:
            # the map of a reduction over no axes: x * x, |x|, log |x| and so on
            return REDUCTIONS[node.op_type](x.unsqueeze(-1), [x.ndim], False)
        axes = list(range(x.ndim))
    axes = [int(a) % x.ndim for a in axes]
    if not axes:  # a scalar
        return REDUCTIONS[node.op_type](x.reshape(1), [0], False)
    return REDUCTIONS[node.op_type](x, axes, bool(keepdims))


@operator(*REDUCTIONS)
def reduce_attributes(
    node: OnnxNode, x: Tensor, *, axes: list[int] | None = None, keepdims: int = 1
) -> Tensor:
    return _reduce(node, x, axes, keepdims, 0)


def reduce_inputs(
    node: OnnxNode,
    x: Tensor,
    axes: Ints | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    return _reduce(node, x, axes, keepdims, noop_with_empty_axes)


operator("ReduceSum", since=13)(reduce_inputs)
operator(*BEFORE_INPUT, since=18)(reduce_inputs)


@operator("ArgMax", "ArgMin")
def arg_extremum(
    node: OnnxNode, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
) -> Tensor:
    function = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    source = unsigned.ordered(x) if x.dtype in WIDE_UNSIGNED else x
    if not select_last_index:
        return function(source, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - function(torch.flip(source, [axis]), axis, keepdim=bool(keepdims))


def _running(
    function: Callable[..., Tensor], x: Tensor, axis: int, exclusive: int, reverse: int, first: int
) -> Tensor:
    x = torch.flip(x, [axis]) if reverse else x
    y = function(x, axis, dtype=x.dtype)
    if exclusive:
        y = torch.narrow(y, axis, 0, x.shape[axis] - 1)
        shape = list(x.shape)
        shape[axis] = 1
        y = torch.cat([torch.full(shape, first, dtype=x.dtype), y], axis)
    return torch.flip(y, [axis]) if reverse else y


@operator("CumSum")
def cumulative_sum(
    node: OnnxNode, x: Tensor, axis: Int, *, exclusive: int = 0, reverse: int = 0
) -> Tensor:
    return _running(torch.cumsum, x, axis, exclusive, reverse, 0)


@operator("CumProd")
def cumulative_product(
    node: OnnxNode, x: Tensor, axis: Int, *, exclusive: int = 0, reverse: int = 0
) -> Tensor:
    return _running(torch.cumprod, x, axis, exclusive, reverse, 1)
