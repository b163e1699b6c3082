"""`graphc demo`"""

from __future__ import annotations

from pathlib import Path

import click

from cli.inspect import show
from cli.options import BuildOptions
from cli.plans import PlanFolder
from cli.render import print_build
from cli.run import execute, print_run


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-plan"),
    show_default=True,
    help="Folder of the plan.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of the executor [all cores].")
def demo(output: Path, threads: int | None) -> None:
    """Build, run and inspect the built-in model.

    The second time every kernel comes from the cache and nothing is compiled.
    """
    heading(f"graphc build demo -o {output}")
    report = BuildOptions().build("demo", output)
    print_build(report, output)

    values = "ids=randint:0:1024:1x128"
    heading(f"graphc run {output} --input {values} --iters 20")
    result = execute(output, (values,), threads=threads, iters=20, warmup=3)
    result["outputs"] = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in result["outputs"].items()
    }
    print_run(result, report.compile, [])

    folder = PlanFolder.open(output)
    for view in ("summary", "passes", "memory"):
        heading(f"graphc inspect {output} {view}")
        show(folder, view)

    click.echo()
    if report.compile.compiled:
        click.echo("Run it again: everything will come from the cache.")
    else:
        click.echo("Nothing was compiled: every kernel came from the cache.")


def heading(command: str) -> None:
    click.echo(f"\n$ {command}")
