"""Elementwise operators as C++ expressions over scalars.

One row per operator: how its operands are converted, and the expression. Adding an elementwise
operator is adding a row. Arithmetic on float16 and bfloat16 is done in float; integers are kept
in their own type, so they wrap as torch's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphc.ir.graph import Node, Value
from graphc.ir.types import TensorType, torch_dtype
from graphc.lowering.context import Refuse

#: C++ type that holds one element in memory
STORAGE = {
    "float32": "float", "float64": "double", "bfloat16": "gc::bf16", "float16": "gc::f16",
    "int64": "int64_t", "int32": "int32_t", "int16": "int16_t", "int8": "int8_t",
    "uint8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip
#: C++ type that arithmetic is done in
COMPUTE = STORAGE | {"bfloat16": "float", "float16": "float", "bool": "bool"}
FLOATS = ("float32", "float64", "bfloat16", "float16")


def is_float(dtype: str) -> bool:
    """Whether dtype is one of the floating types that kernels support."""
    return dtype in FLOATS


def literal(value: Any, dtype: str) -> str:
    """A Python scalar as a C++ constant of `dtype`'s compute type."""
    ctype = COMPUTE[dtype]
    if dtype == "bool":
        return "true" if value else "false"
    if is_float(dtype):
        number = float(value)
        if math.isnan(number):
            return f"({ctype})NAN"
        if math.isinf(number):
            return f"({ctype}){'-' if number < 0 else ''}INFINITY"
        if dtype in ("bfloat16", "float16"):
            return f"(float){number!r}"
        return f"({ctype}){number!r}"
    if isinstance(value, float) and (math.isnan(value) or math.isinf(value)):
        raise Refuse(f"the constant {value} does not fit {dtype}")
    number = int(value)
    bits = torch.iinfo(torch_dtype(dtype)).bits
    number &= (1 << bits) - 1
    if dtype != "uint8" and number >= 1 << (bits - 1):
        number -= 1 << bits
    if number == -(2**63):
        return "INT64_MIN"
    return f"({ctype}){number}LL"


def cast(expression: str, source: str, target: str) -> str:
    """Converts an expression of compute type `source` to compute type `target`."""
    if source == target or COMPUTE[source] == COMPUTE[target]:
        return expression
    if target == "bool":
        return f"({expression} != 0)"
    if is_float(source) and not is_float(target):
        return f"gc::to_int<{COMPUTE[target]}>({expression})"
    return f"({COMPUTE[target]})({expression})"


def rounded(expression: str, dtype: str) -> str:
    """Rounds a float to what `dtype` can hold (an explicit cast in the user's model)."""
    if dtype in ("bfloat16", "float16"):
        return f"gc::rounded<{STORAGE[dtype]}>({expression})"
    return expression


@dataclass(frozen=True)
class Row:
    """operands: "result" converts all operands to the result dtype, "common" to their promoted
    dtype, "bool" to bool, "own" leaves them. `expression` maps operand texts (and the node) to
    C++; `heavy` marks what is dearer than a load (kept, not recomputed)."""

    expression: Callable[..., str]
    operands: str = "result"
    heavy: bool = False


ROWS: dict[str, Row] = {}


def _row(names: str, expression: Callable[..., str], operands: str = "result", heavy: bool = False) -> None:  # fmt: skip # noqa: E501
    for name in names.split():
        ROWS[f"aten.{name}"] = Row(expression, operands, heavy)


def _call(function: str) -> Callable[..., str]:
    return lambda node, *xs: f"{function}({', '.join(xs)})"


def _alpha(node: Node, dtype: str) -> str | None:
    try:
        alpha = node.argument("alpha")
    except KeyError:
        return None
    return None if alpha == 1 else literal(alpha, dtype)


def _result(node: Node) -> str:
    return node.outputs[0].type.dtype


def _add(node: Node, a: str, b: str) -> str:
    alpha = _alpha(node, _result(node))
    if _result(node) == "bool":
        return f"({a} || {b})" if alpha != "false" else a
    return f"({a} + {b})" if alpha is None else f"({a} + {alpha} * {b})"


