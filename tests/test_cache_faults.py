"""What the cache survives: damage of every kind, kills, and a file system that fails.

The first test runs a short `benchmarks/cache_faults.py`; the others reach single places of it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache import entry, folder, locks, quarantine
from cache.manifest import Meta
from cache.store import Store
from graphc.errors import UsageError
from graphc.store import KERNELS, Stored

HOME = Path(__file__).resolve().parents[1]
FIELDS = (("kind", "test"), ("source", "x" * 100))
DATA = b"payload" * 100


def put(store: Store, fields: tuple[tuple[str, str], ...] = FIELDS) -> Stored:
    return store.fetch_or_make(
        KERNELS, fields, lambda path: path.write_bytes(DATA), store.workspace(), label="l"
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def place(stored: Stored, store: Store) -> Path:
    return entry.folder(store.root, KERNELS, stored.key)


def test_a_short_campaign_finds_nothing(tmp_path: Path) -> None:
    command = ["benchmarks/cache_faults.py", "--damages", "40", "--kills", "6", "--kernels", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=HOME, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 violations\n" in done.stdout
    counts = dict(re.findall(r"^(\w+) +(\d+) +\d+$", done.stdout, re.MULTILINE))
    assert int(counts.pop("all")) >= 40
    assert min(map(int, counts.values())) >= 1, done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("graphc")] == []


# -- quarantine -------------------------------------------------------------------------------


def test_what_is_damaged_is_kept_with_the_reason(store: Store) -> None:
    stored = put(store)
    (place(stored, store) / "object.o").write_bytes(b"other")
    assert store.fetch(KERNELS, FIELDS, store.workspace()) is None
    (cell,) = quarantine.cells(store.root)
    assert (cell / stored.key / "object.o").read_bytes() == b"other"
    where, why = (cell / quarantine.REASON).read_text().splitlines()
    assert where == f"{KERNELS}/{stored.key[:2]}/{stored.key}"
    assert why == f"object.o: 5 bytes instead of {len(DATA)}"
    assert [path.stat().st_mode & 0o777 for path in (cell, cell / quarantine.REASON)] == [
        0o700, 0o600,
    ]  # fmt: skip
    assert put(store).origin == "made" and put(store).origin == "hit"
    assert store.check() == []


def test_the_quarantine_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(quarantine.KEPT + 5):
        stored = put(store)
        (place(stored, store) / "object.o").write_bytes(b"%d" % number)
        store.fetch(KERNELS, FIELDS, store.workspace())
    assert len(quarantine.cells(store.root)) == quarantine.KEPT
    names = [sorted(path.name for path in cell.iterdir()) for cell in quarantine.cells(store.root)]
    assert names == [[stored.key, "reason.txt"]] * quarantine.KEPT
    quarantine.trim(store.root, limit=3000)
    names = [sorted(path.name for path in cell.iterdir()) for cell in quarantine.cells(store.root)]
    assert names[0] == ["reason.txt"] and names[-1] == [stored.key, "reason.txt"]
    assert len(names) == quarantine.KEPT
    put(store)
    store.clear()
    assert quarantine.cells(store.root) == []


def test_one_warning_for_an_entry_and_none_for_a_sound_one(store: Store) -> None:
    stored = put(store)
    put(store, (("kind", "other"),))
    (place(stored, store) / "manifest.txt").write_bytes(b"")
    for _ in range(3):
        store.fetch(KERNELS, FIELDS, store.workspace())
        put(store)
    (note,) = store.drain_notes()
    assert note.startswith(f"damaged cache entry {KERNELS}/{stored.key[:12]} is made again: ")


def test_an_entry_that_another_process_repaired_meanwhile_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage is seen, then the entry is made again by somebody else, then it would be set aside."""
    stored = put(store)
    file = place(stored, store) / "object.o"
    good, check = file.read_bytes(), entry.Payload.check
    file.write_bytes(b"bad")

    def checking(self: entry.Payload) -> None:  # once more, with the lock held
        file.write_bytes(good)
        check(self)

    monkeypatch.setattr(entry.Payload, "check", checking)
    assert store.fetch(KERNELS, FIELDS, store.workspace()) is None
    assert quarantine.cells(store.root) == []
    assert put(store).origin == "hit"


