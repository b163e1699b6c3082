"""The kernel cache: keys, verified hits, damage, races, lack of space, bundles.

`Store.check() == []` is the closing line of the tests: it verifies every entry and the index.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache import entry, folder
from cache.bundle import export_bundle, import_bundle
from cache.index import PickleRefused, StringDisk
from cache.key import Key
from cache.store import Store
from cache.why import Catalogue, one_line
from graphc.errors import CacheMissError, CompileError, DamagedError, UsageError
from graphc.lowering.context import Unit
from graphc.store import KERNELS, LINKS, Fields, NoSpaceError, Stored
from graphc.toolchain.compile import CompileReport, compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa

HOME = Path(__file__).resolve().parents[1]

#: poses as g++: an object is the source itself; every compile of a unit is noted in $FAKE_LOG
FAKE = """#!/bin/sh
[ "$1" = -v ] && { echo "gcc version ${FAKE_VERSION:-12.0.0}"; echo "Target: x86_64-fake"; exit 0; }
[ -f unit.cpp ] || exit 1
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
head -n 1 unit.cpp >> "$FAKE_LOG"
sleep ${FAKE_DELAY:-0}
if [ "$FAKE_FULL" = always ] || { [ -n "$FAKE_FULL" ] && case "$out" in $FAKE_FULL*) ;; *) false ;; esac; }
then echo "fatal error: error writing to unit.s: No space left on device"; exit 1; fi
cp unit.cpp "$out"
"""  # noqa: E501


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that takes milliseconds; gives the log of its compiles."""
    program, log = tmp_path / "fake-g++", tmp_path / "log"
    program.write_text(FAKE)
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHC_CACHE_SIZE", raising=False)
    yield log


def build(
    store: Store, *names: str, isa: str = "portable", require_cached: bool = False
) -> CompileReport:
    units = [Unit(name, f"// {name}\nint {name};\n") for name in names]
    level = Isa.of(isa)
    return compile_units(
        units, level, Compiler.discover(), store, jobs=2, require_cached=require_cached
    )


def put(store: Store, fields: Fields, data: bytes = b"data", bucket: str = KERNELS) -> Stored:
    def make(path: Path) -> None:
        path.write_bytes(data)

    return store.fetch_or_make(bucket, fields, make, store.workspace(), label=fields[0][1])


def payloads(store: Store) -> list[Path]:
    return sorted(store.root.glob("kernels-v2/*/*/object.o"))


# -- keys -------------------------------------------------------------------------------------


def test_fields_cannot_run_together() -> None:
    keys = [
        Key((("a", "bc"),)),
        Key((("ab", "c"),)),
        Key((("a", "b"), ("c", ""))),
        Key((("a", ""), ("b", "c"))),
        Key((("b", "c"), ("a", ""))),
        Key(()),
    ]
    assert len({key.digest for key in keys}) == len(keys)


def test_the_digest_is_the_same_in_every_version() -> None:
    """Who changes this makes every stored kernel a miss: bump the buckets' versions instead."""
    key = Key((("kind", "kernel"), ("source", "int x;\n")))
    assert key.digest == "4341d2bfad606599ba0b5019d0efdb25c2e613d5cb14b9b48d877999ae7d2772"


@pytest.mark.parametrize(
    "fields", [(("a", "1"), ("s", "x\n[b 3]\nfoo\n")), (("é", "ü\n\n"),), (("empty", ""),), ()]
)
def test_text_parses_back(fields: Fields) -> None:
    key = Key(fields)
    assert Key.parse(key.text()) == key


@pytest.mark.parametrize("text", ["", "graphc key 2\n", "graphc key 1\n[a 9]\nshort\n", "x"])
def test_other_text_is_no_key(text: str) -> None:
    with pytest.raises(ValueError):
        Key.parse(text)


def test_field_names_are_distinct_and_plain() -> None:
    for fields in ((("a", "1"), ("a", "2")), (("a]", "1"),), (("", "1"),)):
        with pytest.raises(ValueError):
            Key(fields)


def test_the_key_ignores_what_changes_no_code(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(Store(), "one")
    script = (
        "from tests_build import *\n"
        "from cache.store import Store\n"
        "print([u.origin for u in build(Store(), 'one').units])\n"
    )
    (tmp_path / "tests_build.py").write_text(Path(__file__).read_text())
    for seed, place in (("1", tmp_path), ("77", HOME)):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "TMPDIR": str(tmp_path),
            "CPATH": "/x",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME)]),
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment, cwd=place, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == "['hit']\n", done.stderr
    assert Store().check() == []


