"""Which entry was used when: least-recently-used eviction under a size limit, kept by diskcache.

The entries' files are the truth and the index can always be rebuilt from them; it only decides
what to drop. Keys and values are plain strings, and the Disk below refuses pickles both ways:
diskcache would otherwise run code out of a database that somebody has written to (CVE-2025-69872).
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from cache import entry
from cache.folder import discard

FOLDER = "index-v1"
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
    """The index database is not what it should be; `rebuild` makes it anew."""


class IndexUnavailable(Exception):
    """The index cannot be used now (busy, read-only, no space); nothing is wrong with it."""


class Index:
    """The index of the cache at `root`, which must be writable.

    Every method may raise IndexDamaged and IndexUnavailable.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root, self._limit = root, limit
        self._cache = self._guard(self._open)

    def _open(self) -> Any:
        folder = self._root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        return diskcache.Cache(
            str(folder),
            timeout=60,
            disk=StringDisk,
            eviction_policy="least-recently-used",
            size_limit=self._limit,
            cull_limit=1,
            statistics=1,
            tag_index=0,
            disk_min_file_size=1 << 15,
        )

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

    def touch(self, digest: str) -> bool:
        """Marks the entry as used now; False if the index does not know it."""
        return self._guard(self._cache.get, digest) is not None

    def put(self, bucket: str, digest: str, size: int) -> None:
        """Notes an entry, newest of all, and evicts the oldest beyond the limit."""
        self._guard(self._put, f"{bucket}/{digest}", digest, size)

    def _put(self, place: str, digest: str, size: int) -> None:
        spared = self._cache.disk.spared
        spared.place = place
        try:
            self._cache.set(digest, f"{place} {size}", retry=True)
            # each set evicts the one oldest row while the volume is above the limit
            while len(self._cache) > 1 and self._cache.volume() > self._limit:
                self._cache.set(digest, f"{place} {size}", retry=True)
        finally:
            spared.place = None

    def drop(self, digest: str) -> None:
        """Forgets an entry and removes its folder."""
        self._guard(self._cache.delete, digest, True)

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

    def lookups(self) -> tuple[int, int]:
        """How many look-ups hit and missed since the cache was made."""
        hits, misses = self._guard(self._cache.stats)
        return int(hits), int(misses)

    def close(self) -> None:
        self._guard(self._cache.close)


def rebuild(root: Path, limit: int, entries: Iterable[tuple[str, str, int]]) -> Index:
    """A new index out of (bucket, digest, size), oldest first."""
    discard(root / FOLDER)
    index = Index(root, limit)
    for bucket, digest, size in entries:
        index.put(bucket, digest, size)
    return index
