"""`graphc cache`: what it shows, counts, explains, prunes and repairs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cache import entry
from cache.counters import Counters
from cache.journal import Journal
from cache.key import Key
from cache.listing import listed, parse_age, prune
from cache.store import Store
from cli.cache import cache as command
from cli.options import BuildOptions
from graphc.errors import CacheMissError, DamagedError, UsageError
from graphc.store import GRAPHS, KERNELS, LINKS
from graphc.toolchain.isa import Isa
from tests.test_cache import FAKE, build, fake, flip, payloads, put

__all__ = ["fake"]  # a fixture


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def stats() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("stats", "--json"))
    return found


def reasons() -> dict[str, int]:
    """The reasons of kernels' misses so far; the fake compiler makes no precompiled header."""
    counts = Store().counters.counts()
    return dict(counts.misses.get(KERNELS, {}))


def test_the_command_shows_verifies_explains_and_clears(tmp_path: Path) -> None:
    build(Store(), "one", "two")
    assert stats()["buckets"][KERNELS]["entries"] == 2 and stats()["writable"]
    assert "kernels-v2" in run("stats")
    entries = json.loads(run("list", "--json"))
    assert {item["label"] for item in entries} == {"one", "two"}
    assert "two" in run("list")
    assert "source: " in run("why", "--last")
    assert "nearest: " in run("why", entries[0]["key"][:10])
    found = json.loads(run("why", entries[0]["key"], "--json"))
    assert found["entries"][0]["nearest"]["diffs"] and found["lookups"] is None
    assert "sound" in run("verify")
    flip(payloads(Store())[0])
    result = CliRunner().invoke(command, ["verify", "--json"])
    assert isinstance(result.exception, DamagedError)
    assert len(json.loads(result.output)) == 1
    assert "repaired" in run("verify", "--repair")
    assert "exported 1 entries" in run("export", str(tmp_path / "b.zip"))
    assert "removed 1 entries" in run("clear")
    assert "imported 1 entries" in run("import", str(tmp_path / "b.zip"))
    assert run("dir").strip() == str(Store().root)
    assert json.loads(run("dir", "--json")) == {"folder": str(Store().root)}
    assert Store().check() == []


def test_the_command_refuses_an_unknown_key() -> None:
    for arguments in (["why", "ffff"], ["why"], ["why", "ab", "--last"]):
        result = CliRunner().invoke(command, arguments)
        assert isinstance(result.exception, UsageError)


# -- stats ------------------------------------------------------------------------------------


def test_hits_and_misses_are_counted_over_stores() -> None:
    build(Store(), "one", "two")
    build(Store(), "one", "two", "three")
    counts = Store().counters.counts()
    assert (counts.hits[KERNELS], counts.misses[KERNELS].total()) == (2, 3)
    assert reasons() == {"empty": 2, "source": 1}
    found = stats()
    assert (found["hits"], found["buckets"][KERNELS]["misses"]) == (2, 3)
    assert "2 of 7 look-ups hit" in run("stats")  # and twice a precompiled header that fails
    assert "no entry is of this source" in run("stats")


def test_seconds_saved_are_those_the_entries_hit_took(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DELAY", "0.1")
    build(Store(), "one")
    assert stats()["saved_s"] == 0
    build(Store(), "one")
    build(Store(), "one")
    took = listed(Store())[0].seconds
    assert took >= 0.1 and stats()["saved_s"] == pytest.approx(2 * took, abs=0.002)


def another_compiler(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = fake.parent / "other-g++"
    other.write_text(FAKE.replace("12.0.0", "12.0.1"))
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))


