"""`graphc bundle PLAN -o FILE`: a plan as one file, and back."""

from __future__ import annotations

from pathlib import Path

import click

from cli.render import print_json, size
from graphc.errors import UsageError
from graphc.plan_bundle import extract, verify_bundle, write_bundle


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="PATH",
    help="The file to write; with --extract, the new folder.",
)  # fmt: skip
@click.option("--extract", "extracting", is_flag=True, help="PLAN is a bundle: unpack it.")
@click.option("--verify", is_flag=True, help="PLAN is a bundle: check it, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bundle(plan: Path, output: Path | None, extracting: bool, verify: bool, as_json: bool) -> None:
    """Put PLAN into one file: libraries, weights, graph, report and sources.

    The same plan gives the same bytes. `graphc run`, `generate`, `inspect` and graphc.load take the
    file as it is: it is unpacked once, into the cache folder, and checked. Libraries are code: use
    only bundles that you would run.

    \b
    graphc bundle plan/ -o model.graphc
    graphc bundle --verify model.graphc
    graphc bundle --extract model.graphc -o plan/
    """
    if extracting and verify:
        raise UsageError("expected --extract or --verify, found both")
    if verify != (output is None):
        raise UsageError(
            "expected no -o with --verify" if verify else "expected -o, where to write"
        )
    if output is None:
        listed, said = verify_bundle(plan), f"{plan} is sound"
    elif extracting:
        listed, said = extract(plan, output), f"{plan} -> {output}"
    else:
        if output.is_dir():
            raise UsageError("expected a file to write, found a folder", where=str(output))
        listed, said = write_bundle(plan, output), f"{plan} -> {output}"
    if as_json:
        print_json(
            {
                "plan": str(plan),
                "output": None if output is None else str(output),
                "digest": listed.digest,
                "files": len(listed.files) + 1,
                "nbytes": listed.nbytes,
            }
        )
    else:
        click.echo(f"{said}  ({len(listed.files) + 1} files, {size(listed.nbytes)})")
