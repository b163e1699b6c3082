"""The store: verified fetch, make once, publish whole, evict the least recently used.

Nothing here can fail a build for the cache's sake: a damaged entry is moved aside and made again, a
damaged index is made again from the entries, and what the folder cannot take is made in a private
temporary folder and not kept. Each of these is noted once (`drain_notes`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cache import entry, folder, locks, quarantine
from cache.check import Finding, check_entries, check_index
from cache.counters import Counters, Kind
from cache.entry import Damage
from cache.index import Index
from cache.key import Key
from cache.makers import makers
from cache.manifest import Meta
from cache.notes import Notes
from cache.tracker import Tracker
from cache.trust import Distrusted, read_file
from cache.why import Catalogue, one_line
from cache.workspace import Area, no_space, private_area
from graphc.errors import GraphcError
from graphc.store import KERNELS, PAYLOADS, Fields, NoSpaceError, Stored, Workspace

if TYPE_CHECKING:
    from cache.remote import Remote

_LOCK_SECONDS = 900.0
_MISSES = "last-misses.json"
_MISSES_KEPT = 64


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


class Store:
    """The persistent cache in one folder. Fulfils `graphc.store.KernelStore`.

    Args:
        root: the folder; default $GRAPHC_CACHE_DIR or the user's cache folder.
        limit: size in bytes above which old entries go; default $GRAPHC_CACHE_SIZE or 5 GB.

    Raises:
        UsageError: the folder belongs to another user, or others may write into it.
    """

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        self.root = (root or folder.default_root()).absolute()
        self.limit = limit if limit is not None else folder.size_limit()
        self._notes = Notes()
        self._names = itertools.count()
        self._tracker = Tracker(self.root, self.limit, self._notes)
        self.obstacle = folder.open_root(self.root)  # why it cannot be written, "" if it can
        self.writable = not self.obstacle
        self.counters = Counters(self.root, self.writable)
        self._remote: Remote | None = None
        if os.environ.get("GRAPHC_REMOTE_CACHE"):
            from cache.remote import Remote

            self._remote = Remote()
        if self.writable:
            folder.sweep(self.root)
            self._tracker.index()

    @property
    def lanes(self) -> int:
        """See `KernelStore`: look-ups that wait for the network are made side by side."""
        if self._remote is None:
            return 1
        from cache.remote import LANES

        return LANES

    @property
    def fills_shared(self) -> bool:
        """Whether builds store in the shared tier what they look up."""
        return self._remote is not None and self._remote.writes

    # -- KernelStore ---------------------------------------------------------------------------

    def workspace(self) -> Workspace:
        """See `KernelStore.workspace`."""
        return private_area(self.root / "tmp" if self.writable else None)

    def fetch(self, bucket: str, fields: Fields, workspace: Workspace) -> Stored | None:
        """See `KernelStore.fetch`."""
        key = Key(fields)
        found = self._fetch(bucket, key.digest, workspace)
        found = found or self._from_remote(bucket, key, workspace)
        if found is not None:
            self.counters.hit(bucket, found.seconds, "remote" if found.remote else "hit")
            self._share(bucket, key, found)
        elif bucket != KERNELS:  # a build records the misses of its kernels all at once
            self.counters.missed(bucket, [key])
        return found

    def fetch_or_make(
        self,
        bucket: str,
        fields: Fields,
        make: Callable[[Path], None],
        workspace: Workspace,
        *,
        label: str,
        cancelled: Callable[[], bool] = _never,
        waiting: Callable[[], None] = _nothing,
    ) -> Stored:
        """See `KernelStore.fetch_or_make`."""
        key = Key(fields)
        with self._lock(key.digest, cancelled, waiting):
            # also the re-read after waiting for a process that was making the same
            found = self._fetch(bucket, key.digest, workspace, locked=True)
            found = found or self._from_remote(bucket, key, workspace)
            if found is not None:
                kind: Kind = "remote" if found.remote else "wait" if bucket == KERNELS else "hit"
                self.counters.hit(bucket, found.seconds, kind)
            else:
                if bucket != KERNELS:
                    self.counters.missed(bucket, [key])
                found = self._made(bucket, key, make, workspace, label)
        self._share(bucket, key, found, label)
        return found

    def makers(self) -> list[tuple[str, str]]:
        """See `KernelStore.makers`."""
        found = makers(self.root)
        if self._remote is not None:
            found += [maker for maker in self._remote.makers() if maker not in found]
        return found

    def put(
        self, bucket: str, fields: Fields, write: Callable[[Path], None], *, label: str,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """See `KernelStore.put`."""
        key = Key(fields)
        if not self.writable:
            return
        with contextlib.closing(self.workspace()) as area, self._lock(key.digest):
            try:
                path, _held = self._make(write, self._target(bucket, area), area)
            except (NoSpaceError, OSError) as error:
                self._notes.add(f"{label} is not kept in {self.root}: {error}")
                return
            self._publish(bucket, key, path, label, seconds)

    def why(self, bucket: str, keys: Sequence[Fields]) -> list[str]:
        """See `KernelStore.why`."""
        known = Catalogue(self.root, bucket)
        return [one_line(known.nearest(Key(fields))) for fields in keys]

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
            data = read_file(self.root / _MISSES)
            return msgspec.json.decode(data, type=list[tuple[str, str, Fields]])
        except (OSError, Distrusted, msgspec.MsgspecError):
            return []

    def drain_notes(self) -> list[str]:
        """See `KernelStore.drain_notes`."""
        shared = self._remote.drain_notes() if self._remote is not None else []
        return self._notes.drain() + shared

    # -- care ----------------------------------------------------------------------------------

    def check(self, repair: bool = False) -> list[Finding]:
        """Verifies every entry's payload, key and meta, and the index against the entries; with
        `repair`, moves what is damaged aside and brings the index in line. Empty: all is well."""
        fix = repair and self.writable
        findings, sizes = check_entries(self.root, self._repair if fix else None)
        if self.writable:
            findings += check_index(self.root, self._tracker, sizes, fix)
        return findings

    def clear(self) -> int:
        """Removes every entry; how many there were. Builds that run meanwhile are not harmed."""
        count = 0
        for bucket in PAYLOADS:
            for digest in list(entry.digests(self.root, bucket)):
                self.remove(bucket, digest)
                count += 1
        for path in (self.root / _MISSES, *quarantine.cells(self.root)):
            folder.discard(path)
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
            self._lock(key.digest),
        ):
            if self._fetch(bucket, key.digest, area, locked=True) is not None:
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
        rows = self._tracker.use(Index.rows, nothing)
        return {digest: used for digest, (_, used) in rows.items()}

    def close(self) -> None:
        """Closes the index; the store must not be used afterwards."""
        self._tracker.close()

    # -- inside --------------------------------------------------------------------------------

    def _fetch(
        self,
        bucket: str,
        digest: str,
        workspace: Workspace,
        *,
        locked: bool = False,
    ) -> Stored | None:
        """The entry's payload in `workspace`, or None; `locked`: the caller holds its lock."""
        place = entry.folder(self.root, bucket, digest)
        try:
            with self._opened(place, bucket) as payload:
                path, area = self._make(payload.copy, self._target(bucket, workspace), workspace)
        except Damage as damage:
            self._set_aside(bucket, digest, damage, locked)
            return None
        except FileNotFoundError:
            if self.writable:
                self._tracker.use(lambda index: index.missed(bucket, digest), None)
            return None
        except OSError as error:  # busy, stale, a disk's error: what is stored may be sound
            self._notes.failing(f"the cache {self.root} cannot be read: {error.strerror}")
            return None
        meta = payload.meta
        if self.writable:
            self._tracker.use(lambda index: index.used(bucket, digest, meta.bytes), None)
        return Stored(path, meta.sha256, digest, "hit", area, meta.seconds)

    @contextlib.contextmanager
    def _opened(self, place: Path, bucket: str) -> Iterator[entry.Payload]:
        """The payload of an entry; looks twice before it says that the entry is damaged."""
        with contextlib.ExitStack() as stack:
            try:
                payload = stack.enter_context(entry.opened(place, bucket))
            except Damage as damage:
                # a folder of ours with a strange mode is put right: each entry in it is verified
                shared = damage.place != place
                if (shared or not entry.written_by_others(place)) and folder.mend(damage.place):
                    self._notes.add(f"folder of the cache {damage.place} given mode 0700 again")
                # half of it may have been evicted between two reads: damage shows again
                payload = stack.enter_context(entry.opened(place, bucket))
            yield payload

    def _verify(self, bucket: str, digest: str) -> None:
        with self._opened(entry.folder(self.root, bucket, digest), bucket) as payload:
            payload.check()

    def _set_aside(self, bucket: str, digest: str, damage: Damage, locked: bool) -> None:
        """Quarantines what is damaged, unless another process is making it again."""
        self._notes.add(
            f"damaged cache entry {bucket}/{digest[:12]} is made again: {damage}",
            once=f"damaged {digest}",
        )
        if not self.writable:
            return
        with contextlib.ExitStack() as stack:
            if not locked:
                with contextlib.suppress(OSError):
                    lock = locks.acquire(self.root / "locks" / digest, seconds=0)
                    if lock is None:
                        return
                    stack.callback(lock.release)
                try:
                    self._verify(bucket, digest)
                    return  # another process was first
                except Damage as now:
                    damage = now
                except OSError:
                    return
            self.counters.lost(digest, "damaged")
            quarantine.put_aside(self.root, damage.place, str(damage))

    def _repair(self, bucket: str, digest: str) -> None:
        try:
            self._verify(bucket, digest)
        except Damage as damage:
            self._set_aside(bucket, digest, damage, locked=False)
            self._tracker.use(lambda index: index.forget(bucket, digest), None)
        except OSError:
            self._drop(bucket, digest, "damaged")

    def _made(
        self, bucket: str, key: Key, make: Callable[[Path], None], workspace: Workspace, label: str
    ) -> Stored:
        """A new entry, or a private file where the cache cannot take it."""
        started = time.perf_counter()
        path, area = self._make(make, self._target(bucket, workspace), workspace)
        seconds = time.perf_counter() - started
        meta = self._publish(bucket, key, path, label, seconds)
        if meta is not None:
            return Stored(path, meta.sha256, key.digest, "made", area, seconds)
        sha256 = entry.file_digest(path)[0]
        return Stored(path, sha256, key.digest, "private", area, seconds)

    def _share(self, bucket: str, key: Key, found: Stored, label: str = "") -> None:
        """Stores in the shared tier, if it is written from here, what it may not have."""
        if self._remote is None or not self.fills_shared or found.remote:
            return
        with contextlib.suppress(Damage, OSError):  # of what is only to be told besides
            place = entry.folder(self.root, bucket, key.digest)
            label = label or entry.read_meta(place).label
        self._remote.offer(
            bucket, key, found.path, label, found.seconds, replace=found.origin != "hit"
        )

    def _from_remote(self, bucket: str, key: Key, workspace: Workspace) -> Stored | None:
        """An entry of the shared tier, which becomes one of this cache."""
        found = self._remote.fetch(bucket, key.digest) if self._remote is not None else None
        if found is None:
            return None
        path, area = self._written(found.payload, self._target(bucket, workspace), workspace)
        self._publish(bucket, key, path, found.label, found.seconds)
        return Stored(path, found.sha256, key.digest, "hit", area, found.seconds, remote=True)

    def _target(self, bucket: str, workspace: Workspace) -> Path:
        return workspace.path / f"{next(self._names)}-{PAYLOADS[bucket]}"

    def _written(self, data: bytes, path: Path, area: Workspace) -> tuple[Path, Workspace]:
        return self._make(lambda target: entry.write_new(target, data), path, area)

    def _make(
        self, make: Callable[[Path], None], path: Path, workspace: Workspace
    ) -> tuple[Path, Workspace]:
        """Where `make` could make its file: `path`, or on the cache's disk if that is full.

        Raises:
            NoSpaceError: there is no space on either.
        """
        try:
            make(path)
            return path, workspace
        except (NoSpaceError, OSError) as error:
            area = self._second_area(error)
        path.unlink(missing_ok=True)
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

    def _second_area(self, problem: Exception) -> Workspace:
        """A workspace in the cache, when the system's temporary folder is full or fails; raises
        `problem` where that is impossible."""
        full = not isinstance(problem, OSError) or problem.errno in folder.NO_SPACE
        first, second = folder.system_folder(), self.root / "tmp"
        if self.writable:
            with contextlib.suppress(OSError):
                area = Area(second)
                reason = "no space left" if full else str(problem)
                self._notes.add(f"temporary files go to {second}, not to {first}: {reason}")
                return area
        raise no_space(first) if full else problem

    def _publish(
        self, bucket: str, key: Key, path: Path, label: str, seconds: float
    ) -> Meta | None:
        if not self.writable:
            self._notes.failing(f"new kernels are not kept in {self.root}: {self.obstacle}")
            return None
        size = path.stat().st_size
        for last in (False, True):
            # the index first: were a kill to fall between, it would name what is not there, which
            # the next look-up puts right; an entry that it does not know would never be evicted
            self._tracker.use(lambda index: index.put(bucket, key.digest, size), None)
            try:
                meta = entry.publish(self.root, bucket, key, path, label, seconds)
                self.counters.made(bucket, key)
                return meta
            except FileNotFoundError as error:  # somebody removed the whole cache
                if last or folder.open_root(self.root):
                    self._not_kept(error)
                    break
            except OSError as error:
                self._not_kept(error)
                break
        self._tracker.use(lambda index: index.forget(bucket, key.digest), None)
        return None

    def _not_kept(self, error: OSError) -> None:
        self._notes.failing(f"new kernels are not kept in {self.root}: {error.strerror}")

    def _drop(self, bucket: str, digest: str, cause: str) -> None:
        self.counters.lost(digest, cause)
        self._tracker.use(lambda index: index.drop(digest), None)
        with contextlib.suppress(OSError):
            entry.remove(self.root, bucket, digest)

    @contextlib.contextmanager
    def _lock(
        self,
        name: str,
        cancelled: Callable[[], bool] = _never,
        waiting: Callable[[], None] = _nothing,
    ) -> Iterator[None]:
        """The lock of a key; none where the folder is read-only. A holder of one never waits for
        a second, so they cannot dead-lock."""
        lock = self._acquired(name, cancelled, waiting) if self.writable else None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _acquired(
        self, name: str, cancelled: Callable[[], bool], waiting: Callable[[], None]
    ) -> locks.Lock | None:
        path = self.root / "locks" / name
        for last in (False, True):
            try:
                lock = locks.acquire(
                    path, seconds=_LOCK_SECONDS, cancelled=cancelled, waiting=waiting
                )
                if lock is None and not cancelled():
                    self._notes.add("another process holds a cache lock for very long; "
                               "going on without it")  # fmt: skip
                return lock
            except FileNotFoundError:  # somebody removed the whole cache
                if last or folder.open_root(self.root):
                    break
            except OSError as error:  # the same may be made twice, never mixed
                self._notes.minor(f"nothing can be locked in {self.root}, kernels may be compiled "
                                  f"twice: {error.strerror}")  # fmt: skip
                break
        return None