# -- hit and miss -----------------------------------------------------------------------------


def test_miss_then_hit(fake: Path) -> None:
    store = Store()
    first = build(store, "one", "two")
    assert [u.origin for u in first.units] == ["made", "made"]
    again = build(Store(), "one", "two", "three")
    assert [u.origin for u in again.units] == ["hit", "hit", "made"]
    assert [o.path.read_text().split()[1] for o in again.objects] == ["one", "two", "three"]
    assert sorted(fake.read_text().split("\n")) == ["", "// one", "// three", "// two"]
    assert Store().check() == []


def test_another_isa_or_compiler_is_another_key(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(Store(), "one")
    if Isa.detect().level != "portable":
        assert build(Store(), "one", isa="x86-64-v3").compiled == 1
    other = fake.parent / "other-g++"
    other.write_text(FAKE.replace("12.0.0", "12.0.1"))
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert build(Store(), "one").compiled == 1
    assert Store().check() == []


def test_objects_live_as_long_as_their_report_even_if_the_cache_is_wiped() -> None:
    store = Store()
    report = build(store, "one")
    shutil.rmtree(store.root / KERNELS)
    assert report.objects[0].path.read_text().startswith("// one")
    assert build(store, "one").compiled == 1
    assert store.check() == []


def test_a_cache_removed_under_a_running_store_is_made_again() -> None:
    store = Store()
    report = build(store, "one")
    shutil.rmtree(store.root)
    assert build(store, "one").compiled == 1
    assert build(store, "one").hits == 1
    assert len(report.objects) == 1
    assert store.check() == []
    assert Store().check() == []


def test_two_processes_compile_once(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "tests_build.py").write_text(Path(__file__).read_text())
    script = (
        "from tests_build import *\n"
        "print([u.origin for u in build(Store(), 'a', 'b', 'c').units])\n"
    )
    environment = {
        **os.environ,
        "FAKE_DELAY": "0.4",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME)]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(answer.count("made") for answer in answers) == 3
    assert sum(answer.count("hit") for answer in answers) == 3
    assert sorted(fake.read_text().split("\n")) == ["", "// a", "// b", "// c"]
    assert Store().check() == []


def test_threads_make_once() -> None:
    store, made = Store(), []
    barrier = threading.Barrier(6)

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"x")

    def work() -> None:
        barrier.wait()
        area = store.workspace()
        store.fetch_or_make(KERNELS, (("k", "v"),), make, area, label="l")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert store.check() == []


def test_a_failing_make_leaves_nothing() -> None:
    store = Store()

    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise CompileError("no")

    area = store.workspace()
    with pytest.raises(CompileError):
        store.fetch_or_make(KERNELS, (("k", "v"),), make, area, label="l")
    area.close()
    assert payloads(store) == [] and list((store.root / "tmp").iterdir()) == []
    assert store.check() == []


# -- damage -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link_elsewhere(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, 5),
    "empty": lambda path: os.truncate(path, 0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": lambda path: path.unlink(),
    "symbolic link": link_elsewhere,
    "folder": make_folder,
}


@pytest.mark.parametrize("file", ["object.o", "manifest.txt"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_reported_and_made_again(file: str, damage: str) -> None:
    store = Store()
    first = build(store, "one")
    good = first.objects[0].path.read_bytes()
    path = payloads(store)[0].with_name(file)
    DAMAGES[damage](path)
    assert len(store.check()) == 1
    report = build(store, "one")
    assert report.units[0].origin == "made"
    assert any("damaged cache entry" in note for note in report.notes)
    assert report.objects[0].path.read_bytes() == good
    assert build(store, "one").hits == 1
    assert store.check() == []


def test_swapped_entries_are_noticed() -> None:
    store = Store()
    build(store, "one", "two")
    one, two = (path.parent for path in payloads(store))
    one.rename(store.root / "aside")
    two.rename(one)
    two.parent.mkdir(exist_ok=True)
    (store.root / "aside").rename(two)
    assert len(store.check()) == 2
    report = build(store, "one", "two")
    assert report.compiled == 2
    assert [o.path.read_text().split()[1] for o in report.objects] == ["one", "two"]
    assert store.check() == []


def test_check_repairs() -> None:
    store = Store()
    build(store, "one", "two")
    flip(payloads(store)[0])
    shutil.rmtree(payloads(store)[1].parent)
    findings = store.check(repair=True)
    assert len(findings) == 2 and all(finding.repaired for finding in findings)
    assert store.check() == []
    assert build(store, "one", "two").compiled == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda db: db.write_bytes(b"\0" * 64 + db.read_bytes()[64:]),
        lambda db: db.write_bytes(b"no database at all"),
        lambda db: os.truncate(db, 5000),
        lambda db: db.unlink(),
        lambda db: sql(db, "DROP TABLE Cache"),
        lambda db: sql(db, "INSERT INTO Settings VALUES ('disk_evil', 1)"),
    ],
    ids=["header", "text", "cut", "gone", "table", "setting"],
)
def test_a_damaged_index_is_rebuilt_from_the_files(harm: Callable[[Path], object]) -> None:
    store = Store()
    build(store, "one", "two")
    store.close()
    sql(store.root / "index-v2" / "cache.db", "PRAGMA wal_checkpoint(TRUNCATE)")
    harm(store.root / "index-v2" / "cache.db")
    again = Store()
    assert build(again, "one", "two").hits == 2
    again.check(repair=True)
    assert len(again.used()) == 2
    assert Store().check() == []


