"""The report of a build, from what its stages left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import graphc
from graphc.lowering.layers import Layers
from graphc.lowering.program import evaluate
from graphc.lowering.steps import KernelStep, Lowered
from graphc.plan import Plan, Program
from graphc.report import (
    BucketRecord,
    BuildReport,
    CompileRecord,
    FallbackRecord,
    Interval,
    KernelRecord,
    LayerRecord,
    MemoryRecord,
    PassRecord,
    StageRecord,
    SymbolRecord,
    TuningRecord,
)
from graphc.store import KERNELS, LINKS, Stored
from graphc.toolchain.compile import CompileReport

if TYPE_CHECKING:
    from graphc.ir.graph import Graph


def build_report(
    plan: Plan,
    sides: Sequence[tuple[str, Lowered]],
    programs: Sequence[tuple[Program, Lowered]],
    origins: Sequence[Graph],
    objects: CompileReport,
    *,
    source: str,
    library: Stored,
    compiler: str,
    level: str,
    stages: list[StageRecord],
    passes: list[PassRecord],
    sources: Mapping[str, str],
    notes: Sequence[str],
    tuning: list[TuningRecord],
) -> BuildReport:
    """What `graphc inspect` shows. `sides` are the lowered graphs with their phases, `origins`
    these graphs before all passes, `programs` the step tables with the graph each is of; `sources`
    names the file of each kernel symbol, `library` is what was linked of the `objects`."""
    lowered = [side for _, side in sides]
    return BuildReport(
        model=plan.model,
        source=source,
        version=graphc.__version__,
        symbols=[SymbolRecord(s.name, s.minimum, s.maximum) for s in plan.symbols],
        stages=stages,
        passes=passes,
        buckets=[
            BucketRecord(
                p.phase, p.bucket, dict(p.limits), len(p.steps),
                sum(s.kernel is not None for s in p.steps),
                sum(s.fallback is not None for s in p.steps),
            )
            for p, _ in programs
        ],
        memory=[_memory(p, side) for p, side in programs],
        kernels=_kernels(lowered, objects, sources),
        fallbacks=[
            FallbackRecord(node.split(" = ")[1], node.split(" = ")[0], reason, where, phase)
            for phase, side in sides
            for node, reason, where in side.fallbacks
        ],
        compile=CompileRecord(
            len(objects.units), objects.hits, objects.compiled, objects.seconds, compiler, level,
            [*(f"{KERNELS}/{o.key}" for o in objects.objects), f"{LINKS}/{library.key}"],
            objects.remote_hits,
        ),
        weights_bytes=sum({w.offset: w.nbytes for w in plan.weights}.values()),
        weights=len({w.offset for w in plan.weights}),
        notes=[*notes, *objects.notes],
        tuning=tuning,
        layers=_layers(lowered, origins, programs),
    )  # fmt: skip


def _layers(
    sides: Sequence[Lowered], origins: Sequence[Graph], programs: Sequence[tuple[Program, Lowered]]
) -> list[LayerRecord]:
    tables = {id(side): Layers(graph, side) for side, graph in zip(sides, origins, strict=True)}
    return [
        record
        for program, side in programs
        for record in tables[id(side)].records(program.phase, program.bucket, program.limits)
    ]


def _kernels(
    sides: Sequence[Lowered], objects: CompileReport, sources: Mapping[str, str]
) -> list[KernelRecord]:
    location = {node.name: node.location for side in sides for node in side.graph.nodes}
    origins = {u.name: u for u in objects.units}
    kernels: dict[str, KernelRecord] = {}
    for step in (step for side in sides for step in side.steps):
        if not isinstance(step, KernelStep):
            continue
        old = kernels.get(step.symbol)
        places = sorted({location.get(n, "") for n in step.nodes} - {""})
        made = origins.get(step.unit.name)
        kernels[step.symbol] = KernelRecord(
            step.symbol, sources.get(step.symbol, ""), (old.steps if old else 0) + 1,
            made is None or made.origin == "hit", step.label,
            [*(old.nodes if old else []), *step.nodes],
            list(dict.fromkeys([*(old.where if old else []), *places])),
            made.seconds if made else 0.0,
        )  # fmt: skip
    return list(kernels.values())


def _memory(program: Program, lowered: Lowered) -> MemoryRecord:
    intervals = [
        Interval(
            buffer.name, buffer.first, buffer.last, buffer.offset,
            evaluate(info.nbytes, program.limits),
        )
        for buffer, info in zip(program.buffers, lowered.buffers, strict=True)
        if buffer.kind == "arena"
    ]  # fmt: skip
    return MemoryRecord(
        program.phase, program.bucket, program.arena_bytes, program.lower_bound,
        program.naive_bytes, len(program.steps), intervals,
    )  # fmt: skip
