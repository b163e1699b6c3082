"""Captured graph -> plan folder: passes, lowering, compile, link, write.

`graphc.api` wires this to the passes and the cache; nothing here imports either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from graphc.frontends.capture import Captured
from graphc.ir.graph import Graph
from graphc.lowering.program import Planner
from graphc.lowering.templates.pack import remembered
from graphc.lowering.tuning import Candidate
from graphc.plan import DecoderPlan, Plan
from graphc.plan_io import KERNELS, WEIGHTS
from graphc.plan_writer import Content, write_plans
from graphc.report import (
    BuildReport,
    PassRecord,
    PrecisionReport,
    StageRecord,
    TargetRecord,
    TuningRecord,
)
from graphc.shapes import Bucket
from graphc.store import KernelStore
from graphc.target_build import Made, Shared, TargetBuild
from graphc.toolchain.isa import Isa
from graphc.toolchain.lookups import LookupsOnly

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


@dataclass(frozen=True)
class For:
    """One target of a plan. `transform` runs the passes on the graph of a phase; targets of the
    same `passes` share what it gives. `tune` measures what rules leave open; None: their
    defaults."""

    name: str
    isa: Isa
    transform: Callable[[Graph, str], tuple[Graph, list[PassRecord]]]
    passes: tuple[str, ...] = ()
    tune: Tune | None = None


@dataclass
class Request:
    """What to build. `captured` says how the plan is called; `sides` are its graphs, which answer
    in one form; `targets` are the CPUs, the most demanding first; `planner` places buffers;
    `lookups_only`: the build ends with `LookupsOnly`."""

    captured: Captured
    sides: Sequence[Side]
    output: Path
    model: str
    source: str
    targets: Sequence[For]
    planner: Planner
    store: KernelStore
    jobs: int | None = None
    require_cached: bool = False
    lookups_only: bool = False
    progress: Progress | None = None
    stages: list[StageRecord] = field(default_factory=list)
    text: Callable[[Graph], str] | None = None
    records: Sequence[PassRecord] = ()  # of passes that made the sides' graphs
    decoder: DecoderPlan | None = None
    files: Mapping[str, Content] = field(default_factory=dict)  # further files of the plan folder
    describe: Describe | None = None
    command: Sequence[str] = ()  # as of `graphc.plan.Manifest`


def build_plan(request: Request) -> list[BuildReport]:
    """Builds and writes the plan of `request.captured`; gives the report for each target."""
    shared = Shared(request, list(request.stages))
    if request.lookups_only:
        raise LookupsOnly(tuple(TargetBuild(shared, each).lookups() for each in request.targets))
    area = request.store.workspace()
    try:
        made: list[Made] = []
        with remembered():
            for number, target in enumerate(request.targets):
                library = area.path / str(number) / KERNELS
                library.parent.mkdir()
                made.append(TargetBuild(shared, target).run(library))
        targets = _target_records(request.targets, made)
        for one in made:
            one.report = replace(one.report, stages=shared.stages, targets=targets)
            one.files["report.json"] = one.report.to_json()
        weights = {**request.files, WEIGHTS: shared.writer.write}
        plans = [(one.plan, one.files) for one in made]
        write_plans(request.output, plans, weights, request.command)
    finally:
        area.close()
    return [one.report for one in made]


def _target_records(targets: Sequence[For], made: Sequence[Made]) -> list[TargetRecord]:
    """What each target took to build, and its share of the weights."""
    used = [{(w.offset, w.nbytes) for w in one.plan.weights} for one in made]
    records: list[TargetRecord] = []
    for number, (target, one) in enumerate(zip(targets, made, strict=True)):
        others = set().union(*(some for k, some in enumerate(used) if k != number))
        done = one.report.compile
        records.append(
            TargetRecord(
                target.name, target.isa.level, list(target.isa.features), done.units, done.hits,
                done.compiled, done.seconds, sum(n for _, n in used[number]),
                sum(n for _, n in used[number] - others), done.remote_hits,
            )
        )  # fmt: skip
    return records
