"""Several processes on one cache: each kernel is compiled once, and a wiped folder harms nobody.

`benchmarks/cache_race.py` does the same with eight.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cache import locks
from cache.key import Key
from cache.store import Store
from graphc.lowering.context import Unit
from graphc.store import KERNELS
from graphc.toolchain.compile import compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa
from graphc.toolchain.sources import kernel_fields, prelude_fields

HOME = Path(__file__).resolve().parents[1]

#: poses as g++: an object is the source itself
FAKE = """#!/bin/sh
[ "$1" = -v ] && { echo "gcc version 12.0.0"; echo "Target: x86_64-fake"; exit 0; }
[ -f unit.cpp ] || exit 1
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
cp unit.cpp "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    program = tmp_path / "fake-g++"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return Compiler.discover()


def test_three_processes_make_each_kernel_once_and_survive_a_wipe(tmp_path: Path) -> None:
    command = ["benchmarks/cache_race.py", "--processes", "3", "--rounds", "1", "--wipes", "1",
               "--kernels", "3"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=HOME, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(empty|wiped) +3 +(\d+) +(\d+) +\d+ +[\d.]+ +(\d+)$", done.stdout, re.M)
    (empty, kernels, compiles, wrong), wiped = rows
    assert (empty, wiped[0]) == ("empty", "wiped")
    assert compiles == kernels and int(kernels) >= 5
    assert wrong == wiped[3] == "0"


@pytest.mark.parametrize("name", ["mine", "precompiled header"])
def test_waiting_for_another_process_is_shown(
    tmp_path: Path, compiler: Compiler, name: str
) -> None:
    store, isa = Store(tmp_path / "cache"), Isa.detect()
    unit = Unit("mine", "// mine\n")
    every = {
        "mine": kernel_fields(unit, isa, compiler),
        "precompiled header": prelude_fields(isa, compiler),
    }
    digest = Key(every[name]).digest
    held = locks.acquire(store.root / "locks" / digest, seconds=0)
    assert held is not None
    told: list[tuple[str, int, int]] = []
    shown = threading.Event()

    def waiting(*what: object) -> None:
        told.append(what)  # type: ignore[arg-type]
        shown.set()

    def release() -> None:
        shown.wait(60)
        held.release()

    thread = threading.Thread(target=release)
    thread.start()
    units = [unit, Unit("other", "// other\n")]
    report = compile_units(units, isa, compiler, store, waiting=waiting)
    thread.join()
    assert told[0] == (name, int(name == "mine"), 2)
    assert report.compiled == 2
    assert store.check() == []


def test_a_wipe_while_a_kernel_is_made(tmp_path: Path) -> None:
    """Lock, workspace and index are gone; the file is made, kept, and others can make theirs."""
    import shutil

    store, other = Store(tmp_path / "cache"), Store(tmp_path / "cache")
    fields = (("kind", "test"),)

    def make(path: Path) -> None:
        shutil.rmtree(store.root)
        assert other.fetch(KERNELS, fields, other.workspace()) is None
        path.write_bytes(b"made")

    made = store.fetch_or_make(KERNELS, fields, make, store.workspace(), label="l")
    assert made.origin == "made" and made.path.read_bytes() == b"made"
    for again in (store, other, Store(store.root)):
        found = again.fetch(KERNELS, fields, again.workspace())
        assert found is not None and found.path.read_bytes() == b"made"
        assert again.check() == []
    assert store.drain_notes() == []


def test_the_file_that_was_checked_is_the_one_that_is_used(tmp_path: Path) -> None:
    """Whatever happens to the entry afterwards."""
    store = Store(tmp_path / "cache")
    fields = (("kind", "test"),)
    for _ in range(2):
        stored = store.fetch_or_make(
            KERNELS, fields, lambda path: path.write_bytes(b"right"), store.workspace(), label="l"
        )
        for path in store.root.glob(f"{KERNELS}/*/*/object.o"):
            path.write_bytes(b"wrong")
        assert stored.path.read_bytes() == b"right"


def test_a_hundred_kernels_are_two_hundred_files(tmp_path: Path, compiler: Compiler) -> None:
    store, isa = Store(tmp_path / "cache"), Isa.detect()
    units = [Unit(f"k{number}", f"// {number}\n") for number in range(100)]
    report = compile_units(units, isa, compiler, store)
    assert report.compiled == 100
    store.close()
    files = [path for path in store.root.rglob("*") if not path.is_dir()]
    entries = [path for path in files if path.parts[-4] == KERNELS]
    assert len(entries) == 200
    assert len(files) <= 300
    assert not any(path.parent.name == "locks" for path in files)


def test_a_hit_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    """CPU time of the median of 20; the limit leaves room for machines slower than ours."""
    store = Store(tmp_path / "cache")
    every = [(("kind", "test"), ("source", f"{n}" + "int x;\n" * 1000)) for n in range(20)]
    data = os.urandom(50_000)
    for fields in every:
        store.fetch_or_make(
            KERNELS, fields, lambda path: path.write_bytes(data), store.workspace(), label="l"
        )
    area, times = store.workspace(), []
    for fields in every:
        start = time.thread_time()
        found = store.fetch(KERNELS, fields, area)
        times.append(time.thread_time() - start)
        assert found is not None
    assert sorted(times)[10] < 0.003
