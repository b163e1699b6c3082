"""Plans on disk: writing a plan folder, reading and checking it. The structs are in graphc.plan.

plan.json is one JSON object,

    {"graphc_plan": 1, "sha256": "<digest of the payload>", "payload": {"sizes": .., "plan": ..}}

whose payload is hashed byte for byte; `sizes` gives the bytes of every other file. Opening a plan
checks that digest, all sizes, and the SHA-256 of kernels.so, which is about to be executed.
`verify_files` reads every file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from graphc.errors import DamagedError, PlanMismatchError, UsageError
from graphc.plan import ABI_VERSION, FORMAT_VERSION, Plan, PlanWork, Weight

if TYPE_CHECKING:
    from pathlib import Path

    from graphc.distinct import Distinct

MANIFEST = "plan.json"
WEIGHTS = "weights.bin"
KERNELS = "kernels.so"
WORK = "work.json"
ALIGNMENT = 4096  # of each weight in weights.bin
_MOST_PIECES = 1024  # of one write: IOV_MAX of Linux and macOS
_SMALL = 2 << 20  # bytes

_HEAD = b'{"graphc_plan": 1, "sha256": "%s", "payload": '
_TAIL = b"}\n"
_REBUILD = "rebuild the plan: graphc build"

#: content of one file of a plan: bytes or text to write, a file to copy, or what writes the file
Content: TypeAlias = "bytes | str | Path | Callable[[Path], None]"


class _Payload(msgspec.Struct, frozen=True):
    sizes: dict[str, int]
    plan: Plan


class _Versions(msgspec.Struct, frozen=True):
    format: int = -1
    abi: int = -1


class _Header(msgspec.Struct, frozen=True):
    plan: _Versions


# ---------------------------------------------------------------- writing


class WeightsWriter:
    """Collects weights.bin; equal bytes are stored once.

    writer = WeightsWriter()
    index = writer.add("fc.weight", "float32", [4, 8], array)
    write_plan(folder, Plan(..., weights=writer.weights), {"weights.bin": writer.write, ...})
    """

    def __init__(self) -> None:
        from graphc.distinct import Distinct  # here: a program that only loads starts sooner

        self.weights: list[Weight] = []
        self._end = 0
        self._pieces: list[memoryview] = []
        self._places: Distinct[int] = Distinct()

    def add(
        self,
        name: str,
        dtype: str,
        shape: Iterable[int],
        data: bytes | bytearray | memoryview,
        layout: str = "",
        origin: str = "",
    ) -> int:
        """Appends one constant, given as its C-contiguous bytes, which must stay as they are until
        all is written; gives its index in `weights`."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        offset = self._places.find(view) if view.nbytes else 0
        if offset is None:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._pieces += [memoryview(bytes(offset - self._end)), view]
            self._places.note(view, offset)
            self._end = offset + view.nbytes
        self.weights.append(
            Weight(name, dtype, list(shape), offset, view.nbytes, layout=layout, origin=origin)
        )
        return len(self.weights) - 1

    def write(self, path: Path) -> None:
        """Writes the file, as much at a time as the kernel takes. Linux then keeps it in its page
        cache in pages as large as it finds, where a mapped file is read faster than in pieces."""
        waiting = [piece for piece in self._pieces if piece.nbytes]
        first = 0
        with path.open("wb", buffering=0) as file:
            while first < len(waiting):
                done = os.writev(file.fileno(), waiting[first : first + _MOST_PIECES])
                while first < len(waiting) and done >= waiting[first].nbytes:
                    done -= waiting[first].nbytes
                    first += 1
                if done:
                    waiting[first] = waiting[first][done:]


def write_plan(folder: Path | str, plan: Plan, files: Mapping[str, Content]) -> Plan:
    """Writes a plan folder, replacing a plan that stands there, and gives the plan as written
    (`files` filled in).

    Args:
        folder: where to. It must not exist, be empty, or hold a plan.
        plan: its `files` is ignored.
        files: every file but plan.json by its name in the folder ("kernels.so", "weights.bin",
            "report.json", "graph.txt", "sources/x.cpp").

    The folder is prepared beside its destination and moved there whole: a reader sees the old
    plan or the new one. Raises UsageError if the destination holds something else; OSError (disk
    full, read-only) leaves the old plan in place.
    """
    import shutil  # here, not above: a program that only loads plans starts sooner
    import tempfile
    from pathlib import Path

    folder = Path(folder).absolute()
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())
    ):
        raise UsageError(
            "the output folder holds something that is not a plan",
            where=str(folder),
            hint="name another folder or empty it",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        work.chmod(0o755)
        digests: dict[str, str] = {}
        sizes: dict[str, int] = {}
        for name, content in files.items():
            path = work / _safe_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            elif isinstance(content, Path):
                path.write_bytes(content.read_bytes())
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            digests[name] = file_digest(path)
            sizes[name] = path.stat().st_size
        plan = msgspec.structs.replace(plan, files=digests)
        payload = msgspec.json.encode(_Payload(sizes, plan))
        manifest = work / MANIFEST
        with manifest.open("wb") as file:
            file.write(_HEAD % digest(payload).encode() + payload + _TAIL)
            file.flush()
            os.fsync(file.fileno())
        old = None
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.rename(folder, old / "plan")
        try:
            os.rename(work, folder)
        except OSError:
            if old:
                os.rename(old / "plan", folder)
            raise
        finally:
            if old:
                shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return plan


def _safe_name(name: str) -> str:
    parts = name.split("/")
    if name == MANIFEST or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"{name!r} cannot be a file of a plan")
    return name


