"""The graphc:: operators; importing this package registers them with torch."""

from graphc.ops.attention import attention
from graphc.ops.integer_linear import integer_linear
from graphc.ops.recurrent import gru, lstm

__all__ = ["attention", "gru", "integer_linear", "lstm"]
