"""The language for operators over sequence state (docs/dsl.md)."""

from graphc.dsl.operator import Affine, SequenceOperator, column, flag, log_decay, number, rows
from graphc.dsl.registry import define
from graphc.dsl.tiles import K, SequenceOperatorError, V, exp, normalized, scores, sigmoid, solve

__all__ = [
    "Affine", "K", "SequenceOperator", "SequenceOperatorError", "V", "column", "define", "exp",
    "flag", "log_decay", "normalized", "number", "rows", "scores", "sigmoid", "solve",
]  # fmt: skip
