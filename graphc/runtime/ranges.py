"""Inputs that are used as indices: their values, against what the plan allows.

One pass over such an input, and only over those: a kernel reads a valid element for an index out
of range, so without this a wrong index would be a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import InputRejectedError
from graphc.plan import Plan
from graphc.runtime.tensors import Bound

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_ranges(plan: Plan, bound: Sequence[Bound]) -> None:
    """Raises InputRejectedError naming the input, the first value out of range and the range."""
    for k, low, end, text in plan.ranges:
        used: Any = bound[k].used
        values: NDArray[Any] = used.detach().numpy() if bound[k].torch else used
        if not values.size:
            continue
        if low == 0 and values.dtype.kind == "i":
            # a negative value is a huge unsigned one: one reduction instead of two
            unsigned = values.view(_UNSIGNED[values.dtype.itemsize])
            fits = int(np.maximum.reduce(unsigned, axis=None)) < end
        else:
            fits = int(values.min()) >= low and int(values.max()) < end
        if not fits:
            raise _outside(plan, k, values, low, end, text)


_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _outside(
    plan: Plan, k: int, values: NDArray[Any], low: int, end: int, text: str
) -> InputRejectedError:
    wrong = (values < low) | (values >= end)
    place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    return InputRejectedError(
        f"expected values from {low} to {end - 1} ({text}), found {int(values[place])} "
        f"at {list(place)}",
        where=f"input {plan.inputs[k].name!r}",
    )