def _sub(node: Node, a: str, b: str) -> str:
    alpha = _alpha(node, _result(node))
    return f"({a} - {b})" if alpha is None else f"({a} - {alpha} * {b})"


def _mul(node: Node, a: str, b: str) -> str:
    return f"({a} && {b})" if _result(node) == "bool" else f"({a} * {b})"


def _div_mode(node: Node, a: str, b: str) -> str:
    mode = node.argument("rounding_mode")
    if mode is None:
        return f"({a} / {b})"
    return f"gc::{'floordiv' if mode == 'floor' else 'truncdiv'}({a}, {b})"


def _pow(node: Node, a: str, b: str) -> str:
    exponent = node.args[1]
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        simple = {
            0: "1", 1: a, 2: f"({a} * {a})", 3: f"({a} * {a} * {a})",
        }  # fmt: skip
        if exponent in simple:
            value = simple[int(exponent)]
            return value if exponent else f"({COMPUTE[_result(node)]})1"
        if is_float(_result(node)):
            if exponent == 4:
                return f"(({a} * {a}) * ({a} * {a}))"
            if exponent == 0.5:
                return f"sqrt({a})"
            if exponent == -0.5:
                return f"(1 / sqrt({a}))"
            if exponent == -1:
                return f"(1 / {a})"
            if exponent == -2:
                return f"(1 / ({a} * {a}))"
    return f"gc::ipow({a}, {b})"


def _relation(operator: str) -> Callable[..., str]:
    return lambda node, a, b: f"({a} {operator} {b})"


def _bitwise(operator: str, logic: str) -> Callable[..., str]:
    return lambda node, a, b: (
        f"({a} {logic} {b})" if _result(node) == "bool" else f"({a} {operator} {b})"
    )


def _number(node: Node, name: str, dtype: str | None = None) -> str:
    value = node.argument(name)
    if isinstance(value, (Value, sympy.Expr)):
        raise Refuse(f"{name} is not a constant")
    return literal(value, dtype or _result(node))


def _clamp(node: Node, x: str) -> str:
    low, high = node.argument("min"), node.argument("max")
    if low is not None:
        x = f"gc::vmax({x}, {_number(node, 'min')})"
    if high is not None:
        x = f"gc::vmin({x}, {_number(node, 'max')})"
    return x


def _clamp_tensor(node: Node, *xs: str) -> str:
    x, rest = xs[0], list(xs[1:])
    if node.argument("min") is not None:
        x = f"gc::vmax({x}, {rest.pop(0)})"
    if node.argument("max") is not None:
        x = f"gc::vmin({x}, {rest.pop(0)})"
    return x


def _elu(node: Node, x: str) -> str:
    alpha, scale, inner = (_number(node, n) for n in ("alpha", "scale", "input_scale"))
    return f"({x} > 0 ? {x} * {scale} : gc::vexpm1({x} * {inner}) * {alpha} * {scale})"


def _softplus(node: Node, x: str) -> str:
    beta, threshold = node.argument("beta"), node.argument("threshold")
    b = literal(beta, _result(node))
    inner = f"({x} * {b})"
    return f"({inner} > {literal(threshold, _result(node))} ? {x} : gc::vsoftplus({inner}) / {b})"


def _gelu(node: Node, x: str) -> str:
    return f"gc::vgelu{'_tanh' if node.argument('approximate') == 'tanh' else ''}({x})"


def _round(node: Node, x: str) -> str:
    if not is_float(_result(node)):
        return x
    return f"nearbyint({x})" if COMPUTE[_result(node)] == "double" else f"nearbyintf({x})"


def _sign(node: Node, x: str) -> str:
    t = COMPUTE[_result(node)]
    if t == "bool":
        return x
    return f"({x} > 0 ? ({t})1 : {x} < 0 ? ({t})-1 : ({t})0)"  # 0 for NaN, as torch's


