"""A Session: a loaded plan, its memory and its states, ready to run.

session = graphc.runtime.session.load("plan-folder")
result = session.run(tokens, mask=mask)
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from graphc.errors import UsageError
from graphc.plan import Plan
from graphc.plan_io import KERNELS, WEIGHTS, open_plan, own
from graphc.runtime.binding import Binder, build_results, read_tree
from graphc.runtime.caller_pages import CallerPages
from graphc.runtime.choice import Assignment, Chooser, Shapes
from graphc.runtime.execution import Execution, Natives
from graphc.runtime.machine import default_threads, runnable
from graphc.runtime.native import Library, load_library
from graphc.runtime.pool import MappedFile
from graphc.runtime.ranges import check_ranges
from graphc.runtime.states import States
from graphc.runtime.tensors import Bound, Input

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from graphc.runtime.trace import Trace

_CHOICES = 256  # remembered shape assignments
_LOOK_AT = frozenset(2**k for k in range(1, 40))  # runs after which inputs are looked at
_MOVE_AFTER = 3  # runs before the weights move to huge pages


class Stats(msgspec.Struct):
    """Counts since load. `copied_inputs` counts inputs made contiguous; `choices` the
    times a program was chosen for new shapes."""

    runs: int = 0
    copied_inputs: int = 0
    fallback_calls: int = 0
    choices: int = 0


class StepTime(msgspec.Struct, frozen=True):
    """Time of one Step, added up over the profiled runs."""

    index: int
    label: str
    kernel: str
    nanoseconds: int


def load(
    path: Path | str,
    *,
    threads: int | None = None,
    verify: bool = False,
    share_weights: bool | None = None,
) -> Session:
    """Loads a plan folder, for the best of its targets that this machine runs.

    Args:
        path: the folder.
        threads: threads of native steps, the caller included; default: $GRAPHC_THREADS, else the
            CPUs this process may use. Results do not depend on it.
        verify: read and hash every file, the weights too.
        share_weights: leave the weights in the page cache, which all processes share. Otherwise a
            Session that runs repeatedly moves them into huge pages of its own, which are read
            faster (graphc.runtime.weights). Default: whether $GRAPHC_SHARE_WEIGHTS is set.

    Raises UsageError (no plan there), PlanMismatchError (another format, ABI or CPU),
    DamagedError (naming the file).
    """
    begin = time.perf_counter()
    folder = os.fspath(path)
    if threads is None:
        threads = default_threads()
    if threads < 1:
        raise UsageError(f"expected at least one thread, found {threads}")
    if share_weights is None:
        share_weights = bool(os.environ.get("GRAPHC_SHARE_WEIGHTS"))
    # a manifest is thousands of objects that all stay: looking for garbage among them takes longer
    # than reading it
    collecting = gc.isenabled()
    gc.disable()
    try:
        file = open_plan(folder)
        plan = file.read(runnable(file))
        if verify:
            file.verify(plan)
        kernels = own(plan, KERNELS)
        library = load_library(os.path.join(folder, kernels), plan.files[kernels])
        return Session(plan, folder, library, threads, begin, share_weights)
    finally:
        if collecting:
            gc.enable()


class Session:
    """Made by `load`. Runs from several threads take turns."""

    def __init__(
        self,
        plan: Plan,
        folder: str,
        library: Library,
        threads: int,
        begin: float,
        share_weights: bool,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.threads = threads
        self.stats = Stats()
        self._lock = threading.Lock()
        self._weights = MappedFile(os.path.join(folder, WEIGHTS))
        self._binder = Binder(plan)
        self._results = read_tree(plan.results)
        self._slots = [Input(t, i in plan.mutated_inputs) for i, t in enumerate(plan.inputs)]
        natives = Natives(library, plan)
        self._chooser = Chooser(plan, natives)
        self._choices: dict[Shapes, Assignment] = {}
        self._states = States(plan, natives[0], self._weights.bytes)
        self._execution = Execution(
            plan, library, self._weights, self._chooser, natives, self._states, threads
        )
        self._move_after = -1 if share_weights else _MOVE_AFTER
        self._mover: threading.Thread | None = None
        self._pages = CallerPages()
        self._begin = begin
        self._load_seconds = time.perf_counter() - begin
        self._first_seconds: float | None = None

    # ------------------------------------------------------------ running

    def run(self, /, *args: Any, as_torch: bool | None = None, **kwargs: Any) -> Any:
        """Runs the model on numpy arrays or torch tensors.

        Arguments are those of the captured call, positional or by name. Returns the captured
        result containers with new tensors: torch if `as_torch` or any input is torch, else numpy.

        Raises InputRejectedError (dtype, rank, size, range, guard or scalar differs from what the
        plan was built for, or an index is outside of its table). Nothing ran then, unless the plan
        has a size that depends on data and that size is rejected: states may have changed up to
        there.
        """
        with self._lock:
            leaves = self._binder.bind(args, kwargs)
            bound = [slot.bind(leaf) for slot, leaf in zip(self._slots, leaves, strict=True)]
            if self.plan.ranges:
                check_ranges(self.plan, bound)
            if self.plan.mutated_inputs:
                self._separate(bound)
            shapes = tuple([b.shape for b in bound])
            choice = self._choices.get(shapes)
            if choice is None:
                choice = self._chooser.choose(shapes)
                if len(self._choices) >= _CHOICES:
                    del self._choices[next(iter(self._choices))]
                self._choices[shapes] = choice
                self.stats.choices += 1
            if as_torch is None:
                as_torch = any(b.torch for b in bound)
            values = self._execution.run(choice, bound, as_torch)
            for i in self.plan.mutated_inputs:
                self._slots[i].write_back(bound[i])
            self.stats.runs += 1
            if self.stats.runs == self._move_after:
                from graphc.runtime.weights import move_in_background

                self._mover = move_in_background(self._weights)
            if self._pages.pending or self.stats.runs in _LOOK_AT:
                self._pages.see([(b.address, _nbytes(b)) for b in bound if b.used is b.given])
            self.stats.fallback_calls = self._execution.fallback_calls
            for b in bound:
                if b.used is not b.given:
                    self.stats.copied_inputs += 1
            if self._first_seconds is None:
                self._first_seconds = time.perf_counter() - self._begin
            return build_results(self._results, values)

    __call__ = run

    def _separate(self, bound: list[Bound]) -> None:
        """Gives a mutated input its own memory if another input overlaps it."""
        ends = [b.address + _nbytes(b) for b in bound]
        for i in self.plan.mutated_inputs:
            for j, other in enumerate(bound):
                if i != j and bound[i].address < ends[j] and other.address < ends[i]:
                    bound[i] = self._slots[i].private(bound[i])
                    ends[i] = bound[i].address + _nbytes(bound[i])

    # ------------------------------------------------------------ states

    @property
    def states(self) -> dict[str, NDArray[Any]]:
        """The states by name, as numpy views of their live memory."""
        return self._states.views()

    def reset(self) -> None:
        """Sets all states to their initial values."""
        with self._lock:
            self._states.reset()

    def save_states(self, path: Path | str) -> None:
        """Writes all states to one .npz file."""
        with self._lock:
            self._states.save(path)

    def load_states(self, path: Path | str) -> None:
        """Reads states that `save_states` of a Session of this model wrote. Raises DamagedError,
        or UsageError if they are another model's."""
        with self._lock:
            self._states.load(path)

    # ------------------------------------------------------------ what it did

    @property
    def profiling(self) -> bool:
        """Whether runs measure their Steps; switching it on clears `step_times`."""
        return self._execution.profiling

    @profiling.setter
    def profiling(self, on: bool) -> None:
        with self._lock:
            self._execution.profiling = on
            if on:
                for schedule in self._execution.schedules.values():
                    schedule.times[:] = 0

    def step_times(self) -> list[StepTime]:
        """Times per Step of the last program run, while `profiling` was on."""
        if self._execution.last < 0:
            return []
        times = self._execution.schedule(self._execution.last).times
        rows = []
        for i, step in enumerate(self.plan.programs[self._execution.last].steps):
            if step.kernel:
                label, kernel = step.kernel.label or step.kernel.symbol, step.kernel.symbol
            else:
                assert step.fallback
                label, kernel = step.fallback.label or step.fallback.target, step.fallback.target
            rows.append(StepTime(i, label, kernel, int(times[i])))
        return rows

    @contextlib.contextmanager
    def trace(self, path: Path | str | None = None) -> Iterator[Trace]:
        """Records the runs of a `with` block per Step, chunk and thread; writes them to `path` (if
        given) as a JSON file that Perfetto and chrome://tracing open. See graphc.runtime.trace.

        with session.trace("trace.json"):
            session.run(x)
        """
        from graphc.runtime.trace import Trace

        trace = Trace(self.plan, self.folder, self.threads)
        with self._lock:
            if self._execution.trace is not None:
                raise UsageError("this Session is being traced already")
            self._execution.trace = trace
        try:
            yield trace
        finally:
            with self._lock:
                self._execution.trace = None
            if path is not None:
                trace.write(path)

    def describe(self) -> dict[str, Any]:
        """Facts for reports: the last bucket, times in seconds, memory in bytes, counts."""
        import resource

        program = self.plan.programs[self._execution.last] if self._execution.last >= 0 else None
        steps = program.steps if program else []
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "model": self.plan.model,
            "phase": program.phase if program else None,
            "bucket": program.bucket if program else None,
            "limits": dict(program.limits) if program else None,
            "threads": self.threads,
            "target": self.plan.target,
            "isa": self.plan.machine.isa,
            "load_seconds": self._load_seconds,
            "first_output_seconds": self._first_seconds,
            "native_steps": sum(step.kernel is not None for step in steps),
            "fallback_steps": sum(step.fallback is not None for step in steps),
            "arena_bytes": program.arena_bytes if program else self._execution.arena.nbytes,
            "reserved_arena_bytes": self._execution.arena.nbytes,
            "lower_bound_bytes": program.lower_bound if program else None,
            "naive_bytes": program.naive_bytes if program else None,
            "weights_bytes": self._weights.nbytes,
            "states_bytes": self._states.nbytes,
            "scratch_bytes": self._execution.scratch.nbytes,
            "peak_resident_bytes": peak if sys.platform == "darwin" else peak * 1024,
            "runs": self.stats.runs,
            "copied_inputs": self.stats.copied_inputs,
            "fallback_calls": self.stats.fallback_calls,
        }


def _nbytes(bound: Bound) -> int:
    if bound.torch:
        return int(bound.used.numel() * bound.used.element_size())
    return int(bound.used.nbytes)
