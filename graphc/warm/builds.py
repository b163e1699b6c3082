"""The way from a model's name to what an earlier build of the same made, without capturing it.

observed   what the model is made of: a checkpoint's files; for a factory or a file of another
           kind, what was read when it was captured last, if all of that is as it was
build      key: observed, options, graphc, machine, compiler. Entry: where the finished plan is
graphs     key: observed, options of the frontend. Entry: the captured graphs
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from graphc.errors import GraphcError
from graphc.plan import ABI_VERSION, FORMAT_VERSION
from graphc.plan_io import MANIFEST, file_digest, open_plan
from graphc.plan_writer import copy_plan
from graphc.report import BuildReport, CompileRecord, StageRecord, TargetRecord
from graphc.store import BUILDS, GRAPHS, OBSERVED, Fields, KernelStore
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import targets
from graphc.warm import identity
from graphc.warm.identity import CAPTURE_ROOMS, PLAN_ROOMS, FileDigests
from graphc.warm.observed import Observed, of_folder, of_watch
from graphc.warm.watch import Watch, watching

if TYPE_CHECKING:
    from graphc.frontends.capture import Captured
    from graphc.warm.captures import Kept

#: packages that decide what is captured, whatever else is loaded
PACKAGES = ("torch", "transformers", "safetensors", "onnx", "numpy", "sympy", "ml_dtypes")
#: names of a plan's place that are remembered
_PLACES = 8
#: seconds, more than the clock of a file system takes from one time to the next: what changes
#: after such a rest has a later time than what had changed before it
_TICK = 0.02


Record = TypeVar("Record", CompileRecord, TargetRecord)


class _Build(msgspec.Struct, frozen=True):
    """Where a plan was written, newest first, and the SHA-256 of its manifest."""

    manifest: str
    places: list[str]


@dataclass
class Warm:
    """What the cache has of one model.

    model: as the user names it. digests: of files, remembered over processes. limit: the most
    bytes of weights that are kept with captured graphs.
    """

    model: str
    store: KernelStore
    digests: FileDigests
    limit: int
    reason: str = ""  # why its captured graphs are not kept

    @cached_property
    def observed(self) -> Observed | None:
        """What the model is made of, as it is now; None where that is not known."""
        if self.model == "demo":
            return Observed({}, packages={name: identity.version(name) for name in PACKAGES})
        if self._folder is not None:
            return of_folder(self._folder, PACKAGES, self.digests)
        data = self._fetched(OBSERVED, self._name())
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found = msgspec.json.decode(data or b"", type=Observed)
            return found if not found.changed(self.digests) else None
        return None

    @property
    def _folder(self) -> Path | None:
        path = Path(self.model)
        return path if ":" not in self.model and path.is_dir() else None

    def _name(self) -> Fields:
        """The key of what was observed last."""
        source, colon, _ = self.model.rpartition(":")
        file = not colon or source.endswith(".py")
        place = str(Path(source if colon else self.model).absolute()) if file else os.getcwd()
        return (
            ("what", "what a model is made of"),
            ("model", self.model),
            ("place", place),
            ("path", os.pathsep.join(sys.path)),
            ("python", identity.python()),
        )

    # -- finished plans ------------------------------------------------------------------------

    def plan(self, output: Path, options: Mapping[str, object]) -> BuildReport | None:
        """Puts the plan that an earlier build made of the same into `output`, if it is there or
        wherever that build wrote it, whole; gives its report.

        Raises UsageError if `output` holds something else.
        """
        clock = time.perf_counter()
        for compiler in self._compilers():
            fields = self._build_fields(options, compiler)
            data = self._fetched(BUILDS, fields) if fields is not None else None
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                known = msgspec.json.decode(data or b"", type=_Build)
                found = self._taken(fields or (), known, output.absolute())
                if found is not None:
                    self.digests.save()
                    stage = StageRecord("unchanged", time.perf_counter() - clock)
                    return msgspec.structs.replace(found, stages=[stage])
        return None

    def _taken(self, fields: Fields, known: _Build, output: Path) -> BuildReport | None:
        """The report of a known plan, brought to `output`; None if it is nowhere whole."""
        for place in dict.fromkeys([output, *map(Path, known.places)]):
            if not _is(place, known.manifest):
                continue
            if place != output:
                copy_plan(place, output)
                self._keep_build(fields, output, known)
            folder = open_plan(output).target().folder
            report = BuildReport.load(output / folder / "report.json")
            return msgspec.structs.replace(
                report, compile=_made_before(report.compile),
                targets=[_made_before(record) for record in report.targets],
            )  # fmt: skip
        return None

    def _compilers(self) -> list[str]:
        """Identities: of this machine's; where it has none, of those that filled the cache."""
        try:
            return [Compiler.discover().identity]
        except GraphcError:
            return [identity for identity, _ in self.store.makers()]

    def keep_plan(self, output: Path, options: Mapping[str, object], compiler: str) -> None:
        """Remembers where the plan of a build is that this compiler's kernels went into."""
        fields = self._build_fields(options, compiler)
        if fields is not None:
            output = output.absolute()
            self._keep_build(fields, output, _Build(file_digest(output / MANIFEST), []))
        self.digests.save()

    def _keep_build(self, fields: Fields, output: Path, known: _Build) -> None:
        others = (place for place in known.places if place != str(output))
        data = msgspec.json.encode(_Build(known.manifest, [str(output), *others][:_PLACES]))
        self.store.put(BUILDS, fields, lambda path: _write(path, data), label=self.model)

    def _build_fields(self, options: Mapping[str, object], compiler: str) -> Fields | None:
        if self.observed is None:
            return None
        levels = targets(str(options["target"])).values()
        return (
            ("what", f"plan, format {FORMAT_VERSION}, ABI {ABI_VERSION}"),
            ("model", _called(self.model)),
            ("options", _text(options)),
            ("compiler", compiler),
            ("machine", "\n".join(" ".join((i.architecture, *i.features)) for i in levels)),
            ("graphc", identity.sources(PLAN_ROOMS)),
            ("python", identity.python()),
            *self.observed.fields(),
        )

    # -- captured graphs -----------------------------------------------------------------------

    def captures(self, options: Mapping[str, object]) -> Kept | None:
        """The captured graphs of an earlier build."""
        from graphc.warm.captures import Unfit, read_captures

        if self.observed is None:
            return None
        area = self.store.workspace()
        try:
            found = self.store.fetch(GRAPHS, self._graph_fields(options), area)
            # mapped files stay readable when the workspace goes
            return None if found is None else read_captures(found.path, self._checkpoint())
        except Unfit:
            return None
        finally:
            area.close()

    def keep_captures(
        self, options: Mapping[str, object], captures: Sequence[Captured], extra: Any = None,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Keeps captured graphs, with further facts as plain JSON; else sets `reason`."""
        from graphc.warm.captures import Unfit, write_captures

        if self.observed is None:
            return

        def write(path: Path) -> None:
            write_captures(path, captures, extra, self._checkpoint(), self.limit)

        try:
            self.store.put(GRAPHS, self._graph_fields(options), write,
                           label=_called(self.model), seconds=seconds)  # fmt: skip
        except Unfit as error:
            self.reason = str(error)

    def _checkpoint(self) -> list[Path]:
        return sorted(self._folder.glob("*.safetensors")) if self._folder is not None else []

    def _graph_fields(self, options: Mapping[str, object]) -> Fields:
        assert self.observed is not None
        return (
            ("what", "captured graphs"),
            ("model", _called(self.model)),
            ("options", _text(options)),
            ("graphc", identity.sources(CAPTURE_ROOMS)),
            ("python", identity.python()),
            *self.observed.fields(),
        )

    # -- observing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Around the capture of the model: sees what it is made of, or sets `reason`."""
        if self._folder is not None or self.model == "demo":
            before = self.observed
            yield
            if before is not None and (what := before.changed(self.digests)):
                self._unknown(f"{what} changed while it was captured")
            return
        begin = time.time_ns()
        time.sleep(_TICK)
        with watching() as watch:
            yield
        self._saw(watch, begin)

    def _saw(self, watch: Watch, begin: int) -> None:
        if ":" not in self.model:
            watch.files.add(str(Path(self.model).absolute()))
        try:
            found = of_watch(watch, PACKAGES, self.digests)
            late = [f for f in found.files if os.stat(f).st_mtime_ns > begin]
        except OSError as error:
            self._unknown(f"{error.filename} cannot be read again: {error.strerror}")
            return
        if watch.unknown:
            self._unknown(watch.unknown)
        elif stale := watch.stale():
            self._unknown(f"{stale} may have changed after this process loaded it")
        elif late:
            self._unknown(f"{late[0]} changed while it was captured")
        else:
            data = msgspec.json.encode(found)
            self.store.put(OBSERVED, self._name(), lambda path: _write(path, data),
                           label=self.model)  # fmt: skip
            self.__dict__["observed"] = found

    def _unknown(self, reason: str) -> None:
        self.reason = reason
        self.__dict__["observed"] = None

    def _fetched(self, bucket: str, fields: Fields) -> bytes | None:
        area = self.store.workspace()
        try:
            found = self.store.fetch(bucket, fields, area)
            return None if found is None else found.path.read_bytes()
        finally:
            area.close()


def _made_before(record: Record) -> Record:
    """A record of compiles for a build that compiles nothing."""
    return msgspec.structs.replace(record, compiled=0, hits=record.units, seconds=0.0)


def _is(place: Path, manifest: str) -> bool:
    """Whether the whole plan at `place` is the one with this manifest."""
    try:
        files = open_plan(place).manifest.files
        whole = all(file_digest(place / name) == wanted for name, wanted in files.items())
        return whole and file_digest(place / MANIFEST) == manifest
    except (OSError, GraphcError):
        return False


def _called(model: str) -> str:
    """The model's name without the way to it."""
    source, colon, factory = model.rpartition(":")
    return f"{Path(source).name}:{factory}" if colon else Path(model).absolute().name


def _text(options: Mapping[str, object]) -> str:
    return msgspec.json.encode(options, order="sorted").decode()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
