"""A plan as one file: its folder in an uncompressed ZIP archive, plan.json first.

Members bear no times and stand in order of name, so one plan gives one file, byte for byte. The
digest in plan.json covers the digests of all other files: it names the content of the whole bundle,
and unpacking checks every byte against it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from graphc.errors import DamagedError, UsageError
from graphc.files import replacing
from graphc.plan_io import MANIFEST, digest

_EPOCH = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_BLOCK = 1 << 20
_LONGEST_MANIFEST = 1 << 30
#: how every bundle begins: a member's header, and the name of the first
_SIGNATURE, _NAME_AT = b"PK\3\4", 30
#: what zipfile raises on archives that are cut, garbled or encrypted
_UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError,
               struct.error)  # fmt: skip


class _Files(msgspec.Struct, frozen=True):
    files: dict[str, str]


class _Payload(msgspec.Struct, frozen=True):
    sizes: dict[str, int]
    plan: _Files


class _Manifest(msgspec.Struct, frozen=True):
    graphc_plan: int
    sha256: str
    payload: msgspec.Raw


@dataclass(frozen=True)
class Listed:
    """What a plan's manifest lists. `digest` names the content of the whole plan; `files` are
    (size in bytes, SHA-256) by name."""

    digest: str
    files: dict[str, tuple[int, str]]
    text: bytes

    @property
    def nbytes(self) -> int:
        """Size of all files, the manifest too."""
        return len(self.text) + sum(size for size, _ in self.files.values())


def is_bundle(path: Path | str) -> bool:
    """Whether a file begins as a bundle does."""
    try:
        with open(path, "rb") as file:
            head = file.read(_NAME_AT + len(MANIFEST))
    except OSError:
        return False
    return head.startswith(_SIGNATURE) and head[_NAME_AT:] == MANIFEST.encode()


def write_bundle(folder: Path, output: Path) -> Listed:
    """Puts the plan in `folder` into the file `output`, atomically, and checks it on the way.

    Raises:
        UsageError: there is no plan, or `output` cannot be written.
        DamagedError: a file is not as the manifest says; names it.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError:
        raise UsageError(
            "no plan found",
            where=str(folder),
            hint="a plan is a folder with a plan.json; make one: graphc build",
        ) from None
    listed = _listed(text, str(folder / MANIFEST))
    try:
        with (
            replacing(output, 0o644) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ):
            archive.writestr(_member(MANIFEST, len(text)), text)
            for name, (size, sha256) in sorted(listed.files.items()):
                where = str(folder / name)
                with _readable(folder / name) as reader, archive.open(
                    _member(name, size), "w"
                ) as writer:  # fmt: skip
                    if _copied(reader, writer.write, size) != sha256:
                        _damaged("its SHA-256 is not that of the manifest", where)
    except OSError as error:
        raise UsageError(f"cannot write the bundle: {error.strerror}", where=str(output)) from None
    return listed


def read_bundle(path: Path) -> Listed:
    """What the bundle lists; its other files are not looked at.

    Raises:
        UsageError: there is no such file, or it is no bundle of a plan.
        DamagedError: its manifest or its table of contents is damaged.
    """
    with _archive(path) as archive:
        return _contents(archive, path)


def verify_bundle(path: Path) -> Listed:
    """Reads the whole bundle and checks every file. Raises as `extract`."""
    with _archive(path) as archive:
        listed = _contents(archive, path)
        for name in listed.files:
            _unpack(archive, name, listed, None, path)
        return listed