# -- who may write ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
@pytest.mark.parametrize("name", ["object.o", "manifest.txt", ""])
def test_what_others_may_write_to_is_made_again(store: Store, name: str, mode: int) -> None:
    stored = put(store)
    (place(stored, store) / name).chmod(mode | (0 if name else 0o100))
    assert store.fetch(KERNELS, FIELDS, store.workspace()) is None
    assert "is writable by" in store.drain_notes()[0]
    assert put(store).origin == "made"
    assert store.check() == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_folder_of_entries_that_others_may_write_to_is_closed(store: Store, level: int) -> None:
    """Each entry in it is verified, files and all, so none is lost."""
    stored = put(store)
    around = place(stored, store).parents[level - 1]
    around.chmod(0o777)
    assert len(store.check()) == 2
    assert put(store).origin == "hit"
    assert around.stat().st_mode & 0o777 == 0o700
    assert len(store.drain_notes()) == 1
    assert store.check() == []


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("name", ["object.o", "manifest.txt", "", ".."])
def test_what_belongs_to_another_user_is_made_again(store: Store, name: str) -> None:
    stored = put(store)
    os.chown(place(stored, store) / name, 12345, -1)
    assert put(store).origin == "made"
    assert "belongs to another user" in store.drain_notes()[0]
    assert place(stored, store).parent.stat().st_uid == 0
    assert store.check() == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UsageError, match="writable by") as caught:
        Store(tmp_path / "open")
    assert "chmod go-w" in caught.value.hint


@pytest.mark.skipif(os.getuid() != 0, reason="makes a link of another user")
def test_a_cache_behind_the_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Store(tmp_path / "link").close()
    os.lchown(tmp_path / "link", 12345, -1)
    with pytest.raises(UsageError, match="belongs to another user"):
        Store(tmp_path / "link")


@pytest.mark.parametrize("name", ["tmp", "locks", "quarantine", "index-v2", "CACHEDIR.TAG"])
def test_no_link_inside_the_cache_is_followed(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "old").touch()
    os.utime(precious / "old", (0, 0))
    put(Store(tmp_path / "cache"))
    folder.discard(tmp_path / "cache" / name)
    (tmp_path / "cache" / name).symlink_to(precious)
    store = Store(tmp_path / "cache")
    stored = put(store)
    assert stored.origin == "hit"
    (place(stored, store) / "object.o").write_bytes(b"")
    assert put(store).origin == "made"
    store.clear()
    assert os.listdir(precious) == ["old"]


def test_files_and_folders_are_private(store: Store) -> None:
    old = os.umask(0)
    try:
        put(Store(store.root.with_name("other")))
    finally:
        os.umask(old)
    made = list(store.root.with_name("other").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


# -- locks ------------------------------------------------------------------------------------


def test_no_lock_stays_and_a_stale_one_is_no_obstacle(store: Store) -> None:
    stale = store.root / "locks" / put(store).key
    assert os.listdir(stale.parent) == []
    stale.touch()
    put(store, FIELDS[:1])
    entry.remove(store.root, KERNELS, stale.name)
    started = time.monotonic()
    assert put(store).origin == "made"
    assert time.monotonic() - started < 5
    assert os.listdir(stale.parent) == []


def test_a_lock_whose_file_was_removed_is_taken_by_others_and_let_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.acquire(path, seconds=0)
    assert first is not None and locks.acquire(path, seconds=0) is None
    path.unlink()
    second = locks.acquire(path, seconds=0)
    assert second is not None
    first.release()
    assert path.exists() and locks.acquire(path, seconds=0) is None
    second.release()
    assert not path.exists()


def test_waiting_is_told_and_can_be_given_up(tmp_path: Path) -> None:
    path, told = tmp_path / "lock", []
    held = locks.acquire(path, seconds=0)
    assert held is not None
    waited = locks.acquire(
        path, seconds=60, cancelled=lambda: len(told) > 3, waiting=lambda: told.append(1)
    )
    assert waited is None and len(told) == 4
    held.release()


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/x")])
def test_something_else_in_the_place_of_a_lock(
    store: Store, make: Callable[[Path], object]
) -> None:
    make(store.root / "locks" / put(store).key)
    assert put(store).origin == "hit"
    assert os.listdir(store.root / "locks") == []


# -- a file system that fails -----------------------------------------------------------------

#: whatever the cache calls of os with a path, or with an open file
CALLS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "listdir", "scandir", "stat",
         "lstat", "chmod", "fsync", "fstat")  # fmt: skip


