"""`graphc bench MODEL --vs eager,compile,ort`"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from cli.inputs import SEED, make_inputs
from cli.jobs import Inputs, Job, Unavailable, save_draws
from cli.measure import cpu_seconds
from cli.options import BuildOptions, build_options
from cli.peers import GRAPHC, PEERS, REFERENCE
from cli.race import cores, prepare, race
from cli.render import duration, print_json, print_table, size
from cli.run import split_inputs
from cli.targets import must_run
from graphc.errors import UsageError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@click.command()
@click.argument("model")
@build_options
@click.option("--vs", default="eager,ort", show_default=True, help=f"Of {', '.join(PEERS)}.")
@click.option("--length", "lengths", multiple=True, metavar="T=128", help="Length of a symbol.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="In turn.")
@click.option("--seconds", type=click.FloatRange(0.01), default=2.0, show_default=True,
              help="Timed for each, about.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="For all.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(
    model: str,
    vs: str,
    lengths: tuple[str, ...],
    rounds: int,
    seconds: float,
    threads: int,
    as_json: bool,
    inputs: tuple[str, ...],
    **options: Any,
) -> None:
    """Time one call of MODEL: graphc and its peers in turn, medians.

    Each runs in a process of its own, pinned to the same cores. Ranked by CPU time at one thread,
    which other work on the machine does not change, and by wall time at more. Errors are relative
    to the model in float64; those of a few calls, whose made-up inputs differ, as their root mean
    square. A peer that is not installed, or that cannot take the model, is named
    and left out.
    """
    wanted = [name.strip() for name in vs.split(",") if name.strip()]
    for name in wanted:
        if name not in PEERS:
            raise UsageError(
                f"expected a peer, found {name!r}", where="--vs", hint=f"one of {', '.join(PEERS)}"
            )
    available = len(cores(1 << 20))
    if threads > available:
        raise UsageError(f"expected at most {available} threads, found {threads}")
    types, values = split_inputs(inputs)
    dtype = options["dtype"]
    options["dtype"] = _DTYPES.get(dtype, dtype)
    build = BuildOptions(**options, inputs=types)
    must_run(build.target)
    with tempfile.TemporaryDirectory(prefix="graphc-bench-") as folder:
        result = _measure(
            Path(folder), model, build, wanted, values, lengths, rounds, seconds, threads, as_json
        )
    if as_json:
        print_json(result)
    else:
        _show(result)


def _measure(
    folder: Path,
    model: str,
    build: BuildOptions,
    wanted: list[str],
    values: tuple[str, ...],
    lengths: tuple[str, ...],
    rounds: int,
    seconds: float,
    threads: int,
    quiet: bool,
) -> dict[str, Any]:
    from graphc.plan_io import read_plan
    from graphc.runtime.binding import build_results

    place = folder / GRAPHC / "plan"
    place.parent.mkdir()
    begin = cpu_seconds()
    build.build(model, place, quiet=quiet)
    built = {GRAPHC: cpu_seconds() - begin}
    plan = read_plan(place)
    _, symbols, _ = make_inputs(plan, values, lengths, build.shapes)

    def draw(number: int) -> Inputs:
        arrays, _, _ = make_inputs(plan, values, lengths, build.shapes, SEED + number)
        args = tuple(build_results(plan.arguments, arrays) or ())
        kwargs = dict(build_results(plan.keywords, arrays) or {})
        return Inputs(args, kwargs, [tensor.name for tensor in plan.inputs])

    job = Job(
        peer=GRAPHC, folder=str(folder / GRAPHC), shared=str(folder), loader="cli.bench:load_model",
        model=str(Path(model).absolute()) if Path(model).exists() else model, dtype=build.dtype,
        threads=threads, cpus=cores(threads), inputs=save_draws(folder / "inputs", draw),
        reference=str(folder / "reference.npz"), path=["."],
        onnx=str(Path(model).absolute()) if Path(model).suffix == ".onnx" else "",
    )  # fmt: skip
    skipped: dict[str, str] = {}
    jobs = {GRAPHC: job}
    for name in (REFERENCE, *wanted):
        peer = replace_job(job, name, folder / name)
        try:
            built[name] = prepare(peer, model).get("cpu_s", 0.0)
        except Unavailable as error:
            skipped[name] = str(error)
            continue
        if name != REFERENCE:
            jobs[name] = peer
    entries, failed = race(jobs, rounds=rounds, seconds=seconds)
    if GRAPHC in failed:
        raise UsageError(f"graphc itself cannot run it: {failed[GRAPHC]}")
    return {
        "model": model,
        "symbols": symbols,
        "dtype": build.dtype,
        "threads": threads,
        "clock": "cpu" if threads == 1 else "wall",
        "runtimes": {
            name: {"build_cpu_s": built.get(name, 0.0), **entry.summary()}
            for name, entry in entries.items()
        },
        "skipped": skipped | failed,
    }


def replace_job(job: Job, peer: str, folder: Path) -> Job:
    """The same job for another peer."""
    import msgspec

    return msgspec.structs.replace(job, peer=peer, folder=str(folder))


def load_model(model: str, dtype: str | None) -> Any:
    """The model as an eager torch module: the loader of the workers."""
    from graphc import api
    from graphc.errors import GraphcError

    try:
        return api.reference(model, dtype=dtype)
    except GraphcError as error:
        raise Unavailable(error.what) from None


def _show(result: dict[str, Any]) -> None:
    clock = result["clock"]
    runtimes: dict[str, dict[str, Any]] = result["runtimes"]
    ours = runtimes[GRAPHC][f"{clock}_s"]
    rows = [
        [
            name,
            duration(item[f"{clock}_s"]),
            duration(item[f"{clock}_min_s"]),
            f"{item[f'{clock}_s'] / ours:.2f}",
            item.get("mismatch") or (f"{item['error']:.1e}" if "error" in item else "-"),
            duration(item["build_cpu_s"]),
            size(item["peak_bytes"]),
        ]
        for name, item in sorted(runtimes.items(), key=lambda pair: pair[1][f"{clock}_s"])
    ]
    lines = ", ".join(f"{name} = {value}" for name, value in result["symbols"].items())
    click.echo(
        f"{result['model']} at {lines or 'fixed lengths'}, {result['dtype'] or 'its own dtypes'}, "
        f"{result['threads']} thread(s): {clock} time of a call"
    )
    head = ["", "median", "best", "x graphc", "error", "build", "peak memory"]
    print_table(head, rows, "lrrrrrr")
    draws = max((item.get("draws", 1) for item in runtimes.values()), default=1)
    if draws > 1:
        click.echo(f"errors: root mean square over {draws} calls with other inputs")
    for name, reason in result["skipped"].items():
        click.echo(f"skipped {name}: {reason}")
