"""One run of a program: memory for what it makes, its native stretches and fallbacks in turn."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from graphc.errors import InputRejectedError, InternalError
from graphc.plan import Plan, Program
from graphc.runtime.binding import scalar
from graphc.runtime.choice import Assignment, Chooser, guard_failed
from graphc.runtime.native import UNBOUND, Frame, Library, NativeProgram, now, thread_pool
from graphc.runtime.pool import MappedFile, Region, aligned_empty, round_up
from graphc.runtime.states import States
from graphc.runtime.tensors import Bound, as_numpy, new_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graphc.runtime.trace import Trace

Shape = tuple[int, ...]


class Natives(Sequence[NativeProgram]):
    """The programs of a plan inside the executor, made when first asked for."""

    def __init__(self, library: Library, plan: Plan) -> None:
        self._library, self._plan = library, plan
        self._made: list[NativeProgram | None] = [None] * len(plan.programs)

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, i: Any) -> Any:
        native = self._made[i]
        if native is None:
            native = NativeProgram(self._library, self._plan, self._plan.programs[i])
            self._made[i] = native
        return native


class Schedule(msgspec.Struct):
    """A program as alternating native stretches (first, end) and fallbacks (step, callable)."""

    parts: list[tuple[int, Any]]
    outputs: list[int]  # per result leaf: the output position it comes from, or -1
    externals: list[int]  # per result leaf: the external buffer it comes from, or -1
    loose: list[int]  # external and dynamic buffers
    dynamic: list[int]
    last: dict[int, int]  # last step that uses a loose buffer; results stay
    table: array[int]  # addresses of loose buffers, by buffer
    times: NDArray[np.int64]  # nanoseconds per step


class _Run(msgspec.Struct):
    """What one run has made so far."""

    choice: Assignment
    schedule: Schedule
    as_torch: bool
    shapes: list[Shape | None]
    made: list[Any]  # outputs by position
    owned: dict[int, Any]  # fallback results and dynamic buffers


class Execution:
    """The memory of a Session and the run loop over it. Not thread-safe by itself."""

    def __init__(
        self,
        plan: Plan,
        library: Library,
        weights: MappedFile,
        chooser: Chooser,
        natives: Natives,
        states: States,
        threads: int,
    ) -> None:
        self.plan = plan
        self.threads = threads
        self.profiling = False
        self.trace: Trace | None = None
        self.fallback_calls = 0
        self.last = -1  # the last program run
        self.arena = Region(max((p.arena_bytes for p in plan.programs), default=0))
        self.scratch = Region(0)
        self.schedules: dict[int, Schedule] = {}
        self._library = library
        self._weights = weights
        self._chooser = chooser
        self._natives = natives
        self._states = states
        self._inputs = array("Q", bytes(8 * max(len(plan.inputs), 1)))
        self._outputs = array("Q", bytes(8 * max(len(plan.outputs), 1)))
        self._frame = Frame(
            inputs=self._inputs.buffer_info()[0],
            outputs=self._outputs.buffer_info()[0],
            weights=weights.address,
            states=states.table.buffer_info()[0],
            arena=self.arena.address,
        )
        self._frame_address = ctypes.addressof(self._frame)
        self._positions = range(len(self._outputs))

    def run(self, choice: Assignment, bound: list[Bound], as_torch: bool) -> list[Any]:
        """Runs the chosen program; gives the value of every result leaf."""
        native, frame, schedule = choice.native, self._frame, self.schedule(choice.program)
        if native.assigned is not choice:
            if choice.symbols:
                native.symbols[:] = choice.symbols
            self._reserve_scratch(native.evaluate())
            native.assigned = choice
            if self.arena.sparse and not choice.placed:
                self._place(choice)
        if self.threads > 1:
            frame.pool = thread_pool(self._library, self.threads)
        frame.symbols = native.symbols_address
        frame.externals = schedule.table.buffer_info()[0]
        frame.times = schedule.times.ctypes.data if self.profiling else None
        frame.trace = self.trace.begin(choice.program, native) if self.trace else None
        for i, b in enumerate(bound):
            self._inputs[i] = b.address
        for i in self._positions:
            self._outputs[i] = 0
        for i in schedule.loose:
            schedule.table[i] = 0
        self.last = choice.program
        run = _Run(choice, schedule, as_torch, choice.outputs, [None] * len(self.plan.outputs), {})
        self._allocate(run)
        try:
            for first, what in schedule.parts:
                if isinstance(what, int):
                    native.run(self._frame_address, first, what)
                else:
                    self._fallback(run, first, what)
        finally:
            if self.trace:
                self.trace.end()
        return self._results(run, bound)

    def _place(self, choice: Assignment) -> None:
        """Huge pages for the large buffers of an arena that is planned for far longer inputs."""
        choice.placed = True
        for buffer in choice.native.program.buffers:
            if buffer.kind == "arena" and choice.native.defined[buffer.nbytes]:
                self.arena.use_huge_pages(buffer.offset, choice.native.value(buffer.nbytes))

    def _fallback(self, run: _Run, index: int, step: Any) -> None:
        native, schedule = run.choice.native, run.schedule
        for buffer in [b for b in run.owned if schedule.last.get(b, index) < index]:
            del run.owned[buffer]
            schedule.table[buffer] = 0
        begin = now()
        results = step.call(self._addresses(native, schedule))
        end = now()
        if self.profiling:
            schedule.times[index] += end - begin
        if self.trace:
            self.trace.record(index, begin, end)
        self.fallback_calls += 1
        for buffer, tensor in results.items():
            run.owned[buffer] = tensor
            schedule.table[buffer] = tensor.data_ptr() or self.arena.address
        if step.fallback.binds:
            self._check_bound(run.choice, step.fallback.binds)
            self._reserve_scratch(native.evaluate())
            run.shapes = self._chooser.output_shapes(run.choice.program)
            self._allocate(run)

    def _allocate(self, run: _Run) -> None:
        """Makes the outputs and dynamic buffers whose sizes have become known."""
        schedule, native = run.schedule, run.choice.native
        for i, output in enumerate(self.plan.outputs):
            shape = run.shapes[i]
            if schedule.outputs[i] == i and run.made[i] is None and shape is not None:
                assert output.tensor is not None
                run.made[i], self._outputs[i] = new_tensor(output.tensor.dtype, shape, run.as_torch)
        for buffer in schedule.dynamic:
            size = native.program.buffers[buffer].nbytes
            if buffer not in run.owned and native.defined[size]:
                memory = aligned_empty(native.value(size))
                run.owned[buffer] = memory
                schedule.table[buffer] = memory.__array_interface__["data"][0]

    def _addresses(self, native: NativeProgram, schedule: Schedule) -> Callable[[int], int]:
        def address(number: int) -> int:
            buffer = native.program.buffers[number]
            if buffer.kind == "input":
                base = self._inputs[buffer.index]
            elif buffer.kind == "output":
                base = self._outputs[buffer.index]
            elif buffer.kind == "weight":
                base = self._weights.address + self.plan.weights[buffer.index].offset
            elif buffer.kind == "state":
                base = self._states.table[buffer.index]
            elif buffer.kind == "arena":
                base = self.arena.address
            else:
                base = schedule.table[number]
            if not base:
                raise InternalError(f"buffer {number} ({buffer.name}) has no memory yet")
            return base + buffer.offset

        return address

    def _check_bound(self, choice: Assignment, binds: list[tuple[int, int, int]]) -> None:
        native = choice.native
        program = self.plan.programs[choice.program]
        for k, _, _ in binds:
            symbol = self.plan.symbols[k]
            value = int(native.symbols[k])
            most = min(symbol.maximum, program.limits.get(symbol.name, symbol.maximum))
            if not symbol.minimum <= value <= most:
                raise InputRejectedError(
                    f"expected the data-dependent size {symbol.name} from {symbol.minimum} to "
                    f"{most}, found {value}"
                )
        for expression, text in choice.unchecked:
            if native.holds(expression) is False:
                raise guard_failed(text)

    def _results(self, run: _Run, bound: list[Bound]) -> list[Any]:
        values: list[Any] = []
        for i, output in enumerate(self.plan.outputs):
            if output.kind == "input":
                values.append(bound[output.index].given)
            elif output.kind == "constant":
                values.append(scalar(output.value))
            elif output.kind == "expression":
                first = self._natives[0]
                first.symbols[:] = run.choice.native.symbols
                first.evaluate()
                values.append(first.value(output.index))
            elif run.schedule.outputs[i] >= 0:
                values.append(run.made[run.schedule.outputs[i]])
            else:
                values.append(self._external(run, i))
            if output.kind == "buffer" and values[-1] is None:
                raise InternalError(f"result {i} was not made")
        return values

    def _external(self, run: _Run, i: int) -> Any:
        buffer = run.schedule.externals[i]
        tensor, declared = run.owned.get(buffer), self.plan.outputs[i].tensor
        if tensor is None or declared is None or tuple(tensor.shape) != run.shapes[i]:
            raise InternalError(f"result {i} was not made as declared")
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if not run.as_torch and not isinstance(tensor, np.ndarray):
            return as_numpy(tensor, declared.dtype)
        return tensor

    def _reserve_scratch(self, nbytes: int) -> None:
        if nbytes > self._frame.scratch_stride or not self._frame.scratch:
            # a line more than whole pages: the threads' scratch must not share cache sets
            stride = round_up(max(nbytes, 1), 4096) + 64
            self.scratch = Region(stride * self.threads)
            self._frame.scratch = self.scratch.address
            self._frame.scratch_stride = stride

    def schedule(self, i: int) -> Schedule:
        """The schedule of program i, made when first asked for (with a fallback: imports torch),
        scratch for the bucket at its limits included. Changes the program's symbols."""
        schedule = self.schedules.get(i)
        if schedule is None:
            schedule = make_schedule(self.plan, i, self._natives[i])
            native, limits = self._natives[i], self.plan.programs[i].limits
            for k, symbol in enumerate(self.plan.symbols):
                native.symbols[k] = limits.get(symbol.name, UNBOUND)
            self._reserve_scratch(native.evaluate())
            self.schedules[i] = schedule
        return schedule


