"""Rules that evaluate operators on `Static` values with symbolic lengths.

Values whose items are all numbers never come here: the ordinary handlers compute them on real
tensors. So these rules are for the integer arithmetic of shapes, in terms of symbols.
"""

from __future__ import annotations

import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphc.frontends.onnx.dtypes import torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import static
from graphc.frontends.onnx.values import Ratio, Static, choose, decided, statically_true


def array_of(items: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    flat = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        flat[i] = item
    return flat.reshape(shape)


def _map(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray | None:
    """`function` over broadcast object arrays; None if it gives NotImplemented for any item."""
    views = np.broadcast_arrays(*arrays)
    items = [function(*row) for row in zip(*(v.reshape(-1) for v in views), strict=True)]
    if any(item is NotImplemented for item in items):
        return None
    return array_of(items, views[0].shape)


def _elementwise(
    function: Callable[..., Any], *values: Static, dtype: torch.dtype | None = None
) -> Any:
    mapped = _map(function, *(v.items for v in values))
    return NotImplemented if mapped is None else Static(mapped, dtype or values[0].dtype)


def is_whole(item: Any) -> bool:
    return isinstance(item, torch.SymInt) or (
        isinstance(item, (int, float)) and float(item).is_integer()
    )


def whole(item: Any) -> Any:
    return int(item) if isinstance(item, (int, float)) else item


def _add(a: Any, b: Any) -> Any:
    if is_whole(a) and is_whole(b):
        return whole(a) + whole(b)
    return NotImplemented


def _sub(a: Any, b: Any) -> Any:
    return whole(a) - whole(b) if is_whole(a) and is_whole(b) else NotImplemented


def _mul(a: Any, b: Any) -> Any:
    """Products; a float factor must have few bits, so the float32 product is exact."""
    if isinstance(b, Ratio):
        a, b = b, a
    if isinstance(a, Ratio):
        if is_whole(b):
            return _ratio(a.numerator * whole(b), a.denominator)
        return NotImplemented
    if is_whole(a) and is_whole(b):
        return whole(a) * whole(b)
    factor, length = (a, b) if isinstance(a, float) else (b, a)
    if isinstance(factor, float) and isinstance(length, torch.SymInt):
        top, bottom = factor.as_integer_ratio()
        if 0 < top < 64 and bottom <= 64:
            return _ratio(length * top, bottom)
    return NotImplemented


def _ratio(numerator: Any, denominator: int) -> Any:
    if statically_true(numerator % denominator == 0):
        return numerator // denominator
    return Ratio(numerator, denominator)


def _integer_div(a: Any, b: Any) -> Any:
    """Quotient truncated towards zero, where signs are known."""
    if statically_true(a >= 0) and statically_true(b > 0):
        return a // b
    if isinstance(b, int) and b == 1:
        return a
    if statically_true(b > 0):
        return choose(a >= 0, a // b, -((-a) // b))
    return NotImplemented


def _float_div(a: Any, b: Any) -> Any:
    if isinstance(a, Ratio) and is_whole(b) and isinstance(whole(b), int) and b > 0:
        return _ratio(a.numerator, a.denominator * whole(b))
    if not (is_whole(a) and is_whole(b)):
        if isinstance(a, torch.SymInt) and isinstance(b, float) and b > 0:
            top, bottom = b.as_integer_ratio()
            if top < 64 and bottom <= 64:
                return _ratio(a * bottom, top)
        return NotImplemented
    a, b = whole(a), whole(b)
    if statically_true(a == b):
        return 1.0
    if isinstance(b, int) and b > 0:
        return _ratio(a, b)
    return NotImplemented


def _legacy(attributes: dict[str, Any]) -> bool:
    return bool(attributes.get("broadcast")) or "consumed_inputs" in attributes


@static("Add", "Sub", "Mul", "Div", "Mod")
def arithmetic(node: OnnxNode, a: Static, b: Static, **attributes: Any) -> Any:
    if _legacy(attributes):
        return NotImplemented
    if node.op_type == "Div":
        function = _float_div if a.dtype.is_floating_point else _integer_div
    elif node.op_type == "Mod":
        if a.dtype.is_floating_point:
            return NotImplemented
        function = _modulo
    else:
        function = {"Add": _add, "Sub": _sub, "Mul": _mul}[node.op_type]
    return _elementwise(function, a, b)


def _modulo(a: Any, b: Any) -> Any:
    positive = statically_true(a >= 0) and statically_true(b > 0)
    return a % b if positive else NotImplemented


@static("Pow")
def power(node: OnnxNode, a: Static, b: Static, **attributes: Any) -> Any:
    def function(base: Any, exponent: Any) -> Any:
        if is_whole(base) and exponent in (1, 2, 3):
            base = whole(base)
            return base ** int(exponent)
        return NotImplemented

    return _elementwise(function, a, b)


@static("Neg")
def negate(node: OnnxNode, x: Static, **attributes: Any) -> Any:
    return _elementwise(lambda a: -a if is_whole(a) else NotImplemented, x)


@static("Abs", "Relu")
def absolute(node: OnnxNode, x: Static, **attributes: Any) -> Any:
    return _elementwise(lambda a: a if statically_true(a >= 0) else NotImplemented, x)


@static("Floor", "Ceil", "Round")
def rounded(node: OnnxNode, x: Static, **attributes: Any) -> Any:
    def function(item: Any) -> Any:
        if isinstance(item, Ratio):
            if node.op_type == "Round":
                return NotImplemented
            return item.floor() if node.op_type == "Floor" else item.ceil()
        return item if is_whole(item) else NotImplemented

    return _elementwise(function, x)


@static("Min", "Max", "Sum")
def extremum(node: OnnxNode, *values: Static, **attributes: Any) -> Any:
    pick = {"Min": torch.sym_min, "Max": torch.sym_max, "Sum": python.add}[node.op_type]

    def function(*items: Any) -> Any:
        if not all(is_whole(i) for i in items):
            return NotImplemented
        result = whole(items[0])
        for item in items[1:]:
            result = pick(result, whole(item))
        return result

    return _elementwise(function, *values)


@static("Clip")
def clip(node: OnnxNode, x: Static, low: Any = None, high: Any = None, **attributes: Any) -> Any:
    if attributes:
        return NotImplemented

    def function(item: Any, *bounds: Any) -> Any:
        if not is_whole(item) or not all(is_whole(b) for b in bounds):
            return NotImplemented
        rest = list(bounds)
        if low is not None:
            item = torch.sym_max(item, whole(rest.pop(0)))
        return torch.sym_min(item, whole(rest.pop(0))) if high is not None else item

    return _elementwise(function, *(v for v in (x, low, high) if v is not None))


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "Equal": python.eq,
    "Greater": python.gt,
    "Less": python.lt,
    "GreaterOrEqual": python.ge,
    "LessOrEqual": python.le,
}


@static(*COMPARE)
def compare(node: OnnxNode, a: Static, b: Static, **attributes: Any) -> Any:
    if _legacy(attributes):
        return NotImplemented

    def function(left: Any, right: Any) -> Any:
        if isinstance(left, Ratio) or isinstance(right, Ratio):
            return NotImplemented
        if isinstance(left, (bool, torch.SymBool)) or isinstance(right, (bool, torch.SymBool)):
            return NotImplemented
        return _settled(COMPARE[node.op_type](left, right))

    return _elementwise(function, a, b, dtype=torch.bool)


def _settled(condition: Any) -> Any:
    """A SymBool as a bool if it holds, or fails, for every length."""
    known = decided(condition)
    return condition if known is None else known


@static("Not")
def logical_not(node: OnnxNode, x: Static) -> Any:
    return _elementwise(lambda a: torch.sym_not(a) if isinstance(a, torch.SymBool) else not a, x)


@static("And", "Or")
def logical(node: OnnxNode, a: Static, b: Static, **attributes: Any) -> Any:
    if attributes:
        return NotImplemented
    both = node.op_type == "And"

    def function(left: Any, right: Any) -> Any:
        for known, other in ((left, right), (right, left)):
            if not isinstance(known, torch.SymBool):
                if both:
                    return other if known else False
                return True if known else other
        return left & right if both else left | right

    return _elementwise(function, a, b, dtype=torch.bool)


@static("Where")
def where(node: OnnxNode, condition: Static, a: Static, b: Static) -> Any:
    def function(c: Any, left: Any, right: Any) -> Any:
        if not isinstance(c, torch.SymBool):
            return left if c else right
        if not (is_whole(left) and is_whole(right)):
            return NotImplemented
        return choose(c, whole(left), whole(right))

    mapped = _map(function, condition.items, a.items, b.items)
    return NotImplemented if mapped is None else Static(mapped, a.dtype)


@static("Cast")
def cast(node: OnnxNode, x: Static, *, to: int, **attributes: Any) -> Any:
    return converted(x, torch_dtype(to, node.where))


@static("CastLike")
def cast_like(node: OnnxNode, x: Static, like: Static, **attributes: Any) -> Any:
    return converted(x, like.dtype)


def converted(x: Static, dtype: torch.dtype) -> Any:
    """Symbolic lengths in another type, as long as every length up to 2**23 fits it exactly."""
    wide = (torch.int64, torch.int32, torch.float32, torch.float64)
    if dtype not in wide and dtype != torch.bool:
        return NotImplemented

    def function(item: Any) -> Any:
        if dtype == torch.bool:
            return item if isinstance(item, torch.SymBool) else _settled(item != 0)
        if isinstance(item, torch.SymBool):
            return choose(item, 1, 0)
        if isinstance(item, Ratio):
            return item if dtype.is_floating_point else item.truncate()
        if isinstance(item, torch.SymInt):
            return item
        return float(item) if dtype.is_floating_point else int(item)

    return _elementwise(function, x, dtype=dtype)
