"""One entry on disk: a folder `<bucket>/<2 digits>/<digest>/` that appears and vanishes whole.

object.o (or library.so, prelude.pch)   the payload
key.txt                                  the key's fields, readable; its digest is the folder name
entry.json                               SHA-256 and size of the payload, label, seconds to make
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cache.folder import discard, sync_folder, write_synced
from cache.key import Key
from graphc.store import PAYLOADS

KEY, META = "key.txt", "entry.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Meta(msgspec.Struct, frozen=True):
    """Contents of entry.json. `seconds` is what making the payload took."""

    sha256: str
    bytes: int
    label: str = ""
    seconds: float = 0.0


class Damage(Exception):
    """Why an entry cannot be used."""


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


def _names(path: Path) -> list[str]:
    try:
        return sorted(found.name for found in path.iterdir())
    except OSError:
        return []


def read_meta(place: Path) -> Meta:
    """The entry's entry.json.

    Raises:
        Damage: it is missing or not of that form.
        FileNotFoundError: there is no entry.
    """
    try:
        return msgspec.json.decode(_bytes(place / META), type=Meta)
    except FileNotFoundError:
        if not place.is_dir():
            raise
        raise Damage(f"{META} is missing") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damage(f"{META}: {error}") from None


def read_key(place: Path) -> Key:
    """The entry's key, proved to be the one its folder is named by."""
    try:
        key = Key.parse(_bytes(place / KEY).decode())
    except (OSError, ValueError) as error:
        raise Damage(f"{KEY}: {error}") from None
    if key.digest != place.name:
        raise Damage(f"{KEY} belongs to {key.digest[:12]}")
    return key


def take(place: Path, bucket: str, target: Path) -> Meta:
    """Gives `target` the payload (a hard link where possible, else a copy), verified.

    Raises:
        FileNotFoundError: there is no entry.
        Damage: payload, key or meta are not what was stored.
    """
    meta = read_meta(place)
    read_key(place)
    source = place / PAYLOADS[bucket]
    if source.is_symlink():
        raise Damage("the payload is a symbolic link")
    try:
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, target)
    except FileNotFoundError:
        if not place.is_dir():
            raise
        raise Damage("the payload is missing") from None
    found, size = file_digest(target)
    if size != meta.bytes or found != meta.sha256:
        target.unlink()
        what = f"{size} bytes instead of {meta.bytes}" if size != meta.bytes else "SHA-256 differs"
        raise Damage(f"{PAYLOADS[bucket]}: {what}")
    return meta


def publish(root: Path, bucket: str, key: Key, payload: Path, label: str, seconds: float) -> Meta:
    """Makes `payload` (which stays where it is) an entry; the caller holds the key's lock.

    Raises:
        OSError: the cache cannot take it; nothing of it is left there.
    """
    staged = Path(tempfile.mkdtemp(dir=root / "tmp", prefix="publish-"))
    try:
        sha256, size = _copy_synced(payload, staged / PAYLOADS[bucket])
        meta = Meta(sha256, size, label, round(seconds, 3))
        write_synced(staged / KEY, key.text().encode())
        write_synced(staged / META, msgspec.json.encode(meta))
        sync_folder(staged)
        place = folder(root, bucket, key.digest)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.exists():
            remove(root, bucket, key.digest)
        try:
            staged.rename(place)
        except OSError:
            if not place.is_dir():  # else another process without a lock was first: as good
                raise
        sync_folder(place.parent)
    finally:
        discard(staged)
    return meta


def remove(root: Path, bucket: str, digest: str) -> None:
    """Takes an entry away whole: a reader sees all of it or nothing."""
    place = folder(root, bucket, digest)
    if not place.exists():
        return
    aside: Path | None = None
    try:
        aside = Path(tempfile.mkdtemp(dir=root / "tmp", prefix="remove-"))
        place.rename(aside / digest)
    except FileNotFoundError:
        pass  # another process was first
    except OSError:  # no space even for a folder: remove in place, meta first
        (place / META).unlink(missing_ok=True)
        discard(place)
    if aside is not None:
        discard(aside)


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 (hexadecimal) and size of a file."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return found, file.tell()


def _copy_synced(source: Path, target: Path) -> tuple[str, int]:
    hasher, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(1 << 20):
            hasher.update(block)
            size += len(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    target.chmod(0o600)
    return hasher.hexdigest(), size


def _bytes(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        return file.read()
