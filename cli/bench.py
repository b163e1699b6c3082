"""`graphc bench MODEL --vs eager,ort`"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cli.inputs import make_inputs
from cli.measure import interleaved, median
from cli.options import BuildOptions, build_options
from cli.peers import PEERS, Unavailable
from cli.render import duration, print_json, print_table
from cli.run import split_inputs
from graphc.errors import UsageError


@click.command()
@click.argument("model")
@build_options
@click.option("--vs", default="eager,ort", show_default=True, help=f"Of {', '.join(PEERS)}.")
@click.option("--length", "lengths", multiple=True, metavar="T=128", help="Length of a symbol.")
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True, help="Timed runs.")
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True, help="Runs before.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="For all.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(
    model: str,
    vs: str,
    lengths: tuple[str, ...],
    rounds: int,
    warmup: int,
    threads: int,
    as_json: bool,
    inputs: tuple[str, ...],
    **options: Any,
) -> None:
    """Time one call of MODEL: graphc and its peers in turn, medians.

    A peer that is not installed, or that cannot take the model, is named and left out.
    """
    wanted = [name.strip() for name in vs.split(",") if name.strip()]
    for name in wanted:
        if name not in PEERS:
            raise UsageError(
                f"expected a peer, found {name!r}", where="--vs", hint=f"one of {', '.join(PEERS)}"
            )
    types, values = split_inputs(inputs)
    build = BuildOptions(**options, inputs=types)
    with tempfile.TemporaryDirectory(prefix="graphc-bench-") as folder:
        place = Path(folder) / "plan"
        build.build(model, place, quiet=as_json)
        result = measure(place, model, build, wanted, values, lengths, rounds, warmup, threads)
    if as_json:
        print_json(result)
        return
    ours = result["median_s"]["graphc"]
    rows = [
        [name, duration(seconds), f"{seconds / ours:.2f}"]
        for name, seconds in result["median_s"].items()
    ]
    lines = ", ".join(f"{name} = {value}" for name, value in result["symbols"].items())
    click.echo(f"{model} at {lines or 'fixed lengths'}, {threads} thread(s), median of {rounds}")
    print_table(["", "latency", "x graphc"], rows, "lrr")
    for name, reason in result["skipped"].items():
        click.echo(f"skipped {name}: {reason}")


def measure(
    place: Path,
    model: str,
    build: BuildOptions,
    peers: list[str],
    values: tuple[str, ...],
    lengths: tuple[str, ...],
    rounds: int,
    warmup: int,
    threads: int,
) -> dict[str, Any]:
    """Interleaved medians, in seconds, of the plan at `place` and of each peer that can run."""
    from graphc.runtime import session as runtime
    from graphc.runtime.binding import build_results

    session = runtime.load(place, threads=threads)
    plan = session.plan
    arrays, symbols, _ = make_inputs(plan, values, lengths, build.shapes)
    args = build_results(plan.arguments, arrays) or ()
    kwargs = build_results(plan.keywords, arrays) or {}
    calls: dict[str, Callable[[], object]] = {"graphc": lambda: session.run(*args, **kwargs)}
    skipped: dict[str, str] = {}
    for name in peers:
        try:
            calls[name] = PEERS[name](model, build, args, kwargs, threads)
        except Unavailable as error:
            skipped[name] = str(error)
    times = interleaved(calls, rounds, warmup)
    return {
        "model": model,
        "symbols": symbols,
        "threads": threads,
        "rounds": rounds,
        "median_s": {name: median(seconds) for name, seconds in times.items()},
        "best_s": {name: min(seconds) for name, seconds in times.items()},
        "skipped": skipped,
    }