def test_the_index_destroyed_under_a_running_store() -> None:
    store = Store()
    build(store, "one")
    for file in (store.root / "index-v2").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    assert build(store, "one", "two").hits == 1
    assert build(Store(), "one", "two").hits == 2
    fresh = Store()
    fresh.check(repair=True)
    assert Store().check() == []


# -- pickles ----------------------------------------------------------------------------------


class Bomb:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.mark,))


def sql(database: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    ["UPDATE Cache SET mode = 4, value = ?", "UPDATE Cache SET key = ?, raw = 0"],
    ids=["value", "key"],
)
def test_no_pickle_is_ever_loaded(tmp_path: Path, statement: str) -> None:
    store = Store()
    build(store, "one")
    store.close()
    mark = tmp_path / "executed"
    sql(store.root / "index-v2" / "cache.db", statement, pickle.dumps(Bomb(mark)))
    again = Store()
    assert build(again, "one").hits == 1
    again.used()
    again.check(repair=True)
    again.clear()
    assert not mark.exists()
    assert Store().check() == []


def test_a_planted_path_removes_nothing_outside(tmp_path: Path) -> None:
    store = Store()
    build(store, "one")
    store.close()
    outside = tmp_path / "precious"
    outside.mkdir()
    sql(store.root / "index-v2" / "cache.db", "UPDATE Cache SET filename = '../precious'")
    again = Store()
    again.clear()
    again.check(repair=True)
    assert outside.is_dir()
    assert Store().check() == []


def test_nothing_but_strings_goes_in(tmp_path: Path) -> None:
    disk = StringDisk(str(tmp_path))
    with pytest.raises(PickleRefused):
        disk.put(("a", 1))
    with pytest.raises(PickleRefused):
        disk.put("no digest")
    with pytest.raises(PickleRefused):
        disk.store({"a": 1}, False)
    with pytest.raises(PickleRefused):
        disk.fetch(4, None, pickle.dumps(1), False)
    with pytest.raises(PickleRefused):
        disk.get(pickle.dumps(1), 0)


# -- the folder -------------------------------------------------------------------------------


def test_the_folder_is_private() -> None:
    store = Store()
    build(store, "one")
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert payloads(store)[0].stat().st_mode & 0o077 == 0


def test_a_folder_open_to_all_or_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UsageError, match="writable by everyone"):
        Store(root)
    root.chmod(0o700)
    os_user = os.getuid()
    if os_user == 0:
        os.chown(root, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: os_user + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        Store(root)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="to be a folder"):
        Store(file)