def _abs(node: Node, x: str) -> str:
    if is_float(_result(node)):
        return f"fabs{'' if COMPUTE[_result(node)] == 'double' else 'f'}({x})"
    return x if _result(node) in ("bool", "uint8") else f"({x} < 0 ? -{x} : {x})"


def _neg(node: Node, x: str) -> str:
    return f"(-{x})"


def _nan_to_num(node: Node, x: str) -> str:
    dtype = _result(node)
    if not is_float(dtype):
        return x
    info = torch.finfo(torch_dtype(dtype))
    nan, high, low = (node.argument(n) for n in ("nan", "posinf", "neginf"))
    return (
        f"({x} != {x} ? {literal(0.0 if nan is None else nan, dtype)} : {x} == INFINITY ? "
        f"{literal(info.max if high is None else high, dtype)} : {x} == -INFINITY ? "
        f"{literal(info.min if low is None else low, dtype)} : {x})"
    )


def _shift(operator: str) -> Callable[..., str]:
    def expression(node: Node, a: str, b: str) -> str:
        bits = torch.iinfo(torch_dtype(_result(node))).bits
        t = COMPUTE[_result(node)]
        if operator == "<<":
            return f"(({b} < 0 || {b} >= {bits}) ? ({t})0 : ({t})((uint64_t){a} << ({b} & 63)))"
        return f"(({b} < 0 || {b} >= {bits}) ? ({t})({a} < 0 ? -1 : 0) : ({t})({a} >> ({b} & 63)))"

    return expression


def _float_call(function: str) -> Callable[..., str]:
    """A libm function in the width of the result (sinf for float, sin for double)."""
    return lambda node, *xs: (
        f"{function}{'' if COMPUTE[_result(node)] == 'double' else 'f'}({', '.join(xs)})"
    )


_row("add.Tensor add.Scalar", _add)
_row("sub.Tensor sub.Scalar", _sub)
_row("rsub.Tensor rsub.Scalar", lambda n, a, b: _sub(n, b, a))
_row("mul.Tensor mul.Scalar", _mul)
_row("div.Tensor div.Scalar true_divide.Tensor", lambda n, a, b: f"({a} / {b})")
_row("div.Tensor_mode div.Scalar_mode", _div_mode)
_row("floor_divide.default floor_divide.Scalar", _call("gc::floordiv"))
_row("remainder.Tensor remainder.Scalar remainder.Scalar_Tensor", _call("gc::pymod"))
_row("fmod.Tensor fmod.Scalar", _call("gc::truncmod"))
_row("pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar", _pow, heavy=True)
_row("maximum.default", _call("gc::vmax"))
_row("minimum.default", _call("gc::vmin"))
_row("fmax.default", lambda n, a, b: f"({a} != {a} ? {b} : ({b} != {b} ? {a} : ({a} > {b} ? {a} : {b})))")  # fmt: skip # noqa: E501
_row("fmin.default", lambda n, a, b: f"({a} != {a} ? {b} : ({b} != {b} ? {a} : ({a} < {b} ? {a} : {b})))")  # fmt: skip # noqa: E501
_row("neg.default", _neg)
_row("abs.default", _abs)
_row("sign.default sgn.default", _sign)
_row("exp.default", _call("gc::vexp"), heavy=True)
_row("exp2.default", _float_call("exp2"), heavy=True)
_row("expm1.default", _call("gc::vexpm1"), heavy=True)
_row("log.default", _call("gc::vlog"), heavy=True)
_row("log1p.default", _call("gc::vlog1p"), heavy=True)
_row("log2.default", _float_call("log2"), heavy=True)
_row("log10.default", _float_call("log10"), heavy=True)
_row("sqrt.default", _float_call("sqrt"))
_row("rsqrt.default", lambda n, x: f"(1 / sqrt({x}))")
_row("reciprocal.default", lambda n, x: f"(1 / {x})")
_row("square.default", lambda n, x: f"({x} * {x})")
_row("sin.default", _call("gc::vsin"), heavy=True)
_row("cos.default", _call("gc::vcos"), heavy=True)
_row("tanh.default", _call("gc::vtanh"), heavy=True)
_row("erf.default", _call("gc::verf"), heavy=True)
_row("sigmoid.default", _call("gc::vsigmoid"), heavy=True)
_row("silu.default", _call("gc::vsilu"), heavy=True)
_row("gelu.default", _gelu, heavy=True)
_row("softplus.default", _softplus, heavy=True)
_row("elu.default", _elu, heavy=True)
for _name in [
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "erfc",
    "lgamma",
]:
    _row(f"{_name}.default", _float_call(_name), heavy=True)
