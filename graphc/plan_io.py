"""Plans on disk: reading and checking a plan folder. The structs are in graphc.plan; folders are
written by graphc.plan_writer.

plan.json is one JSON object,

    {"graphc_plan": 1, "sha256": "<digest of the payload>", "payload": {"sizes": .., "plan": ..}}

whose payload is hashed byte for byte; `plan` is the Manifest and `sizes` gives the bytes of every
other file. Opening a plan checks that digest. Reading it for one of its targets checks the sizes of
the files that this target needs, and the SHA-256 of program.json and of kernels.so, which is about
to be executed. `verify_files` reads every file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from graphc.cpu import lacking
from graphc.errors import DamagedError, PlanMismatchError, UsageError
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    Manifest,
    Plan,
    PlanWork,
    Target,
)

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "plan.json"
WEIGHTS = "weights.bin"
PROGRAM = "program.json"
KERNELS = "kernels.so"
WORK = "work.json"
_SMALL = 2 << 20  # bytes

HEAD = b'{"graphc_plan": 1, "sha256": "%s", "payload": '
TAIL = b"}\n"
_REBUILD = "rebuild the plan: graphc build"


class Payload(msgspec.Struct, frozen=True):
    """What the digest of plan.json is of."""

    sizes: dict[str, int]
    plan: Manifest


class _Versions(msgspec.Struct, frozen=True):
    format: int = -1
    abi: int = -1
    version: str = "?"


class _Header(msgspec.Struct, frozen=True):
    plan: _Versions


def safe_name(name: str) -> str:
    """The name, which stays inside the folder. Raises UsageError."""
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


class PlanFile:
    """A plan folder whose manifest was read and checked; made by `open_plan`."""

    def __init__(self, folder: str, manifest: Manifest, sizes: Mapping[str, int]) -> None:
        self.folder, self.manifest, self.sizes = folder, manifest, sizes

    def target(self, name: str = "") -> Target:
        """The target of this name; without one, the best that runs here, else the first.

        Raises UsageError: there is no such target.
        """
        targets = self.manifest.targets
        if not name:
            fits = (t for t in targets if not lacking(t.machine.architecture, t.machine.features))
            return next(fits, targets[0])
        found = [target for target in targets if target.name == name]
        if not found:
            names = ", ".join(target.name for target in targets)
            raise UsageError(
                f"expected a target of the plan out of {names}, found {name!r}", where=self.folder
            )
        return found[0]

    def rebuild(self, targets: Sequence[str] = ()) -> str:
        """The command that builds the plan again, for other targets if any are named."""
        import shlex

        names = targets or [target.name for target in self.manifest.targets]
        what = self.manifest.command or ["MODEL"]
        words = [*what, "-o", self.folder, "--target", ",".join(names)]
        return "graphc build " + shlex.join(words)

    def read(self, target: Target) -> Plan:
        """The plan for a target, whose files are checked (as this module says).

        Raises DamagedError, naming the file.
        """
        name = f"{target.folder}/{PROGRAM}" if target.folder else PROGRAM
        where = os.path.join(self.folder, name)
        try:
            with open(where, "rb") as file:
                data = file.read()
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror}", name) from error
        if digest(data) != self.manifest.files.get(name):
            raise self._damaged("its SHA-256 is not that of the manifest", name)
        try:
            plan = with_files(msgspec.json.decode(data, type=Plan), self.manifest)
        except msgspec.DecodeError as error:
            raise self._damaged(f"cannot be read: {error}", name) from error
        self._check_sizes(plan)
        self.verify(plan, (own(plan, KERNELS),))
        return plan

    def verify(self, plan: Plan, names: Iterable[str] | None = None) -> None:
        """As `verify_files`."""
        verify_files(self.folder, plan, names, self._hint())

    def _check_sizes(self, plan: Plan) -> None:
        for name in plan.files:
            try:
                found = os.stat(os.path.join(self.folder, safe_name(name))).st_size
            except OSError as error:
                raise self._damaged("a file of the plan is missing", name) from error
            if found != self.sizes[name]:
                raise self._damaged(f"expected {self.sizes[name]:,} bytes, found {found:,}", name)
        for name in (own(plan, KERNELS), WEIGHTS):
            if name not in plan.files:
                raise self._damaged(f"{name} is not listed", MANIFEST)
        for weight in plan.weights:
            if weight.offset < 0 or weight.offset + weight.nbytes > self.sizes[WEIGHTS]:
                raise self._damaged(f"weight {weight.name} lies outside {WEIGHTS}", MANIFEST)

    def _damaged(self, what: str, name: str) -> DamagedError:
        return DamagedError(what, where=os.path.join(self.folder, name), hint=self._hint())

    def _hint(self) -> str:
        return f"rebuild the plan: {self.rebuild()}"


def open_plan(folder: Path | str) -> PlanFile:
    """Reads and checks the manifest of a plan folder.

    Raises UsageError (no plan there), PlanMismatchError (another format or ABI version),
    DamagedError.
    """
    folder = os.fspath(folder)
    where = os.path.join(folder, MANIFEST)
    try:
        with open(where, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            "no plan found",
            where=folder,
            hint="a plan is a folder with a plan.json; make one: graphc build",
        ) from error
    payload = _checked_payload(text, where)
    try:
        decoded = msgspec.json.decode(payload, type=Payload)
    except msgspec.DecodeError as error:
        _check_versions(payload, where)
        raise DamagedError(f"cannot be read: {error}", where=where, hint=_REBUILD) from error
    _check_versions(payload, where, decoded.plan)
    if set(decoded.sizes) != set(decoded.plan.files) or not decoded.plan.targets:
        raise DamagedError("its tables of files disagree", where=where, hint=_REBUILD)
    return PlanFile(folder, decoded.plan, decoded.sizes)


def read_plan(folder: Path | str, target: str = "") -> Plan:
    """The plan in a folder for the target that is named, else for the best that this machine runs,
    else for the first: kernels are not loaded. Errors as of `open_plan`, `PlanFile.target` and
    `PlanFile.read`."""
    file = open_plan(folder)
    return file.read(file.target(target))


def own(plan: Plan, name: str) -> str:
    """What a file of one target is called in the plan's folder."""
    return f"{plan.folder}/{name}" if plan.folder else name


