"""The Python face of graphc, and the one module that looks up to the passes and the cache."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphc.cpu import lacking, told
from graphc.errors import UsageError
from graphc.from_cache import build_or_take, captured_graphs
from graphc.garbage import rarely_collected
from graphc.options import Options as Options
from graphc.options import Progress as Progress
from graphc.options import decisive
from graphc.quantization import OPENS, Quantization, quantization
from graphc.report import BisectRecord, BuildReport, PassRecord, PrecisionReport, StageRecord
from graphc.toolchain.isa import Isa, targets

if TYPE_CHECKING:
    import torch

    from cache.store import Store
    from graphc.builder import Side, Tune
    from graphc.compiled import Compiled
    from graphc.frontends.capture import Captured
    from graphc.ir.graph import Graph
    from graphc.lowering.program import PlannedMemory
    from graphc.plan import DecoderPlan, Plan, Step
    from graphc.precision import Precision
    from graphc.runtime.calibration import Peaks
    from graphc.shapes import Shapes
    from graphc.warm.builds import Warm

#: weights stay plain
NO_CODES = "coded_linear{enabled=no}"


def missing(isa: Isa) -> list[str]:
    """What this machine lacks to run code made for `isa`."""
    return lacking(isa.architecture, isa.features)


def memory_planner(steps: Sequence[Step], sizes: Mapping[int, int]) -> PlannedMemory:
    """Places arena buffers and has the independent checker judge the result."""
    from graphc.lowering.program import PlannedMemory
    from passes.memory.check_memory import check_memory
    from passes.memory.lifetimes import intervals, lifetimes
    from passes.memory.plan_memory import place

    spans = lifetimes(steps)
    placed = intervals(spans, sizes)
    ordered = list(placed.values())
    placement = place(ordered)
    facts = check_memory(ordered, placement.offsets, placement.arena_bytes)
    offsets = dict(zip(placed, placement.offsets, strict=True))
    return PlannedMemory(spans, offsets, facts.arena_bytes, facts.lower_bound, facts.naive_bytes)


def pipeline(disable: Sequence[str] = (), options: Sequence[str] = ()) -> Sequence[Any]:
    """The passes that run, switched and configured.

    Raises UsageError for an unknown pass or option.
    """
    from graphc.rewrite import configure
    from passes import PIPELINE

    chosen: Sequence[Any] = configure(PIPELINE, disable=disable, options=options)
    return chosen


def precision_policy(table: Shapes, options: Options) -> Precision:
    """What a build may narrow: as `Options.precision` says, else what passes are asked to narrow,
    else as shapes.yaml says, else the default.

    Raises UsageError for an unknown role or format.
    """
    from graphc.precision import Precision

    policy = table.precision
    asked = quantization(options.quant).pass_options()
    for one in pipeline(options.disable_pass, [*asked, *options.pass_options]):
        if one.name in OPENS and one.form:
            policy = policy.opened(OPENS[one.name], [one.form], f"{one.name}{{form={one.form}}}")
    return Precision.parse(options.precision).over(policy)


def checked(graph: Graph, policy: Precision, source: str) -> Graph:
    """The graph, if it narrows no more than the policy allows. What an ONNX file narrows is the
    model as its author wrote it.

    Raises PrecisionError, which names the node.
    """
    from passes.quantization.guard import check_precision

    check_precision(graph, policy, authored=source == "onnx")
    return graph


def machine_options(level: Isa, graphs: int) -> list[str]:
    """Options of passes that depend on the machine, or on how many graphs share the weights of the
    plan; the user's come behind them."""
    # another graph may read the same weights for many rows, in their plain form
    fast = "avx512_bf16" in level.features and graphs == 1
    return [] if fast else [NO_CODES]


