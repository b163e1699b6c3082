"""`graphc inspect PLAN [VIEW]`"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cli.fusion import fusion, print_fusion
from cli.inputs import make_lengths
from cli.plans import PlanFolder, unbundled
from cli.precision import print_precision, print_states
from cli.render import (
    bucket_line,
    built_line,
    duration,
    fallback_line,
    lifetime_chart,
    memory_line,
    places_text,
    print_json,
    print_passes,
    print_table,
    range_text,
    size,
    tuning_line,
)
from cli.roofline import print_roofline, roofline
from cli.targets import print_targets, targets
from graphc.report import TuningRecord

VIEWS = (
    "summary", "passes", "fusion", "graph", "memory", "kernels", "buckets", "fallbacks", "tuning",
    "roofline", "precision",
)  # fmt: skip


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("view", type=click.Choice(VIEWS), default="summary")
@click.option("--target", default="", metavar="CPU", help="Of a plan for several CPUs, this one.")
@click.option("--kernel", metavar="NAME", help="Print the generated source of a kernel.")
@click.option("--roofline", "roofline_view", is_flag=True, help="The view `roofline`.")
@click.option("--length", "lengths", multiple=True, metavar="T=128", help="Roofline: a length.")
@click.option("--threads", type=click.IntRange(1), help="Roofline: threads [all cores].")
@click.option(
    "--shapes",
    type=click.Path(path_type=Path),
    help="Roofline: file with default lengths [./shapes.yaml, else built in].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the view as JSON.")
def inspect(
    plan: Path,
    view: str,
    target: str,
    kernel: str | None,
    roofline_view: bool,
    lengths: tuple[str, ...],
    threads: int | None,
    shapes: Path | None,
    as_json: bool,
) -> None:
    """Show what a plan holds and how it came about.

    \b
    summary    model, inputs and outputs, sizes, what ran from the cache
    passes     each pass: matches and refusals with reasons and lines of your model
    fusion     fusions with counts; launches and bytes by kind of layer; refusals
    graph      the graph after all passes
    memory     states, arena, lower bound, and which buffer lives when
    kernels    each kernel with its uses; --kernel NAME prints its source
    buckets    the programs of the plan and their limits
    fallbacks  what runs through torch, and why
    tuning     what --tune measured, and what won
    precision  formats and bytes by class of tensors, and the policy in force
    roofline   the least time of each step at the machine's peaks (graphc doctor --calibrate)
    """
    folder = PlanFolder.open(unbundled(plan), target)
    if roofline_view or view == "roofline":
        data = roofline(folder, make_lengths(folder.plan, lengths, shapes), threads)
        print_json(data) if as_json else print_roofline(data)
        return
    if kernel is not None:
        name, source = folder.source(kernel)
        if as_json:
            print_json({"file": name, "source": source})
        else:
            click.echo(source, nl=not source.endswith("\n"))
    elif as_json:
        print_json(as_data(folder, view))
    else:
        show(folder, view)


def show(folder: PlanFolder, view: str) -> None:
    """Prints one view as text."""
    _TEXT[view](folder)


def as_data(folder: PlanFolder, view: str) -> dict[str, object]:
    """The `--json` form of a view: parts of the report as they are, plus the plan's tables."""
    plan, report = folder.plan, folder.report
    if view == "graph":
        return {"graph": folder.graph_text()}
    if view == "fusion":
        return {"fusion": fusion(report)}
    if view == "summary":
        summary = {k: v for k, v in report.to_dict().items() if k not in (*VIEWS, "layers")}
        tables = {
            "inputs": plan.inputs,
            "outputs": [output.tensor for output in plan.outputs],
            "states": plan.states,
            "machine": plan.machine,
            "targets": targets(folder),
            "uses_torch": plan.uses_torch,
        }
        return {**summary, **{k: msgspec.to_builtins(v) for k, v in tables.items()}}
    return {view: msgspec.to_builtins(getattr(report, view))}


