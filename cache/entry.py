"""One entry on disk: a folder `<bucket>/<2 digits>/<digest>/` that appears and vanishes whole.

object.o (or library.so, prelude.pch)   the payload
manifest.txt                            key, size and SHA-256 of the payload (`cache.manifest`)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path

from cache import manifest
from cache.folder import discard, own_folder, write_synced
from cache.key import Key
from cache.manifest import Meta
from cache.trust import Distrusted, open_file, open_folder, read_file
from graphc.store import PAYLOADS

MANIFEST = "manifest.txt"
_BLOCK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Damage(Exception):
    """Why an entry cannot be used. `place` is what is wrong: the entry's folder, or one above; it
    means nothing for an entry that is in no cache yet."""

    def __init__(self, what: str, place: Path = Path()) -> None:
        super().__init__(what)
        self.place = place


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def folder(root: Path, bucket: str, digest: str) -> Path:
    """Where the entry stands, if it is there."""
    if bucket not in PAYLOADS or not is_digest(digest):
        raise ValueError(f"expected a bucket and a digest, found {bucket!r}, {digest!r}")
    return root / bucket / digest[:2] / digest


def digests(root: Path, bucket: str) -> Iterator[str]:
    """Every entry of a bucket, in order of name."""
    for group in _names(root / bucket):
        for name in _names(root / bucket / group):
            if is_digest(name) and name[:2] == group:
                yield name


def strays(root: Path, bucket: str) -> Iterator[tuple[Path, str]]:
    """What stands in a bucket, or in its place, without being an entry or a trusted folder of
    them; and why."""
    if not os.path.isdir(root):
        return
    yield from _stray(root / bucket, True)
    for group in _names(root / bucket):
        path = root / bucket / group
        yield from _stray(path, re.fullmatch("[0-9a-f]{2}", group) is not None)
        for name in _names(path):
            if not is_digest(name) or name[:2] != group:
                yield path / name, "is no entry"


def _stray(path: Path, named: bool) -> Iterator[tuple[Path, str]]:
    try:
        os.close(open_folder(path))
    except Distrusted as reason:
        yield path, str(reason)
    except OSError:
        return
    else:
        if not named:
            yield path, "is no folder of entries"


def _names(path: Path) -> list[str]:
    if os.path.islink(path):
        return []
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def written_by_others(place: Path) -> bool:
    """Whether others may have changed what is in the entry's folder."""
    try:
        return bool(place.lstat().st_mode & 0o022)
    except OSError:
        return False


def read_meta(place: Path) -> Meta:
    """What the entry at `place` holds.

    Raises:
        Damage: its manifest is not what was stored.
        FileNotFoundError: there is no entry.
        OSError: it cannot be read now.
    """
    return read_manifest(place)[0]


def read_key(place: Path) -> Key:
    """The entry's key, proved to be the one its folder is named by.

    Raises:
        Damage: its manifest is not what was stored, or cannot be read.
    """
    try:
        return read_manifest(place)[1]
    except OSError as error:
        raise Damage(f"{MANIFEST}: {error}", place) from None


def read_manifest(place: Path) -> tuple[Meta, Key]:
    """Both. Raises as `read_meta`."""
    with _entered(place) as handle:
        return _manifest(handle, place)


class Payload:
    """The payload of an entry, opened; `meta` is what it must be. `copy` and `check` raise Damage
    if it is not that; `copy` raises OSError if the copy cannot be written."""

    def __init__(self, meta: Meta, file: RawIOBase, place: Path, name: str) -> None:
        self.meta, self._file, self._place, self._name = meta, file, place, name

    def copy(self, target: Path) -> None:
        """Writes it into the new file `target`, verified: what was read is what is there."""
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb", buffering=0) as writer:
                self._read(lambda block: _write_all(writer, block))
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def check(self) -> None:
        """Reads it only to verify it."""
        self._read(lambda block: None)

    def _read(self, use: Callable[[bytes], object]) -> None:
        self._file.seek(0)
        hasher, size = hashlib.sha256(), 0
        while block := self._block():
            hasher.update(block)
            size += len(block)
            use(block)
        if size != self.meta.bytes:
            what = f"{size} bytes instead of {self.meta.bytes}"
            raise Damage(f"{self._name}: {what}", self._place)
        if hasher.hexdigest() != self.meta.sha256:
            raise Damage(f"{self._name}: SHA-256 differs", self._place)

    def _block(self) -> bytes:
        try:
            return self._file.read(_BLOCK) or b""
        except OSError as error:  # of a disk, that is: made again, it gets another place there
            raise Damage(f"{self._name}: {error.strerror}", self._place) from None


@contextlib.contextmanager
def opened(place: Path, bucket: str) -> Iterator[Payload]:
    """The payload of the entry at `place`, not verified yet.

    Raises:
        Damage: key or meta are not what was stored, or others could have written a part.
        FileNotFoundError: there is no entry.
        OSError: it cannot be read now.
    """
    name = PAYLOADS[bucket]
    with _entered(place) as handle:
        meta, _ = _manifest(handle, place)
        with _inside(handle, name, place):
            inner = open_file(name, handle)
        with os.fdopen(inner, "rb", buffering=0) as file:
            yield Payload(meta, file, place, name)