@rarely_collected()
def build_captured(
    captured: Captured,
    output: Path,
    options: Options | None = None,
    *,
    model: str = "module",
    source: str = "module",
    variants: Sequence[Captured] = (),
    sides: Sequence[Side] = (),
    decoder: DecoderPlan | None = None,
    files: Mapping[str, str] | None = None,
    records: Sequence[PassRecord] = (),
    policy: Precision | None = None,
    asked: Quantization | None = None,
    store: Store | None = None,
) -> BuildReport:
    """Builds a captured graph (and its captures for other lengths) into the folder `output`; with
    `sides`, these graphs of it (the phases of a decoder), which passes that left `records` made.
    `files` are put beside the plan's own. `policy` is what may be narrowed, `asked` what is to be,
    if it is not as the options say. `store`: the cache, if the caller has it open. Gives the report
    of the target that runs here, or of the first if none does."""
    from graphc.builder import For, Request, Side, build_plan
    from graphc.ir.text import print_graph
    from graphc.rewrite import run_passes
    from graphc.shapes import Bucket, Shapes

    options = options or Options()
    table = Shapes.load(options.shapes)
    found = targets_of(options.target, options.tune)
    phase = options.phase or table.default_phase_of(model)
    policy = policy or precision_policy(table, options)
    graphs = len(sides) or 1 + len(variants)
    asked = asked or quantization(options.quant)
    own = {name: tuple(machine_options(isa, graphs)) for name, isa in found.items()}

    def transform(name: str, graph: Graph, phase: str) -> tuple[Graph, list[PassRecord]]:
        passes = pipeline(
            options.disable_pass, [*own[name], *asked.pass_options(), *options.pass_options]
        )
        dump = options.dump_passes
        if dump is not None and len(set(own.values())) > 1:
            dump = dump / name
        # before the passes too: folding leaves nothing to see of how weights were narrowed
        made, records = run_passes(
            checked(graph, policy, source), passes, verify=options.verify,
            dump=dump, phase=phase, progress=options.progress,
        )  # fmt: skip
        asked.check(records)
        return checked(made, policy, source), records

    def describe(
        graphs: Sequence[tuple[str, Graph]], plan: Plan, report: BuildReport,
        dtypes: Mapping[str, str],
    ) -> PrecisionReport:  # fmt: skip
        from passes.quantization.tensor_classes import precision_report

        return precision_report(graphs, *_facts(plan, report, dtypes), policy=policy)

    def buckets(ranges: Mapping[str, tuple[int, int]]) -> list[Bucket]:
        return table.buckets_for(model, options.phase, ranges, only=list(options.buckets))

    with opened_store(store) as cache:

        def tune(isa: Isa) -> Tune | None:
            if not options.tune:
                return None
            from graphc.tuner import Tuner

            place = cache.root if cache.writable else None
            return Tuner(
                isa, cache, place, options.jobs, options.progress, options.require_cached,
                measures=not options.lookups_only,
            ).tune  # fmt: skip

        reports = build_plan(
            Request(
                captured=captured,
                sides=sides or [Side(c.graph, phase, buckets) for c in (captured, *variants)],
                output=Path(output),
                model=model,
                source=source,
                targets=[
                    For(name, isa, partial(transform, name), own[name], tune(isa))
                    for name, isa in found.items()
                ],
                planner=memory_planner,
                store=cache,
                jobs=options.jobs,
                require_cached=options.require_cached,
                lookups_only=options.lookups_only,
                progress=options.progress,
                stages=list(options.stages),
                text=lambda graph: print_graph(graph, contents=False),
                decoder=decoder,
                files=files or {},
                records=records,
                describe=describe,
                command=options.command,
            )
        )
    here = [r for r, isa in zip(reports, found.values(), strict=True) if not missing(isa)]
    return (here or reports)[0]


@contextlib.contextmanager
def opened_store(store: Store | None = None) -> Iterator[Store]:
    """The cache: `store`, or one that is open while inside."""
    from cache.store import Store

    if store is not None:
        yield store
        return
    own = Store()
    try:
        yield own
    finally:
        own.close()


