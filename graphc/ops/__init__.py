"""The graphc:: operators; importing this package registers them with torch."""

from graphc.ops.integer_linear import integer_linear
from graphc.ops.recurrent import gru, lstm

__all__ = ["gru", "integer_linear", "lstm"]