def another_flag(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphc.toolchain.flags._COMMON", ("-O2",))


def other_headers(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphc.toolchain.sources.ABI_VERSION", 999)


def other_features(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = Isa("avx2", "x86_64", ("avx2",))
    monkeypatch.setattr(Isa, "of", staticmethod(lambda name: isa))


def damaged(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(payloads(Store())[0])


def removed(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("clear")


def evicted(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(Store(limit=1000), (("n", "big"),), b"x" * 2000)
    assert stats()["evicted"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_compiler, "compiler"),
        (other_features, "cpu"),
        (other_headers, "headers"),
        (another_flag, "flags"),
        (damaged, "damaged"),
        (removed, "removed"),
        (evicted, "evicted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_of_a_miss(
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    build(Store(), "one")
    change(fake, monkeypatch)
    assert build(Store(), "one").compiled == 1
    assert reasons() == {"empty": 1, reason: 1}
    found = stats()
    assert [found[cause] for cause in ("damaged", "removed")] == [
        int(reason == cause) for cause in ("damaged", "removed")
    ]
    assert build(Store(), "one").hits == 1


def test_captured_graphs_are_counted_apart() -> None:
    store = Store()
    area = store.workspace()
    wanted = (("model", "m.py:f"), ("options", "a"), ("graphc", "1"))
    others = [(*wanted[:1], ("options", "b"), *wanted[2:]), (*wanted[:2], ("graphc", "2"))]
    assert store.fetch(GRAPHS, wanted, area) is None
    store.put(GRAPHS, wanted, lambda path: path.touch(), label="m", seconds=7.0)
    assert store.fetch(GRAPHS, wanted, area) is not None
    assert [store.fetch(GRAPHS, other, area) for other in others] == [None, None]
    found = stats()
    assert (found["hits"], found["saved_s"], found["capture_saved_s"]) == (1, 0, 7)
    assert {r: n for r, n in found["reasons"].items() if n} == {
        "empty": 1,
        "flags": 1,
        "headers": 1,
    }
    assert "7.00 s of capturing saved" in run("stats")


def test_the_ledger_is_made_again_from_the_entries(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(Store(), "one")
    (Store().root / "counters-v1" / "ledger").write_bytes(b"\xff\0 no ledger\nmade x\n")
    another_compiler(fake, monkeypatch)
    build(Store(), "one")
    assert reasons() == {"empty": 1, "compiler": 1}


def test_counters_never_fail_a_build(fake: Path) -> None:
    store = Store()
    (store.root / "counters-v1").write_text("in the way")
    assert build(store, "one").compiled == 1
    assert build(store, "one").hits == 1
    assert stats()["hits"] == 0
    (store.root / "counters-v1").unlink()
    outside = fake.parent / "outside"
    outside.write_text("precious\n")
    (store.root / "counters-v1").mkdir()
    for name in ("counts", "ledger"):
        (store.root / "counters-v1" / name).symlink_to(outside)
    assert build(Store(), "one").hits == 1
    assert outside.read_text() == "precious\n"


# -- why --------------------------------------------------------------------------------------

MODEL = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), (torch.ones(2, 8),)
"""


def test_why_a_model_would_miss(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = f"{tmp_path}/model.py:model"
    store = Store()

    def why(*options: str) -> tuple[int, int, list[dict[str, Any]]]:
        found = json.loads(run("why", model, *options, "--json"))
        return found["hits"], found["lookups"], found["entries"]

    (lookups,) = BuildOptions().lookups(model, quiet=True)
    count = len(lookups.kernels)
    hits, asked, entries = why()
    assert (hits, asked) == (0, count) and len(entries) == count >= 2
    assert {item["reason"] for item in entries} == {"empty"}
    for _, fields in lookups.kernels:
        put(store, fields, fields[-1][1].encode())
    hits, asked, entries = why()
    assert (hits, asked) == (count, count + 1)  # all kernels; with them the library's key is known
    assert [(item["label"], item["bucket"]) for item in entries] == [("library", LINKS)]
    hits, asked, entries = why("--target", "portable")
    assert (hits, asked) == (0, count)
    changed = {item["label"]: item for item in entries}["executor"]
    assert changed["reason"] == "cpu" and changed["nearest"]["label"] == "kernel"
    assert {diff["name"] for diff in changed["nearest"]["diffs"]} >= {"isa", "features", "flags"}
    flip(payloads(store)[0])
    hits, asked, entries = why()
    assert (hits, asked) == (count - 1, count) and entries[0]["reason"] == "damaged"
    assert f"{count - 1} of {count} look-ups hit" in run("why", model)
    counts = Store().counters.counts()
    asked = {*counts.hits, *counts.misses, *counts.lost}
    assert not asked & {KERNELS, LINKS}  # asking is no look-up
    assert store.last_misses() == [] and fake.read_text() == "" and len(payloads(store)) == count


def test_the_last_misses_keep_their_reasons_when_they_are_made(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(Store(), "one", "two")
    another_compiler(fake, monkeypatch)
    build(Store(), "one", "three")
    found = json.loads(run("why", "--last", "--json"))["entries"]
    assert [(item["label"], item["reason"], item["made"]) for item in found] == [
        ("one", "compiler", True),
        ("three", "source", True),
    ]
    assert "one " in run("why", "--last") and "another compiler, there now" in run("why", "--last")
    with pytest.raises(CacheMissError):
        build(Store(), "four", require_cached=True)
    assert "four" in run("why", "--last") and "there now" not in run("why", "--last")


def test_why_takes_options_of_a_build_only_with_a_model() -> None:
    build(Store(), "one")
    key = listed(Store())[0].key
    for arguments in (
        ["why", key, "--target", "portable"],
        ["why", "--last", "--generate"],
        ["why", "demo", "--chunk", "5"],
        ["why", "no-such-model.onnx"],
    ):
        result = CliRunner().invoke(command, arguments)
        assert isinstance(result.exception, UsageError), arguments


# -- the journal ------------------------------------------------------------------------------


def _sum(lines: Any) -> list[str]:
    return [f"n {sum(int(w[1]) for w in lines if len(w) == 2 and w[1].isdigit())}"]


def _journal(folder: Path, limit: int = 2000) -> Journal:
    return Journal(folder / "counts" / "n", folder, limit, _sum)


def _append(folder: str, count: int) -> None:
    journal = _journal(Path(folder))
    for _ in range(count):
        journal.append("n 1")


def test_no_line_is_lost_between_processes_that_append_and_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.journal._PATIENCE", 30.0)  # a fold may wait for a CPU here
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(str(tmp_path), 1000)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    journal = _journal(tmp_path)
    assert _sum(journal.read()) == ["n 3000"]
    assert journal.path.stat().st_size < 2100
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.glob("fold-*")) == []


def test_a_killed_process_loses_no_line_of_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    journal = _journal(tmp_path)
    journal.append("n 5")
    writer = context.Process(target=_append, args=(str(tmp_path), 10**9))
    writer.start()
    while journal.path.stat().st_size < 1000:
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    before = int(_sum(journal.read())[0].split()[1])
    with journal.path.open("a") as file:
        file.write("n 7")  # half a line, as a crash or a full disk leaves it
    journal.append("n 100", "n 1")
    after = int(_sum(journal.read())[0].split()[1])
    assert before > 5 and after - before in (1, 71_01)


def test_counting_a_hit_costs_little(tmp_path: Path) -> None:
    counters = Counters(tmp_path, True)
    times = []
    for _ in range(200):
        start = time.thread_time()
        counters.hit(KERNELS, 1.0)
        times.append(time.thread_time() - start)
    assert sorted(times)[100] < 0.0005


def test_folding_keeps_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.counters._COUNTS_LIMIT", 3000)
    monkeypatch.setattr("cache.counters._LEDGER_LIMIT", 5000)
    (tmp_path / "tmp").mkdir()
    counters = Counters(tmp_path, True)
    keys = [Key((("compiler", "a"), ("source", str(number)))) for number in range(100)]
    counters.missed(KERNELS, keys[:1])
    for number, key in enumerate(keys):
        counters.hit(KERNELS, 0.5)
        counters.hit(LINKS, 0.25, "wait")
        counters.made(KERNELS, key)
        if number % 2:
            counters.lost(key.digest, "damaged")
        counters.missed(KERNELS, [key])
    counts = counters.counts()
    assert (counts.hits[KERNELS], counts.waits[LINKS], counts.lost["damaged"]) == (100, 100, 50)
    assert counts.misses[KERNELS] == {"empty": 1, "evicted": 50, "damaged": 50}
    assert counters.evicted([keys[0].digest, keys[1].digest]) == 49
    assert counts.saved == pytest.approx({KERNELS: 50, LINKS: 25}) and counts.since > 0
    assert (tmp_path / "counters-v1" / "counts").stat().st_size < 3100
    other = Key((("compiler", "b"), ("source", "7")))
    assert counters.reasons(KERNELS, [other, keys[99]]) == ["compiler", "damaged"]


# -- prune ------------------------------------------------------------------------------------


def _aged(store: Store) -> None:
    """Entries a to d of 100,000 bytes, used 4, 3, 2 and 1 days ago."""
    for name in "abcd":
        put(store, (("n", name),), name.encode() * 100_000)
    with sqlite3.connect(store.root / "index-v2" / "cache.db") as connection:
        for days, name in zip((4, 3, 2, 1), "abcd", strict=True):
            key = Key((("n", name),)).digest
            connection.execute(
                "UPDATE Cache SET access_time = ? WHERE key = ?", (time.time() - days * 86400, key)
            )
    connection.close()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--max-size", "250k"], "cd"),
        (["--max-size", "0"], ""),
        (["--max-size", "1G"], "abcd"),
        (["--max-age", "36h"], "d"),
        (["--max-age", "1w"], "abcd"),
        (["--max-age", "3.5d", "--max-size", "200000"], "cd"),
    ],
)
def test_prune_removes_what_was_used_longest_ago(options: list[str], kept: str) -> None:
    store = Store()
    _aged(store)
    gone = json.loads(run("prune", *options, "--dry-run", "--json"))
    assert gone["dry_run"] and gone["removed"] == 4 - len(kept)
    assert gone["nbytes"] == 100_000 * gone["removed"] and len(payloads(store)) == 4
    assert f"would remove {4 - len(kept)} entries" in run("prune", *options, "--dry-run")
    assert f"removed {4 - len(kept)} entries" in run("prune", *options)
    places = [entry.folder(store.root, KERNELS, Key((("n", n),)).digest) for n in "abcd"]
    assert "".join(n for n, p in zip("abcd", places, strict=True) if p.is_dir()) == kept
    assert stats()["removed"] == 4 - len(kept)
    assert Store().check() == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["--dry-run"], ["--max-size", "much"], ["--max-size", "-1"], ["--max-age", "30"],
     ["--max-age", "soon"]],
)  # fmt: skip
def test_prune_refuses_what_it_cannot_read(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, ["prune", *arguments])
    assert isinstance(result.exception, UsageError)


def test_ages() -> None:
    assert [parse_age(text) for text in ("45s", "90m", "1.5h", "30d", "2W")] == [
        45, 5400, 5400, 30 * 86400, 14 * 86400,
    ]  # fmt: skip
    assert prune(Store(), None, None) == []


def test_require_cached_counts_its_misses_and_explains_them(fake: Path) -> None:
    build(Store(), "one")
    with pytest.raises(CacheMissError):
        build(Store(), "one", "two", require_cached=True)
    assert reasons() == {"empty": 1, "source": 1}
