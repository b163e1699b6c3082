"""Cache entries in one file, to carry them to another machine.

A bundle is a ZIP archive without compression: for each entry `<bucket>/<digest>/` with payload and
manifest, just as in the cache; and what `graphc build --tune` measured, a file a CPU, so that a
tuned build finds the same kernels. Import verifies every name, digest and size before it publishes
the first entry. The digests prove that a bundle is whole, not who made it: kernels are code, so
import only what you would run.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import struct
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cache import entry, folder, manifest
from cache.entry import Damage
from cache.key import Key
from cache.manifest import Meta
from cache.store import Store
from cache.trust import Distrusted, read_file
from cache.workspace import Area
from graphc.errors import DamagedError, UsageError
from graphc.files import replacing
from graphc.store import KERNELS, LINKS, PAYLOADS

#: a precompiled header is large, and some compilers refuse it on another machine
CARRIED = (KERNELS, LINKS)
_NAME = re.compile(r"([a-z]+-v\d+)/([0-9a-f]{64})/([a-z]+\.[a-z]+)")
_FAMILIES = {bucket.partition("-v")[0] for bucket in CARRIED}
#: measurements by CPU, which whoever tunes reads and writes (graphc.tuner)
_TABLES = "tuning-v1"
_TABLE = re.compile(_TABLES + r"/[0-9a-f]{8,64}\.json")
#: what zipfile raises on archives that are cut, garbled or encrypted
_UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError,
               struct.error, OSError, Damage)  # fmt: skip
_TEXT_LIMIT = 64 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal entries give an equal file


@dataclass(frozen=True)
class Counts:
    """What an export or import did."""

    entries: int
    bytes: int
    skipped: int = 0  # import: already there; export: damaged


def export_bundle(store: Store, output: Path, only: Collection[str] | None = None) -> Counts:
    """Writes all kernels and libraries of the cache into `output`, atomically; with `only`, these
    alone ("bucket/digest").

    Raises:
        UsageError: `output` cannot be written, or the cache lacks one of `only`.
    """
    wanted = {
        bucket: [d for d in entry.digests(store.root, bucket) if _asked(bucket, d, only)]
        for bucket in CARRIED
    }
    if only is not None:
        _complete(store, only, {f"{b}/{digest}" for b, found in wanted.items() for digest in found})
    entries = total = skipped = 0
    try:
        with (
            replacing(output, 0o644) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ):
            for bucket, digests in wanted.items():
                for digest in digests:
                    place = entry.folder(store.root, bucket, digest)
                    try:
                        meta, data = entry.load(place, bucket)
                        text = manifest.encode(*entry.read_manifest(place))
                    except (Damage, FileNotFoundError):
                        if only is not None:
                            _complete(store, only, set(only) - {f"{bucket}/{digest}"})
                        skipped += 1
                        continue
                    for name, content in ((entry.MANIFEST, text), (PAYLOADS[bucket], data)):
                        info = zipfile.ZipInfo(f"{bucket}/{digest}/{name}", _EPOCH)
                        archive.writestr(info, content)
                    entries, total = entries + 1, total + meta.bytes
            for path in sorted((store.root / _TABLES).glob("*.json")) if only is None else ():
                archive.writestr(zipfile.ZipInfo(f"{_TABLES}/{path.name}", _EPOCH), _text(path))
    except OSError as error:
        raise _unwritable(error, output) from None
    return Counts(entries, total, skipped)


def _asked(bucket: str, digest: str, only: Collection[str] | None) -> bool:
    return only is None or f"{bucket}/{digest}" in only


def _complete(store: Store, only: Collection[str], found: Collection[str]) -> None:
    lacking = len(set(only) - set(found))
    if lacking:
        raise UsageError(
            f"expected all {len(only)} entries of the plan in the cache, {lacking} are not there",
            where=str(store.root),
            hint="build the plan again with this cache, then export it",
        )


def import_bundle(store: Store, source: Path) -> Counts:
    """Publishes the entries of a bundle that the cache does not hold.

    Raises:
        DamagedError: something in the bundle is not what its digests say; nothing was imported.
        UsageError: there is no such file, it is of another version, or the cache cannot be written.
    """
    if not store.writable:
        raise UsageError(f"the cache cannot be written: {store.obstacle}", where=str(store.root))
    try:
        with (
            zipfile.ZipFile(source) as archive,
            contextlib.closing(Area(store.root / "tmp")) as area,
        ):
            verified, tables = list(_verified(archive, area.path)), _tables(archive)
            counts = [
                (meta.bytes, store.adopt(bucket, key, payload, meta.label, meta.seconds))
                for bucket, key, meta, payload in verified
            ]
            for name, data in tables.items():
                _keep(store.root / name, data)
    except FileNotFoundError:
        raise UsageError("expected a bundle, found no such file", where=str(source)) from None
    except IsADirectoryError:
        raise UsageError("expected a bundle, found a folder", where=str(source)) from None
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # seeks to nowhere
            raise
        raise DamagedError(
            f"the bundle is damaged, nothing was imported: {error}",
            where=str(source),
            hint="export it again with `graphc cache export`",
        ) from None
    taken = [size for size, new in counts if new]
    return Counts(len(taken), sum(taken), len(counts) - len(taken))


def _verified(archive: zipfile.ZipFile, area: Path) -> Iterator[tuple[str, Key, Meta, Path]]:
    """Every entry with its payload unpacked under a name of our own, never the archive's."""
    for (bucket, digest), members in sorted(_grouped(archive).items()):
        where = f"{bucket}/{digest[:12]}"
        if set(members) != {entry.MANIFEST, PAYLOADS[bucket]}:
            raise Damage(f"{where}: expected two files, found {sorted(members)}")
        try:
            meta, key = manifest.decode(_read(archive, members[entry.MANIFEST]))
        except ValueError as error:
            raise Damage(f"{where}: {entry.MANIFEST}: {error}") from None
        if key.digest != digest:
            raise Damage(f"{where}: {entry.MANIFEST} belongs to {key.digest[:12]}")
        info = members[PAYLOADS[bucket]]
        if info.file_size != meta.bytes:
            raise Damage(f"{where}: {info.file_size} bytes instead of {meta.bytes}")
        payload = area / digest
        with archive.open(info) as reader, payload.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
        if entry.file_digest(payload) != (meta.sha256, meta.bytes):
            raise Damage(f"{where}: SHA-256 differs")
        yield bucket, key, meta, payload


