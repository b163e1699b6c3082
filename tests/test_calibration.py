"""The measured peaks of the machine: loops, folder, and what is derived from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import cli.doctor
from cli.doctor import doctor
from graphc import api
from graphc.runtime import calibration
from graphc.runtime.calibration import Level, Peaks, Rates, cache_levels, measured, save


def level(name: str, capacity: int, shared: int, read: float) -> Level:
    return Level(name, capacity, shared, capacity // 2, read, read / 2, read * 1.5)


def rates(threads: int, factor: float) -> Rates:
    levels = [
        level("L1", 32 << 10, 1, 200 * factor),
        level("L2", 1 << 20, 1, 100 * factor),
        level("L3", 32 << 20, 2, 80 * factor),
        level("DRAM", 0, 1, 30 * factor),
    ]
    return Rates(threads, 100 * factor, 200 * factor, 0, levels)


def peaks() -> Peaks:
    return Peaks("some CPU", calibration.cpu_key(), rates(1, 1), rates(4, 3))


def test_arithmetic_peaks_grow_with_threads_up_to_the_measured_total() -> None:
    made = peaks()
    assert made.gflops("fp32", 1) == 100
    assert made.gflops("bf16", 2) == 400
    assert made.gflops("bf16", 4) == 600
    assert made.gflops("int8", 1) == 100  # no instruction: widened


def test_the_level_that_holds_the_bytes() -> None:
    made = peaks()
    assert made.level(16 << 10, 1).name == "L1"
    assert made.level((32 << 10) + 1, 1).name == "L2"
    assert made.level(2 << 20, 1).name == "L3"
    assert made.level(2 << 20, 2).name == "L2"  # each thread has a cache of its own
    assert made.level(32 << 20, 2).name == "L3"
    assert made.level(48 << 20, 2).name == "DRAM"  # two threads share one
    assert made.level(1 << 40, 64).name == "DRAM"
    assert made.level(1 << 40, 2).read == 60
    assert made.level(1 << 40, 4).read == 90


def test_kept_under_the_key_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(tmp_path) is None
    path = save(peaks(), tmp_path)
    assert measured(tmp_path) == peaks()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-20])
    assert measured(tmp_path) is None
    save(replace(peaks(), format=calibration.FORMAT + 1), tmp_path)
    assert measured(tmp_path) is None
    save(peaks(), tmp_path)
    monkeypatch.setattr(calibration, "cpu_name", lambda: "another CPU")
    assert measured(tmp_path) is None


def test_the_best_of_two_calibrations() -> None:
    busy, quiet = replace(peaks(), all=rates(4, 1.5)), replace(peaks(), one=rates(1, 0.9))
    both = busy.best(quiet)
    assert (both.one, both.all, both.runs) == (rates(1, 1), rates(4, 3), 2)
    assert busy.best(None) == busy
    assert busy.best(replace(quiet, key={"cpu": "another"})) == busy
    pinned = replace(quiet, all=rates(1, 9))  # a calibration on fewer CPUs tells less
    assert pinned.best(busy).all == busy.best(pinned).all == busy.all
    other = replace(quiet.all, levels=quiet.all.levels[:2])
    assert busy.best(replace(quiet, all=other)).all == busy.all


def test_caches_as_the_system_tells_them(tmp_path: Path) -> None:
    for index, (number, kind, size, shared) in enumerate(
        [(1, "Data", "48K", "0,64"), (1, "Instruction", "32K", "0"), (2, "Unified", "2M", "0-1,64"),
         (3, "Unified", "garbage", "0-63")]
    ):  # fmt: skip
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", str(number)), ("type", kind), ("size", size),
                           ("shared_cpu_list", shared)):  # fmt: skip
            (folder / name).write_text(text + "\n")
    assert cache_levels(tmp_path) == [("L1", 48 << 10, 2), ("L2", 2 << 20, 3)]
    assert [name for name, _, _ in cache_levels(tmp_path / "none")] == ["L1", "L2"]


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_working_sets_meet_their_level(threads: int) -> None:
    caches = [("L1", 32 << 10, 1), ("L2", 1 << 20, 1), ("L3", 32 << 20, 16)]
    sets = calibration._working_sets(caches, threads)
    assert len(sets) == 4
    assert sets[0] <= 32 << 10 < sets[1] <= 1 << 20 < sets[2] < sets[3]


def test_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loops, briefly, through a cache of their own."""
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "_ALONE", (1, 1e-4))
    monkeypatch.setattr(calibration, "_TOGETHER", (1, 1e-4))
    monkeypatch.setattr(calibration, "default_threads", lambda: 2)
    monkeypatch.setattr(calibration, "_working_sets", lambda caches, n: [4096] * (len(caches) + 1))
    shown: list[tuple[str, int, int]] = []
    assert api.measured() is None
    found = api.calibrate(lambda *step: shown.append(step))
    assert api.measured() == found
    assert (found.one.threads, found.all.threads) == (1, 2)
    for side in (found.one, found.all):
        assert side.fp32 > 0
        assert all(min(one.read, one.write, one.copy) > 0 for one in side.levels)
    flags = calibration.features() or frozenset()
    assert (found.one.bf16 > 0) == ("avx512_bf16" in flags)
    assert (found.one.int8 > 0) == ("avx512_vnni" in flags)
    assert shown[0] == ("compile", 0, 0)
    assert [done for _, done, _ in shown[1:]] == list(range(shown[1][2]))
    again = api.calibrate()
    assert again.runs == 2 and again.one.fp32 >= found.one.fp32


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cli.doctor, "EXAMINATIONS", (cli.doctor.peak_rates,))
    assert "graphc doctor --calibrate" in CliRunner().invoke(doctor, []).output

    def calibrate(progress: Any = None) -> Peaks:
        save(peaks(), tmp_path)
        return peaks()

    monkeypatch.setattr(api, "calibrate", calibrate)
    text = CliRunner().invoke(doctor, ["--calibrate"]).output
    assert "1 thread" in text and "4 threads" in text
    rows = {line[:11].strip(): line.split() for line in text.splitlines()}
    assert rows["bf16"][1:4] == ["200", "600", "GFLOP/s"]
    assert rows["int8"][1:3] == ["-", "-"]
    assert rows["DRAM copy"][2:5] == ["45", "135", "GB/s"]
    data = json.loads(CliRunner().invoke(doctor, ["--calibrate", "--json"]).output)
    assert data["peaks"]["one"]["levels"][3]["read"] == 30
    assert "fp32 100, bf16 200 GFLOP/s, memory 30 GB/s" in CliRunner().invoke(doctor, []).output