def test_a_read_only_folder_serves_hits_and_keeps_nothing(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Store()
    build(writer, "one")
    before = sorted(writer.root.rglob("*"))

    def refuse(*args: object, **options: object) -> object:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        # as root, permissions do not stop a test from writing
        patch.setattr(tempfile, "TemporaryFile", refuse)
        store = Store()
    assert not store.writable
    report = build(store, "one", "two")
    assert [u.origin for u in report.units] == ["hit", "private"]
    assert any("not kept in" in note and "Read-only" in note for note in report.notes)
    assert report.objects[1].path.read_text().startswith("// two")
    assert store.root not in report.objects[1].path.parents
    assert sorted(writer.root.rglob("*")) == before
    flip(payloads(writer)[0])
    damaged = build(store, "one")
    assert damaged.units[0].origin == "private"
    assert any("damaged" in note for note in damaged.notes)
    assert len(store.check(repair=True)) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user to run as")
def test_a_folder_without_write_permission(fake: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from tests_build import *\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "report = build(Store(), 'one', 'two')\n"
        "print([u.origin for u in report.units], report.notes)\n"
    )
    store = Store()
    build(store, "one")
    for path in [store.root, *store.root.rglob("*")]:
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    for path in [tmp_path, *list(tmp_path.parents)[:3]]:
        os.chmod(path, 0o755)
    (tmp_path / "tests_build.py").write_text(Path(__file__).read_text())
    fake.chmod(0o666)
    environment = {
        **os.environ,
        "TMPDIR": "/tmp",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("['hit', 'private']"), done.stderr
    assert "Permission denied" in done.stdout


def test_a_folder_that_cannot_be_made_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "cache")
    report = build(store, "one")
    assert report.units[0].origin == "private"
    assert store.check() == [] and store.clear() == 0


# -- space ------------------------------------------------------------------------------------


def test_a_full_disk_while_publishing_keeps_the_build_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    build(store, "one")

    def full(source: Path, target: Path) -> tuple[str, int]:
        target.write_bytes(source.read_bytes()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(entry, "_copy_synced", full)
        report = build(store, "one", "two")
    assert [u.origin for u in report.units] == ["hit", "private"]
    assert any("No space left" in note for note in report.notes)
    del report
    assert list((store.root / "tmp").iterdir()) == []
    assert build(store, "two").compiled == 1
    assert store.check() == []


def test_a_full_temporary_folder_while_compiling_uses_the_caches(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    store = Store()
    monkeypatch.setenv("FAKE_FULL", str(tmp_path / "tmp"))
    report = build(store, "one")
    assert report.units[0].origin == "made"
    assert report.objects[0].path.read_text().startswith("// one")
    assert any("no space left" in note for note in report.notes)
    assert store.root in report.objects[0].path.parents
    del report
    assert list((store.root / "tmp").iterdir()) == [] == list((tmp_path / "tmp").iterdir())
    assert store.check() == []


def test_no_space_anywhere_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setenv("FAKE_FULL", "always")
    with pytest.raises(NoSpaceError, match="no space left") as caught:
        build(store, "one")
    assert caught.value.exit_code == 2 and "GRAPHC_CACHE_DIR" in caught.value.hint
    monkeypatch.delenv("FAKE_FULL")
    assert build(store, "one").compiled == 1
    assert store.check() == []


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "small", limit=900_000)
    for name in "abcd":
        put(store, (("n", name),), name.encode() * 200_000)
    assert store.fetch(KERNELS, (("n", "a"),), store.workspace()) is not None
    put(store, (("n", "e"),), b"e" * 200_000)
    kept = [store.fetch(KERNELS, (("n", n),), store.workspace()) is not None for n in "abcde"]
    assert kept == [True, False, True, True, True] or kept == [True, False, False, True, True]
    assert sum(path.stat().st_size for path in payloads(store)) < 900_000
    assert store.check() == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("5G", 5_000_000_000), ("1.5 MB", 1_500_000), ("77", 77), ("2GiB", 2 * 10**9)],
)
def test_size_limits(text: str, size: int) -> None:
    assert folder.size_limit({"GRAPHC_CACHE_SIZE": text}) == size


def test_a_bad_size_limit_is_refused() -> None:
    for text in ("big", "-5G", "0"):
        with pytest.raises(UsageError, match="expected a size"):
            folder.size_limit({"GRAPHC_CACHE_SIZE": text})


# -- why --------------------------------------------------------------------------------------


