"""`graphc verify MODEL [--bisect | --quality]`"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from cli.options import BuildOptions, build_options
from cli.quality import Budgets, quality_options
from cli.quality import quality as judged
from cli.render import print_json, print_passes
from graphc.errors import NumericsError, UsageError
from graphc.report import BisectRecord, PassRecord


@click.command()
@click.argument("model")
@build_options
@click.option("--bisect", is_flag=True, help="Name the first pass and node that break it.")
@click.option("--rtol", type=float, default=1e-4, show_default=True, help="Relative tolerance.")
@click.option("--atol", type=float, default=1e-5, show_default=True, help="Absolute tolerance.")
@quality_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    model: str,
    bisect: bool,
    rtol: float,
    atol: float,
    quality: bool,
    text: Path | None,
    tokens: int | None,
    max_perplexity_change: float | None,
    min_mass: float | None,
    max_recall_drop: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the graph in eager torch before and after each pass, and compare.

    A pass fails if an output differs by more than --atol, and by more than --rtol of the output's
    largest value. Exit code 5 if one does.

    With --quality: run a language model plain and narrowed by each --quant alone and all together,
    and report perplexity, the indexers' choice of keys and every layer's error (docs/quality.md).
    """
    build = BuildOptions(**options)
    budgets = Budgets(max_perplexity_change, min_mass, max_recall_drop)
    if quality:
        if bisect:
            raise UsageError("expected either --bisect or --quality")
        judged(model, build, text, tokens, budgets, as_json)
        return
    if text is not None or tokens is not None or budgets != Budgets():
        raise UsageError("expected --quality with --text, --tokens and budgets")
    if bisect:
        found = build.bisect(model, rtol=rtol, atol=atol)
        if as_json:
            print_json({"ok": found is None, "bisect": msgspec.to_builtins(found)})
        elif found is None:
            click.echo("every pass is within the tolerance")
        else:
            print_bisect(found)
        if found is not None:
            raise failure(found.pass_name, found.max_abs, found.max_rel, rtol, atol)
        return
    with tempfile.TemporaryDirectory(prefix="graphc-verify-") as folder:
        report = build.build(model, Path(folder) / "plan", verify=True, quiet=as_json)
    worst = failing(report.passes, rtol, atol)
    if as_json:
        print_json(
            {
                "ok": worst is None,
                "rtol": rtol,
                "atol": atol,
                "passes": msgspec.to_builtins(report.passes),
            }
        )
    else:
        print_passes(report.passes)
        if worst is None:
            click.echo(f"\nevery pass is within rtol {rtol:g}, atol {atol:g}")
    if worst is not None:
        raise failure(worst.name, worst.max_abs or 0.0, worst.max_rel or 0.0, rtol, atol)


def failing(passes: Sequence[PassRecord], rtol: float, atol: float) -> PassRecord | None:
    """The first pass out of tolerance; not-a-number counts as out."""
    for record in passes:
        if record.max_abs is None or record.max_rel is None:
            continue
        if not (record.max_abs <= atol or record.max_rel <= rtol):
            return record
    return None


def failure(name: str, max_abs: float, max_rel: float, rtol: float, atol: float) -> NumericsError:
    return NumericsError(
        f"expected pass {name} within rtol {rtol:g}, atol {atol:g}, "
        f"found max abs {max_abs:.3g}, max rel {max_rel:.3g}",
        hint=f"leave it out with --disable-pass {name}; find the node with --bisect",
    )


def print_bisect(found: BisectRecord) -> None:
    click.echo(f"first pass out of tolerance  {found.pass_name}")
    click.echo(f"first node                   {found.node}")
    if found.where:
        click.echo(f"in your model                {found.where}")
    click.echo(f"output                       {found.output}")
    click.echo(f"max abs, max rel             {found.max_abs:.3g}, {found.max_rel:.3g}")
    if found.expected is not None:
        click.echo(f"worst element                expected {found.expected}, found {found.found}")
