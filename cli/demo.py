"""`graphc demo`"""

from __future__ import annotations

from pathlib import Path

import click

from cli.generate import print_rates, stream
from cli.inspect import show
from cli.options import BuildOptions
from cli.plans import PlanFolder
from cli.render import print_build

PROMPT = "    def test_copy(self):\n        self."
TOKENS, TEMPERATURE, TOP_P, SEED = 240, 0.8, 0.95, 1


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
    """Build, run and inspect the built-in language model: a small hybrid of linear and sparse
    attention over bytes.

    The second time every kernel comes from the cache and nothing is compiled.
    """
    from graphc.runtime.sampling import Sampler

    heading(f"graphc build demo --generate -o {output}")
    report = BuildOptions().build_decoder("demo", output)
    print_build(report, output)

    heading(
        f"graphc generate {output} --prompt {PROMPT!r} --max-new-tokens {TOKENS} "
        f"--temperature {TEMPERATURE} --top-p {TOP_P} --seed {SEED}"
    )
    click.echo(PROMPT, nl=False)
    sampler = Sampler(TEMPERATURE, top_p=TOP_P, seed=SEED)
    print_rates(stream(output, PROMPT, max_new_tokens=TOKENS, sampler=sampler, threads=threads))

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
