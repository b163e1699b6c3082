"""What an operator keeps of a sequence, and what devices exchange of a range of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from graphc.dsl.operator import SequenceOperator, trace
from graphc.dsl.tiles import ONE, K, V


@dataclass(frozen=True)
class Layout:
    """A tensor of each layer and sequence; numbers are adjacent in the order of `shape`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of one sequence."""
        return prod(self.shape) * (8 if self.dtype == "float64" else 4)


def state_layout(heads: int, channels: int, width: int) -> Layout:
    """The state of a sequence, key channels first."""
    return Layout((heads, channels, width), "float32")


def summary_layout(
    operator: SequenceOperator, heads: int, channels: int, width: int
) -> tuple[Layout, Layout]:
    """(factor, offset) of the summary of any range of tokens."""
    flags = frozenset((name, False) for name in operator.of_kind("flag"))
    sizes = {K: channels, V: width, ONE: 1}
    factor = trace(operator, flags).summary.factor.shape
    kind = operator.summary_dtype
    return (
        Layout((heads, sizes[factor[0]], sizes[factor[1]]), kind),
        Layout((heads, channels, width), kind),
    )
