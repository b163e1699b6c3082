"""The store: verified fetch, make once, publish whole, evict the least recently used.

Nothing here can fail a build for the cache's sake: a damaged entry is dropped and made again, a
damaged index is rebuilt from the files, and a folder that cannot be written serves its hits while
new files go to a private temporary folder. Each of these is noted once (`drain_notes`).
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import msgspec

from cache import entry, folder, why
from cache.counters import Counters
from cache.index import Index, IndexDamaged, IndexUnavailable, rebuild
from cache.key import Key
from cache.makers import makers
from cache.workspace import Area, no_space, private_area
from graphc.errors import GraphcError
from graphc.store import KERNELS, PAYLOADS, Fields, NoSpaceError, Stored, Workspace

T = TypeVar("T")

_LOCK_SECONDS = 900.0
_SPACE_FOR_INDEX = 1 << 20
_MISSES = "last-misses.json"
_MISSES_KEPT = 64


@dataclass(frozen=True)
class Finding:
    """What `check` found wrong; `repaired` once it has been put right."""

    what: str
    repaired: bool = False


class Store:
    """The persistent cache in one folder. Fulfils `graphc.store.KernelStore`.

    Args:
        root: the folder; default $GRAPHC_CACHE_DIR or the user's cache folder.
        limit: size in bytes above which old entries go; default $GRAPHC_CACHE_SIZE or 5 GB.

    Raises:
        UsageError: the folder belongs to another user or everyone may write into it.
    """

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        self.root = (root or folder.default_root()).absolute()
        self.limit = limit if limit is not None else folder.size_limit()
        self.obstacle = folder.open_root(self.root)  # why it cannot be written, "" if it can
        self.writable = not self.obstacle
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self._mutex = threading.RLock()
        self._names = itertools.count()
        self._index: Index | None = None
        self.counters = Counters(self.root, self.writable)
        if self.writable:
            folder.sweep(self.root)
            self._open_index()

    # -- KernelStore ---------------------------------------------------------------------------

    def workspace(self) -> Workspace:
        """See `KernelStore.workspace`."""
        if self.writable:
            try:
                if not (self.root / "tmp").is_dir():  # somebody removed the whole cache
                    folder.open_root(self.root)
                    self._open_index()
                return Area(self.root / "tmp")
            except OSError as error:
                self._note(f"cache folder not usable for temporary files: {error.strerror}")
        return private_area()

    def fetch(self, bucket: str, fields: Fields, workspace: Workspace) -> Stored | None:
        """See `KernelStore.fetch`."""
        found = self._fetch(bucket, Key(fields).digest, workspace)
        if found is not None:
            self.counters.hit(bucket, found.seconds)
        return found

    def fetch_or_make(
        self,
        bucket: str,
        fields: Fields,
        make: Callable[[Path], None],
        workspace: Workspace,
        *,
        label: str,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Stored:
        """See `KernelStore.fetch_or_make`."""
        key = Key(fields)
        with self._lock(key.digest[:2], cancelled):
            # also the re-read after waiting for a process that was making the same
            found = self._fetch(bucket, key.digest, workspace, counted=bucket == KERNELS)
            if found is not None:
                self.counters.hit(bucket, found.seconds, waited=bucket == KERNELS)
                return found
            if bucket != KERNELS:  # a build records the misses of its kernels all at once
                self.counters.missed(bucket, [key])
            started = time.perf_counter()
            path, area = self._make(make, self._target(bucket, workspace), workspace)
            seconds = time.perf_counter() - started
            meta = self._publish(bucket, key, path, label, seconds)
            if meta is not None:
                return Stored(path, meta.sha256, key.digest, "made", area)
        return Stored(path, entry.file_digest(path)[0], key.digest, "private", area)

    def makers(self) -> list[tuple[str, str]]:
        """See `KernelStore.makers`."""
        return makers(self.root)

    def why(self, bucket: str, fields: Fields) -> str:
        """See `KernelStore.why`."""
        return why.one_line(why.nearest(self.root, bucket, Key(fields)))

    def record_misses(self, misses: list[tuple[str, str, Fields]]) -> None:
        """See `KernelStore.record_misses`."""
        for bucket in PAYLOADS:
            keys = [Key(fields) for place, _, fields in misses if place == bucket]
            self.counters.missed(bucket, keys)
        if not self.writable:
            return
        data = msgspec.json.encode(misses[:_MISSES_KEPT])
        with contextlib.suppress(OSError), contextlib.closing(Area(self.root / "tmp")) as area:
            new = area.path / _MISSES
            folder.write_synced(new, data)
            new.replace(self.root / _MISSES)

    def last_misses(self) -> list[tuple[str, str, Fields]]:
        """What `record_misses` wrote last; empty if nothing did."""
        try:
            data = (self.root / _MISSES).read_bytes()
            return msgspec.json.decode(data, type=list[tuple[str, str, Fields]])
        except (OSError, msgspec.MsgspecError):
            return []

    def drain_notes(self) -> list[str]:
        """See `KernelStore.drain_notes`."""
        with self._mutex:
            notes, self._notes = self._notes, []
        return notes

    # -- care ----------------------------------------------------------------------------------

    def check(self, repair: bool = False) -> list[Finding]:
        """Verifies every entry's payload, key and meta, and the index against the files; with
        `repair`, drops what is damaged and brings the index in line. Empty: all is well."""
        findings: list[Finding] = []
        fix = repair and self.writable
        sizes: dict[str, tuple[str, int]] = {}
        with contextlib.closing(self.workspace()) as area:
            for bucket in PAYLOADS:
                for digest in entry.digests(self.root, bucket):
                    place = entry.folder(self.root, bucket, digest)
                    try:
                        target = self._target(bucket, area)
                        sizes[digest] = (bucket, entry.take(place, bucket, target).bytes)
                        target.unlink()
                    except FileNotFoundError:
                        continue  # evicted meanwhile
                    except (entry.Damage, OSError) as error:
                        if fix:
                            self._drop(bucket, digest, "damaged")
                        findings.append(Finding(f"{bucket}/{digest}: {error}", fix))
        return findings + (self._check_index(sizes, fix) if self.writable else [])

    def _check_index(self, sizes: dict[str, tuple[str, int]], fix: bool) -> list[Finding]:
        index = self._index
        if index is None:
            return [Finding("the index cannot be used")]
        try:
            rows = index.rows()
        except IndexUnavailable as error:
            return [Finding(f"the index cannot be read now: {error}")]
        except IndexDamaged as error:
            if fix:
                self._rebuild_index(str(error))
            return [Finding(f"the index is damaged: {error}", fix)]
        findings = []
        for digest in sorted(sizes.keys() - rows.keys()):
            if fix:
                index.put(sizes[digest][0], digest, sizes[digest][1])
            findings.append(Finding(f"the index does not know {digest}", fix))
        for digest in sorted(rows.keys() - sizes.keys()):
            if entry.folder(self.root, rows[digest][0], digest).is_dir():
                continue  # damaged, reported above
            if fix:
                index.drop(digest)
            findings.append(Finding(f"the index names {digest}, which is not there", fix))
        return findings

    def clear(self) -> int:
        """Removes every entry; how many there were. Builds that run meanwhile are not harmed."""
        count = 0
        for bucket in PAYLOADS:
            for digest in list(entry.digests(self.root, bucket)):
                self.remove(bucket, digest)
                count += 1
        with contextlib.suppress(OSError):
            (self.root / _MISSES).unlink(missing_ok=True)
        return count

    def remove(self, bucket: str, digest: str) -> None:
        """Removes an entry that is not wanted any more."""
        self._drop(bucket, digest, "removed")

    def adopt(self, bucket: str, key: Key, payload: Path, label: str, seconds: float) -> bool:
        """Publishes a file made elsewhere (a bundle's); False if a sound entry is there already.

        Raises:
            GraphcError: the cache cannot take it.
        """
        with (
            contextlib.closing(self.workspace()) as area,
            self._lock(key.digest[:2], lambda: False),
        ):
            if self._fetch(bucket, key.digest, area) is not None:
                return False
            if self._publish(bucket, key, payload, label, seconds) is None:
                raise GraphcError(
                    "the cache cannot take the entry: " + "; ".join(self.drain_notes()),
                    where=str(self.root),
                )
            return True

    def used(self) -> dict[str, float]:
        """Digest -> time of last use, of the entries the index knows."""
        nothing: dict[str, tuple[str, float]] = {}
        rows = self._with_index(Index.rows, nothing)
        return {digest: used for digest, (_, used) in rows.items()}

    def lookups(self) -> tuple[int, int]:
        """How many look-ups hit and missed since the cache was made."""
        return self._with_index(Index.lookups, (0, 0))

    def close(self) -> None:
        """Closes the index; the store must not be used afterwards."""
        self._with_index(Index.close, None)
        self._index = None

    # -- inside --------------------------------------------------------------------------------

    def _fetch(
        self, bucket: str, digest: str, workspace: Workspace, counted: bool = False
    ) -> Stored | None:
        place = entry.folder(self.root, bucket, digest)
        target = self._target(bucket, workspace)
        try:
            try:
                meta = entry.take(place, bucket, target)
            except entry.Damage:
                # half of it may have been evicted between two reads: damage shows again
                target.unlink(missing_ok=True)
                meta = entry.take(place, bucket, target)
        except FileNotFoundError:
            if not counted:
                self._with_index(lambda index: index.touch(digest), False)  # counts the miss
            return None
        except (entry.Damage, OSError) as error:
            target.unlink(missing_ok=True)
            self._note(f"damaged cache entry {bucket}/{digest[:12]} is made again: {error}")
            if self.writable:
                self._drop(bucket, digest, "damaged")
            return None

        def touch(index: Index) -> None:
            if not index.touch(digest):
                index.put(bucket, digest, meta.bytes)

        self._with_index(touch, None)
        return Stored(target, meta.sha256, digest, "hit", workspace, meta.seconds)

    def _target(self, bucket: str, workspace: Workspace) -> Path:
        return workspace.path / f"{next(self._names)}-{PAYLOADS[bucket]}"

    def _make(
        self, make: Callable[[Path], None], path: Path, workspace: Workspace
    ) -> tuple[Path, Workspace]:
        try:
            make(path)
            return path, workspace
        except NoSpaceError:
            pass
        except OSError as error:
            if error.errno not in folder.NO_SPACE:
                raise
        # the cache's disk is full: once more on the temporary folder's
        path.unlink(missing_ok=True)
        self._note(f"no space left in {self.root}: compiling in the temporary folder")
        area = private_area()
        try:
            make(area.path / path.name)
        except OSError as error:
            area.close()
            if error.errno not in folder.NO_SPACE:
                raise
            raise no_space(area.path) from None
        except BaseException:
            area.close()
            raise
        return area.path / path.name, area

    def _publish(
        self, bucket: str, key: Key, path: Path, label: str, seconds: float
    ) -> entry.Meta | None:
        if not self.writable:
            self._note(f"new kernels are not kept in {self.root}: {self.obstacle}")
            return None
        try:
            meta = entry.publish(self.root, bucket, key, path, label, seconds)
        except OSError as error:
            self._note(f"new kernels are not kept in {self.root}: {error.strerror}")
            return None
        self.counters.made(bucket, key)
        self._with_index(lambda index: index.put(bucket, key.digest, meta.bytes), None)
        return meta

    def _drop(self, bucket: str, digest: str, cause: str) -> None:
        self.counters.lost(digest, cause)
        self._with_index(lambda index: index.drop(digest), None)
        with contextlib.suppress(OSError):
            entry.remove(self.root, bucket, digest)

    @contextlib.contextmanager
    def _lock(self, name: str, cancelled: Callable[[], bool]) -> Iterator[None]:
        """One of 256 locks shared by all processes; none where the folder is read-only. A holder
        of one never waits for a second, so they cannot dead-lock."""
        if not self.writable:
            yield
            return
        lock = filelock.FileLock(self.root / "locks" / f"{name}.lock", mode=0o600)
        try:
            lock.acquire(timeout=_LOCK_SECONDS, poll_interval=0.02, cancel_check=cancelled)
        except filelock.Timeout:
            if not cancelled():
                self._note("another process holds a cache lock for very long; going on without it")
        except (OSError, NotImplementedError):
            pass  # a file system without locks: the same may be made twice, never mixed
        try:
            yield
        finally:
            if lock.is_locked:
                lock.release()

    def _note(self, text: str) -> None:
        with self._mutex:
            if text not in self._noted:
                self._noted.add(text)
                self._notes.append(text)

    def _open_index(self) -> None:
        try:
            self._index = Index(self.root, self.limit)
        except IndexUnavailable as error:
            self._note(f"the cache's index cannot be used now, nothing is evicted: {error}")
        except IndexDamaged as error:
            self._rebuild_index(str(error))

    def _with_index(self, action: Callable[[Index], T], otherwise: T) -> T:
        index = self._index
        if index is None:
            return otherwise
        try:
            return action(index)
        except IndexUnavailable as error:
            self._note(f"the cache's index cannot be used now: {error}")
        except IndexDamaged as error:
            self._rebuild_index(str(error))
            if self._index is not None:
                with contextlib.suppress(IndexDamaged, IndexUnavailable):
                    return action(self._index)
        return otherwise

    def _rebuild_index(self, reason: str) -> None:
        """Makes the index anew from the files, unless another process just did."""
        self._index = None
        if shutil.disk_usage(self.root).free < _SPACE_FOR_INDEX:
            # what looks like damage may be a full disk's doing, and a rebuild would fail
            self._note(f"the cache's index cannot be used, its disk is full: {reason}")
            return
        with self._mutex, self._lock("index", lambda: False):
            try:
                index = Index(self.root, self.limit)
                index.rows()
            except IndexUnavailable:
                return
            except IndexDamaged:
                self._note(f"the cache's index was damaged and is rebuilt: {reason}")
                try:
                    index = rebuild(self.root, self.limit, self._entries_by_age())
                except (IndexDamaged, IndexUnavailable) as error:
                    self._note(f"the cache's index cannot be rebuilt: {error}")
                    return
            self._index = index

    def _entries_by_age(self) -> list[tuple[str, str, int]]:
        found: list[tuple[float, str, str, int]] = []
        for bucket in PAYLOADS:
            for digest in entry.digests(self.root, bucket):
                place = entry.folder(self.root, bucket, digest)
                with contextlib.suppress(OSError, entry.Damage):
                    made = place.stat().st_mtime
                    found.append((made, bucket, digest, entry.read_meta(place).bytes))
        return [(bucket, digest, size) for _, bucket, digest, size in sorted(found)]
