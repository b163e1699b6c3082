"""Places buffers in one arena: offline dynamic storage allocation.

The problem is NP-hard; greedy placement in a good order comes close to the bound in practice.
"Greedy by size" is from Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference" (2020). Here several orders are tried with two fits, then the best one is improved by
moving what sticks out. Everything is deterministic: work is bounded by counts, not by a clock.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.memory.lifetimes import Interval

PAGE = 4096
_SLACK = 1.02  # an arena with page alignment may be this much larger than the bound
_GOOD = 1.003  # near enough to the bound to stop the search


@dataclass(frozen=True)
class Placement:
    """Byte offset of each buffer, and the bytes of the arena that holds them all."""

    offsets: list[int]
    arena_bytes: int


def place(intervals: Sequence[Interval], alignment: int = 64, work: int = 4_000_000) -> Placement:
    """Gives buffers with overlapping lifetimes disjoint places.

    Every offset is a multiple of `alignment` (a power of two). Buffers of a page or more start on
    a page if the arena then stays within 2% of the lower bound (most bytes live at one Step), or
    grows not at all. `work` bounds the search, in pairs of buffers looked at (about 0.1 us each).
    """
    if not intervals:
        return Placement([], 0)
    packer = _Packer(intervals)
    plain = packer.best([alignment] * len(intervals), packer.bound * _GOOD, work // 2)
    page = max(PAGE, alignment)
    paged = packer.best(
        [page if i.nbytes >= PAGE else alignment for i in intervals],
        max(packer.bound * _SLACK, plain.arena_bytes),
        work // 2,
    )
    if paged.arena_bytes <= max(packer.bound * _SLACK, plain.arena_bytes):
        return paged
    return plain


class _Packer:
    def __init__(self, intervals: Sequence[Interval]) -> None:
        table = np.array(intervals, np.int64).reshape(-1, 3)
        self._first, self._last, self._nbytes = table[:, 0], table[:, 1], table[:, 2]
        self.nbytes: list[int] = self._nbytes.tolist()
        self.conflicts: list[list[int]] = [
            np.flatnonzero((self._first <= interval.last) & (self._last >= interval.first)).tolist()
            for interval in intervals
        ]
        steps = np.unique(self._first)  # live bytes peak where something begins
        begins, ends = np.argsort(self._first), np.argsort(self._last)
        begun = np.concatenate(([0], np.cumsum(self._nbytes[begins])))
        ended = np.concatenate(([0], np.cumsum(self._nbytes[ends])))
        live = (
            begun[np.searchsorted(self._first[begins], steps, "right")]
            - ended[np.searchsorted(self._last[ends], steps, "left")]
        )
        self.bound = int(live.max())
        self._peak = int(steps[live.argmax()])

    def orders(self) -> list[list[int]]:
        """Orders worth trying, the most promising first; ties go by the time of first use."""
        first, nbytes = self._first, self._nbytes
        length = self._last - first + 1
        at_peak = (first <= self._peak) & (self._peak <= self._last)
        return [
            np.lexsort(keys).tolist()
            for keys in (
                (first, -length, -nbytes),
                (first, -nbytes, ~at_peak),
                (first, -nbytes, -nbytes * length),
                (first, -nbytes, -length),
                (-nbytes, first),
            )
        ]

    def best(self, alignment: list[int], enough: float, work: int) -> Placement:
        """The first placement of at most `enough` bytes, or the best found by looking at about
        `work` pairs of buffers."""
        tries = max(1, work // max(1, sum(map(len, self.conflicts))))
        best: tuple[int, list[int], list[int], bool] | None = None
        for order in self.orders():
            for tight in (False, True):
                offsets = self.pack(order, alignment, tight)
                size = self.size(offsets)
                if best is None or size < best[0]:
                    best = (size, offsets, order, tight)
                tries -= 1
                if size <= enough or tries <= 0:
                    return Placement(best[1], best[0])
        assert best is not None
        return self.improve(alignment, enough, tries, *best)

    def size(self, offsets: list[int]) -> int:
        size: int = max(map(operator.add, offsets, self.nbytes))
        return size

    def pack(self, order: list[int], alignment: list[int], tight: bool) -> list[int]:
        """Places in this order, each in the lowest gap that holds it, or the tightest."""
        start, end = [-1] * len(order), [0] * len(order)
        for i in order:
            step, size = alignment[i], self.nbytes[i]
            begin, chosen, slack = 0, -1, 0
            for other, other_end in sorted(
                [(start[j], end[j]) for j in self.conflicts[i] if start[j] >= 0]
            ):
                rest = other - begin - size
                if rest >= 0 and (chosen < 0 or rest < slack):
                    chosen, slack = begin, rest
                    if not tight:
                        break
                if other_end > begin:
                    begin = -(-other_end // step) * step
            start[i] = begin if chosen < 0 else chosen
            end[i] = start[i] + size
        return start

    def improve(
        self,
        alignment: list[int],
        enough: float,
        tries: int,
        size: int,
        offsets: list[int],
        order: list[int],
        tight: bool,
    ) -> Placement:
        """Hill climbing: moves a buffer that reaches the arena's end to an earlier place in the
        order, or swaps two; keeps what is not worse."""
        chance = random.Random(0)
        n = len(order)
        for _ in range(tries):
            if size <= enough:
                break
            moved = order.copy()
            top = [i for i in range(n) if offsets[i] + self.nbytes[i] == size]
            at = moved.index(chance.choice(top))
            if at > 0 and chance.random() < 0.7:
                moved.insert(chance.randrange(at), moved.pop(at))
            else:
                a, b = chance.randrange(n), chance.randrange(n)
                moved[a], moved[b] = moved[b], moved[a]
            placed = self.pack(moved, alignment, tight)
            reached = self.size(placed)
            if reached <= size:
                size, offsets, order = reached, placed, moved
        return Placement(offsets, size)
