"""`graphc run PLAN_OR_MODEL --input name=@file.npy`"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli.compare import Comparison, as_array, check, compare, read_expected, save
from cli.inputs import HELP, flatten, make_inputs
from cli.measure import median, peak_memory, since_process_start
from cli.options import BuildOptions, build_options
from cli.plans import is_plan, plan_place, unbundled
from cli.render import bucket_line, compiled, duration, print_json, size
from cli.targets import must_run
from graphc.errors import UsageError
from graphc.plan import Plan
from graphc.report import CompileRecord


@click.command()
@click.argument("plan_or_model", metavar="PLAN_OR_MODEL")
@build_options
@click.option("--length", "lengths", multiple=True, metavar="T=128", help="Length of a symbol.")
@click.option("--expect", type=click.Path(path_type=Path), metavar="FILE.npz", help="References.")
@click.option("--rtol", type=float, help="Relative tolerance of --expect [by dtype].")
@click.option("--atol", type=float, help="Absolute tolerance of --expect [by dtype].")
@click.option("--iters", type=click.IntRange(0), default=5, show_default=True, help="Timed runs.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Runs before.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the executor [all cores].")
@click.option("--profile", is_flag=True, help="Time each step, against the roofline.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one more run for Perfetto.",
)
@click.option("--save", "save_to", type=click.Path(path_type=Path), help="Write outputs as .npz.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def run(
    plan_or_model: str,
    lengths: tuple[str, ...],
    expect: Path | None,
    rtol: float | None,
    atol: float | None,
    iters: int,
    warmup: int,
    threads: int | None,
    profile: bool,
    trace: Path | None,
    save_to: Path | None,
    as_json: bool,
    inputs: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a plan, or build a model into the cache folder and run it.

    Inputs that are not given are made up: random floats, ones for integers and bools, at the
    default lengths of shapes.yaml. A value of --input is one of

    \b
      name=@file.npy        an array of a file; name=@file.npz:key
      name=random:1x513     standard normal, the same in every run
      name=zeros:1x16       also ones:1x16; without dimensions: the plan's shape
      name=randint:0:99:1x16
      name=3                a scalar
    """
    built, units = None, 0
    folder = unbundled(Path(plan_or_model))
    build = BuildOptions(**options)
    if not is_plan(folder):
        if folder.is_dir() and not any(folder.glob("*.json")):
            raise UsageError("no plan found", where=plan_or_model, hint="make one: graphc build")
        must_run(build.target)
        types, inputs = split_inputs(inputs)
        build = replace(build, inputs=types)
        folder = plan_place(plan_or_model, build)
        folder.parent.mkdir(parents=True, exist_ok=True)
        report = build.build(plan_or_model, folder, quiet=as_json)
        built, units = report.compile, sum(made.compiled for made in report.targets)
    result = execute(
        folder,
        inputs,
        lengths,
        shapes=build.shapes,
        threads=threads,
        iters=iters,
        warmup=warmup,
        profile=profile,
        trace=trace,
    )
    outputs = result.pop("outputs")
    comparisons = []
    if expect is not None:
        comparisons = compare(outputs, read_expected(expect, list(outputs)), rtol, atol)
    if save_to is not None:
        save(save_to, outputs)
    result["outputs"] = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in outputs.items()
    }
    result["compiled"] = units
    result["expect"] = [
        {"name": c.name, "max_abs": c.max_abs, "max_rel": c.max_rel, "ok": c.ok}
        for c in comparisons
    ]
    if as_json:
        print_json(result)
    else:
        print_run(result, built, comparisons)
    check(comparisons, str(expect))