def _summary(folder: PlanFolder) -> None:
    plan, report = folder.plan, folder.report
    click.echo(f"model      {report.model} ({report.source}), graphc {plan.version}")
    machine = plan.machine
    click.echo(f"machine    {machine.architecture}, {machine.isa}, {report.compile.compiler}")
    print_targets(folder, "target     ")
    for symbol in report.symbols:
        click.echo(f"symbol     {symbol.name}: {range_text(symbol.minimum, symbol.maximum)}")
    for kind, tensors in (
        ("input", plan.inputs),
        ("output", [output.tensor for output in plan.outputs if output.tensor]),
        ("state", [state.tensor for state in plan.states]),
    ):
        for tensor in tensors:
            click.echo(f"{kind:<10} {tensor.name}: {tensor.dtype}[{', '.join(tensor.text)}]")
    click.echo(f"weights    {report.weights} in {size(report.weights_bytes)}")
    if report.passes:
        first = report.passes[0].nodes_before
        click.echo(f"operators  {first} captured, {report.passes[-1].nodes_after} after passes")
    for bucket in report.buckets:
        click.echo(
            f"bucket     {bucket_line(bucket.phase, bucket.name, bucket.limits)}: "
            f"{bucket.steps} steps, {bucket.kernels} kernels, {bucket.fallbacks} fallbacks"
        )
    for memory in report.memory:
        click.echo(f"arena      {memory.phase} {memory.bucket}: {memory_line(memory)}")
    for record in report.targets:
        click.echo(f"kernels    {built_line(record)}")
    if report.tuning:
        click.echo(f"tuned      {tuning_line(report)}")
    stages = ", ".join(f"{stage.name} {duration(stage.seconds)}" for stage in report.stages)
    click.echo(f"built in   {duration(report.seconds)}: {stages}")
    for note in report.notes:
        click.echo(f"note       {note}")
    click.echo(f"fallbacks  {fallback_line(report)}")


def _passes(folder: PlanFolder) -> None:
    print_passes(folder.report.passes)


def _fusion(folder: PlanFolder) -> None:
    print_fusion(folder.report)


def _precision(folder: PlanFolder) -> None:
    print_precision(folder.report.precision)


def _graph(folder: PlanFolder) -> None:
    click.echo(folder.graph_text(), nl=False)


def _memory(folder: PlanFolder) -> None:
    print_states(folder.report.precision)
    for index, memory in enumerate(folder.report.memory):
        click.echo(("\n" if index else "") + f"{memory.phase} {memory.bucket}")
        click.echo(f"  arena        {size(memory.arena_bytes):>10}")
        click.echo(f"  lower bound  {size(memory.lower_bound):>10}  most bytes alive at one step")
        click.echo(f"  no reuse     {size(memory.naive_bytes):>10}  sum of all buffers\n")
        click.echo("\n".join(lifetime_chart(memory)))


def _kernels(folder: PlanFolder) -> None:
    rows = [
        [
            kernel.symbol,
            kernel.steps,
            "cache" if kernel.cached else duration(kernel.seconds),
            kernel.label,
            places_text(kernel.where),
        ]
        for kernel in folder.report.kernels
    ]
    print_table(["kernel", "steps", "compiled", "computes", "at"], rows, "lrrll")


def _buckets(folder: PlanFolder) -> None:
    rows = [
        [
            bucket.phase,
            bucket.name,
            ", ".join(f"{name} <= {limit}" for name, limit in bucket.limits.items()),
            bucket.steps,
            bucket.kernels,
            bucket.fallbacks,
        ]
        for bucket in folder.report.buckets
    ]
    columns = ["phase", "bucket", "limits", "steps", "kernels", "fallbacks"]
    print_table(columns, rows, "lllrrr")


def _fallbacks(folder: PlanFolder) -> None:
    fallbacks = folder.report.fallbacks
    if not fallbacks:
        click.echo(fallback_line(folder.report))
        return
    rows = [[f.target, f.node, f.phase, f.reason, f.where] for f in fallbacks]
    print_table(["operator", "node", "phase", "reason", "at"], rows)


def _tuning(folder: PlanFolder) -> None:
    records = folder.report.tuning
    if not records:
        click.echo("nothing was measured: defaults everywhere (graphc build --tune)")
        return
    rows = [
        [
            record.choice,
            record.sizes,
            ", ".join(f"{name} {duration(s)}" for name, s in record.seconds.items()),
            record.winner + ("" if record.winner != record.default else " (default)"),
            _gain(record),
            "cache" if record.cached else "this build",
        ]
        for record in records
    ]
    columns = ["choice", "sizes", "tried", "winner", "saves", "measured by"]
    print_table(columns, rows, "llllr")


def _gain(record: TuningRecord) -> str:
    default, winner = (record.seconds[name] for name in (record.default, record.winner))
    return f"{100 * (1 - winner / default):.0f}%" if winner < default else ""


_TEXT = {
    "summary": _summary,
    "passes": _passes,
    "fusion": _fusion,
    "graph": _graph,
    "memory": _memory,
    "kernels": _kernels,
    "buckets": _buckets,
    "fallbacks": _fallbacks,
    "tuning": _tuning,
    "precision": _precision,
}
