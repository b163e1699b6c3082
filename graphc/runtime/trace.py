"""What runs did, Step by Step and thread by thread, in the trace format of Chrome, which Perfetto
(ui.perfetto.dev) and chrome://tracing open.

with session.trace("trace.json"):
    session.run(x)

One track per thread. The caller's has a slice per run and per Step, and in a Step that several
threads shared a slice per chunk; a worker's has its chunks. Events are written natively into memory
that is reserved before the run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from graphc.plan import Plan, PlanWork, Program
from graphc.plan_io import WORK, own, read_work
from graphc.runtime.expressions import known
from graphc.runtime.native import UNBOUND, NativeProgram, now

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNKS = 32  # MOST_CHUNKS of executor.cpp, per thread
_STEP, _THREAD, _CHUNK, _BEGIN, _END, _FROM, _TO = range(7)  # columns: gc_event of executor.cpp


class _Header(ctypes.Structure):
    """gc_trace of executor.cpp."""

    _fields_ = [
        ("capacity", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("events", ctypes.c_void_p),
    ]


class _Run(msgspec.Struct):
    program: int
    symbols: list[int | None]
    begin: int
    end: int
    events: NDArray[np.int64]  # rows of gc_event


class Trace:
    """The runs of a Session since recording began. Made by `Session.trace`.

    `dropped` counts events that found no room; the reserved memory is sized so that there are none.
    """

    def __init__(self, plan: Plan, folder: Path | str, threads: int) -> None:
        self._plan = plan
        self._folder = folder
        self._threads = threads
        self._runs: list[_Run] = []
        self._fallbacks: list[tuple[int, ...]] = []
        self._header = _Header()
        self._events: NDArray[np.int64] = np.empty((0, 7), np.int64)
        self._native: NativeProgram | None = None
        self._program = self._begin = 0
        self.dropped = 0

    # ------------------------------------------------------------ recording, by Execution

    def begin(self, program: int, native: NativeProgram) -> int:
        """Makes room for a run of a program; gives the address of its gc_trace."""
        room = len(native.program.steps) * (1 + (_CHUNKS + 1) * self._threads)
        if len(self._events) < room:
            self._events = np.zeros((room, 7), np.int64)
        self._header.capacity = len(self._events)
        self._header.count = 0
        self._header.events = self._events.ctypes.data
        self._program, self._native, self._begin = program, native, now()
        return ctypes.addressof(self._header)

    def record(self, step: int, begin: int, end: int) -> None:
        """A fallback Step, in nanoseconds of `now`."""
        self._fallbacks.append((step, 0, 0, begin, end, 0, 0))

    def end(self) -> None:
        """The run is over."""
        end, native = now(), self._native
        assert native is not None
        count = min(self._header.count, self._header.capacity)
        self.dropped += self._header.count - count
        fallbacks = np.array(self._fallbacks, np.int64).reshape(-1, 7)
        self._fallbacks.clear()
        events = np.concatenate([self._events[:count], fallbacks])
        symbols = [None if value == UNBOUND else int(value) for value in native.symbols]
        self._runs.append(_Run(self._program, symbols, self._begin, end, events))

    # ------------------------------------------------------------ reading

    def chrome(self) -> dict[str, Any]:
        """The trace as the JSON object that viewers take: "traceEvents" holds "M" events that name
        the process and its threads, and an "X" event (`ts` and `dur` in microseconds) per run, Step
        and chunk. `args` of a Step: its number, kernel or operator, the part of its range, and
        where the plan tells them `flops` and `bytes`."""
        start = min((run.begin for run in self._runs), default=0)
        events: list[dict[str, Any]] = [_meta("process_name", 0, name=f"graphc {self._plan.model}")]
        for thread in range(self._threads):
            name = f"worker {thread}" if thread else "caller"
            events.append(_meta("thread_name", thread, name=name))
            events.append(_meta("thread_sort_index", thread, sort_index=thread))
        plan = self._plan
        work = read_work(self._folder, plan) if own(plan, WORK) in plan.files else None
        for number, run in enumerate(self._runs):
            program = self._plan.programs[run.program]
            args = {"run": number, "phase": program.phase, "bucket": program.bucket}
            events.append(_slice("run", "run", 0, run.begin - start, run.end - run.begin, args))
            steps = [_step_args(program, k) for k in range(len(program.steps))]
            for k, found in _work_args(work, run):
                steps[k][1].update(found)
            order = np.lexsort((-run.events[:, _END], run.events[:, _BEGIN]))
            for row in run.events[order].tolist():
                name, args = steps[row[_STEP]]
                if row[_CHUNK]:
                    args = {"step": row[_STEP], "range": [row[_FROM], row[_TO]]}
                elif row[_TO]:
                    args = args | {"range": [0, row[_TO]]}
                kind = "chunk" if row[_CHUNK] else "step"
                begin = row[_BEGIN]
                events.append(
                    _slice(name, kind, row[_THREAD], begin - start, row[_END] - begin, args)
                )
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def write(self, path: Path | str) -> None:
        """Writes the trace as a JSON file."""
        Path(path).write_bytes(msgspec.json.encode(self.chrome()))


def _slice(
    name: str, kind: str, thread: int, begin: int, length: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name, "cat": kind, "ph": "X", "ts": begin / 1e3, "dur": length / 1e3, "pid": 1,
        "tid": thread, "args": args,
    }  # fmt: skip


def _meta(kind: str, thread: int, **args: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": args}


def _step_args(program: Program, k: int) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a Step."""
    step = program.steps[k]
    if step.kernel:
        name, args = step.kernel.label or step.kernel.symbol, {"kernel": step.kernel.symbol}
    else:
        assert step.fallback is not None
        name, args = step.fallback.label or step.fallback.target, {"op": step.fallback.target}
    return name, {"step": k, **args}


def _work_args(work: PlanWork | None, run: _Run) -> Iterator[tuple[int, dict[str, int | str]]]:
    """Flops and bytes of each Step at the lengths of a run, and the line of the user's model."""
    if work is None:
        return
    side = work.sides[work.programs[run.program]]
    for k, step in enumerate(side.steps):
        found: dict[str, int | str] = {}

        def value(expression: int) -> int | None:
            return None if expression < 0 else known(side.expressions[expression], run.symbols)

        flops = value(step.flops)
        moved = [value(step.kept), value(step.read), value(step.written)]
        if flops is not None:
            found["flops"] = flops
        if None not in moved:
            found["bytes"] = sum(part for part in moved if part is not None)
        if step.place >= 0:
            found["at"] = work.places[step.place]
        yield k, found