def extract(path: Path, folder: Path) -> Listed:
    """Unpacks a bundle into the new plan folder `folder`, which appears whole, checked.

    Raises:
        UsageError: there is no such file, it is no bundle, or `folder` is there already.
        DamagedError: something is not as the manifest says; nothing was unpacked.
        OSError: `folder` cannot be written.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            "expected a new folder, found something there",
            where=str(folder),
            hint="name another folder, or remove it",
        )
    with _archive(path) as archive:
        listed = _contents(archive, path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            work.chmod(0o755)
            for name in listed.files:
                target = work / name
                target.parent.mkdir(parents=True, exist_ok=True)
                _unpack(archive, name, listed, target, path)
            with (work / MANIFEST).open("xb") as file:
                file.write(listed.text)
                file.flush()
                os.fsync(file.fileno())
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return listed


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    if not path.is_file():
        raise UsageError("expected a bundle of a plan, found no such file", where=str(path))
    if not is_bundle(path):
        raise UsageError(
            "expected a bundle of a plan, found another file",
            where=str(path),
            hint="make one: graphc bundle PLAN -o FILE",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _UNREADABLE as error:
        _damaged(str(error), str(path))


def _contents(archive: zipfile.ZipFile, path: Path) -> Listed:
    members = {info.filename: info for info in archive.infolist()}
    manifest = members.get(MANIFEST)
    if manifest is None or manifest.file_size > _LONGEST_MANIFEST:
        _damaged(f"it has no sound {MANIFEST}", str(path))
    listed = _listed(archive.read(manifest), f"{path}: {MANIFEST}")
    if sorted([MANIFEST, *listed.files]) != sorted(info.filename for info in archive.infolist()):
        _damaged("its files are not those of its manifest", str(path))
    for name, (size, _) in listed.files.items():
        if members[name].file_size != size or members[name].compress_type != zipfile.ZIP_STORED:
            _damaged(f"{name} is not as the manifest says", str(path))
    return listed


def is_unpacked(listed: Listed, folder: Path) -> bool:
    """Whether `folder` has the manifest, and files of the sizes that it lists. Loading a plan
    checks more."""
    try:
        sizes = {name: (folder / name).stat().st_size for name in listed.files}
        text = (folder / MANIFEST).read_bytes()
    except OSError:
        return False
    return text == listed.text and sizes == {name: size for name, (size, _) in listed.files.items()}


def _unpack(
    archive: zipfile.ZipFile, name: str, listed: Listed, target: Path | None, path: Path
) -> None:
    size, sha256 = listed.files[name]
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(archive.open(name))
        write = None if target is None else stack.enter_context(target.open("xb")).write
        found = _copied(reader, write, size)
    if found != sha256:
        _damaged(f"the SHA-256 of {name} is not that of the manifest", str(path))


def _copied(reader: IO[bytes], write: Callable[[bytes], object] | None, size: int) -> str:
    """Copies `size` bytes, if `write` is given; gives their SHA-256, "" if there are fewer or
    more."""
    hasher, left = hashlib.sha256(), size
    while block := reader.read(min(_BLOCK, left + 1)):
        left -= len(block)
        if left < 0:
            return ""
        hasher.update(block)
        if write is not None:
            write(block)
    return "" if left else hasher.hexdigest()


def _member(name: str, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr, info.create_system, info.file_size = _MODE, 3, size
    return info


def _readable(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        _damaged(f"cannot be read: {error.strerror}", str(path))


def _listed(text: bytes, where: str) -> Listed:
    try:
        manifest = msgspec.json.decode(text, type=_Manifest)
        payload = bytes(manifest.payload)
        if digest(payload) != manifest.sha256:
            _damaged("the manifest does not match its digest", where)
        made = msgspec.json.decode(payload, type=_Payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _damaged(f"the manifest cannot be read: {error}", where)
    files, sizes = made.plan.files, made.sizes
    if (
        set(files) != set(sizes)
        or not all(map(_plain, files))
        or min(sizes.values(), default=0) < 0
    ):
        _damaged("the manifest's tables of files disagree", where)
    return Listed(manifest.sha256, {name: (sizes[name], files[name]) for name in files}, text)


def _plain(name: str) -> bool:
    """Whether a name stays inside of the plan's folder."""
    parts = name.split("/")
    return name != MANIFEST and not {"", ".", ".."} & set(parts) and not set(name) & set("\\\0:")


def _damaged(what: str, where: str) -> NoReturn:
    raise DamagedError(
        what, where=where, hint="make the bundle again: graphc bundle PLAN -o FILE"
    ) from None
