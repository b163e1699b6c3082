"""Weights that move to huge pages while they are read."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from graphc.plan import Buffer
from graphc.runtime import weights
from graphc.runtime.pool import HUGE_PAGE, MappedFile
from graphc.runtime.session import load
from tests.test_runtime import (
    Table,
    kernel,
    library,  # noqa: F401  (a fixture)
    make_plan,
    out,
    tensor,
)

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
huge_pages = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not _THP.exists() or "[never]" in _THP.read_text(),
    reason="this kernel grants no huge pages",
)


def mapped_file(path: Path, nbytes: int) -> tuple[MappedFile, np.ndarray[tuple[int], np.dtype]]:
    content = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    mapped = MappedFile(path)
    if nbytes and hasattr(mmap, "MADV_NOHUGEPAGE"):  # as where the page cache has small pages
        mapped._map.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped, content


@huge_pages
def test_content_stays_and_pages_grow(tmp_path: Path) -> None:
    mapped, content = mapped_file(tmp_path / "weights", 43 * 1000 * 1000)
    address, bytes_before = mapped.address, int(mapped.bytes[5])
    np.testing.assert_array_equal(mapped.bytes, content)  # read, as by a few runs
    moved = weights.move_to_huge_pages(mapped)
    assert moved % HUGE_PAGE == 0
    assert moved >= 43 * 1000 * 1000 - 2 * HUGE_PAGE
    assert mapped.address == address
    assert int(mapped.bytes[5]) == bytes_before
    np.testing.assert_array_equal(mapped.bytes, content)
    middle = address + mapped.nbytes // 2
    assert weights._mapped(middle, "AnonHugePages") > 0
    assert (tmp_path / "weights").read_bytes() == content.tobytes()


@huge_pages
def test_what_is_hardly_read_stays_in_the_file(tmp_path: Path) -> None:
    mapped, content = mapped_file(tmp_path / "weights", 48 << 20)
    table = mapped.bytes[8 << 20 : 40 << 20]
    rows = [int(row[:64].sum()) for row in (table[i << 23 :] for i in range(4))]  # one in 8 MiB
    np.testing.assert_array_equal(mapped.bytes[: 8 << 20], content[: 8 << 20])
    np.testing.assert_array_equal(mapped.bytes[40 << 20 :], content[40 << 20 :])
    moved = weights.move_to_huge_pages(mapped)
    assert 0 < moved <= 16 << 20
    first = weights.round_up(table.ctypes.data, HUGE_PAGE)
    assert weights._resident(first, 24 << 20) < 0.5
    assert rows == [int(row[:64].sum()) for row in (table[i << 23 :] for i in range(4))]
    np.testing.assert_array_equal(mapped.bytes, content)


def test_small_weights_stay(tmp_path: Path) -> None:
    mapped, content = mapped_file(tmp_path / "weights", weights.LEAST - 1)
    assert weights.move_in_background(mapped) is None
    assert weights.move_to_huge_pages(mapped) == 0
    np.testing.assert_array_equal(mapped.bytes, content)


def test_readers_notice_nothing(tmp_path: Path) -> None:
    mapped, content = mapped_file(tmp_path / "weights", 40 << 20)
    wanted = int(content.view(np.uint64).sum(dtype=np.uint64))
    wrong: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found = int(mapped.bytes.view(np.uint64).sum(dtype=np.uint64))
            if found != wanted:
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    weights.move_to_huge_pages(mapped)
    stop.set()
    reader.join()
    assert not wrong
    np.testing.assert_array_equal(mapped.bytes, content)


@pytest.mark.parametrize("shared", [False, True])
def test_a_session_moves_them_after_some_runs(
    tmp_path: Path, library: Path, shared: bool, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    n = 2 << 20
    e = Table()
    w = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", n)], outputs=[out(e, 2, n)],
        buffers=[Buffer("input", 0, 0, e(4 * n)), Buffer("weight", 0, 0, e(4 * n)),
                 Buffer("output", 0, 0, e(4 * n))],
        steps=[kernel("tk_add", e, [0, 1, 2], e(n), grain=1024)], weight_data=[w],
    )  # fmt: skip
    if shared:
        monkeypatch.setenv("GRAPHC_SHARE_WEIGHTS", "1")
    session = load(plan, threads=2)
    x = np.ones(n, np.float32)
    for k in range(12):
        np.testing.assert_array_equal(session.run(x)[0], x + w)
        assert (session._mover is not None) == (not shared and k >= 2)
    if session._mover is not None:
        session._mover.join()
    np.testing.assert_array_equal(session.run(x)[0], x + w)