def _grouped(archive: zipfile.ZipFile) -> dict[tuple[str, str], dict[str, zipfile.ZipInfo]]:
    groups: dict[tuple[str, str], dict[str, zipfile.ZipInfo]] = {}
    for info in archive.infolist():
        if _TABLE.fullmatch(info.filename):
            continue
        match = _NAME.fullmatch(info.filename)
        if match and match[1] not in CARRIED and match[1].partition("-v")[0] in _FAMILIES:
            raise UsageError(
                f"expected {', '.join(CARRIED)} in the bundle, found {match[1]}",
                hint="it was exported by another version of graphc: export it again",
            )
        if match is None or match[1] not in CARRIED or info.compress_type != zipfile.ZIP_STORED:
            raise Damage(f"unexpected member {info.filename!r}")
        members = groups.setdefault((match[1], match[2]), {})
        if match[3] in members:
            raise Damage(f"member {info.filename!r} is there twice")
        members[match[3]] = info
    return groups


def _tables(archive: zipfile.ZipFile) -> dict[str, bytes]:
    tables: dict[str, bytes] = {}
    for info in archive.infolist():
        if _TABLE.fullmatch(info.filename):
            if info.filename in tables:
                raise Damage(f"member {info.filename!r} is there twice")
            tables[info.filename] = _read(archive, info)
            msgspec.json.decode(tables[info.filename], type=dict)
    return tables


def _text(path: Path) -> bytes:
    try:
        return read_file(path)
    except Distrusted as reason:
        raise UsageError(f"{_TABLES}/{path.name} {reason}", where=str(path)) from None


def _keep(path: Path, data: bytes) -> None:
    """Writes a table, unless this CPU has measured for itself."""
    folder.own_folder(path.parent)
    if not path.exists():
        with replacing(path) as file:
            file.write(data)


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > _TEXT_LIMIT:
        raise Damage(f"{info.filename} is too large")
    return archive.read(info)


def _unwritable(error: OSError, output: Path) -> UsageError:
    return UsageError(f"cannot write the bundle: {error.strerror}", where=str(output))