@contextmanager
def failing(root: Path, number: int, which: Callable[[int], bool]) -> Iterator[list[int]]:
    """Calls inside `root` fail with the error `number`; `which` are told by their order."""
    count = [0]
    originals = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., object]:
        def call(path: object = ".", *rest: object, **options: object) -> object:
            inside = isinstance(path, int) or options.get("dir_fd") is not None
            if inside or str(path).startswith(str(root)):
                count[0] += 1
                if which(count[0]):
                    raise OSError(number, os.strerror(number), str(path))
            return None if name == "fsync" else originals[name](path, *rest, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield count
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


ERRORS = ("EBUSY", "ESTALE", "EIO", "ENOSPC", "EROFS", "EACCES", "ENOENT")


def single_failures(tmp_path: Path, numbers: Callable[[int], int]) -> None:
    """Each of the calls that a hit, a repair and a miss make fails once, one a round."""
    root, other = tmp_path / "cache", (("kind", "other"),)
    store = Store(root)
    put(store)
    damaged = entry.folder(root, KERNELS, put(store, other).key) / "object.o"
    for failure in range(1, 400):
        if damaged.exists():
            damaged.write_bytes(b"")
        missing = (("kind", "missing"), ("n", str(failure)))
        with failing(root, numbers(failure), lambda n, at=failure: n == at) as count:  # type: ignore[misc]
            again = Store(root)
            found = [put(again), put(again, other), put(again, missing)]
            again.close()
        assert [item.path.read_bytes() for item in found] == [DATA] * 3
        if count[0] < failure:
            break
        for cell in quarantine.cells(root):
            folder.discard(cell)
    else:
        raise AssertionError("expected fewer calls")
    assert failure > 50
    after = Store(root)
    put(after), put(after, other)
    after.check(repair=True)
    assert Store(root).check() == []


def test_no_single_failure_of_the_file_system_fails_a_build(tmp_path: Path) -> None:
    single_failures(tmp_path, lambda n: getattr(errno, ERRORS[n % len(ERRORS)]))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ERRORS)
def test_no_single_failure_of_any_kind_fails_a_build(tmp_path: Path, name: str) -> None:
    single_failures(tmp_path, lambda n: getattr(errno, name))


@pytest.mark.parametrize("name", ERRORS)
def test_a_cache_that_fails_altogether_costs_one_warning(store: Store, name: str) -> None:
    put(store)
    store.drain_notes()
    with failing(store.root, getattr(errno, name), lambda n: True):
        found = [put(store, (("kind", "test"), ("n", str(n)))) for n in range(5)]
        assert [item.origin for item in found] == ["private"] * 5
        assert [item.path.read_bytes() for item in found] == [DATA] * 5
    notes = store.drain_notes()
    assert len(notes) == 1 and os.strerror(getattr(errno, name)) in notes[0]
    assert put(store).origin == "hit"
    assert store.check() == []


def test_a_payload_that_the_disk_cannot_read_is_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = put(store).key

    class Broken:
        def __init__(self, file: io.RawIOBase) -> None:
            self.seek = file.seek

        def read(self, size: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    opening = entry.Payload.__init__

    def opened(self: entry.Payload, meta: Meta, file: io.RawIOBase, *rest: object) -> None:
        opening(self, meta, Broken(file), *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(entry.Payload, "__init__", opened)
        assert store.fetch(KERNELS, FIELDS, store.workspace()) is None
    (note,) = store.drain_notes()
    assert key[:12] in note and note.endswith("object.o: Input/output error")
    assert put(store).origin == "made" and put(store).origin == "hit"
    assert store.check() == []


def test_an_index_that_somebody_keeps_locked_is_done_without(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    monkeypatch.setattr("cache.index._TIMEOUT", 0.1)
    holder = sqlite3.connect(store.root / "index-v2" / "cache.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    started = time.monotonic()
    other = Store(store.root)
    assert [put(other).origin for _ in range(20)] == ["hit"] * 20
    assert put(other, (("kind", "new"),)).origin == "made"
    assert time.monotonic() - started < 5
    (note,) = other.drain_notes()
    assert "index cannot be used now" in note and "locked" in note
    holder.execute("ROLLBACK")
    holder.close()
    after = Store(store.root)
    assert put(after, (("kind", "new"),)).origin == "hit"
    assert after.check() == []


def test_a_temporary_folder_that_fails(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    stored = put(store)
    assert stored.origin == "hit" and stored.path.read_bytes() == DATA
    assert store.root in stored.path.parents
