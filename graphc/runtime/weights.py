"""Weights of a Session that is used repeatedly: moved from the page cache into huge pages.

A mapped file starts at once and is shared by all processes, but the kernel keeps files in small
pages more often than not, and kernels that stream weights lose a quarter to a third of the memory's
speed to them. So after a few runs a thread copies the weights piece by piece into huge pages and
puts each piece where the file was mapped: addresses stay, nothing waits, and what is resident does
not grow by more than a piece. The memory is then the process's own. Pieces that the runs hardly
read stay in the file: of a table of embeddings a few rows are resident, not all of it. Linux only;
elsewhere, and where the kernel grants no huge pages, the file stays mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

import numpy as np

from graphc.runtime.pool import HUGE_PAGE, MappedFile, round_up

#: smaller weights stay in the caches, where pages matter less than memory
LEAST = 4 << 20
_PIECE = 2 * HUGE_PAGE
_READ, _READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_MAYMOVE_FIXED = 3
_FAILED = ctypes.c_void_p(-1).value


def move_in_background(weights: MappedFile) -> threading.Thread | None:
    """Starts the move, unless these weights are better where they are."""
    if not sys.platform.startswith("linux") or weights.nbytes < LEAST:
        return None
    thread = threading.Thread(target=move_to_huge_pages, args=(weights,), daemon=True)
    thread.start()
    return thread


def move_to_huge_pages(weights: MappedFile) -> int:
    """Moves the whole huge pages of the mapping of which most was read, while others may read them;
    gives how many bytes were moved."""
    first = round_up(weights.address, HUGE_PAGE)
    last = (weights.address + weights.nbytes) // HUGE_PAGE * HUGE_PAGE
    if last - first < LEAST:
        return 0
    read, huge = (_mapped(weights.address, field) for field in ("Rss", "FilePmdMapped"))
    if 2 * huge > read:
        return 0
    libc = _libc()
    moved = 0
    for target in range(first, last, _PIECE):
        size = min(_PIECE, last - target)
        if _resident(target, size) <= 0.5:
            continue
        if not _move(libc, target, size):
            break
        moved += size
    return moved


def _move(libc: ctypes.CDLL, target: int, size: int) -> bool:
    """Replaces [target, target + size) by huge pages with the same content."""
    whole = size + HUGE_PAGE
    start = libc.mmap(None, whole, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start == _FAILED:
        return False
    piece = round_up(start, HUGE_PAGE)
    libc.madvise(piece, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(piece, target, size)
    moved = (
        2 * _mapped(piece, "AnonHugePages") >= size
        and libc.mprotect(piece, size, _READ) == 0
        and libc.mremap(piece, size, size, _MAYMOVE_FIXED, target) == target
    )
    if moved:  # what is left around the piece
        if piece > start:
            libc.munmap(start, piece - start)
        libc.munmap(piece + size, start + whole - piece - size)
    else:
        libc.munmap(start, whole)
    return moved


def _resident(address: int, size: int) -> float:
    """The share of a range that the process has mapped: of a file, what was read and lies around
    it. All, where /proc/self/pagemap cannot be read."""
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(address // mmap.PAGESIZE * 8)
            pages = np.frombuffer(file.read(size // mmap.PAGESIZE * 8), np.uint64)
    except OSError:
        return 1.0
    return float(np.mean(pages >> np.uint64(63))) if len(pages) else 1.0


def _mapped(address: int, field: str) -> int:
    """Bytes of the mapping that holds an address, as a field of /proc/self/smaps says."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, _, rest = line.partition(" ")
            if not place.endswith(":"):
                begin, end = (int(part, 16) for part in place.split("-"))
                inside = begin <= address < end
            elif inside and place == field + ":":
                return int(rest.split()[0]) * 1024
    return 0


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = libc.mprotect.argtypes = [pointer, size, number]
    libc.mmap.restype = libc.mremap.restype = pointer
    return libc
