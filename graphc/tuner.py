"""`graphc build --tune`: measures what rules left open (graphc.lowering.tuning) and remembers it.

For each open choice the graph is lowered once per candidate. The Steps that the choice concerns are
taken out into a small plan of their own, with made-up data, and run by the native executor; the
candidates take turns. A candidate wins if it is more than 3 % faster than the default. Winners
stay in the cache folder under the CPU's key, for as long as the kernels' sources stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

import graphc.kernels
from graphc.files import replacing
from graphc.ir.graph import Graph
from graphc.ir.types import Dim, as_dim, itemsize
from graphc.lowering.context import Unit
from graphc.lowering.lower import lower
from graphc.lowering.program import evaluate
from graphc.lowering.steps import BufferInfo, KernelStep, Lowered
from graphc.lowering.tuning import Candidate, Choice, Tuning
from graphc.lowering.work import KEPT
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    Buffer,
    Kernel,
    Plan,
    Program,
    State,
    Step,
    Tensor,
)
from graphc.plan_io import KERNELS, WEIGHTS
from graphc.plan_writer import write_plan
from graphc.report import TuningRecord
from graphc.runtime.calibration import cache_levels, cpu_key, key_digest
from graphc.runtime.session import Session, load
from graphc.store import KernelStore
from graphc.toolchain.compile import compile_units
from graphc.toolchain.isa import Isa
from graphc.toolchain.link import link
from graphc.toolchain.recorded import usable_compiler

FORMAT = 1
#: folder inside graphc's cache folder
FOLDER = "tuning-v1"
#: a candidate must be this much faster than the default
GAIN = 0.97
#: seconds spent on one candidate, and how often it runs at least and at most
_SECONDS, _LEAST, _MOST = 0.1, 5, 60
#: operations of one run: Steps with fewer are repeated, or starting the run would count as theirs
_ENOUGH_FLOPS, _REPEATS = 1e8, 64
#: bytes of weights made up at the most, so that they are as far away as in the whole model
_COLD_BYTES = 512 << 20

Progress = Callable[[str, int, int], None]
Lengths = tuple[Mapping[str, int], ...]


class Winner(msgspec.Struct, frozen=True):
    """What was measured for a key: the value to take, and seconds by candidate."""

    value: Candidate
    seconds: dict[str, float]


class Table(msgspec.Struct):
    """Contents of a file of winners. `code` is the digest of the kernels that were measured."""

    code: str
    winners: dict[str, Winner] = {}
    format: int = FORMAT


@dataclass(frozen=True)
class _Trial:
    """One candidate of a key, ready to be compiled: the Steps of one rule and their buffers."""

    candidate: Candidate
    steps: list[KernelStep]
    buffers: list[BufferInfo]


@dataclass
class Tuner:
    """Decides choices for graphs. `folder`: the cache folder, or None to remember nothing."""

    isa: Isa
    store: KernelStore
    folder: Path | None
    jobs: int | None = None
    progress: Progress | None = None
    require_cached: bool = False
    measures: bool = True  # else what was never measured is left at its default

    def tune(
        self, graph: Graph, lengths: Lengths
    ) -> tuple[dict[str, Candidate], list[TuningRecord]]:
        """The values by key for every choice in `graph`, and what is to be told about them.
        lengths: values of all symbols that inputs bind, one entry per bucket."""
        code = kernels_digest()
        known = read_table(self.folder, self.isa, code)
        made: dict[str, Winner] = {}
        asked: dict[str, Choice] = {}
        seen: set[str] = set()
        while True:
            winners = {key: w.value for key, w in (known | made).items()}
            probe = Tuning(winners, {}, lengths)
            lower(graph, self.isa.level, probe)
            asked |= probe.asked
            open_ = [key for key in probe.asked if key not in winners and key not in seen]
            if not open_ or not self.measures:
                break
            name = probe.asked[open_[0]].name  # one choice at a time: the others keep still
            keys = [key for key in open_ if probe.asked[key].name == name]
            seen.update(keys)
            made |= self._measure(graph, lengths, winners, {k: probe.asked[k] for k in keys})
        if made:
            write_table(self.folder, self.isa, code, made)
        values = {key: w.value for key, w in (known | made).items() if key in asked}
        return values, [
            _record(key, choice, (known | made)[key], key not in made)
            for key, choice in asked.items()
            if key in known or key in made
        ]

    def _measure(
        self,
        graph: Graph,
        lengths: Lengths,
        winners: Mapping[str, Candidate],
        choices: Mapping[str, Choice],
    ) -> dict[str, Winner]:
        """Measures keys of one choice; candidates may differ from key to key."""
        trials: dict[str, list[_Trial]] = {key: [] for key in choices}
        candidates = dict.fromkeys(c for choice in choices.values() for c in choice.candidates)
        name = next(iter(choices.values())).name
        weights = 0
        for candidate in candidates:
            lowered = lower(graph, self.isa.level, Tuning(winners, {name: candidate}, lengths))
            weights = max(weights, sum(c.tensor.nbytes for c in lowered.constants))
            for key, choice in choices.items():
                steps = _first_use(lowered, key) if candidate in choice.candidates else []
                if steps:
                    trials[key].append(_Trial(candidate, steps, lowered.buffers))
        cold = weights > max(capacity for _, capacity, _ in cache_levels())
        found: dict[str, Winner] = {}
        with tempfile.TemporaryDirectory(prefix="graphc-tune-") as folder:
            library = self._library(trials, Path(folder))
            for number, (key, choice) in enumerate(choices.items()):
                if self.progress is not None:
                    self.progress(f"tune {name}", number, len(choices))
                times = _times(trials[key], lengths, library, Path(folder), cold)
                if times is not None and choice.default in times:
                    found[key] = _winner(choice, times)
        return found

    def _library(self, trials: Mapping[str, Sequence[_Trial]], folder: Path) -> Path:
        """One library with the kernels of all candidates, through the cache."""
        units: dict[str, Unit] = {}
        for trial in (t for several in trials.values() for t in several):
            for step in trial.steps:
                for unit in (step.unit, *step.units):
                    units.setdefault(unit.source, unit)
        runtime = Path(graphc.__path__[0]) / "runtime" / "executor.cpp"
        executor = Unit("executor", runtime.read_text())
        units.setdefault(executor.source, executor)
        wanted = list(units.values())
        compiler = usable_compiler(wanted, self.isa, self.store)
        objects = compile_units(
            wanted, self.isa, compiler, self.store, jobs=self.jobs,
            require_cached=self.require_cached,
        )  # fmt: skip
        library = folder / KERNELS
        link(objects.objects, library, compiler, self.store)
        return library


def _record(key: str, choice: Choice, winner: Winner, cached: bool) -> TuningRecord:
    return TuningRecord(
        choice.name, key.removeprefix(f"{choice.name} "), str(choice.default), str(winner.value),
        winner.seconds, cached,
    )  # fmt: skip


def _first_use(lowered: Lowered, key: str) -> list[KernelStep]:
    """The Steps of the first rule that asked for `key`."""
    found: list[KernelStep] = []
    for step in lowered.steps:
        if isinstance(step, KernelStep) and key in step.choices:
            if found and step.nodes != found[0].nodes:
                break
            found.append(step)
    return found


def _winner(choice: Choice, times: Mapping[Candidate, float]) -> Winner:
    best = min(times, key=lambda candidate: times[candidate])
    value = best if times[best] < GAIN * times[choice.default] else choice.default
    seconds = {str(candidate): float(f"{t:.4g}") for candidate, t in times.items()}
    return Winner(value, seconds)


def _times(
    trials: Sequence[_Trial],
    lengths: Lengths,
    library: Path,
    folder: Path,
    cold: bool,
) -> dict[Candidate, float] | None:
    """Seconds of each candidate, over all lengths; None where a length depends on data."""
    totals: dict[Candidate, float] = {trial.candidate: 0.0 for trial in trials}
    for values in lengths or ({},):
        with ExitStack() as stack:
            sessions: dict[Candidate, Callable[[], float]] = {}
            for trial in trials:
                try:
                    plan = step_plan(trial.steps, trial.buffers, values, cold)
                except KeyError:
                    return None
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "plan"
                write_plan(place, plan, {KERNELS: library, WEIGHTS: b""})
                session = load(place, threads=1)
                _fill(session)
                repeats = len(plan.programs[0].steps) // len(trial.steps)
                sessions[trial.candidate] = _Timer(session, repeats)
            for candidate, seconds in interleaved(sessions).items():
                totals[candidate] += seconds
    return totals


class _Timer:
    """One run of a session: CPU seconds of its Steps, once."""

    def __init__(self, session: Session, repeats: int) -> None:
        self.session, self.repeats = session, repeats

    def __call__(self) -> float:
        begin = time.thread_time()
        self.session.run()
        return (time.thread_time() - begin) / self.repeats


def interleaved(calls: Mapping[Candidate, Callable[[], float]]) -> dict[Candidate, float]:
    """The least of what each call answers, the calls taking turns."""
    best = dict.fromkeys(calls, math.inf)
    began, rounds = time.perf_counter(), 0
    while rounds < _LEAST or (
        rounds < _MOST and time.perf_counter() - began < _SECONDS * len(calls)
    ):
        for candidate, call in calls.items():
            best[candidate] = min(best[candidate], call())
        rounds += 1
    return best


def _fill(session: Session) -> None:
    """Numbers of everyday size in every buffer; zeros where indices or flags may be."""
    generator = np.random.default_rng(0)
    for tensor in session.plan.states:
        array = session.states[tensor.tensor.name]
        if array.dtype.kind in "fV" and array.size:
            block = generator.uniform(-1, 1, min(array.size, 1 << 16)).astype(array.dtype)
            array.reshape(-1)[:] = np.resize(block, array.size)


def step_plan(
    steps: Sequence[KernelStep],
    buffers: Sequence[BufferInfo],
    lengths: Mapping[str, int],
    cold: bool,
) -> Plan:
    """A plan of a few Steps alone, at fixed lengths, all buffers being states. Short ones are
    repeated; `cold`: over copies of what outlives a run, so that no cache holds it.

    Raises KeyError if a size depends on another symbol than `lengths`.
    """
    dtypes: dict[int, str] = {}
    for step in steps:
        for view in (*step.pointers, *step.read_views, *step.write_views):
            dtypes.setdefault(view.buffer, view.dtype)
    sizes = {number: evaluate(buffers[number].nbytes, lengths) for number in dtypes}
    kept = [number for number in dtypes if buffers[number].kind in KEPT]
    copies = _copies(sum(sizes[number] for number in kept)) if cold else 1
    flops = sum(evaluate(step.flops or 0, lengths) for step in steps)
    repeats = max(copies, min(_REPEATS, -(-int(_ENOUGH_FLOPS) // max(flops, 1))))
    table = _Constants()
    states: list[State] = []
    made: list[Buffer] = []
    places: dict[tuple[int, int], int] = {}
    for copy in range(copies):
        for number, dtype in dtypes.items():
            if copy and number not in kept:
                places[copy, number] = places[0, number]
                continue
            count = -(-sizes[number] // itemsize(dtype))
            tensor = Tensor(f"b{number}_{copy}", dtype, [table.add(count)], [str(count)])
            states.append(State(tensor, -1))
            places[copy, number] = len(made)
            nbytes = table.add(count * itemsize(dtype))
            made.append(Buffer("state", len(states) - 1, 0, nbytes, name=tensor.name))
    calls = [
        _call(step, lengths, table, {n: places[turn % copies, n] for n in dtypes})
        for turn in range(repeats)
        for step in steps
    ]
    program = Program(
        "tune", "tune", {}, table.expressions, [], [], [], made, calls, 0, 0, 0
    )  # fmt: skip
    return Plan(
        format=FORMAT_VERSION, abi=ABI_VERSION, version=graphc.__version__, model="tune",
        machine=Isa.detect().machine(), symbols=[], inputs=[], outputs=[],
        arguments={"tuple": []}, keywords={"dict": []}, results=None, mutated_inputs=[],
        states=states, weights=[], programs=[program], files={}, uses_torch=False,
    )  # fmt: skip


class _Constants:
    """An expression table of plain numbers."""

    def __init__(self) -> None:
        self.expressions: list[list[int | str]] = []
        self._known: dict[int, int] = {}

    def add(self, value: int) -> int:
        if value not in self._known:
            self._known[value] = len(self.expressions)
            self.expressions.append([value])
        return self._known[value]


def _call(
    step: KernelStep, lengths: Mapping[str, int], table: _Constants, places: Mapping[int, int]
) -> Step:
    def number(dim: Dim) -> int:
        return table.add(evaluate(dim, lengths))

    return Step(
        kernel=Kernel(
            symbol=step.symbol,
            pointers=[
                (places[v.buffer], number(as_dim(v.offset * itemsize(v.dtype))))
                for v in step.pointers
            ],
            immediates=[number(i) for i in step.immediates],
            range=number(step.range),
            grain=step.grain,
            scratch=number(step.scratch),
            reads=[places[b] for b in step.reads],
            writes=[places[b] for b in step.writes],
            label=step.label,
        )
    )


def _copies(nbytes: int) -> int:
    """Copies of `nbytes` that no cache holds together."""
    largest = max(capacity for _, capacity, _ in cache_levels())
    wanted = -(-2 * largest // max(nbytes, 1))
    return max(1, min(wanted, _COLD_BYTES // max(nbytes, 1), 64))


# ---------------------------------------------------------------- what is remembered


def kernels_digest() -> str:
    """Digest of the kernels' sources: winners hold for these only."""
    hasher = hashlib.sha256()
    for path in sorted(Path(graphc.kernels.__path__[0]).glob("*.[hc]*")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:24]


def _file(folder: Path, isa: Isa) -> Path:
    key = {**cpu_key(), "code": " ".join((isa.level, *isa.features))}
    return folder / FOLDER / f"{key_digest(key)}.json"


def read_table(folder: Path | None, isa: Isa, code: str) -> dict[str, Winner]:
    """This CPU's winners for kernels of this digest, made for `isa`; none if there is no readable
    file."""
    if folder is None:
        return {}
    try:
        table = msgspec.json.decode(_file(folder, isa).read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError):
        return {}
    return table.winners if (table.format, table.code) == (FORMAT, code) else {}


def write_table(folder: Path | None, isa: Isa, code: str, winners: Mapping[str, Winner]) -> None:
    """Adds winners to the file, atomically. A folder that cannot be written keeps nothing."""
    if folder is None:
        return
    path = _file(folder, isa)
    table = Table(code, {**read_table(folder, isa, code), **winners})
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