def make_schedule(plan: Plan, i: int, native: NativeProgram) -> Schedule:
    """Splits program i at its fallbacks and finds where the results come from."""
    program = plan.programs[i]
    parts: list[tuple[int, Any]] = []
    first = 0
    for k, step in enumerate(program.steps):
        if step.fallback is None:
            continue
        from graphc.runtime.fallback import FallbackStep  # imports torch

        if first < k:
            parts.append((first, k))
        parts.append((k, FallbackStep(step.fallback, native)))
        first = k + 1
    if first < len(program.steps):
        parts.append((first, len(program.steps)))

    kinds = [buffer.kind for buffer in program.buffers]
    own = {buffer.index for buffer in program.buffers if buffer.kind == "output"}
    outputs, externals = [], []
    for k, output in enumerate(plan.outputs):
        position = external = -1
        if output.kind == "buffer" and k in own:
            position = k
        elif output.kind == "buffer":  # a fallback's result, or the tensor of another leaf
            if not 0 <= output.index < len(kinds):
                raise InternalError(f"result {k} names no buffer")
            if kinds[output.index] == "output":
                position = program.buffers[output.index].index
            else:
                external = output.index
        outputs.append(position)
        externals.append(external)

    loose = [b for b, kind in enumerate(kinds) if kind in ("external", "dynamic")]
    last = {b: k for k, used in enumerate(_used_buffers(program)) for b in used}
    kept = {b for b in externals if b >= 0}
    return Schedule(
        parts,
        outputs,
        externals,
        loose,
        dynamic=[b for b in loose if kinds[b] == "dynamic"],
        last={b: last[b] for b in loose if b in last and b not in kept},
        table=array("Q", bytes(8 * max(len(kinds), 1))),
        times=np.zeros(max(len(program.steps), 1), np.int64),
    )


def _used_buffers(program: Program) -> Iterator[set[int]]:
    """Per step, the buffers it touches."""
    for step in program.steps:
        if step.kernel:
            yield {buffer for buffer, _ in step.kernel.pointers}
        else:
            assert step.fallback is not None
            trees = [*step.fallback.arguments, *step.fallback.keywords.values()]
            yield {b for b in step.fallback.outputs if b >= 0}.union(*map(_tree_buffers, trees))


def _tree_buffers(tree: object) -> set[int]:
    if isinstance(tree, list):
        return set().union(*map(_tree_buffers, tree))
    if isinstance(tree, dict) and "buffer" in tree:
        return {int(tree["buffer"])}
    return set()
