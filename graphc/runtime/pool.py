"""Memory of a Session: the arena, per-thread scratch, states, and mapped weights.

All of it is reserved with mmap and committed by the kernel on first touch, so a plan with a large
bucket costs only what the lengths in use touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import DamagedError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PAGE = 4096
HUGE_PAGE = 2 << 20
# the arena of a large bucket may be larger than memory: it must not count before it is touched;
# Python names the flag from 3.13 on
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


_char_at = ctypes.c_char.from_buffer
_address = ctypes.addressof


def address_of(memory: Any) -> int:
    """Where a writable contiguous buffer that is not empty begins (numpy's own ways to tell take
    five times as long)."""
    return _address(_char_at(memory))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _prefer_huge_pages(mapped: mmap.mmap, start: int = 0, length: int | None = None) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        length = len(mapped) - start if length is None else length
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            mapped.madvise(mmap.MADV_HUGEPAGE, start, length)


class Region:
    """Zeroed private memory. `address` is page aligned (2 MiB aligned from 4 MiB on); `nbytes` is
    what was asked for. From 4 MiB on it comes in huge pages, where the kernel grants them; from
    64 MiB on only the parts named by `use_huge_pages`: it may be planned for lengths far beyond
    those in use, so that every small buffer would take a huge page of its own."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        huge = nbytes >= 2 * HUGE_PAGE
        size = max(nbytes + (HUGE_PAGE if huge else 0), 1)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise UsageError(
                f"cannot reserve {nbytes:,} bytes for the arena: {error.strerror}",
                hint="build with smaller limits, such as --bucket T=512,B=8",
            ) from error
        self.sparse = nbytes >= 32 * HUGE_PAGE
        if huge and not self.sparse:
            _prefer_huge_pages(self._map)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        base = int(self._bytes.__array_interface__["data"][0])
        start = (round_up(base, HUGE_PAGE) - base) if huge else 0
        self._start = start
        self.address = base + start
        self.bytes: NDArray[np.uint8] = self._bytes[start : start + nbytes]

    def use_huge_pages(self, offset: int, nbytes: int) -> None:
        """Huge pages for those that lie wholly in a part of a sparse region."""
        first = round_up(offset, HUGE_PAGE)
        last = (offset + nbytes) // HUGE_PAGE * HUGE_PAGE
        if self.sparse and first < last:
            _prefer_huge_pages(self._map, self._start + first, last - first)

    def clear(self) -> None:
        """Sets all bytes to zero."""
        self.bytes[:] = 0


class MappedFile:
    """A file mapped read-only; pages come in when first read. An empty file has the address of an
    empty page."""

    def __init__(self, path: Path | str) -> None:
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size:
                    self._map: Any = mmap.mmap(
                        file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
                    )
                    _prefer_huge_pages(self._map)
                    self.bytes = np.frombuffer(self._map, np.uint8)
                    self.address = int(self.bytes.__array_interface__["data"][0])
        except OSError as error:
            raise DamagedError(
                f"cannot map the weights: {error.strerror}",
                where=str(path),
                hint="rebuild the plan: graphc build",
            ) from error
        self.nbytes = int(self.bytes.nbytes)
        if not self.nbytes:
            self._map = Region(0)
            self.address = self._map.address


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised bytes at a 64-byte aligned address, freed with the array (and its views)."""
    raw: NDArray[np.uint8] = np.empty(nbytes + 64, np.uint8)
    start = -address_of(raw) % 64
    return raw[start : start + nbytes]
