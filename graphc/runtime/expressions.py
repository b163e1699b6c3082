"""The postfix expressions of a plan (graphc.plan.OPERATORS), evaluated without its library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphc.plan import Expression


def evaluate(expression: Expression, symbols: Sequence[int]) -> int:
    """The value of an expression with the given symbol values."""
    stack: list[int] = []
    for item in expression:
        if isinstance(item, int):
            stack.append(item)
        elif item[0] == "s" and item[1:].isdecimal():
            stack.append(symbols[int(item[1:])])
        elif item in _UNARY:
            stack.append(int(_UNARY[item](stack.pop())))
        elif item == "select":
            other, value, condition = stack.pop(), stack.pop(), stack.pop()
            stack.append(value if condition else other)
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(int(_BINARY[item](left, right)))
    return stack[0]


def known(expression: Expression, symbols: Sequence[int | None]) -> int | None:
    """The value, or None while a symbol it needs is unknown or it is undefined (a division by
    zero)."""
    for item in expression:
        if isinstance(item, str) and item[0] == "s" and item[1:].isdecimal():
            if symbols[int(item[1:])] is None:
                return None
    values = [0 if value is None else value for value in symbols]
    try:
        return evaluate(expression, values)
    except ZeroDivisionError:
        return None


_UNARY: dict[str, Any] = {"not": lambda a: not a, "neg": lambda a: -a, "abs": abs}
_BINARY: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
    "pow": lambda a, b: a**b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}
