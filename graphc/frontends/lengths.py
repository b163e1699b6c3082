"""Lengths that a model computes through floating point (`int(T * 0.5)`), as integer expressions."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    ToFloat,
    TruncToInt,
)

#: beyond this denominator a product in float64 is not the exact quotient any more
_LARGEST = 1 << 20


@lru_cache(maxsize=10_000)
def simplify_rounding(expr: sympy.Expr) -> sympy.Expr:
    """floor, ceil and truncation of (length * p / q) in integers where that is exact.

    A factor counts only if it is a fraction with a power-of-two denominator: then the float64
    product is exact for every length below 2**32, and so is the integer quotient.
    """
    if not isinstance(expr, sympy.Basic) or not expr.has(FloorToInt, CeilToInt, TruncToInt):
        return expr
    return expr.replace(
        lambda item: isinstance(item, (FloorToInt, CeilToInt, TruncToInt)), _rounded
    )


def _rounded(item: sympy.Expr) -> sympy.Expr:
    split = _quotient(item.args[0])
    if split is None:
        return item
    top, bottom = split
    if bottom == 1:
        return top
    if isinstance(item, CeilToInt):
        return -FloorDiv(-top, bottom)
    if isinstance(item, TruncToInt) and not top.is_nonnegative:
        return item
    return FloorDiv(top, bottom)


def _quotient(expr: sympy.Expr) -> tuple[sympy.Expr, int] | None:
    """expr = numerator / denominator, both integers; None if that is not exact."""
    if isinstance(expr, ToFloat):
        return expr.args[0], 1
    if isinstance(expr, IntTrueDiv) and isinstance(expr.args[1], sympy.Integer):
        bottom = int(expr.args[1])
        return (expr.args[0], bottom) if 0 < bottom <= _LARGEST else None
    if isinstance(expr, sympy.Float):
        factor = Fraction(float(expr))
        if factor.denominator <= _LARGEST and abs(factor.numerator) <= _LARGEST:
            return sympy.Integer(factor.numerator), factor.denominator
        return None
    if isinstance(expr, sympy.Mul):
        top: sympy.Expr = sympy.Integer(1)
        bottom = 1
        for factor in expr.args:
            split = (factor, 1) if factor.is_integer else _quotient(factor)
            if split is None or (split[1] & (split[1] - 1)):
                return None
            top, bottom = top * split[0], bottom * split[1]
        return top, bottom
    return None
