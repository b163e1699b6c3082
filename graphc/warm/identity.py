"""Digests and versions of what a build is made of: graphc's own sources, packages, files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

import graphc
from graphc.plan_io import file_digest

ROOT = Path(graphc.__file__).resolve().parents[1]
#: packages of ours that decide what a plan is
PLAN_ROOMS = ("graphc", "passes")
#: what decides what is captured (tests/test_layers.py: frontends import nothing else of ours)
CAPTURE_ROOMS = (
    "graphc/frontends", "graphc/ir", "graphc/ops", "graphc/dsl", "graphc/models",
    "graphc/shapes.py", "graphc/shapes_reader.py", "graphc/precision.py", "graphc/decoders.py",
)  # fmt: skip
_SUFFIXES = {".py", ".h", ".cpp", ".yaml", ".json", ".safetensors"}
#: smaller files are hashed each time
_REMEMBERED = 1 << 20
#: a file changed less than this before it was hashed may change again within one tick of its clock
_SETTLED_NS = 2_000_000_000


@lru_cache(maxsize=4)
def sources(rooms: tuple[str, ...]) -> str:
    """SHA-256 over the names and contents of our own files in these folders (or files)."""
    hasher = hashlib.sha256()
    for path in sorted(found for room in rooms for found in _under(ROOT / room)):
        data = path.read_bytes()
        hasher.update(f"{path.relative_to(ROOT)} {len(data)}\n".encode())
        hasher.update(data)
    return hasher.hexdigest()


def _under(place: Path) -> Iterable[Path]:
    if place.is_file():
        return [place]
    return (path for path in place.rglob("*") if path.suffix in _SUFFIXES and path.is_file())


def python() -> str:
    """The interpreter: implementation, version, architecture."""
    return f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"


def version(package: str) -> str:
    """The installed version of a distribution; "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Seen(msgspec.Struct, frozen=True):
    size: int
    changed: int
    modified: int
    inode: int
    device: int
    sha256: str


class FileDigests:
    """SHA-256 of files. Those of large files are remembered in `memory` (a JSON file, None: not at
    all) as long as size, inode and both times of a file stay what they were."""

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._seen: dict[str, _Seen] | None = None
        self._fresh = False

    def of(self, path: Path) -> str:
        """64 hexadecimal digits. Raises OSError."""
        status = path.stat()
        if status.st_size < _REMEMBERED or self._memory is None:
            return file_digest(path)
        known = self._known().get(str(path))
        facts = (
            status.st_size, status.st_ctime_ns, status.st_mtime_ns, status.st_ino, status.st_dev
        )  # fmt: skip
        if known is not None and msgspec.structs.astuple(known)[:-1] == facts:
            return known.sha256
        found = file_digest(path)
        if time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) > _SETTLED_NS:
            self._known()[str(path)] = _Seen(*facts, found)
            self._fresh = True
        return found

    def _known(self) -> dict[str, _Seen]:
        if self._seen is None:
            self._seen = {}
            if self._memory is not None:
                # none yet, or damaged: everything is hashed once more
                with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                    self._seen = msgspec.json.decode(
                        self._memory.read_bytes(), type=dict[str, _Seen]
                    )
        return self._seen

    def save(self) -> None:
        """Writes what is new; a folder that cannot be written means hashing again."""
        from graphc.files import replacing

        if not self._fresh or self._memory is None:
            return
        kept = {name: seen for name, seen in self._known().items() if os.path.exists(name)}
        try:
            with replacing(self._memory) as file:
                file.write(msgspec.json.encode(kept))
        except OSError:
            return
        self._fresh = False
