"""The index as the store uses it: opened when needed, made again when damaged, never in the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from cache import entry, locks
from cache.index import FOLDER, Index, IndexDamaged, IndexUnavailable, identity
from cache.notes import Notes
from cache.quarantine import put_aside
from graphc.store import PAYLOADS

T = TypeVar("T")

_SPACE_NEEDED = 1 << 20
_LOCK_SECONDS = 30.0
_REST = 20.0  # seconds for which an index that cannot be used is left alone


class Tracker:
    """Keeps the index of the cache at `root` in use.

    Args:
        notes: gets what a user should hear.
    """

    def __init__(self, root: Path, limit: int, notes: Notes) -> None:
        self._root, self._limit, self._notes = root, limit, notes
        self._index: Index | None = None
        self._mutex = threading.RLock()
        self._resting = 0.0

    def use(self, action: Callable[[Index], T], otherwise: T) -> T:
        """What `action` makes of the index, or `otherwise` where that is impossible."""
        for _ in range(2):
            index = self.index()
            if index is None:
                break
            try:
                return action(index)
            except IndexUnavailable as error:
                self._rest(str(error))
                break
            except IndexDamaged as error:
                self.rebuild(str(error), index.file)
        return otherwise

    def index(self) -> Index | None:
        """The index, or None while it cannot be used."""
        with self._mutex:
            index = self._index
            if index is not None and index.current():
                return index
            if time.monotonic() < self._resting or not os.path.isdir(self._root):
                return None
            self._index = self._opened()  # for the first time, or somebody removed it
            return self._index

    def close(self) -> None:
        """Closes the database. Use opens it again."""
        with self._mutex:
            if self._index is not None:
                with contextlib.suppress(IndexDamaged, IndexUnavailable):
                    self._index.close()
            self._index = None

    def rebuild(self, reason: str, suspect: tuple[int, int] | None) -> None:
        """Makes the index anew from the entries, unless another process just did: then the
        database is not the file `suspect` any more."""
        with self._mutex:
            self._index = self._opened(suspect, reason)

    def _opened(self, suspect: tuple[int, int] | None = None, reason: str = "") -> Index | None:
        with self._lock():
            try:
                if suspect is not None and identity(self._root) == suspect:
                    raise IndexDamaged(reason)
                index = Index(self._root, self._limit)
                if index.fresh:
                    _fill(index, self._root)
                return index
            except IndexUnavailable as error:
                self._rest(str(error))
                return None
            except IndexDamaged as error:
                return self._made_anew(str(error))

    def _made_anew(self, reason: str) -> Index | None:
        try:
            if shutil.disk_usage(self._root).free < _SPACE_NEEDED:
                # what looks like damage may be a full disk's doing, and a rebuild would fail
                self._rest(f"its disk is full ({reason})")
                return None
            self._notes.add(f"the cache's index was damaged and is made again: {reason}")
            put_aside(self._root, self._root / FOLDER, reason)
            index = Index(self._root, self._limit)
            _fill(index, self._root)
        except (IndexDamaged, IndexUnavailable, OSError) as error:
            self._rest(str(error))
            return None
        return index

    def _rest(self, reason: str) -> None:
        self._resting = time.monotonic() + _REST
        self._notes.minor(f"the cache's index cannot be used now, nothing is evicted: {reason}")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        lock = None
        with contextlib.suppress(OSError):
            lock = locks.acquire(self._root / "locks" / "index", seconds=_LOCK_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()


def _fill(index: Index, root: Path) -> None:
    """Notes every entry that the index does not know, the one used longest ago first."""
    known = index.rows()
    index.fill(
        (bucket, digest, size)
        for _, bucket, digest, size in sorted(_entries(root))
        if digest not in known
    )


def _entries(root: Path) -> Iterator[tuple[float, str, str, int]]:
    for bucket in PAYLOADS:
        for digest in entry.digests(root, bucket):
            with contextlib.suppress(OSError):
                payload = os.lstat(entry.folder(root, bucket, digest) / PAYLOADS[bucket])
                yield max(payload.st_atime, payload.st_mtime), bucket, digest, payload.st_size
