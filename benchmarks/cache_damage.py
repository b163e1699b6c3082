"""Ways to damage a cache, each with what must be made again afterwards."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cache_model import Place
from cache import entry
from cache.folder import discard
from cache.index import DATABASE
from cache.index import FOLDER as INDEX
from graphc.store import PAYLOADS

#: what a file that others may write to, or a folder of entries that is closed, may have as mode
_OPEN, _HARMLESS = (0o666, 0o622, 0o777, 0o602, 0o660), (0o600, 0o400, 0o644, 0o444)


@dataclass
class Target:
    """The cache that is damaged. `free` are the entries that nothing has happened to yet; a damage
    takes those that it damages, `lost` are those that must then be made again."""

    root: Path
    rng: random.Random
    free: list[Place]
    lost: set[Place] = field(default_factory=set)

    def take(self) -> tuple[Place, Path]:
        """An entry to damage, and its folder."""
        place = self.free.pop(self.rng.randrange(len(self.free)))
        return place, entry.folder(self.root, *place)

    def spoil(self) -> tuple[Place, Path]:
        """An entry to damage so that it must be made again."""
        place, folder = self.take()
        self.lost.add(place)
        return place, folder

    def file(self, place: Place) -> Path:
        """One of the two files of an entry."""
        name = self.rng.choice((PAYLOADS[place[0]], entry.MANIFEST))
        return entry.folder(self.root, *place) / name


def truncate(on: Target) -> None:
    place, _ = on.spoil()
    file = on.file(place)
    os.truncate(file, on.rng.randrange(1, file.stat().st_size))


def empty(on: Target) -> None:
    place, _ = on.spoil()
    os.truncate(on.file(place), 0)


def flip(on: Target) -> None:
    """1 to 64 bits of a file."""
    place, _ = on.spoil()
    file = on.file(place)
    data = bytearray(file.read_bytes())
    for bit in on.rng.sample(range(8 * len(data)), on.rng.randint(1, 64)):
        data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def grow(on: Target) -> None:
    place, _ = on.spoil()
    with on.file(place).open("ab") as file:
        file.write(on.rng.randbytes(on.rng.randint(1, 64)))


def swap(on: Target) -> None:
    """Two entries change places, or only their payloads or manifests do."""
    place, one = on.spoil()
    others = [other for other in on.free if other[0] == place[0]]
    if not others:
        return empty_folder(one)
    other = on.rng.choice(others)
    on.free.remove(other)
    on.lost.add(other)
    two = entry.folder(on.root, *other)
    name = on.rng.choice(("", PAYLOADS[place[0]], entry.MANIFEST))
    aside = on.root / "aside"
    (one / name).rename(aside)
    (two / name).rename(one / name)
    aside.rename(two / name)


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def symlink(on: Target) -> None:
    """A file, the entry or the folder of entries around it is a link to where it was moved."""
    place, folder = on.spoil()
    what = on.rng.choice((on.file(place), folder, folder.parent))
    if what == folder.parent:
        _spoil_group(on, folder)
    moved = on.root.parent / f"moved-{on.rng.randrange(1 << 60):x}"
    what.rename(moved)
    what.symlink_to(moved)


def _spoil_group(on: Target, folder: Path) -> None:
    for other in [
        place for place in on.free if entry.folder(on.root, *place).parent == folder.parent
    ]:
        on.free.remove(other)
        on.lost.add(other)


def chmod(on: Target) -> None:
    """Others may write to a file or an entry: it is made again. A folder around entries, which are
    verified one by one, is closed again; a mode that lets nobody else write does no harm."""
    choice = on.rng.randrange(4)
    if choice == 0:
        place, _ = on.spoil()
        on.file(place).chmod(on.rng.choice(_OPEN))
    elif choice == 1:
        _, folder = on.spoil()
        folder.chmod(on.rng.choice((0o777, 0o770, 0o722)))
    elif choice == 2:
        _, folder = on.take()
        on.rng.choice((folder.parent, folder.parent.parent)).chmod(on.rng.choice((0o777, 0o770, 0)))
    else:
        place, _ = on.take()
        on.file(place).chmod(on.rng.choice(_HARMLESS))


def chown(on: Target) -> None:
    """A file, or the entry, belongs to another user. Needs root; others remove the file."""
    place, folder = on.spoil()
    what = on.rng.choice((on.file(place), folder))
    if os.getuid() == 0:
        os.chown(what, 12345, -1)
    else:
        shutil.rmtree(folder)


def half_written(on: Target) -> None:
    """As if an entry were not written aside: a part of it is missing or cut."""
    place, folder = on.spoil()
    choice = on.rng.randrange(3)
    if choice == 0:
        empty_folder(folder)
    elif choice == 1:
        on.file(place).unlink()
    else:
        payload = folder / PAYLOADS[place[0]]
        data = payload.read_bytes()
        payload.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def foreign(on: Target) -> None:
    """A sound entry of another key, a file, a pipe or nothing of ours in the place of an entry."""
    place, folder = on.spoil()
    others = [entry.folder(on.root, *other) for other in on.free if other[0] == place[0]]
    choice = on.rng.randrange(4)
    if choice == 0 and others:
        shutil.rmtree(folder)
        shutil.copytree(on.rng.choice(others), folder)
    elif choice == 1:
        shutil.rmtree(folder)
        folder.write_text("a file")
    elif choice == 2:
        file = on.file(place)
        file.unlink()
        os.mkfifo(file)
    else:
        for name in (PAYLOADS[place[0]], entry.MANIFEST):
            (folder / name).write_bytes(on.rng.randbytes(500))


def planted_row(on: Target) -> None:
    """A pickle, or a path outside, in the index; in the row of an entry or in one of its own."""
    mark = on.root.parent / "executed"
    bomb = pickle.dumps(_Bomb(str(mark)))
    digest = (
        on.rng.choice(_index_keys(on))
        if on.rng.random() < 0.5
        else f"{on.rng.getrandbits(256):064x}"
    )
    statement, values = on.rng.choice((
        ("UPDATE Cache SET mode = 4, value = ? WHERE key = ?", (bomb, digest)),
        ("UPDATE Cache SET key = ?, raw = 0 WHERE key = ?", (bomb, digest)),
        ("UPDATE Cache SET filename = ? WHERE key = ?", ("../../precious", digest)),
        ("INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 4, ?)", (bomb, bomb)),
        ("INSERT INTO Settings VALUES ('disk_evil', ?)", (bomb,)),
        ("UPDATE Cache SET expire_time = ? WHERE key = ?", (1.0, digest)),
    ))  # fmt: skip
    with closing(sqlite3.connect(on.root / INDEX / DATABASE)) as connection, connection:
        connection.execute(statement, values)


def _index_keys(on: Target) -> list[str]:
    with closing(sqlite3.connect(on.root / INDEX / DATABASE)) as connection:
        return [str(key) for (key,) in connection.execute("SELECT key FROM Cache")] or ["none"]


class _Bomb:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.mkdir, (self._mark,))


def broken_index(on: Target) -> None:
    """The index zeroed, emptied, cut, made of text, gone, a link, or open to others."""
    file = on.root / INDEX / DATABASE
    data = file.read_bytes()
    start, length = on.rng.randrange(max(1, len(data))), on.rng.randrange(64, 8192)
    damage: Callable[[], object] = on.rng.choice((
        lambda: file.write_bytes(bytes(len(data))),
        lambda: file.write_bytes(bytes(64) + data[64:]),
        lambda: file.write_bytes(data[:start] + bytes(length) + data[start + length :]),
        lambda: os.truncate(file, 0),
        lambda: os.truncate(file, max(100, start)),
        lambda: file.write_bytes(b"no database at all"),
        lambda: shutil.rmtree(file.parent),
        lambda: file.chmod(0o666),
        lambda: _linked(file),
        lambda: _linked(file.parent),
    ))  # fmt: skip
    damage()


def _linked(path: Path) -> None:
    moved = path.parent.parent / f"tmp/{path.name}-moved"
    discard(moved)
    path.rename(moved)
    path.symlink_to(moved)


def linked_folders(on: Target) -> None:
    """A folder of the cache's own is a link to one that holds something precious, or a file."""
    path = on.root / on.rng.choice(("tmp", "locks", "quarantine"))
    precious = on.root.parent / "precious"
    precious.mkdir(exist_ok=True)
    (precious / "kept").write_text("kept")
    os.utime(precious / "kept", (0, 0))
    discard(path)
    if on.rng.random() < 0.7:
        path.symlink_to(precious)
    else:
        path.write_text("a file")


ENTRY_DAMAGES = (truncate, empty, flip, grow, swap, symlink, chmod, chown, half_written, foreign)
OTHER_DAMAGES = (planted_row, broken_index, linked_folders)
DAMAGES = (*ENTRY_DAMAGES, *OTHER_DAMAGES)


def violations(root: Path) -> Iterator[str]:
    """What damages were meant to bring about and must not have."""
    if (root.parent / "executed").exists():
        yield "a pickle was loaded"
    precious = root.parent / "precious"
    if precious.exists() and os.listdir(precious) != ["kept"]:
        yield f"a link was followed: {precious} holds {os.listdir(precious)}"
