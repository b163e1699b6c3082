"""Captured graph -> plan folder: passes, lowering, compile, link, write.

`graphc.api` wires this to the passes and the cache; nothing here imports either.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import sympy
from msgspec.structs import replace

import graphc
from graphc.build_report import build_report
from graphc.errors import UnsupportedError
from graphc.frontends.capture import Captured
from graphc.ir.content import raw_bytes
from graphc.ir.graph import Graph, Value
from graphc.ir.types import UNBOUNDED, TensorType
from graphc.lowering.context import Unit
from graphc.lowering.index_ranges import index_ranges
from graphc.lowering.lower import lower
from graphc.lowering.program import Expressions, Planner, build_program
from graphc.lowering.steps import KernelStep, Lowered
from graphc.lowering.templates.pack import remembered
from graphc.lowering.tuning import Candidate, Tuning
from graphc.lowering.work import side_work
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    DecoderPlan,
    Output,
    Plan,
    PlanWork,
    Program,
    State,
    Symbol,
    Tensor,
)
from graphc.plan_io import KERNELS, WEIGHTS, WORK, Content, WeightsWriter, write_plan
from graphc.report import (
    BuildReport,
    PassRecord,
    PrecisionReport,
    StageRecord,
    TuningRecord,
)
from graphc.shapes import Bucket
from graphc.store import KernelStore
from graphc.toolchain.compile import CompileReport, compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa
from graphc.toolchain.link import link
from graphc.toolchain.lookups import LookupsOnly, lookups
from graphc.toolchain.recorded import usable_compiler

Progress = Callable[[str, int, int], None]
#: the formats in a plan, of its graphs (with their phases), the report so far, and the dtypes of
#: lowered values by name
Describe = Callable[
    [Sequence[tuple[str, Graph]], Plan, BuildReport, Mapping[str, str]], PrecisionReport
]
#: decides the choices of a graph at given lengths of its symbols, one entry per bucket
Tune = Callable[
    [Graph, tuple[Mapping[str, int], ...]], tuple[dict[str, Candidate], list[TuningRecord]]
]


@dataclass(frozen=True)
class Side:
    """One graph of a plan: the model for some lengths, in one phase. `buckets` gives what to plan
    for the ranges of its symbols (those of all sides of the phase together); `fixed` are lengths
    that inputs tell and that the graph has as numbers."""

    graph: Graph
    phase: str
    buckets: Callable[[Mapping[str, tuple[int, int]]], list[Bucket]]
    fixed: Mapping[str, int] = field(default_factory=dict)
    origin: Graph | None = None  # as the model was captured, where passes made `graph` of it


@dataclass
class Request:
    """What to build. `captured` says how the plan is called; `sides` are its graphs, which answer
    in one form; `transform` runs the passes on the graph of a phase; `planner` places buffers;
    `lookups_only`: the build ends with `LookupsOnly`."""

    captured: Captured
    sides: Sequence[Side]
    output: Path
    model: str
    source: str
    transform: Callable[[Graph, str], tuple[Graph, list[PassRecord]]]
    planner: Planner
    store: KernelStore
    isa: Isa
    jobs: int | None = None
    require_cached: bool = False
    lookups_only: bool = False
    progress: Progress | None = None
    stages: list[StageRecord] = field(default_factory=list)
    text: Callable[[Graph], str] | None = None
    tune: Tune | None = None  # measures what rules leave open; None: their defaults
    records: Sequence[PassRecord] = ()  # of passes that made the sides' graphs
    decoder: DecoderPlan | None = None
    files: Mapping[str, Content] = field(default_factory=dict)  # further files of the plan folder
    describe: Describe | None = None


def build_plan(request: Request) -> BuildReport:
    """Builds and writes the plan of `request.captured`; gives its report."""
    return _Build(request).run()


class _Build:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.stages = list(request.stages)
        self.tuned: list[TuningRecord] = []
        self.graphs: list[tuple[str, Graph]] = []  # behind the passes
        self.show = request.progress or (lambda text, done, total: None)

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        self.show(name, 0, 0)
        result = action()
        self.stages.append(StageRecord(name, time.perf_counter() - start))
        return result

    def run(self) -> BuildReport:
        request = self.request
        sides: list[Lowered] = []
        records: list[PassRecord] = list(request.records)
        with remembered():
            for side in request.sides:
                sides.append(self._side(side, sides, records))
        self.symbols = _symbols([side.graph for side in sides], request.captured.graph)
        units = collect_units(sides)
        compiler = usable_compiler(units, request.isa, request.store)
        if request.lookups_only:
            raise LookupsOnly(lookups(units, request.isa, compiler))
        planned: list[tuple[Program, Expressions]] = self._timed(
            "memory", lambda: self._programs(sides)
        )

        def compiled() -> CompileReport:
            return compile_units(
                units, request.isa, compiler, request.store, jobs=request.jobs,
                require_cached=request.require_cached,
                progress=lambda result, done, total: self.show(
                    f"compile {result.name}", done, total
                ),
                waiting=lambda name, done, total: self.show(
                    f"waiting for another process: {name}", done, total
                ),
            )  # fmt: skip

        objects: CompileReport = self._timed("compile", compiled)
        return self._write(sides, planned, objects, compiler, records)

    def _lower(self, graph: Graph, side: Side) -> Lowered:
        tune, level = self.request.tune, self.request.isa.level
        tuning = None
        if tune is not None:
            tuning = self._timed("tuning", lambda: self._tuning(graph, side, tune))
        made: Lowered = self._timed("lowering", lambda: lower(graph, level, tuning))
        return made

    def _tuning(self, graph: Graph, side: Side, tune: Tune) -> Tuning:
        """What was measured, now or before, for the choices of a graph at its buckets' limits."""
        known = {s.name: s for s in graph.symbols.values() if not s.data}
        ranges = {name: (s.minimum, min(s.maximum, UNBOUNDED)) for name, s in known.items()}
        lengths = tuple(
            {name: min(n, known[name].maximum) for name, n in bucket.limits.items()}
            for bucket in side.buckets(ranges)
        )
        winners, records = tune(graph, lengths)
        told = {(record.choice, record.sizes) for record in self.tuned}
        self.tuned += [r for r in records if (r.choice, r.sizes) not in told]
        return Tuning(winners, {}, lengths)

    def _side(self, side: Side, before: list[Lowered], records: list[PassRecord]) -> Lowered:
        """A side as Steps; its weights stand behind those of the sides before."""
        graph, more = self._timed("passes", lambda: self.request.transform(side.graph, side.phase))
        records += more
        self.graphs.append((side.phase, graph))
        lowered = self._lower(graph, side)
        if before and [k for k, _ in lowered.results] != [k for k, _ in before[0].results]:
            raise UnsupportedError(
                "expected results of one form for all lengths, found different ones",
                hint="ask for a smaller range with --dynamic",
            )
        if before and _forms(lowered.graph) != _forms(before[0].graph):
            raise UnsupportedError(
                "expected states of one form for all lengths, found different ones",
                hint="leave out what narrows them (--quant), or ask for a smaller bucket",
            )
        base = sum(len(other.constants) for other in before)
        for info in lowered.buffers:
            if info.kind == "weight":
                info.index += base
        return lowered

    def _programs(self, sides: Sequence[Lowered]) -> list[tuple[Program, Expressions]]:
        request = self.request
        names = [s.name for s in self.symbols]
        sources = source_names(sides)
        made: list[tuple[Program, Expressions]] = []
        for asked, side in zip(request.sides, sides, strict=True):
            known = side.graph.symbols
            whole = self._ranges(asked.phase, sides)
            for bucket in asked.buckets(whole):
                limits = {
                    name: min(limit, known[name].maximum) for name, limit in bucket.limits.items()
                }
                if any(limit < known[name].minimum for name, limit in limits.items()):
                    continue
                limits |= asked.fixed
                if any(p.limits == limits for p, t in made if t.graph is side.graph):
                    continue
                made.append(
                    build_program(
                        side, phase=asked.phase, bucket=bucket.name, limits=limits,
                        symbols=names, sources=sources, planner=request.planner,
                        least={n: low for n, (low, _) in whole.items()},
                    )
                )  # fmt: skip
        return made

    def _ranges(self, phase: str, sides: Sequence[Lowered]) -> dict[str, tuple[int, int]]:
        """The range of each length that inputs tell, over all sides of a phase."""
        graphs = [
            side.graph
            for asked, side in zip(self.request.sides, sides, strict=True)
            if asked.phase == phase
        ]
        told = {s.name for s in self.symbols if s.input >= 0}
        made: dict[str, tuple[int, int]] = {}
        for info in (info for graph in graphs for info in graph.symbols.values()):
            if info.name in told:
                low, high = made.get(info.name, (info.minimum, 0))
                made[info.name] = (
                    min(low, info.minimum), max(high, min(info.maximum, UNBOUNDED))
                )  # fmt: skip
        return made

    def _write(
        self,
        sides: Sequence[Lowered],
        planned: Sequence[tuple[Program, Expressions]],
        objects: CompileReport,
        compiler: Compiler,
        records: list[PassRecord],
    ) -> BuildReport:
        request = self.request
        graph = sides[0].graph
        programs, table = [program for program, _ in planned], planned[0][1]
        sources = source_names(sides)
        start = time.perf_counter()
        self.show("write", 0, 0)
        request.output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".graphc-", dir=request.output.absolute().parent
        ) as folder:
            library = Path(folder) / KERNELS
            linked = link(objects.objects, library, compiler, request.store)
            writer = WeightsWriter()
            for item in (c for side in sides for c in side.constants):
                writer.add(
                    item.name, str(item.tensor.dtype).removeprefix("torch."),
                    tuple(item.tensor.shape), raw_bytes(item.tensor), item.layout, item.origin,
                )  # fmt: skip
            states = self._states(graph, table, writer)
            plan = self._plan(sides, programs, table, states, writer)
            self.stages.append(StageRecord("write", time.perf_counter() - start))
            report = build_report(
                plan, [(a.phase, side) for a, side in zip(request.sides, sides, strict=True)],
                [(p, next(x for x in sides if x.graph is t.graph)) for p, t in planned],
                [a.origin or a.graph for a in request.sides], objects, source=request.source,
                library=linked, compiler=compiler.identity, level=request.isa.level,
                stages=self.stages, passes=records, sources=sources, notes=request.captured.notes,
                tuning=self.tuned,
            )  # fmt: skip
            if request.describe is not None:
                dtypes = _dtypes([side.graph for side in sides])
                precision = request.describe(self.graphs, plan, report, dtypes)
                report = replace(report, precision=precision)
            files: dict[str, Content] = {
                **request.files,
                KERNELS: library,
                WEIGHTS: writer.write,
                "report.json": report.to_json(),
                WORK: msgspec.json.encode(self._work(sides, planned)),
            }
            if request.text is not None:
                files["graph.txt"] = request.text(graph)
            for step in (step for side in sides for step in side.steps):
                if isinstance(step, KernelStep) and step.symbol in sources:
                    files[f"sources/{sources[step.symbol]}"] = step.unit.source
            write_plan(request.output, plan, files)
        return report

    def _work(
        self, sides: Sequence[Lowered], planned: Sequence[tuple[Program, Expressions]]
    ) -> PlanWork:
        names = [symbol.name for symbol in self.symbols]
        places: dict[str, int] = {}
        made = [side_work(side, names, places) for side in sides]
        graphs = [side.graph for side in sides]
        owners = [next(k for k, g in enumerate(graphs) if g is t.graph) for _, t in planned]
        return PlanWork(list(places), made, owners)

    def _states(self, graph: Graph, table: Expressions, writer: WeightsWriter) -> list[State]:
        made: list[State] = []
        for value, tensor in graph.states.items():
            weight = -1
            # pages are one zero seen many times: looking at all of them would take a while
            seen = tensor[tuple(0 if s == 0 else slice(None) for s in tensor.stride())]
            if tensor.numel() and bool(seen.any()):
                weight = writer.add(
                    value.name, value.type.dtype, tuple(tensor.shape), raw_bytes(tensor),
                    origin=value.name,
                )  # fmt: skip
            made.append(State(_tensor(value.name, value.type, table), weight))
        return made

    def _plan(
        self,
        sides: Sequence[Lowered],
        programs: list[Program],
        table: Expressions,
        states: list[State],
        writer: WeightsWriter,
    ) -> Plan:
        request, captured = self.request, self.request.captured
        lowered = sides[0]
        graph = lowered.graph
        outputs: list[Output] = []
        for position, (kind, what) in enumerate(lowered.results):
            type_, name = lowered.result_types[position], captured.result_names[position]
            described = captured.graph.results[position]
            if type_ is not None and isinstance(described, Value):
                type_ = described.type
            tensor = None if type_ is None else _tensor(name, type_, table)
            if kind == "dim":
                outputs.append(Output(None, "expression", table.add(what)))
            elif kind == "constant":
                outputs.append(Output(None, "constant", value=what))
            else:
                outputs.append(Output(tensor, kind, what))
        return Plan(
            format=FORMAT_VERSION,
            abi=ABI_VERSION,
            version=graphc.__version__,
            model=request.model,
            machine=request.isa.machine(),
            symbols=self.symbols,
            inputs=[_tensor(v.name, v.type, table) for v in captured.graph.inputs],
            outputs=outputs,
            arguments=captured.arguments,
            keywords=captured.keywords,
            results=captured.results,
            mutated_inputs=[k for k, v in enumerate(graph.inputs) if v in graph.input_updates],
            states=states,
            weights=writer.weights,
            programs=programs,
            files={},
            uses_torch=any(not isinstance(s, KernelStep) for side in sides for s in side.steps),
            positional_names=list(captured.positional_names),
            # before lowering: a tied embedding is read by computed places of packed panels then
            ranges=index_ranges([side.graph for side in request.sides]),
            decoder=request.decoder,
        )


