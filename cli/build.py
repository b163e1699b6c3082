"""`graphc build MODEL -o plan/`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import BuildOptions, build_options, decoder_options
from cli.render import print_build, print_json
from graphc.errors import UsageError


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
@click.option(
    "--generate",
    is_flag=True,
    help="Build a language model with its states: prefill and decode, for `graphc generate`.",
)
@decoder_options
@click.option(
    "--drafts", type=click.IntRange(2), metavar="K",
    help="Also a phase that scores up to K drafted tokens at once.",
)  # fmt: skip
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
    generate: bool,
    chunk: int | None,
    batch: int | None,
    drafts: int | None,
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
    build = BuildOptions(**options)
    if generate:
        report = build.build_decoder(
            model, output, chunk=chunk, batch=batch, drafts=drafts, verify=verify,
            dump_passes=dump_passes, quiet=as_json,
        )  # fmt: skip
    elif chunk or batch or drafts:
        raise UsageError("expected --generate with --chunk, --batch and --drafts")
    else:
        report = build.build(model, output, verify=verify, dump_passes=dump_passes, quiet=as_json)
    if as_json:
        print_json({"plan": str(output), "report": report.to_dict()})
    else:
        print_build(report, output)