_row("atan2.default", _float_call("atan2"), heavy=True)
_row("hypot.default", _float_call("hypot"))
_row("copysign.Tensor copysign.Scalar", _float_call("copysign"))
_row("relu.default", lambda n, x: f"gc::vmax({x}, ({COMPUTE[_result(n)]})0)")
_row("relu6.default", lambda n, x: f"gc::vmin(gc::vmax({x}, ({COMPUTE[_result(n)]})0), ({COMPUTE[_result(n)]})6)")  # fmt: skip # noqa: E501
_row("leaky_relu.default", lambda n, x: f"({x} > 0 ? {x} : {x} * {_number(n, 'negative_slope')})")
_row("prelu.default _prelu_kernel.default", lambda n, x, w: f"({x} > 0 ? {x} : {x} * {w})")
_row("threshold.default", lambda n, x: f"({x} <= {_number(n, 'threshold')} ? {_number(n, 'value')} : {x})")  # fmt: skip # noqa: E501
_row("hardtanh.default", lambda n, x: f"gc::vmin(gc::vmax({x}, {_number(n, 'min_val')}), {_number(n, 'max_val')})")  # fmt: skip # noqa: E501
_row("hardsigmoid.default", lambda n, x: f"(gc::vmin(gc::vmax({x} + 3, ({COMPUTE[_result(n)]})0), ({COMPUTE[_result(n)]})6) / 6)")  # fmt: skip # noqa: E501
_row("hardswish.default", lambda n, x: f"({x} * gc::vmin(gc::vmax({x} + 3, ({COMPUTE[_result(n)]})0), ({COMPUTE[_result(n)]})6) / 6)")  # fmt: skip # noqa: E501
_row("clamp.default", _clamp)
_row("clamp.Tensor", _clamp_tensor)
_row("clamp_min.default", lambda n, x: f"gc::vmax({x}, {_number(n, 'min')})")
_row("clamp_max.default", lambda n, x: f"gc::vmin({x}, {_number(n, 'max')})")
_row("clamp_min.Tensor", _call("gc::vmax"))
_row("clamp_max.Tensor", _call("gc::vmin"))
_row("eq.Tensor eq.Scalar", _relation("=="), "common")
_row("ne.Tensor ne.Scalar", _relation("!="), "common")
_row("lt.Tensor lt.Scalar", _relation("<"), "common")
_row("le.Tensor le.Scalar", _relation("<="), "common")
_row("gt.Tensor gt.Scalar", _relation(">"), "common")
_row("ge.Tensor ge.Scalar", _relation(">="), "common")
_row("logical_and.default", lambda n, a, b: f"({a} && {b})", "bool")
_row("logical_or.default", lambda n, a, b: f"({a} || {b})", "bool")
_row("logical_xor.default", lambda n, a, b: f"({a} != {b})", "bool")
_row("logical_not.default", lambda n, a: f"(!{a})", "bool")
_row("bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor", _bitwise("&", "&&"))
_row("bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor", _bitwise("|", "||"))
_row("bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor", _bitwise("^", "!="))
_row("bitwise_not.default", lambda n, x: f"(!{x})" if _result(n) == "bool" else f"(~{x})")
_row("bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Scalar __lshift__.Tensor", _shift("<<"))  # fmt: skip # noqa: E501
_row("bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __rshift__.Scalar __rshift__.Tensor", _shift(">>"))  # fmt: skip # noqa: E501
_row("isnan.default", lambda n, x: f"({x} != {x})", "own")
_row("isinf.default", lambda n, x: f"(({x} - {x}) != 0 && {x} == {x})", "own")
_row("isfinite.default", lambda n, x: f"(({x} - {x}) == 0)", "own")
_row("signbit.default", lambda n, x: f"(bool)signbit((double){x})", "own")
_row("ceil.default", lambda n, x: _float_call("ceil")(n, x) if is_float(_result(n)) else x)
_row("floor.default", lambda n, x: _float_call("floor")(n, x) if is_float(_result(n)) else x)
_row("trunc.default fix.default", lambda n, x: _float_call("trunc")(n, x) if is_float(_result(n)) else x)  # fmt: skip # noqa: E501
_row("round.default", _round)
_row("frac.default", lambda n, x: f"({x} - {_float_call('trunc')(n, x)})")
_row("nan_to_num.default", _nan_to_num)
_row("lerp.Tensor lerp.Scalar", lambda n, a, b, w: f"({w} < 0.5f ? {a} + {w} * ({b} - {a}) : {b} - ({b} - {a}) * (1 - {w}))")  # fmt: skip # noqa: E501
_row("clone.default alias.default detach.default contiguous.default lift_fresh_copy.default", lambda n, x: x)  # fmt: skip # noqa: E501
_row("to.dtype _to_copy.default", lambda n, x: rounded(x, _result(n)))
ROWS["prims.convert_element_type.default"] = ROWS["aten._to_copy.default"]
# where and masked_fill read their condition as bool; the others become the result's dtype
_row("where.self where.ScalarOther where.ScalarSelf where.Scalar", lambda n, c, a, b: f"({c} ? {a} : {b})", "select")  # fmt: skip # noqa: E501
_row("masked_fill.Scalar masked_fill.Tensor", lambda n, x, m, v: f"({m} ? {v} : {x})", "mask")
_row("copy.default", lambda n, a, b: b)
_row("fill.Scalar fill.Tensor", lambda n, a, b: b)

