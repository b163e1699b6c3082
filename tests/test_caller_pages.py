"""Inputs that stay between runs are moved to huge pages where they lie."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from graphc.runtime.caller_pages import GAP, LEAST, CallerPages, collapse, joined
from graphc.runtime.pool import HUGE_PAGE
from graphc.runtime.weights import _mapped


def small_pages(nbytes: int) -> tuple[mmap.mmap, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Anonymous memory that came in small pages, with content."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # as malloc leaves it: neither asked for nor forbidden
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, array


def test_what_stays_is_collapsed_and_keeps_its_content() -> None:
    _, array = small_pages(8 * HUGE_PAGE)
    before, address = array.copy(), array.ctypes.data
    _, probe = small_pages(4 * HUGE_PAGE)
    if not collapse(probe.ctypes.data, probe.nbytes):
        pytest.skip("this kernel does not collapse pages on demand")
    assert _mapped(address, "AnonHugePages") == 0
    pages = CallerPages()
    assert pages.see([(address, array.nbytes), (address, 64)]) is None
    assert pages.pending
    thread = pages.see([(address, array.nbytes)])
    assert thread is not None
    thread.join()
    assert _mapped(address, "AnonHugePages") >= 6 * HUGE_PAGE
    assert np.array_equal(array, before)
    pages.see([(address, array.nbytes)])
    assert not pages.pending, "what is done is not looked at again"


def test_neighbours_share_the_huge_page_at_their_border() -> None:
    far = LEAST + GAP
    assert joined([(far, LEAST), (0, LEAST)]) == [(0, far + LEAST)]
    assert joined([(0, LEAST), (far + 1, LEAST)]) == [(0, LEAST), (far + 1, LEAST)]
    assert joined([(0, 4 * LEAST), (LEAST, LEAST)]) == [(0, 4 * LEAST)]
    _, array = small_pages(6 * HUGE_PAGE)
    _, probe = small_pages(4 * HUGE_PAGE)
    if not collapse(probe.ctypes.data, probe.nbytes):
        pytest.skip("this kernel does not collapse pages on demand")
    before = array.copy()
    border = -(-array.ctypes.data // HUGE_PAGE) * HUGE_PAGE + 5 * HUGE_PAGE // 2
    places = [(border - 4096 - LEAST, LEAST), (border + 64, LEAST)]  # one whole huge page in each
    pages = CallerPages()
    pages.see(places)
    thread = pages.see(places)
    assert thread is not None
    thread.join()
    assert _mapped(array.ctypes.data, "AnonHugePages") == 3 * HUGE_PAGE
    assert np.array_equal(array, before)


def test_what_moves_or_is_small_is_left_alone() -> None:
    pages = CallerPages()
    pages.see([(1 << 40, LEAST - 1)])
    assert not pages.pending
    pages.see([(1 << 40, LEAST)])
    assert pages.see([(1 << 41, LEAST)]) is None


def test_memory_that_is_gone_does_no_harm() -> None:
    memory, array = small_pages(4 * HUGE_PAGE)
    address, nbytes = array.ctypes.data, array.nbytes
    del array
    memory.close()
    assert not collapse(address, nbytes)