def with_files(plan: Plan, manifest: Manifest) -> Plan:
    """The plan with the digests of its files: its own and those of all targets."""
    files = manifest.files
    if len(manifest.targets) > 1:
        others = tuple(f"{t.folder}/" for t in manifest.targets if t.folder != plan.folder)
        files = {name: found for name, found in files.items() if not name.startswith(others)}
    program = own(plan, PROGRAM)
    files = {name: found for name, found in files.items() if name != program}
    return msgspec.structs.replace(plan, files=files)


def read_work(folder: Path | str, plan: Plan) -> PlanWork:
    """What each Step of a plan has to do; `plan` is what `read_plan` gave. Raises DamagedError,
    also for a plan that was built before there was a work.json."""
    name = own(plan, WORK)
    path = os.path.join(folder, name)
    if name not in plan.files:
        raise DamagedError(
            "the plan does not say what its Steps do", where=str(folder), hint=_REBUILD
        )
    verify_files(folder, plan, (name,))
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=PlanWork)
    except msgspec.DecodeError as error:
        raise DamagedError(f"cannot be read: {error}", where=path, hint=_REBUILD) from error


def _checked_payload(text: bytes, manifest: str) -> bytes:
    head = len(HEAD % (b"0" * 64))
    prefix = HEAD[: HEAD.index(b"%s")]
    if text.startswith(prefix) and text.endswith(TAIL):
        payload = text[head : -len(TAIL)]
        if text[:head] == HEAD % digest(payload).encode():
            return payload
    raise DamagedError("the manifest does not match its digest", where=manifest, hint=_REBUILD)


def _check_versions(payload: bytes, where: str, manifest: Manifest | None = None) -> None:
    if manifest is None:
        try:
            found = msgspec.json.decode(payload, type=_Header).plan
        except msgspec.DecodeError:
            return
    else:
        found = _Versions(manifest.format, manifest.abi, manifest.version)
    for what, wanted, number in (
        ("format", FORMAT_VERSION, found.format),
        ("kernel ABI", ABI_VERSION, found.abi),
    ):
        if wanted != number:
            raise PlanMismatchError(
                f"expected plan {what} {wanted}, found {number}, of graphc {found.version}",
                where=where,
                hint=_REBUILD,
            )


def verify_files(
    folder: Path | str, plan: Plan, names: Iterable[str] | None = None, hint: str = _REBUILD
) -> None:
    """Compares files (all by default) with their SHA-256; DamagedError names the first that
    differs."""
    for name in plan.files if names is None else names:
        path = os.path.join(folder, name)
        try:
            found = file_digest(path)
        except OSError as error:
            raise DamagedError(
                f"cannot be read: {error.strerror}", where=str(path), hint=hint
            ) from error
        if found != plan.files[name]:
            raise DamagedError(
                "its SHA-256 is not that of the manifest", where=str(path), hint=hint
            )
