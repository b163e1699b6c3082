"""What the toolchain needs of a cache: a place that keeps made files by the fields of their key.

`cache.store.Store` fulfils it. Files come back as private copies in a workspace of the caller,
already verified, so nobody can evict, change or remove them while in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from graphc.errors import UsageError

Fields = tuple[tuple[str, str], ...]

#: buckets of the cache and the file name of their payload. A change of what a bucket holds gets a
#: new version in its name: that drops this bucket and no other.
PAYLOADS = {
    "kernels-v2": "object.o", "links-v2": "library.so", "pch-v2": "prelude.pch",
    "graphs-v1": "graph.safetensors", "observed-v1": "observed.json", "builds-v1": "build.json",
}  # fmt: skip
KERNELS, LINKS, PCH, GRAPHS, OBSERVED, BUILDS = PAYLOADS


class NoSpaceError(UsageError):
    """No space left on the device (or quota reached) where a file had to be written."""


class Workspace(Protocol):
    """A private temporary folder, removed on `close` or when no longer referenced."""

    @property
    def path(self) -> Path: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Stored:
    """A verified file.

    origin: "hit" (was in the cache), "made" (made now and published), "private" (made now, but
    the cache could not take it; it lives as long as `workspace`). seconds: what making it took.
    remote: a hit that came from the shared tier.
    """

    path: Path
    sha256: str
    key: str
    origin: Literal["hit", "made", "private"]
    workspace: Workspace
    seconds: float = 0.0
    remote: bool = False


class KernelStore(Protocol):
    """Keeps files by key. All methods may be called from several threads; `fetch` is worth
    calling from so many at a time as `lanes` says."""

    @property
    def lanes(self) -> int: ...

    def workspace(self) -> Workspace:
        """A new private folder, in the system's temporary folder when that is writable."""
        ...

    def fetch(self, bucket: str, fields: Fields, workspace: Workspace) -> Stored | None:
        """The entry's file in `workspace`, verified by its SHA-256, or None on a miss. A damaged
        entry is moved aside, noted and counts as a miss."""
        ...

    def fetch_or_make(
        self,
        bucket: str,
        fields: Fields,
        make: Callable[[Path], None],
        workspace: Workspace,
        *,
        label: str,
        cancelled: Callable[[], bool] = lambda: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> Stored:
        """As `fetch`; on a miss calls `make(path)` to write the file, once among all processes
        that want this key, and publishes it atomically. Errors of `make` pass through. While
        another process makes it, `waiting` is called now and then."""
        ...

    def makers(self) -> list[tuple[str, str]]:
        """(identity, target) of each compiler that made a library in the cache, most first."""
        ...

    def put(
        self, bucket: str, fields: Fields, write: Callable[[Path], None], *, label: str,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Publishes the file that `write(path)` writes, in place of what has this key now. A cache
        that cannot take it keeps what it had. Errors of `write` other than OSError pass through."""
        ...

    def why(self, bucket: str, keys: Sequence[Fields]) -> list[str]:
        """A line for each key: how the nearest stored one differs from it."""
        ...

    def record_misses(self, misses: list[tuple[str, str, Fields]]) -> None:
        """Remembers (bucket, label, fields) of the latest build's misses for `cache why --last`."""
        ...

    def drain_notes(self) -> list[str]:
        """What a user should hear (repairs, a read-only folder, no space), once each."""
        ...
