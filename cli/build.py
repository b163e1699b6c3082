"""`graphc build MODEL -o plan/`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import BuildOptions, build_options
from cli.render import print_build, print_json


@click.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("plan"),
    show_default=True,
    help="Folder of the plan; replaced if it holds one.",
)
@build_options
@click.option("--verify", is_flag=True, help="Run the graph before and after each pass, compare.")
@click.option(
    "--dump-passes",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the graph after each pass as a numbered text file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def build(
    model: str,
    output: Path,
    verify: bool,
    dump_passes: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile MODEL into a plan.

    MODEL is `pkg.mod:factory`, `file.py:factory`, a `.pt2` or `.onnx` file, the folder of a
    Hugging Face checkpoint, or `demo`. A factory returns an nn.Module, or (module, args) or
    (module, args, kwargs) with example inputs.
    """
    report = BuildOptions(**options).build(
        model, output, verify=verify, dump_passes=dump_passes, quiet=as_json
    )
    if as_json:
        print_json({"plan": str(output), "report": report.to_dict()})
    else:
        print_build(report, output)
