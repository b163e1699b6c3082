"""The Python face of graphc, and the one module that looks up to the passes and the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphc.builder import Request, build_plan
from graphc.frontends.capture import Captured
from graphc.ir.graph import Graph
from graphc.lowering.classify import native_operators
from graphc.plan import Step
from graphc.report import BuildReport, PassRecord, StageRecord
from graphc.toolchain.isa import Isa

if TYPE_CHECKING:
    import torch


def memory_planner(
    steps: Sequence[Step], sizes: Mapping[int, int]
) -> tuple[dict[int, int], int, int, int]:
    """Places arena buffers and has the independent checker judge the result."""
    from passes.memory.check_memory import check_memory
    from passes.memory.lifetimes import intervals
    from passes.memory.plan_memory import place

    spans = intervals(steps, sizes)
    ordered = list(spans.values())
    placement = place(ordered)
    facts = check_memory(ordered, placement.offsets, placement.arena_bytes)
    offsets = dict(zip(spans, placement.offsets, strict=True))
    return offsets, facts.arena_bytes, facts.lower_bound, facts.naive_bytes


def build_captured(
    captured: Captured,
    output: Path,
    *,
    model: str = "module",
    source: str = "module",
    shapes: Path | None = None,
    phase: str | None = None,
    buckets: Sequence[str] = (),
    disable_pass: Sequence[str] = (),
    pass_options: Sequence[str] = (),
    verify: bool = False,
    dump_passes: Path | None = None,
    require_cached: bool = False,
    jobs: int | None = None,
    isa: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    stages: Sequence[StageRecord] = (),
) -> BuildReport:
    """Builds a captured graph into the plan folder `output`."""
    from cache.store import Store
    from graphc.shapes import Shapes

    table = Shapes.load(shapes)
    level = Isa.detect()
    if isa is not None:
        level = level.lowered(isa)
    chosen = phase or table.default_phase_of(model)

    def transform(graph: Graph) -> tuple[Graph, list[PassRecord]]:
        return graph, []

    store = Store()
    try:
        return build_plan(
            Request(
                captured=captured,
                output=Path(output),
                model=model,
                source=source,
                phase=chosen,
                buckets=lambda ranges: table.buckets_for(model, phase, ranges, only=buckets),
                transform=transform,
                planner=memory_planner,
                store=store,
                isa=level,
                jobs=jobs,
                require_cached=require_cached,
                progress=progress,
                stages=list(stages),
            )
        )
    finally:
        store.close()


def build_module(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    output: Path,
    **options: Any,
) -> tuple[BuildReport, Captured]:
    """Captures and builds an nn.Module on example inputs."""
    from graphc.frontends.capture import capture

    start = time.perf_counter()
    captured = capture(module, args, kwargs, dynamic_shapes, keep=native_operators())
    stages = [StageRecord("capture", time.perf_counter() - start)]
    return build_captured(captured, output, stages=stages, **options), captured
