"""When float32 computes with integers exactly: as long as no partial sum reaches 2**24, sums of
integers are exact in any order."""

from __future__ import annotations

from typing import Any

from graphc.ir.integers import integer_range

EXACT = 1 << 24


def magnitude(value: Any) -> int | None:
    """The largest absolute value an integer can have (`graphc.ir.integers`)."""
    bounds = integer_range(value)
    return None if bounds is None else max(abs(bounds[0]), abs(bounds[1]))