#: arguments that are operands, by position, where not simply every leading tensor or number
OPERANDS = {
    "aten.clamp.default": 1, "aten.clamp_min.default": 1, "aten.clamp_max.default": 1,
    "aten.elu.default": 1, "aten.softplus.default": 1, "aten.gelu.default": 1,
    "aten.leaky_relu.default": 1, "aten.threshold.default": 1, "aten.hardtanh.default": 1,
    "aten.nan_to_num.default": 1, "aten.clone.default": 1, "aten.to.dtype": 1,
    "aten._to_copy.default": 1, "prims.convert_element_type.default": 1,
    "aten.contiguous.default": 1, "aten.div.Tensor_mode": 2, "aten.div.Scalar_mode": 2,
    "aten.round.default": 1, "aten.copy.default": 2,
    "aten.add.Tensor": 2, "aten.add.Scalar": 2, "aten.sub.Tensor": 2, "aten.sub.Scalar": 2,
    "aten.rsub.Tensor": 2, "aten.rsub.Scalar": 2, "aten.clamp.Tensor": 3,
}  # fmt: skip


def supports(node: Node) -> str:
    """ "" if the node can be a loop-nest expression, else the reason why not."""
    if node.target not in ROWS:
        return "no expression for this operator"
    for value in (*node.inputs(), *node.outputs):
        if not isinstance(value.type, TensorType):
            return "a number read from data takes part"
        if value.type.dtype not in STORAGE:
            return f"no kernels for {value.type.dtype}"
    if node.target == "aten.round.default" and len(node.args) > 1:
        return "rounding to decimals"
    if ROWS[node.target].operands == "result" and _result(node) == "bool":
        if node.target.split(".")[1] not in (
            "add", "mul", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "clone",
            "alias", "detach", "contiguous", "to", "_to_copy", "copy", "fill", "abs", "sign",
            "sgn", "maximum", "minimum", "lift_fresh_copy", "convert_element_type",
        ):  # fmt: skip
            return "this operator on bool"
    return ""