def targets_of(text: str, tune: bool) -> dict[str, Isa]:
    """The targets that a build names, the most demanding first.

    Raises UsageError: one is unknown, or is to be tuned and does not run here.
    """
    found = targets(text)
    for name, isa in found.items() if tune else ():
        if lacks := missing(isa):
            raise UsageError(
                f"expected a target that runs here with --tune, which measures, found {name!r}: "
                f"{told()} lacks {', '.join(lacks)}",
                where="--target",
                hint="leave out --tune, or build for it on such a machine",
            )
    return found


def _facts(plan: Plan, report: BuildReport, dtypes: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """What `precision_report` asks of a plan: weights, arenas, and how sequences share states."""
    from passes.quantization.tensor_classes import Arena, Sequences, StoredWeight

    weights = [StoredWeight(w.origin or w.name, w.dtype, w.offset, w.nbytes) for w in plan.weights]
    arenas = [
        Arena(
            memory.phase, memory.bucket, bucket.limits, memory.arena_bytes,
            [(dtypes[i.name], i.nbytes) for i in memory.intervals if i.name in dtypes],
        )
        for memory, bucket in zip(report.memory, report.buckets, strict=True)
    ]  # fmt: skip
    facts = plan.decoder
    shared = Sequences() if facts is None else Sequences(facts.page, facts.context, facts.slots)
    return weights, arenas, shared


@rarely_collected()
def build_module(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    output: Path,
    options: Options | None = None,
) -> tuple[BuildReport, Captured]:
    """Captures and builds an nn.Module on example inputs."""
    from graphc.frontends.capture import capture
    from graphc.frontends.variants import further_captures
    from graphc.lowering.classify import native_operators

    keep = native_operators()
    captured = capture(module, args, kwargs, dynamic_shapes, keep=keep)
    more = further_captures(module, args, kwargs or {}, dynamic_shapes, captured, keep=keep)
    return build_captured(captured, output, options, variants=more), captured


@rarely_collected()
def build(
    model: str | torch.nn.Module,
    output: Path,
    *,
    shapes: Path | None = None,
    inputs: Sequence[str] | None = None,
    dynamic: Sequence[str] | None = None,
    phase: str | None = None,
    buckets: Sequence[str] | None = None,
    dtype: str | None = None,
    disable_pass: Sequence[str] = (),
    pass_options: Sequence[str] = (),
    verify: bool = False,
    dump_passes: Path | None = None,
    require_cached: bool = False,
    jobs: int | None = None,
    target: str = "host",
    progress: Progress | None = None,
    tune: bool = False,
    quant: Sequence[str] = (),
    precision: str = "",
    fresh: bool = False,
    lookups_only: bool = False,
) -> BuildReport:
    """Builds a model into the plan folder `output`; gives the report that `inspect` shows.

    Args:
        model: "demo", "pkg.mod:factory", "file.py:factory", "x.pt2", "x.onnx", a checkpoint
            folder, or a torch.nn.Module.
        inputs: types of inputs, "x=f32[1,T,384]"; a name in place of a size is a free length.
        dynamic: ranges "T=1:2048", and names of dimensions "x.1=T".
        dtype: floating-point weights (and example inputs) are converted to it.
        precision, target, fresh, lookups_only: see `Options`.

    Raises:
        GraphcError: one of graphc.errors, with what, where and what to do.
    """
    options = Options(
        shapes, phase, tuple(buckets or ()), tuple(disable_pass), tuple(pass_options), verify,
        dump_passes, require_cached, jobs, target, progress, (), tune, tuple(quant), precision,
        fresh, lookups_only,
    )  # fmt: skip
    front: dict[str, Any] = {
        "inputs": tuple(inputs or ()),
        "dynamic": tuple(dynamic or ()),
        "dtype": dtype,
    }
    if isinstance(model, str):
        words = [model, *(word for text in front["inputs"] for word in ("--input", text))]
        words += [word for text in front["dynamic"] for word in ("--dynamic", text)]
        words += ["--dtype", dtype] if dtype else []
        options = replace(options, command=(*words, *options.words()))
    decides = decisive(options, kind="model", **front)
    with opened_store() as store:

        def made(warm: Warm | None) -> BuildReport:
            from graphc.shapes import Shapes

            # cheap checks of the user's words come before the model is loaded
            precision_policy(Shapes.load(options.shapes), options)
            targets_of(target, tune)
            start = time.perf_counter()
            if progress is not None:
                progress("capture", 0, 0)
            kept = captured_graphs(warm, front, lambda: _capture(model, **front))
            stages = (StageRecord("capture", time.perf_counter() - start),)
            kind, name = kept.extra
            return build_captured(
                kept.captures[0], Path(output), replace(options, stages=stages), model=name,
                source=kind, variants=kept.captures[1:], store=store,
            )  # fmt: skip

        return build_or_take(model, Path(output), options, store, decides, made)


def build_decoder(
    model: str | torch.nn.Module,
    output: Path,
    options: Options | None = None,
    *,
    dtype: str | None = None,
    chunk: int | None = None,
    batch: int | None = None,
    sequences: int | None = None,
    drafts: int | None = None,
) -> BuildReport:
    """Builds a causal language model with its states, as `graphc.decoders.build` does, out of what
    the cache has of it."""
    options = options or Options()
    sizes: dict[str, Any] = {
        "dtype": dtype, "chunk": chunk, "batch": batch, "sequences": sequences, "drafts": drafts,
    }  # fmt: skip
    decides = decisive(options, kind="decoder", named=str(model), **sizes)
    with opened_store() as store:

        def made(warm: Warm | None) -> BuildReport:
            from graphc import decoders

            return decoders.build(model, output, options, **sizes, warm=warm, store=store)

        return build_or_take(model, output, options, store, decides, made)


def _capture(
    model: str | torch.nn.Module, inputs: Sequence[str], dynamic: Sequence[str], dtype: str | None
) -> tuple[list[Captured], tuple[str, str]]:
    """The captures for all lengths; kind of source and name."""
    from graphc.frontends.resolve import capture_source, resolve
    from graphc.frontends.variants import further_captures
    from graphc.lowering.classify import native_operators

    source = resolve(model, inputs=inputs, dynamic=dynamic, dtype=dtype)
    keep = native_operators()
    captured = capture_source(source, keep)
    more: list[Captured] = []
    if source.program is None:
        more = further_captures(
            source.module, source.args, source.kwargs, source.dynamic_shapes, captured, keep=keep
        )
    return [captured, *more], (source.kind, source.name)


@rarely_collected()
def bisect(
    model: str | torch.nn.Module,
    *,
    shapes: Path | None = None,
    inputs: Sequence[str] | None = None,
    dynamic: Sequence[str] | None = None,
    phase: str | None = None,
    buckets: Sequence[str] | None = None,
    dtype: str | None = None,
    disable_pass: Sequence[str] = (),
    pass_options: Sequence[str] = (),
    rtol: float = 1e-3,
    atol: float = 1e-5,
) -> BisectRecord | None:
    """The first pass, and the first node in it, that moves a result beyond the tolerance; None if
    every pass keeps it. shapes, phase and buckets do not matter to it."""
    from graphc.rewrite import bisect as first_bad

    passes = pipeline(disable_pass, pass_options)
    captures, _ = _capture(model, inputs or (), dynamic or (), dtype)
    found: BisectRecord | None = first_bad(captures[0].graph, passes, rtol=rtol, atol=atol)
    return found


def passes() -> list[tuple[str, str, dict[str, object]]]:
    """(name, what it does, options) of each pass, in pipeline order, once each."""
    from graphc.rewrite.options import describe
    from passes import PIPELINE

    listed: dict[str, tuple[str, str, dict[str, object]]] = {}
    for one in PIPELINE:
        text = (type(one).__doc__ or "").strip().splitlines()
        listed.setdefault(one.name, (one.name, text[0] if text else "", describe(one)))
    return list(listed.values())


def kept_plans() -> Path:
    """The folder of the cache where plans are kept by name."""
    from cache.folder import default_root

    return default_root() / "plans-v1"


#: folders of bundles unpacked for this process alone; removed at its end
_unpacked: list[tempfile.TemporaryDirectory[str]] = []


def unpacked(bundle: Path) -> Path:
    """The plan folder of a bundle (`graphc bundle`), unpacked into the cache folder unless it is
    there: its name is the digest of the content. Where the cache folder cannot be written, into a
    folder that goes with this process.

    Raises:
        UsageError: there is no such file, it is no bundle, or the cache folder cannot be trusted.
        DamagedError: the bundle is damaged.
    """
    from cache.folder import default_root, discard, open_root
    from graphc.errors import UsageError
    from graphc.plan_bundle import extract, is_unpacked, read_bundle

    listed, root = read_bundle(bundle), default_root().absolute()
    obstacle = open_root(root)
    folder = kept_plans() / f"bundle-{listed.digest[:32]}"
    if is_unpacked(listed, folder):
        return folder
    if not obstacle:
        discard(folder)  # what is left of it
    else:
        _unpacked.append(tempfile.TemporaryDirectory(prefix="graphc-"))
        folder = Path(_unpacked[-1].name) / "plan"
    try:
        extract(bundle, folder)
    except (OSError, UsageError):
        if not is_unpacked(listed, folder):  # else another process was first
            raise
    return folder


def compile(
    module: torch.nn.Module,
    *,
    dynamic_shapes: Any = None,
    options: Options | None = None,
    threads: int | None = None,
) -> Compiled:
    """A callable that takes and gives what `module` does, for inference: plans are built when it
    is first called, one for each signature, and reused from the cache by later processes.

    Weights are copied when a plan is built; after they changed in place, or were replaced, the
    next call builds another (torch counts no changes of tensors made under inference_mode, and
    none through `.data`). Buffers that the module itself changes are states of the plan: the
    module's own stay as they are.

    Args:
        dynamic_shapes: as torch.export takes them; one plan then holds for a range of lengths.
        threads: threads of native steps [$GRAPHC_THREADS, else the CPUs this process may use].
    """
    from graphc.compiled import Compiled

    return Compiled(module, dynamic_shapes, options or Options(), threads)


def reference(model: str | torch.nn.Module, *, dtype: str | None = None) -> torch.nn.Module:
    """The model as an eager torch module, for comparisons."""
    from graphc.frontends.resolve import resolve

    return resolve(model, dtype=dtype).module


def measured() -> Peaks | None:
    """This machine's peak rates, if `calibrate` measured them before."""
    from cache.folder import default_root
    from graphc.runtime import calibration

    return calibration.measured(default_root())


def calibrate(progress: Progress | None = None) -> Peaks:
    """Measures this machine's peak rates (GFLOP/s, GB/s; one thread and all), which takes a few
    seconds, and keeps the best of all calibrations in the cache folder. The loops are compiled
    through the cache, for the best instruction set of the machine.

    Raises CompileError (no compiler, and the cache lacks the loops), UsageError (the cache folder
    is not to be trusted).
    """
    import graphc.kernels
    from cache.store import Store
    from graphc.lowering.context import Unit
    from graphc.runtime import calibration
    from graphc.toolchain.compile import compile_units
    from graphc.toolchain.link import link
    from graphc.toolchain.recorded import usable_compiler

    source = Path(graphc.kernels.__path__[0]) / "calibrate.cpp"
    store, isa = Store(), Isa.detect()
    try:
        if progress is not None:
            progress("compile", 0, 0)
        unit = Unit("calibrate", source.read_text(encoding="utf-8"))
        compiler = usable_compiler([unit], isa, store)
        objects = compile_units([unit], isa, compiler, store)
        with tempfile.TemporaryDirectory(prefix="graphc-") as folder:
            library = Path(folder) / "calibrate.so"
            link(objects.objects, library, compiler, store)
            peaks = calibration.measure(library, progress=progress)
        peaks = peaks.best(calibration.measured(store.root))
        if store.writable:
            calibration.save(peaks, store.root)
        return peaks
    finally:
        store.close()
