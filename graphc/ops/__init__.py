"""The graphc:: operators; importing this package registers them with torch."""

from graphc.ops.recurrent import gru, lstm

__all__ = ["gru", "lstm"]
