"""Compiles translation units to objects, in parallel, through the cache."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphc.errors import CacheMissError, CompileError, GraphcError
from graphc.store import KERNELS, Fields, KernelStore, Stored
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.flags import compile_flags, include_flags
from graphc.toolchain.isa import Isa
from graphc.toolchain.prelude import plain_prelude, precompiled_prelude
from graphc.toolchain.process import Cancelled, Runner
from graphc.toolchain.recorded import missing as not_held
from graphc.toolchain.recorded import told
from graphc.toolchain.sources import INCLUDE_ROOTS, kernel_fields

if TYPE_CHECKING:  # sympy, which it needs, takes long to import
    from graphc.lowering.context import Unit

_ERROR_LINES = 12
_SHOWN_EVERY = 0.5  # seconds


@dataclass(frozen=True)
class UnitResult:
    """What became of one unit. `seconds` is the wall time of its compile (0 for a hit)."""

    name: str
    origin: Literal["hit", "made", "private"]
    seconds: float
    key: str
    bytes: int
    remote: bool = False  # a hit that came from the shared tier


@dataclass(frozen=True)
class CompileReport:
    """`objects` has one entry per different source, in the order of first appearance, ready for
    `link`; `units` has one per unit given. `notes` are things to tell the user."""

    units: list[UnitResult]
    objects: list[Stored]
    notes: list[str]
    seconds: float
    precompiled: bool = field(default=False)  # the precompiled header was used

    @property
    def hits(self) -> int:
        return sum(unit.origin == "hit" for unit in self.units)

    @property
    def remote_hits(self) -> int:
        """Those of the hits that came from the shared tier of the cache."""
        return sum(unit.remote for unit in self.units)

    @property
    def compiled(self) -> int:
        return len(self.units) - self.hits


Progress = Callable[[UnitResult, int, int], None]  # a result, how many are done, how many in all
#: name of a unit that another process compiles, how many are done, how many in all
Waiting = Callable[[str, int, int], None]


def compile_units(
    units: Sequence[Unit],
    isa: Isa,
    compiler: Compiler,
    store: KernelStore,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    waiting: Waiting | None = None,
    require_cached: bool = False,
) -> CompileReport:
    """Objects for `units`, out of the cache where it has them.

    Args:
        jobs: compiler processes at a time; None for the CPUs this process may use.
        progress: called from the calling thread after each unit.
        waiting: called from the calling thread, now and then, while nothing is left to do but to
            wait for units that other processes compile.
        require_cached: compile nothing.

    Raises:
        CompileError: the compiler rejected a unit, whose source is kept in the file that is named;
            or there is no compiler, and something is missing.
        CacheMissError: `require_cached` and something is missing.
        NoSpaceError: no disk space, neither in the cache nor in the temporary folder.
    """
    return _Build(isa, compiler, store, progress, waiting).run(units, jobs, require_cached)


@dataclass(frozen=True)
class _Job:
    unit: Unit
    fields: Fields
    copies: int  # how many of the given units have this source


class _Build:
    def __init__(
        self,
        isa: Isa,
        compiler: Compiler,
        store: KernelStore,
        progress: Progress | None,
        waiting: Waiting | None,
    ) -> None:
        self.isa, self.compiler, self.store = isa, compiler, store
        self.progress, self.waiting = progress, waiting
        self.elsewhere: set[str] = set()  # units that other processes compile
        self.runner = Runner()
        self.workspace = store.workspace()
        self.flags = (*compile_flags(isa, compiler), *include_flags(INCLUDE_ROOTS))
        self.prelude: tuple[str, ...] = ()  # flags of the precompiled header, once it works
        self.prelude_file: Stored | None = None  # may live in a folder of its own
        self.notes: list[str] = [] if compiler.command else [told(compiler)]
        self.results: dict[str, tuple[Stored, UnitResult]] = {}
        self.done = 0
        self.total = 0
        self._lock = threading.Lock()

    def run(self, units: Sequence[Unit], jobs: int | None, require_cached: bool) -> CompileReport:
        started = time.perf_counter()
        try:
            missing = self._fetch(_jobs(units, self.isa, self.compiler), len(units))
            if missing:
                self._missing(missing, require_cached)
                self._compile_all(missing, jobs or len(os.sched_getaffinity(0)))
        except BaseException:
            self.runner.cancel()
            self.workspace.close()
            raise
        by_source = {source: self.results[source] for source in {u.source: None for u in units}}
        return CompileReport(
            units=[self._named(unit, by_source[unit.source][1]) for unit in units],
            objects=[stored for stored, _ in by_source.values()],
            notes=self.notes + self.store.drain_notes(),
            seconds=time.perf_counter() - started,
            precompiled=bool(self.prelude),
        )

    @staticmethod
    def _named(unit: Unit, result: UnitResult) -> UnitResult:
        return replace(result, name=unit.name)

    def _fetch(self, jobs: list[_Job], total: int) -> list[_Job]:
        """Takes what the cache has; the rest is returned."""
        self.total = total
        missing = []

        def fetched(job: _Job) -> Stored | None:
            return self.store.fetch(KERNELS, job.fields, self.workspace)

        with contextlib.ExitStack() as stack:
            each: Iterable[Stored | None] = map(fetched, jobs)
            if self.store.lanes > 1:
                pool = stack.enter_context(ThreadPoolExecutor(self.store.lanes))
                each = pool.map(fetched, jobs)
                stack.callback(pool.shutdown, cancel_futures=True)  # of an interrupt
            for job, stored in zip(jobs, each, strict=True):
                if stored is None:
                    missing.append(job)
                else:
                    self._finish(job, stored, 0.0)
        return missing

    def _finish(self, job: _Job, stored: Stored, seconds: float) -> None:
        size = stored.path.stat().st_size
        result = UnitResult(job.unit.name, stored.origin, seconds, stored.key, size, stored.remote)
        self.results[job.unit.source] = (stored, result)
        self.done += job.copies
        if self.progress is not None:
            self.progress(result, self.done, self.total)

    def _missing(self, missing: list[_Job], require_cached: bool) -> None:
        self.store.record_misses([(KERNELS, job.unit.name, job.fields) for job in missing])
        if not require_cached and self.compiler.command:
            return
        shown = missing[: 20 if require_cached else 5]
        reasons = self.store.why(KERNELS, [job.fields for job in shown])
        lines = [f"{job.unit.name}: {why}" for job, why in zip(shown, reasons, strict=True)]
        if len(missing) > len(shown):
            lines.append(f"and {len(missing) - len(shown)} more")
        listed = "\n    ".join(lines)
        if not require_cached:
            count = f"{len(missing)} of {self.total} kernels"
            raise not_held(self.compiler, f"{count}:\n    {listed}")
        raise CacheMissError(
            f"expected every kernel in the cache, {len(missing)} of {self.total} missing:\n    "
            + listed,
            hint="build once without --require-cached; "
            "`graphc cache why --last` shows the differences",
        )

    def _compile_all(self, missing: list[_Job], jobs: int) -> None:
        try:
            self.prelude, self.prelude_file = precompiled_prelude(
                self.isa, self.compiler, self.store, self.workspace, self.runner,
                lambda: self._show_waiting("precompiled header"),
            )  # fmt: skip
        except (CompileError, OSError) as error:
            self._without_prelude(str(error))
        # units of much text first: a long compile that starts last would be waited for alone
        order = sorted(missing, key=lambda job: -len(job.unit.source))
        with ThreadPoolExecutor(max(1, min(jobs, len(order)))) as pool:
            try:  # an interrupt may come while compilers start
                waiting = {pool.submit(self._compile, job): job for job in order}
                while waiting:
                    ready, _ = wait(waiting, _SHOWN_EVERY, return_when=FIRST_COMPLETED)
                    if not ready:
                        self._show_waiting(min(tuple(self.elsewhere), default=""))
                    for future in ready:
                        job = waiting.pop(future)
                        stored, seconds = future.result()
                        self._finish(job, stored, seconds)
            except BaseException:
                self.runner.cancel()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _show_waiting(self, name: str) -> None:
        if name and self.waiting is not None:
            self.waiting(name, self.done, self.total)

    def _compile(self, job: _Job) -> tuple[Stored, float]:
        started = time.perf_counter()
        name = job.unit.name

        def make(path: Path) -> None:
            self.elsewhere.discard(name)
            self._make(job.unit, path)

        try:
            stored = self.store.fetch_or_make(
                KERNELS,
                job.fields,
                make,
                self.workspace,
                label=name,
                cancelled=lambda: self.runner.cancelled,
                waiting=lambda: self.elsewhere.add(name),
            )
        finally:
            self.elsewhere.discard(name)
        return stored, time.perf_counter() - started

    def _make(self, unit: Unit, path: Path) -> None:
        # its own folder and a fixed name: the object then holds nothing that varies
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            Path(folder, "unit.cpp").write_text(unit.source, encoding="utf-8")
            prelude = self.prelude
            if prelude:
                failed = self._run(prelude, path, Path(folder))
                if failed is None:
                    return
            failed = self._run(plain_prelude(), path, Path(folder))
        if failed is not None:
            raise _rejected(unit, failed)
        if prelude:
            self._without_prelude("a unit compiled only without it")

    def _run(self, prelude: tuple[str, ...], path: Path, folder: Path) -> str | None:
        """None on success, else what the compiler said."""
        command = (*self.compiler.command, *self.flags, *prelude, "-c", "unit.cpp", "-o", str(path))
        done = self.runner.run(command, folder)
        if done.status == 0 and path.is_file():
            return None
        path.unlink(missing_ok=True)
        return done.output or f"exit status {done.status}"

    def _without_prelude(self, reason: str) -> None:
        with self._lock:
            if self.prelude or not self.notes:
                self.notes.append(f"compiling without the precompiled header: {reason}")
            self.prelude = ()


def _jobs(units: Sequence[Unit], isa: Isa, compiler: Compiler) -> list[_Job]:
    by_source: dict[str, list[Unit]] = {}
    for unit in units:
        by_source.setdefault(unit.source, []).append(unit)
    return [
        _Job(same[0], kernel_fields(same[0], isa, compiler), len(same))
        for same in by_source.values()
    ]


def _rejected(unit: Unit, output: str) -> GraphcError:
    output = output.replace("unit.cpp", unit.name + ".cpp")
    lines = output.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b", line)), 0)
    shown = "\n    ".join(lines[first : first + _ERROR_LINES])
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", unit.name)[:60]
    try:
        handle, kept = tempfile.mkstemp(prefix=f"graphc-{name}-", suffix=".cpp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(unit.source)
        hint = f"the source is kept in {kept}"
    except OSError as error:
        hint = f"the source could not be kept: {error.strerror}"
    return CompileError(f"the compiler rejected kernel {unit.name}:\n    {shown}", hint=hint)


__all__ = ["Cancelled", "CompileReport", "UnitResult", "compile_units"]