def _forms(graph: Graph) -> list[tuple[str, TensorType]]:
    """The states by name and type."""
    return [(state.name, state.type) for state in graph.states]


def collect_units(sides: Sequence[Lowered]) -> list[Unit]:
    """Every translation unit of the kernels, once per source text, and the executor."""
    found: dict[str, Unit] = {}
    for step in (step for side in sides for step in side.steps):
        if isinstance(step, KernelStep):
            for unit in (step.unit, *step.units):
                found.setdefault(unit.source, unit)
    runtime = Path(__file__).parent / "runtime" / "executor.cpp"
    text = runtime.read_text()
    found.setdefault(text, Unit("executor", text))
    return list(found.values())


def source_names(sides: Sequence[Lowered]) -> dict[str, str]:
    """File name under sources/ of each kernel symbol."""
    names: dict[str, str] = {}
    for step in (step for side in sides for step in side.steps):
        if isinstance(step, KernelStep):
            names.setdefault(step.symbol, f"{step.symbol}.cpp")
    return names


def _dtypes(graphs: Sequence[Graph]) -> dict[str, str]:
    values = (v for graph in graphs for node in graph.nodes for v in node.outputs)
    return {v.name: v.type.dtype for v in values if isinstance(v.type, TensorType)}


def _tensor(name: str, type_: TensorType, table: Expressions) -> Tensor:
    return Tensor(
        name, type_.dtype, [table.add(d) for d in type_.shape], [str(d) for d in type_.shape]
    )


def _symbols(graphs: Sequence[Graph], called: Graph) -> list[Symbol]:
    """Every length of the plan, in the range of all graphs together; `called` has the inputs that
    tell them. What some graphs have fixed is in range, too; what all have, in that of `called`."""
    made: dict[str, Symbol] = {}
    known = [info for graph in graphs for info in graph.symbols.values()]
    free = {info.name for info in known}
    told = [s for s in called.symbols.values() if s.name not in free and not s.data]
    for info in (*known, *told):
        where = (-1, -1) if info.data else _binding(called, info.expr)
        low, high = info.minimum, min(info.maximum, UNBOUNDED)
        if info.name in made:
            low, high = min(low, made[info.name].minimum), max(high, made[info.name].maximum)
        made[info.name] = Symbol(info.name, low, high, *where)
    return list(made.values())


def _binding(graph: Graph, expr: sympy.Symbol) -> tuple[int, int]:
    """The input dimension that tells a symbol: itself, else one that is linear in it alone."""
    for exact in (True, False):
        for position, value in enumerate(graph.inputs):
            for dim, size in enumerate(value.type.shape):
                if isinstance(size, int):
                    continue
                if size == expr or (not exact and size.free_symbols == {expr}):
                    return position, dim
    return -1, -1