def test_why_names_the_field_and_prefers_the_same_source(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    base = {
        "kind": "kernel",
        "isa": "avx512",
        "flags": "-a -b -c -d",
        "header h": "1",
        "source": "x",
    }
    put(store, tuple(base.items()))
    put(store, tuple((base | {"source": "y\nz", "isa": "avx2"}).items()))
    wanted = Key(tuple((base | {"isa": "avx2", "flags": "-a -b -c -e"}).items()))
    found = Catalogue(store.root, KERNELS).nearest(wanted)
    assert found is not None
    assert [d.line() for d in found.diffs] == ["isa: avx512 -> avx2", "flags: --d +-e"]
    changed = Key(tuple((base | {"header h": "2", "new": "n"}).items()))
    assert one_line(Catalogue(store.root, KERNELS).nearest(changed)).endswith(
        "header h: changed; new: new"
    )
    assert one_line(Catalogue(store.root, LINKS).nearest(changed)).startswith("the cache holds no")
    assert store.check() == []


def test_require_cached_compiles_nothing(fake: Path) -> None:
    store = Store()
    build(store, "one")
    log = fake.read_text()
    with pytest.raises(CacheMissError, match="1 of 2 missing:\n    two: nearest .*source"):
        build(store, "one", "two", require_cached=True)
    assert fake.read_text() == log
    assert [label for _, label, _ in store.last_misses()] == ["two"]
    assert store.check() == []


# -- bundles ----------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    store = Store()
    build(store, "one", "two")
    path = tmp_path / "kernels.zip"
    counts = export_bundle(store, path)
    assert (counts.entries, counts.skipped) == (2, 0)
    return path


def test_a_bundle_carries_all_hits(bundle: Path, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    assert import_bundle(other, bundle).entries == 2
    assert build(other, "one", "two", require_cached=True).hits == 2
    again = import_bundle(other, bundle)
    assert (again.entries, again.skipped) == (0, 2)
    second = tmp_path / "second.zip"
    export_bundle(other, second)
    assert second.read_bytes() == bundle.read_bytes()
    assert other.check() == []


def test_a_bundle_of_another_version_is_told_from_damage(bundle: Path, tmp_path: Path) -> None:
    rewrite(bundle, lambda n, d: [(n.replace(KERNELS, "kernels-v0"), d)])
    with pytest.raises(UsageError, match="found kernels-v0"):
        import_bundle(Store(tmp_path / "other"), bundle)


def test_a_bundle_carries_what_was_tuned(tmp_path: Path) -> None:
    store = Store()
    build(store, "one")
    table = store.root / "tuning-v1" / ("ab12" * 4 + ".json")
    table.parent.mkdir()
    table.write_text('{"code": "x"}')
    bundle = tmp_path / "kernels.zip"
    assert export_bundle(store, bundle).entries == 1
    other = Store(tmp_path / "other")
    import_bundle(other, bundle)
    copy = other.root / "tuning-v1" / table.name
    assert copy.read_text() == '{"code": "x"}'
    copy.write_text('{"code": "own"}')
    import_bundle(other, bundle)
    assert copy.read_text() == '{"code": "own"}'
    rewrite(bundle, lambda n, d: [(n, b"{" if n.startswith("tuning") else d)])
    third = Store(tmp_path / "third")
    with pytest.raises(DamagedError, match="nothing was imported"):
        import_bundle(third, bundle)
    assert payloads(third) == [] and not (third.root / "tuning-v1").exists()


def rewrite(bundle: Path, change: Callable[[str, bytes], list[tuple[str, bytes]]]) -> None:
    with zipfile.ZipFile(bundle) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    changed = dict(pair for name, data in members for pair in change(name, data))
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, data in changed.items():
            archive.writestr(name, data)


TAMPERING: dict[str, Callable[[str, bytes], list[tuple[str, bytes]]]] = {
    "payload": lambda n, d: [(n, b"//" + d[2:][::-1] if n.endswith(".o") else d)],
    "longer payload": lambda n, d: [(n, d + b"x" if n.endswith(".o") else d)],
    "key": lambda n, d: [(n, d.replace(b"portable", b"avx9") if n.endswith("manifest.txt") else d)],
    "traversal": lambda n, d: [(n, d), ("../../evil", d)],
    "absolute": lambda n, d: [(n, d), ("/tmp/evil", d)],
    "bucket": lambda n, d: [(n.replace("kernels-v2", "other-v1"), d)],
    "missing part": lambda n, d: [] if n.endswith("manifest.txt") else [(n, d)],
    "extra part": lambda n, d: [(n, d), (n.rpartition("/")[0] + "/more.txt", d)],
    "meta": lambda n, d: [(n, b"{}" if n.endswith(".txt") else d)],
}


@pytest.mark.parametrize("how", TAMPERING)
def test_a_tampered_bundle_is_refused_whole(bundle: Path, tmp_path: Path, how: str) -> None:
    rewrite(bundle, TAMPERING[how])
    other = Store(tmp_path / "other")
    with pytest.raises(DamagedError, match="nothing was imported") as caught:
        import_bundle(other, bundle)
    assert caught.value.exit_code == 7
    assert payloads(other) == [] and list((other.root / "tmp").iterdir()) == []
    assert not (tmp_path / "evil").exists() and not Path("/tmp/evil").exists()
    assert other.check() == []


def test_a_damaged_bundle_file_is_refused(bundle: Path, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    whole = bundle.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"text", whole[200:]):
        bundle.write_bytes(data)
        with pytest.raises(DamagedError):
            import_bundle(other, bundle)
    with pytest.raises(UsageError):
        import_bundle(other, tmp_path / "absent")
    with pytest.raises(UsageError):
        export_bundle(other, tmp_path / "absent" / "b.zip")
    assert other.check() == []
