"""The independent judge of a memory plan. It knows intervals and offsets, and no planner."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from graphc.errors import InternalError
from passes.memory.lifetimes import Interval


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of an arena: its size, the most that is live at once (no plan can be smaller), and
    the sum of all buffers (what a plan without reuse needs)."""

    arena_bytes: int
    lower_bound: int
    naive_bytes: int


def check_memory(
    intervals: Sequence[Interval], offsets: Sequence[int], arena_bytes: int, alignment: int = 64
) -> MemoryFacts:
    """Checks that buffers in use at the same time do not overlap, lie inside the arena and are
    aligned. Raises InternalError naming the two buffers, by position in `intervals`."""
    if len(intervals) != len(offsets):
        raise InternalError(f"expected {len(intervals)} offsets, found {len(offsets)}")
    for i, (interval, offset) in enumerate(zip(intervals, offsets, strict=True)):
        if interval.last < interval.first or interval.nbytes < 0:
            raise InternalError(f"buffer {i} has the impossible lifetime {interval}")
        if offset < 0 or offset % alignment or offset + interval.nbytes > arena_bytes:
            raise InternalError(
                f"buffer {i} at offset {offset} with {interval.nbytes} bytes is unaligned or "
                f"outside the arena of {arena_bytes} bytes"
            )
    _check_overlaps(intervals, offsets)
    return MemoryFacts(arena_bytes, lower_bound(intervals), sum(i.nbytes for i in intervals))


def _check_overlaps(intervals: Sequence[Interval], offsets: Sequence[int]) -> None:
    # Sweep over time with the live buffers sorted by offset: as long as they are disjoint, a new
    # one can only meet its two neighbours.
    live: list[tuple[int, int, int]] = []  # (offset, end, buffer)
    ending: list[tuple[int, tuple[int, int, int]]] = []
    for i in sorted(range(len(intervals)), key=lambda k: intervals[k].first):
        interval = intervals[i]
        if interval.nbytes == 0:
            continue
        while ending and ending[0][0] < interval.first:
            live.remove(heapq.heappop(ending)[1])
        entry = (offsets[i], offsets[i] + interval.nbytes, i)
        at = bisect_left(live, entry)
        for other in live[max(at - 1, 0) : at + 1]:
            if other[0] < entry[1] and entry[0] < other[1]:
                raise InternalError(
                    f"buffers {other[2]} {intervals[other[2]]} and {i} {interval} overlap: bytes "
                    f"{other[0]}..{other[1]} and {entry[0]}..{entry[1]}"
                )
        insort(live, entry)
        heapq.heappush(ending, (interval.last, entry))


def lower_bound(intervals: Sequence[Interval]) -> int:
    """The most bytes live at one Step, without alignment."""
    changes: dict[int, int] = {}
    for interval in intervals:
        changes[interval.first] = changes.get(interval.first, 0) + interval.nbytes
        changes[interval.last + 1] = changes.get(interval.last + 1, 0) - interval.nbytes
    live = most = 0
    for step in sorted(changes):
        live += changes[step]
        most = max(most, live)
    return most
