"""Which entry was used when: least-recently-used eviction under a size limit, kept by diskcache.

The entries' files are the truth and the index can always be made again from them; it only decides
what to drop. Keys and values are plain strings, and the Disk below refuses pickles both ways:
diskcache would otherwise run code out of a database that somebody has written to (CVE-2025-69872).

The database has a rollback journal and never waits for the disk. So it is one file, no part of it
is mapped (damage to a mapped file ends the process), it works on network disks, and a killed
process leaves it sound; what a power cut does to it is found and made good.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from cache import entry
from cache.folder import own_folder
from cache.trust import distrusted

FOLDER = "index-v2"
DATABASE = "cache.db"
_TIMEOUT = 5  # seconds to wait for another process's transaction
#: what SQLite says when the database is sound but cannot be used at this moment
_PASSING = ("locked", "readonly", "read-only", "unable to open", "full")
_PLACE = re.compile(r"([a-z]+-v\d+)/([0-9a-f]{64})")


class PickleRefused(Exception):
    """The index holds, or was asked to hold, something other than a plain string."""


class StringDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys and values are strings in the database; removing a row removes the entry's folder."""

    def __init__(self, directory: str, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self._root = Path(directory).parent
        self.spared = threading.local()  # a place whose row is being replaced, not dropped

    def put(self, key: Any) -> Any:
        if type(key) is not str or not entry.is_digest(key):
            raise PickleRefused(f"expected a digest as key, found {key!r}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if raw != 1 or type(key) is not str or not entry.is_digest(key):
            raise PickleRefused(f"expected a digest as key, found {key!r}")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> Any:
        place, _, size = str(value).partition(" ")
        if type(value) is not str or _PLACE.fullmatch(place) is None:
            raise PickleRefused(f"expected a place and a size, found {value!r}")
        return int(size), MODE_RAW, place, value

    def fetch(self, mode: int, filename: Any, value: Any, read: bool) -> str:
        if mode != MODE_RAW or type(value) is not str:
            raise PickleRefused(f"expected a plain string, found mode {mode}")
        return value

    def remove(self, file_path: Any) -> None:
        match = _PLACE.fullmatch(str(file_path))
        if match is None or getattr(self.spared, "place", None) == file_path:
            return
        # what cannot be removed stays as an entry without a row, which `check` finds
        with contextlib.suppress(OSError, ValueError):
            entry.remove(self._root, match[1], match[2])


class IndexDamaged(Exception):
    """The index database is not what it should be, and must be made anew."""


class IndexUnavailable(Exception):
    """The index cannot be used now (busy, read-only, no space); nothing is wrong with it."""


#: rows that nobody but `Index.put` may have written have all of these
_SOUND = """raw IS 1 AND mode IS 1 AND expire_time IS NULL AND typeof(key) = 'text'
    AND typeof(value) = 'text' AND typeof(filename) = 'text' AND length(key) = 64
    AND substr(filename, instr(filename, '/') + 1) = key AND value = filename || ' ' || size"""
_SURVEY = f"SELECT count(*), ifnull(sum(size), 0), ifnull(sum(NOT ({_SOUND})), 0) FROM Cache"


class Index:
    """The index of the cache at `root`, which must be writable. `fresh`: there was none.

    Every method but `current` may raise IndexDamaged and IndexUnavailable.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root, self._limit = root, limit
        self.fresh = False
        self._cache = self._guard(self._open)

    def _open(self) -> Any:
        folder = self._root / FOLDER
        own_folder(folder)
        self.fresh = _prepare(folder)
        _probe(folder / DATABASE)
        cache = diskcache.Cache(
            str(folder),
            timeout=_TIMEOUT,
            disk=StringDisk,
            eviction_policy="least-recently-used",
            size_limit=self._limit,
            cull_limit=1,
            tag_index=0,
            disk_min_file_size=1 << 15,
            sqlite_journal_mode="truncate",
            sqlite_synchronous=0,
            sqlite_mmap_size=0,
        )
        ((count, size, unsound),) = cache._sql(_SURVEY).fetchall()
        # entries are evicted by these sums, which triggers keep
        if unsound or (count, size) != (cache.reset("count"), cache.reset("size")):
            cache.close()
            raise PickleRefused("rows or sums that graphc did not write")
        self.file = identity(self._root)
        return cache

    def current(self) -> bool:
        """Whether the database is still the one that was opened: not removed, nor another."""
        return identity(self._root) == self.file

    def _guard(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except (diskcache.Timeout, OSError) as error:
            raise IndexUnavailable(f"{type(error).__name__}: {error}") from error
        except sqlite3.OperationalError as error:
            if any(mark in str(error) for mark in _PASSING):
                raise IndexUnavailable(str(error)) from error
            raise IndexDamaged(str(error)) from error
        except (sqlite3.Error, PickleRefused, TypeError, ValueError, LookupError, AttributeError,
                AssertionError) as error:  # fmt: skip
            raise IndexDamaged(f"{type(error).__name__}: {error}") from error

    def used(self, bucket: str, digest: str, size: int) -> None:
        """Marks the entry as used now."""
        if self._guard(self._cache.get, digest) is None:
            self.put(bucket, digest, size)

    def missed(self, bucket: str, digest: str) -> None:
        """There is no such entry: forgets it, should it be known."""
        if self._guard(lambda: digest in self._cache):
            self.forget(bucket, digest)

    def put(self, bucket: str, digest: str, size: int) -> None:
        """Notes an entry, newest of all, and evicts the oldest beyond the limit."""
        self._guard(self._put, f"{bucket}/{digest}", digest, size)

    def fill(self, entries: Iterable[tuple[str, str, int]]) -> None:
        """Notes (bucket, digest, size) of many entries, the one used longest ago first."""

        def put() -> None:
            with self._cache.transact():
                for bucket, digest, size in entries:
                    self._put(f"{bucket}/{digest}", digest, size)

        self._guard(put)

    def _put(self, place: str, digest: str, size: int) -> None:
        spared = self._cache.disk.spared
        spared.place = place
        try:
            self._cache.set(digest, f"{place} {size}")
            # each set evicts the one oldest row while the volume is above the limit
            while len(self._cache) > 1 and self._cache.volume() > self._limit:
                self._cache.set(digest, f"{place} {size}")
        finally:
            spared.place = None

    def drop(self, digest: str) -> None:
        """Forgets an entry and removes its folder."""
        self._guard(self._cache.delete, digest)

    def forget(self, bucket: str, digest: str) -> None:
        """Forgets an entry whose folder is gone. Should another process just have made it again,
        it stays."""
        spared = self._cache.disk.spared
        spared.place = f"{bucket}/{digest}"
        try:
            self.drop(digest)
        finally:
            spared.place = None

    def rows(self) -> dict[str, tuple[str, float]]:
        """Digest -> (bucket, time of last use in seconds since 1970) of every row."""

        def read() -> dict[str, tuple[str, float]]:
            # reading through `get` would count as a use and change the order of eviction
            rows = self._cache._sql("SELECT key, raw, filename, access_time FROM Cache").fetchall()
            found: dict[str, tuple[str, float]] = {}
            for key, raw, place, used in rows:
                match = _PLACE.fullmatch(str(place))
                digest = self._cache.disk.get(key, raw)
                if match is None or match[2] != digest:
                    raise PickleRefused(f"expected the place of {digest[:12]}, found {place!r}")
                found[digest] = (match[1], float(used))
            return found

        return dict(self._guard(read))

    def close(self) -> None:
        self._guard(self._cache.close)


def _prepare(folder: Path) -> bool:
    """Makes an empty private database if there is none; whether there was none, or it is empty.

    Raises:
        PickleRefused: a file of the database may have been written by others.
    """
    path = folder / DATABASE
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with os.scandir(folder) as found:
        for item in found:
            status = item.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise PickleRefused(f"{item.name} is a symbolic link or no file")
            if reason := distrusted(status):
                raise PickleRefused(f"{item.name} {reason}")
    return path.stat().st_size == 0


def _probe(path: Path) -> None:
    """Raises what SQLite says if nothing can be written; diskcache would try for a minute."""
    probe = sqlite3.connect(path, timeout=_TIMEOUT, isolation_level=None)
    with contextlib.closing(probe):
        probe.execute("BEGIN IMMEDIATE")
        probe.execute("ROLLBACK")


def identity(root: Path) -> tuple[int, int] | None:
    """Which file the database of the cache at `root` is; None if there is none."""
    try:
        status = os.lstat(root / FOLDER / DATABASE)
    except OSError:
        return None
    return status.st_dev, status.st_ino