def file_digest(path: Path | str) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= _SMALL:
            return digest(file.read())
        import hashlib

        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of bytes, in hex. What is small is hashed by the interpreter's own code: to load
    OpenSSL, as hashlib does, takes longer."""
    if len(data) <= _SMALL:
        with contextlib.suppress(ImportError):  # left out of this Python
            own = importlib.import_module("_sha2" if sys.version_info >= (3, 12) else "_sha256")
            return str(own.sha256(data).hexdigest())
    import hashlib

    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------- reading


def read_plan(folder: Path | str) -> Plan:
    """Reads and checks a plan folder: format and ABI version, the manifest's digest, the presence
    and size of every file, and the content of kernels.so.

    Raises UsageError (no plan there), PlanMismatchError (another version), DamagedError (naming
    the file).
    """
    manifest = os.path.join(folder, MANIFEST)
    try:
        with open(manifest, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            "no plan found",
            where=str(folder),
            hint="a plan is a folder with a plan.json; make one: graphc build",
        ) from error
    payload = _checked_payload(text, manifest)
    try:
        decoded = msgspec.json.decode(payload, type=_Payload)
    except msgspec.DecodeError as error:
        _check_versions(payload, manifest)
        raise DamagedError(f"cannot be read: {error}", where=manifest, hint=_REBUILD) from error
    _check_versions(payload, manifest, decoded.plan)
    for name, size in decoded.sizes.items():
        try:
            found = os.stat(os.path.join(folder, _safe_name(name))).st_size
        except OSError as error:
            raise DamagedError(
                "a file of the plan is missing", where=os.path.join(folder, name), hint=_REBUILD
            ) from error
        if found != size:
            raise DamagedError(
                f"expected {size:,} bytes, found {found:,}",
                where=os.path.join(folder, name),
                hint=_REBUILD,
            )
    if set(decoded.sizes) != set(decoded.plan.files):
        raise DamagedError("its tables of files disagree", where=manifest, hint=_REBUILD)
    for name in (KERNELS, WEIGHTS):
        if name not in decoded.sizes:
            raise DamagedError(f"{name} is not listed", where=manifest, hint=_REBUILD)
    size = decoded.sizes[WEIGHTS]
    for weight in decoded.plan.weights:
        if weight.offset < 0 or weight.offset + weight.nbytes > size:
            raise DamagedError(
                f"weight {weight.name} lies outside {WEIGHTS}", where=manifest, hint=_REBUILD
            )
    verify_files(folder, decoded.plan, (KERNELS,))
    return decoded.plan


def read_work(folder: Path | str, plan: Plan) -> PlanWork:
    """What each Step of a plan has to do; `plan` is what `read_plan` gave. Raises DamagedError,
    also for a plan that was built before there was a work.json."""
    path = os.path.join(folder, WORK)
    if WORK not in plan.files:
        raise DamagedError(
            "the plan does not say what its Steps do", where=str(folder), hint=_REBUILD
        )
    verify_files(folder, plan, (WORK,))
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=PlanWork)
    except msgspec.DecodeError as error:
        raise DamagedError(f"cannot be read: {error}", where=path, hint=_REBUILD) from error


def _checked_payload(text: bytes, manifest: str) -> bytes:
    head = len(_HEAD % (b"0" * 64))
    prefix = _HEAD[: _HEAD.index(b"%s")]
    if text.startswith(prefix) and text.endswith(_TAIL):
        payload = text[head : -len(_TAIL)]
        if text[:head] == _HEAD % digest(payload).encode():
            return payload
    raise DamagedError("the manifest does not match its digest", where=manifest, hint=_REBUILD)


def _check_versions(payload: bytes, manifest: str, plan: Plan | None = None) -> None:
    if plan is None:
        try:
            found = msgspec.json.decode(payload, type=_Header).plan
        except msgspec.DecodeError:
            return
    else:
        found = _Versions(plan.format, plan.abi)
    for what, wanted, number in (
        ("format", FORMAT_VERSION, found.format),
        ("kernel ABI", ABI_VERSION, found.abi),
    ):
        if wanted != number:
            raise PlanMismatchError(
                f"expected plan {what} {wanted}, found {number}", where=manifest, hint=_REBUILD
            )


def verify_files(folder: Path | str, plan: Plan, names: Iterable[str] | None = None) -> None:
    """Compares files (all by default) with their SHA-256; DamagedError names the first that
    differs."""
    for name in plan.files if names is None else names:
        path = os.path.join(folder, name)
        try:
            found = file_digest(path)
        except OSError as error:
            raise DamagedError(
                f"cannot be read: {error.strerror}", where=str(path), hint=_REBUILD
            ) from error
        if found != plan.files[name]:
            raise DamagedError(
                "its SHA-256 is not that of the manifest", where=str(path), hint=_REBUILD
            )
