"""One target of a build: captured graphs -> kernels, weights and a Plan, ready to be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import sympy
from msgspec.structs import replace

import graphc
from graphc.build_report import build_report
from graphc.errors import UnsupportedError
from graphc.ir.content import raw_bytes
from graphc.ir.graph import Graph, Value
from graphc.ir.types import UNBOUNDED, TensorType
from graphc.lowering.context import Unit
from graphc.lowering.index_ranges import index_ranges
from graphc.lowering.lower import lower
from graphc.lowering.program import Expressions, build_program
from graphc.lowering.steps import KernelStep, Lowered
from graphc.lowering.tuning import Tuning
from graphc.lowering.work import side_work
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    Output,
    Plan,
    PlanWork,
    Program,
    State,
    Symbol,
    Tensor,
)
from graphc.plan_io import KERNELS, WORK
from graphc.plan_writer import Content, WeightsWriter
from graphc.report import BuildReport, PassRecord, StageRecord, TuningRecord
from graphc.toolchain.compile import CompileReport, compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.link import link
from graphc.toolchain.lookups import Lookups, lookups
from graphc.toolchain.recorded import usable_compiler

if TYPE_CHECKING:
    from graphc.builder import For, Progress, Request, Side, Tune


@dataclass
class Shared:
    """What the targets of one plan have in common. `passed` is what passes gave, by their options,
    graph and phase."""

    request: Request
    stages: list[StageRecord]
    writer: WeightsWriter = field(default_factory=WeightsWriter)
    passed: dict[tuple[Any, ...], tuple[Graph, list[PassRecord]]] = field(default_factory=dict)


@dataclass
class Made:
    """One target, ready to be written."""

    plan: Plan
    report: BuildReport
    files: dict[str, Content]


class TargetBuild:
    """Builds the plan for one target, up to what is written."""

    def __init__(self, shared: Shared, target: For) -> None:
        self.shared, self.request, self.target = shared, shared.request, target
        self.isa = target.isa
        self.suffix = f" {target.name}" if len(self.request.targets) > 1 else ""
        self.tuned: list[TuningRecord] = []
        self.graphs: list[tuple[str, Graph]] = []  # behind the passes
        show = self.request.progress or (lambda text, done, total: None)
        self.show: Progress = lambda text, done, total: show(text + self.suffix, done, total)

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        self.show(name, 0, 0)
        result = action()
        self._stage(name, start)
        return result

    def _stage(self, name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self.shared.stages.append(StageRecord(name + self.suffix, seconds))

    def lookups(self) -> Lookups:
        """What `run` would look up in the cache. Raises UsageError as it does."""
        sides, _ = self._sides()
        for side in self.request.sides:
            side.buckets(self._ranges(side.phase, sides))  # wrong words for what to plan for
        units = collect_units(sides)
        return lookups(units, self.isa, usable_compiler(units, self.isa, self.request.store))

    def run(self, library: Path) -> Made:
        """library: where to link the kernels."""
        request = self.request
        sides, records = self._sides()
        planned: list[tuple[Program, Expressions]] = self._timed(
            "memory", lambda: self._programs(sides)
        )
        units = collect_units(sides)
        compiler = usable_compiler(units, self.isa, request.store)

        def compiled() -> CompileReport:
            return compile_units(
                units, self.isa, compiler, request.store, jobs=request.jobs,
                require_cached=request.require_cached,
                progress=lambda result, done, total: self.show(
                    f"compile {result.name}", done, total
                ),
                waiting=lambda name, done, total: self.show(
                    f"waiting for another process: {name}", done, total
                ),
            )  # fmt: skip

        objects: CompileReport = self._timed("compile", compiled)
        return self._made(sides, planned, objects, compiler, records, library)

    def _sides(self) -> tuple[list[Lowered], list[PassRecord]]:
        """The graphs as Steps, and what passes did to them."""
        sides: list[Lowered] = []
        records: list[PassRecord] = list(self.request.records)
        for side in self.request.sides:
            sides.append(self._side(side, sides, records))
        self.symbols = _symbols([side.graph for side in sides], self.request.captured.graph)
        return sides, records

    def _lower(self, graph: Graph, side: Side) -> Lowered:
        tune, level = self.target.tune, self.isa.level
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
        graph, more = self._timed("passes", lambda: self._passed(side))
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

    def _passed(self, side: Side) -> tuple[Graph, list[PassRecord]]:
        passed, key = self.shared.passed, (self.target.passes, id(side), side.phase)
        if key not in passed:
            passed[key] = self.target.transform(side.graph, side.phase)
        return passed[key]

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

    def _made(
        self,
        sides: Sequence[Lowered],
        planned: Sequence[tuple[Program, Expressions]],
        objects: CompileReport,
        compiler: Compiler,
        records: list[PassRecord],
        library: Path,
    ) -> Made:
        request, writer = self.request, self.shared.writer
        graph = sides[0].graph
        programs, table = [program for program, _ in planned], planned[0][1]
        sources = source_names(sides)
        start = time.perf_counter()
        self.show("write", 0, 0)
        linked = link(objects.objects, library, compiler, request.store)
        objects.notes.extend(request.store.drain_notes())
        writer.begin()
        for item in (c for side in sides for c in side.constants):
            writer.add(
                item.name, str(item.tensor.dtype).removeprefix("torch."),
                tuple(item.tensor.shape), raw_bytes(item.tensor), item.layout, item.origin,
            )  # fmt: skip
        states = self._states(graph, table, writer)
        plan = self._plan(sides, programs, table, states, writer)
        self._stage("write", start)
        report = build_report(
            plan, [(a.phase, side) for a, side in zip(request.sides, sides, strict=True)],
            [(p, next(x for x in sides if x.graph is t.graph)) for p, t in planned],
            [a.origin or a.graph for a in request.sides], objects, source=request.source,
            library=linked, compiler=compiler.identity, level=self.isa.level,
            stages=self.shared.stages, passes=records, sources=sources,
            notes=request.captured.notes, tuning=self.tuned,
        )  # fmt: skip
        if request.describe is not None:
            dtypes = _dtypes([side.graph for side in sides])
            precision = request.describe(self.graphs, plan, report, dtypes)
            report = replace(report, precision=precision)
        files: dict[str, Content] = {
            KERNELS: library,
            "report.json": b"",  # when all targets are built
            WORK: msgspec.json.encode(self._work(sides, planned)),
        }
        if request.text is not None:
            files["graph.txt"] = request.text(graph)
        for step in (step for side in sides for step in side.steps):
            if isinstance(step, KernelStep) and step.symbol in sources:
                files[f"sources/{sources[step.symbol]}"] = step.unit.source
        return Made(plan, report, files)

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
            machine=self.isa.machine(),
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
            target=self.target.name,
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