def split_inputs(inputs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """When a model is built and run: types such as `x=f32[1,T]` go to the build, values to the
    run."""
    types = tuple(text for text in inputs if text.endswith("]") and "[" in text)
    return types, tuple(text for text in inputs if text not in types)


def execute(
    folder: Path,
    inputs: tuple[str, ...],
    lengths: tuple[str, ...] = (),
    *,
    shapes: Path | None = None,
    threads: int | None = None,
    iters: int,
    warmup: int,
    profile: bool = False,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Loads the plan, runs it once and then `warmup` + `iters` times.

    Returns the figures that `--json` prints, and under "outputs" the arrays of the first run by
    name (later runs of a model with states continue from there).
    """
    from graphc.runtime import session as runtime
    from graphc.runtime.binding import build_results

    session = runtime.load(folder, threads=threads)
    plan = session.plan
    arrays, symbols, made_up = make_inputs(plan, inputs, lengths, shapes)
    args = build_results(plan.arguments, arrays) or ()
    kwargs = build_results(plan.keywords, arrays) or {}
    first = session.run(*args, **kwargs)
    first_output = since_process_start()
    outputs = {
        _output_name(plan, index): as_array(value)
        for index, value in sorted(flatten(plan.results, first).items())
        if value is not None
    }
    for _ in range(warmup):
        session.run(*args, **kwargs)
    times: list[float] = []
    for _ in range(iters):
        start = time.perf_counter()
        session.run(*args, **kwargs)
        times.append(time.perf_counter() - start)
    facts = session.describe()
    if trace is not None:
        with session.trace(trace):
            session.run(*args, **kwargs)
    profiled: dict[str, Any] = {"steps": [], "fixes": [], "roofline": False}
    if profile:
        from cli.profile import profile as measure_steps

        profiled = measure_steps(session, lambda: session.run(*args, **kwargs), iters, symbols)
    return {
        "plan": str(folder),
        "model": plan.model,
        "target": plan.target,
        "phase": facts["phase"],
        "bucket": facts["bucket"],
        "limits": facts["limits"] or {},
        "symbols": symbols,
        "made_up": made_up,
        "first_output_s": first_output,
        "latency_s": median(times) if times else None,
        "iters": iters,
        "threads": facts["threads"],
        "peak_memory": peak_memory(),
        "arena_bytes": facts["arena_bytes"],
        "fallback_steps": facts["fallback_steps"],
        **profiled,
        "trace": None if trace is None else str(trace),
        "outputs": outputs,
    }


def print_run(
    result: dict[str, Any], built: CompileRecord | None, comparisons: list[Comparison]
) -> None:
    """The text view of `execute`'s figures."""
    symbols = ", ".join(f"{name} = {value}" for name, value in result["symbols"].items())
    if result["bucket"] is not None:
        bucket = bucket_line(result["phase"], result["bucket"], result["limits"])
        click.echo(f"bucket        {bucket}" + (f" at {symbols}" if symbols else ""))
    made = compiled(built) if built else "from cache"
    click.echo(f"kernels       {made} ({result['target']})")
    click.echo(f"first output  {duration(result['first_output_s'])} after process start")
    if result["latency_s"] is not None:
        click.echo(f"latency       {duration(result['latency_s'])}, median of {result['iters']}")
    click.echo(f"peak memory   {size(result['peak_memory'])}")
    for name, output in result["outputs"].items():
        click.echo(f"output        {name}: {output['dtype']}{output['shape']}")
    if result["made_up"]:
        names = ", ".join(result["made_up"])
        click.echo(f"made up       {names} (give values with --input {HELP.split(',')[0]})")
    if result["trace"]:
        click.echo(f"trace         {result['trace']} (open it in ui.perfetto.dev)")
    if result["steps"]:
        from cli.profile import print_profile

        print_profile(result)
    for item in comparisons:
        verdict = "ok" if item.ok else "DIFFERS"
        click.echo(
            f"expected      {item.name}: {verdict}, max abs {item.max_abs:.3g}, "
            f"max rel {item.max_rel:.3g} (rtol {item.rtol:g}, atol {item.atol:g})"
        )


def _output_name(plan: Plan, index: int) -> str:
    tensor = plan.outputs[index].tensor
    return tensor.name if tensor and tensor.name else f"output_{index}"