def verify(place: Path, bucket: str) -> Meta:
    """Reads the whole entry. Raises as `opened`."""
    with opened(place, bucket) as payload:
        payload.check()
        return payload.meta


def load(place: Path, bucket: str) -> tuple[Meta, bytes]:
    """The payload in memory, verified. Raises as `opened`."""
    with opened(place, bucket) as payload:
        blocks: list[bytes] = []
        payload._read(blocks.append)
        return payload.meta, b"".join(blocks)


def take(place: Path, bucket: str, target: Path) -> Meta:
    """Writes the payload, verified, into the new file `target`. Raises as `opened`."""
    with opened(place, bucket) as payload:
        payload.copy(target)
        return payload.meta


def write_new(target: Path, data: bytes) -> None:
    """Writes a private file that must not be there yet. Raises OSError."""
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb", buffering=0) as file:
        _write_all(file, data)


def _write_all(file: RawIOBase, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


@contextlib.contextmanager
def _entered(place: Path) -> Iterator[int]:
    """The entry's folder, opened step by step from the root so that no link is followed."""
    root = place.parents[2]
    handles = [os.open(root, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for path in (place.parents[1], place.parents[0], place):
            try:
                handles.append(open_folder(path.name, handles[-1]))
            except Distrusted as reason:
                raise Damage(f"{path.relative_to(root)} {reason}", path) from None
        yield handles[-1]
    finally:
        for handle in handles:
            os.close(handle)


@contextlib.contextmanager
def _inside(handle: int, name: str, place: Path) -> Iterator[None]:
    """Around opening a file of the entry."""
    try:
        yield
    except FileNotFoundError:
        if not _still_there(handle, place):
            raise
        raise Damage(f"{name} is missing", place) from None
    except Distrusted as reason:
        raise Damage(f"{name} {reason}", place) from None


def _still_there(handle: int, place: Path) -> bool:
    """Whether the folder that was opened is the entry: not one that was taken away meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), place.lstat())
    except OSError:
        return False


def _manifest(handle: int, place: Path) -> tuple[Meta, Key]:
    with _inside(handle, MANIFEST, place):
        data = read_file(MANIFEST, handle)
    try:
        meta, key = manifest.decode(data)
    except ValueError as error:
        raise Damage(f"{MANIFEST}: {error}", place) from None
    if key.digest != place.name:
        raise Damage(f"{MANIFEST} belongs to {key.digest[:12]}", place)
    return meta, key


def publish(root: Path, bucket: str, key: Key, payload: Path, label: str, seconds: float) -> Meta:
    """Makes `payload` (which stays where it is) an entry; the caller holds the key's lock.

    The files reach the disk before they get their place, so a power cut damages no entry. It may
    undo the rename, which is a miss.

    Raises:
        OSError: the cache cannot take it; nothing of it is left there.
    """
    place = folder(root, bucket, key.digest)
    staged = Path(tempfile.mkdtemp(dir=root / "tmp", prefix="publish-"))
    try:
        sha256, size = _copy_synced(payload, staged / PAYLOADS[bucket])
        meta = Meta(sha256, size, label, round(seconds, 3))
        write_synced(staged / MANIFEST, manifest.encode(meta, key))
        own_folder(root / bucket)
        own_folder(place.parent)
        _into_place(staged, place, root)
    finally:
        discard(staged)
    return meta


def _into_place(staged: Path, place: Path, root: Path) -> None:
    if os.path.lexists(place):
        remove_at(root, place)
    try:
        staged.rename(place)
    except OSError as error:
        # another process, which could have no lock, was first: as good
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def remove(root: Path, bucket: str, digest: str) -> None:
    """Takes an entry away whole: a reader sees all of it or nothing. Raises OSError."""
    remove_at(root, folder(root, bucket, digest))


def remove_at(root: Path, place: Path) -> None:
    """As `remove`, for any file, link or folder of the cache."""
    aside: Path | None = None
    try:
        aside = Path(tempfile.mkdtemp(dir=root / "tmp", prefix="remove-"))
        move(place, aside / place.name)
    except FileNotFoundError:
        pass  # another process was first
    except OSError:  # no space even for a folder: remove in place, manifest first
        with contextlib.suppress(OSError):
            (place / MANIFEST).unlink(missing_ok=True)
        discard(place)
    if aside is not None:
        discard(aside)


def move(place: Path, target: Path) -> None:
    """Renames a file, link or folder, also a folder that its mode keeps from being moved."""
    try:
        place.rename(target)
    except PermissionError:
        if os.path.islink(place) or not os.path.isdir(place):
            raise
        place.chmod(0o700)
        place.rename(target)


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 (hexadecimal) and size of a file."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return found, file.tell()


def _copy_synced(source: Path, target: Path) -> tuple[str, int]:
    hasher, size = hashlib.sha256(), 0
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with source.open("rb") as reader, os.fdopen(handle, "wb") as writer:
        while block := reader.read(1 << 20):
            hasher.update(block)
            size += len(block)
            writer.write(block)
        writer.flush()
        os.fsync(handle)
    return hasher.hexdigest(), size
