"""Element-wise arithmetic."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from graphc.frontends.onnx import unsigned
from graphc.frontends.onnx.dtypes import WIDE_UNSIGNED
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Raw, Static, Tensor, Value


def operand(node: OnnxNode, value: Value, other: Value) -> Any:
    """`value` as a Python number if that leaves the result's shape and dtype alone, else a tensor.

    Numbers become immediates of the captured operator instead of constant tensors.
    """
    if (
        isinstance(value, Static)
        and isinstance(other, torch.Tensor)
        and value.items.size == 1
        and value.concrete
        and value.dtype == other.dtype
        and value.dtype != torch.bool
        and value.dtype not in WIDE_UNSIGNED
        and other.ndim >= len(value.shape)
    ):
        return value.flat[0]
    return node.tensor(value)


def operands(node: OnnxNode, a: Value, b: Value) -> tuple[Any, Any]:
    """Both inputs of a binary operator, at most one of them a Python number."""
    return operand(node, a, b), operand(node, b, a)


def aligned(b: Value, a: Value, axis: int | None, broadcast: int, node: OnnxNode) -> Value:
    """Before opset 7, `b` is matched to the axes of `a` that start at `axis`."""
    if not broadcast or axis is None:
        return b
    left, right = node.tensor(a), node.tensor(b)
    trailing = left.ndim - (axis % left.ndim) - right.ndim
    return right.reshape(list(right.shape) + [1] * trailing)


def _is_integer(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return not x.is_floating_point()
    return isinstance(x, int)


def _wide(a: Any, b: Any) -> torch.dtype | None:
    for x in (a, b):
        if isinstance(x, torch.Tensor) and x.dtype in WIDE_UNSIGNED:
            return x.dtype
    return None


def arithmetic(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Tensor:
    """A binary operation whose low bits depend on low bits only, on any dtype."""
    wide = _wide(a, b)
    if wide is None:
        return function(a, b)  # type: ignore[no-any-return]
    return unsigned.narrow(function(unsigned.widen(a), unsigned.widen(b)), wide)


@operator("Add")
def add(
    node: OnnxNode,
    a: Raw,
    b: Raw,
    *,
    axis: int | None = None,
    broadcast: int = 0,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    return arithmetic(python.add, *operands(node, a, aligned(b, a, axis, broadcast, node)))


@operator("Sub")
def sub(
    node: OnnxNode,
    a: Raw,
    b: Raw,
    *,
    axis: int | None = None,
    broadcast: int = 0,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    return arithmetic(python.sub, *operands(node, a, aligned(b, a, axis, broadcast, node)))


@operator("Mul")
def mul(
    node: OnnxNode,
    a: Raw,
    b: Raw,
    *,
    axis: int | None = None,
    broadcast: int = 0,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    return arithmetic(python.mul, *operands(node, a, aligned(b, a, axis, broadcast, node)))


@operator("Div")
def div(
    node: OnnxNode,
    a: Raw,
    b: Raw,
    *,
    axis: int | None = None,
    broadcast: int = 0,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    x, y = operands(node, a, aligned(b, a, axis, broadcast, node))
    wide = _wide(x, y)
    if wide == torch.uint64:
        return unsigned.narrow(unsigned.divide(unsigned.widen(x), unsigned.widen(y)), torch.uint64)
    if wide is not None:
        quotient = torch.div(unsigned.widen(x), unsigned.widen(y), rounding_mode="trunc")
        return unsigned.narrow(quotient, wide)
    if _is_integer(x) and _is_integer(y):
        x = x if isinstance(x, torch.Tensor) else node.tensor(a)
        return torch.div(x, y, rounding_mode="trunc")
    return x / y  # type: ignore[no-any-return]


@operator("Mod")
def mod(node: OnnxNode, a: Tensor, b: Raw, *, fmod: int = 0) -> Tensor:
    divisor = operand(node, b, a)
    wide = _wide(a, divisor)
    if wide == torch.uint64:
        x, y = unsigned.widen(a), unsigned.widen(divisor)
        return unsigned.narrow(x - unsigned.divide(x, y) * y, torch.uint64)
    if wide is not None:
        return unsigned.narrow(torch.remainder(unsigned.widen(a), unsigned.widen(divisor)), wide)
    return torch.fmod(a, divisor) if fmod else torch.remainder(a, divisor)


@operator("Pow")
def power(
    node: OnnxNode, a: Tensor, b: Raw, *, axis: int | None = None, broadcast: int = 0
) -> Tensor:
    b = aligned(b, a, axis, broadcast, node)
    if a.is_floating_point():
        if isinstance(b, Static) and b.items.size == 1 and b.concrete and a.ndim >= len(b.shape):
            exponent = b.flat[0]
            if exponent == 0.5:
                # sqrt differs from pow at -0.0 and -inf only; keep pow there
                return torch.pow(a, 0.5)
            return torch.pow(a, exponent)
        return torch.pow(a, node.tensor(b).to(a.dtype))
    exponents = node.tensor(b)
    if exponents.is_floating_point():
        return torch.pow(a.to(torch.float64), exponents.to(torch.float64)).to(a.dtype)
    wide = a.dtype if a.dtype in WIDE_UNSIGNED else None
    result = torch.pow(unsigned.widen(a), unsigned.widen(exponents).to(torch.int64))
    return unsigned.narrow(result, wide) if wide else result.to(a.dtype)


def _extremum(node: OnnxNode, values: tuple[Value, ...], function: Callable[..., Tensor]) -> Tensor:
    tensors = [node.tensor(v) for v in values]
    dtype = tensors[0].dtype
    if dtype in WIDE_UNSIGNED:
        return unsigned.restore(reduce(function, [unsigned.ordered(t) for t in tensors]), dtype)
    return reduce(function, tensors)


@operator("Max")
def maximum(node: OnnxNode, *values: Raw, consumed_inputs: list[int] | None = None) -> Tensor:
    return _extremum(node, values, torch.maximum)


@operator("Min")
def minimum(node: OnnxNode, *values: Raw, consumed_inputs: list[int] | None = None) -> Tensor:
    return _extremum(node, values, torch.minimum)


@operator("Sum")
def total(node: OnnxNode, *values: Tensor, consumed_inputs: list[int] | None = None) -> Tensor:
    return reduce(torch.add, values)


@operator("Mean")
def mean(node: OnnxNode, *values: Tensor, consumed_inputs: list[int] | None = None) -> Tensor:
    return reduce(torch.add, values) / len(values)


@operator("Abs")
def absolute(node: OnnxNode, x: Tensor, *, consumed_inputs: list[int] | None = None) -> Tensor:
    return x if x.dtype in WIDE_UNSIGNED else torch.abs(x)


@operator("Neg")
def negate(node: OnnxNode, x: Tensor, *, consumed_inputs: list[int] | None = None) -> Tensor:
    return torch.neg(x)


@operator("Ceil", "Floor", "Exp", "Log", "Sqrt", "Reciprocal", "Tanh", "Sigmoid")
def legacy_unary(node: OnnxNode, x: Tensor, *, consumed_inputs: list[int] | None = None) -> Tensor:
    functions = {
        "Ceil": torch.ceil,
        "Floor": torch.floor,
        "Exp": torch.exp,
        "Log": torch.log,
        "Sqrt": torch.sqrt,
        "Reciprocal": torch.reciprocal,
        "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid,
    }
    return functions[node.op_type](x)


@operator(
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "Erf",
    "Round",
)
def unary(node: OnnxNode, x: Tensor) -> Tensor:
    return getattr(torch, node.op_type.lower())(x)  # type: ignore[no-any-return]


@operator("Sign")
def sign(node: OnnxNode, x: Tensor) -> Tensor:
    if x.dtype in WIDE_UNSIGNED:
        return unsigned.narrow((unsigned.widen(x) != 0).to(torch.int64), x.dtype)
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


@operator("IsNaN")
def is_nan(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.isnan(x)


@operator("IsInf")
def is_inf(
    node: OnnxNode, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1
) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return x == math.inf
    return x == -math.inf if detect_negative else torch.zeros_like(x, dtype=torch.bool)


@operator("Clip")
def clip_attributes(
    node: OnnxNode,
    x: Tensor,
    *,
    min: float | None = None,
    max: float | None = None,
    consumed_inputs: list[int] | None = None,
) -> Tensor:
    return x if min is None and max is None else torch.clamp(x, min, max)


@operator("Clip", since=11)
def clip(node: OnnxNode, x: Tensor, low: Raw = None, high: Raw = None) -> Tensor:
    if x.dtype in WIDE_UNSIGNED:
        bounds = [None if v is None else unsigned.ordered(node.tensor(v)) for v in (low, high)]
        result = unsigned.ordered(x)
        result = result if bounds[0] is None else torch.maximum(result, bounds[0])
        result = result if bounds[1] is None else torch.minimum(result, bounds[1])
        return unsigned.restore(result, x.dtype)
    lower = None if low is None else operand(node, low, x)
    upper = None if high is None else operand(node, high, x)
    if lower is None and upper is None:
        return x
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        # clamp wants numbers or tensors, not one of each
        lower = node.tensor(low) if low is not None else None
        upper = node.tensor(high) if high is not None else None
    return torch.clamp(x, lower, upper)


@operator("BitShift")
def bit_shift(node: OnnxNode, x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    if direction not in ("LEFT", "RIGHT"):
        raise node.invalid(f"direction must be LEFT or RIGHT, found {direction!r}")
    if x.dtype in WIDE_UNSIGNED:
        a, b = unsigned.widen(x), unsigned.widen(y)
        if direction == "LEFT":
            shifted = a << b
        elif x.dtype == torch.uint64:
            # a logical shift: clear the copies of the sign bit
            mask = torch.where(b == 0, -1, ~(torch.full_like(b, -1) << torch.clamp(64 - b, max=63)))
            shifted = (a >> b) & mask
        else:
            shifted = a >> b
        return unsigned.narrow(shifted, x.dtype)
    return x << y if direction == "LEFT" else x >> y


@operator("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def bitwise(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    functions = {"BitwiseAnd": python.and_, "BitwiseOr": python.or_, "BitwiseXor": python.xor}
    return arithmetic(functions[node.op_type], a, b)


@operator("BitwiseNot")
def bitwise_not(node: OnnxNode, x: Tensor) -> Tensor:
    if x.dtype in WIDE_UNSIGNED:
        return unsigned.narrow(~unsigned.widen(x), x.dtype)
    return torch.bitwise_not(x)
