"""Lifetimes of buffers, read off the step table: from the first to the last Step that touches one.

Kernels run one after the other, so two buffers conflict if some Step lies in both lifetimes. A
Step's inputs and outputs conflict: nothing is overwritten while it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphc.plan import Step


class Interval(NamedTuple):
    """A buffer in use during the Steps first..last, both included; nbytes is its size."""

    first: int
    last: int
    nbytes: int


def touched(step: Step) -> set[int]:
    """The buffers a Step reads, writes or points to."""
    if step.kernel is not None:
        kernel = step.kernel
        return {*kernel.reads, *kernel.writes, *(buffer for buffer, _ in kernel.pointers)}
    assert step.fallback is not None
    fallback = step.fallback
    found = {*fallback.reads, *(buffer for buffer in fallback.outputs if buffer >= 0)}
    trees: list[object] = [*fallback.arguments, *fallback.keywords.values()]
    while trees:
        tree = trees.pop()
        if isinstance(tree, list):
            trees.extend(tree)
        elif isinstance(tree, dict) and "buffer" in tree:
            found.add(int(tree["buffer"]))
    return found


def lifetimes(steps: Sequence[Step]) -> dict[int, tuple[int, int]]:
    """(first, last) Step of every buffer that some Step touches, by buffer number."""
    spans: dict[int, tuple[int, int]] = {}
    for i, step in enumerate(steps):
        for buffer in touched(step):
            spans[buffer] = (spans.get(buffer, (i, i))[0], i)
    return spans


def intervals(
    spans: Mapping[int, tuple[int, int]], nbytes: Mapping[int, int]
) -> dict[int, Interval]:
    """Intervals of the buffers in `nbytes` (size in bytes at the bucket's limits, by buffer
    number), in the order of `nbytes`; a buffer without `lifetimes` has none."""
    return {
        buffer: Interval(*spans[buffer], size) for buffer, size in nbytes.items() if buffer in spans
    }
