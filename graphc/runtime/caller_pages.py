"""Large inputs that come back run after run, such as caches: their pages become huge pages.

A kernel that streams a cache from small pages gets two thirds of the memory's speed. The kernel can
collapse pages where they are (MADV_COLLAPSE, Linux 6.1): addresses and contents stay, whoever owns
the memory notices nothing, and what is resident does not grow. Inputs that lie at the same address
in two runs in a row are taken to stay; a thread collapses them, and no run waits for it. Nothing is
done where the administrator has switched huge pages off.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence

from graphc.runtime.pool import HUGE_PAGE, PAGE, round_up

#: smaller inputs stay in the caches
LEAST = 4 << 20
#: at most so far apart, places are one: an allocator's header lies between two allocations
GAP = 2 * PAGE
_COLLAPSE = 25  # MADV_COLLAPSE
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


class CallerPages:
    """Watches the (address, bytes) of the inputs of runs, two in a row at a time."""

    def __init__(self) -> None:
        self.pending = False  # the next run is the second of two
        self._before: set[tuple[int, int]] = set()
        self._done: set[tuple[int, int]] = set()

    def see(self, places: Sequence[tuple[int, int]]) -> threading.Thread | None:
        """Remembers large inputs, or collapses those that were remembered and are here again."""
        large = {place for place in places if place[1] >= LEAST} - self._done
        if not self.pending:
            self._before = large
            self.pending = bool(large) and _allowed()
            return None
        self.pending = False
        stay = self._before & large
        if not stay:
            return None
        self._done |= stay
        thread = threading.Thread(target=_collapse_all, args=(sorted(stay),), daemon=True)
        thread.start()
        return thread


def _collapse_all(places: Sequence[tuple[int, int]]) -> None:
    for address, nbytes in joined(places):
        collapse(address, nbytes)


def joined(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one place each, so that huge pages can go across their borders: of caches of
    4 MiB, half would stay on small pages otherwise."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(places):
        last, size = found[-1] if found else (address, -1 - GAP)
        if address - (last + size) <= GAP:
            found[-1] = (last, max(size, address + nbytes - last))
        else:
            found.append((address, nbytes))
    return found


def collapse(address: int, nbytes: int) -> bool:
    """Collapses the whole huge pages of a range; whether the kernel did. Memory that was given back
    in the meantime, or can't be collapsed, is left alone."""
    first = round_up(address, HUGE_PAGE)
    size = (address + nbytes) // HUGE_PAGE * HUGE_PAGE - first
    if size <= 0:
        return False
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(libc.madvise(first, size, _COLLAPSE) == 0)


def _allowed() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        with open(_SETTING, encoding="ascii") as file:
            return "[never]" not in file.read()
    except OSError:
        return False
