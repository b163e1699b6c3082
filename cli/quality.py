"""`graphc verify MODEL --quality`: what narrowing costs, as tables and against budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cli.options import BuildOptions, check_model
from cli.progress import progress
from cli.render import print_json, print_table
from cli.targets import must_run
from cli.tokens import Tokens
from graphc.errors import NumericsError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from graphc.quality.report import BucketQuality, QualityReport, Stretch
    from graphc.runtime.decoder import Decoder

#: rows of a table on a terminal; `--json` has all
ROWS = 12
#: keys that no budget is for
CONTROLS = ("plain", "bfloat16")


@dataclass(frozen=True)
class Budgets:
    """What may be lost, in percent (and points of recall); None: anything."""

    perplexity: float | None = None
    kept: float | None = None
    recall: float | None = None

    def exceeded(self, report: QualityReport) -> list[str]:
        """What goes beyond, in words."""
        return [text for bucket in report.buckets for text in self._of(bucket)]

    def _of(self, bucket: BucketQuality) -> Iterator[str]:
        for found in bucket.perplexity:
            if self.perplexity is not None and not found.change <= self.perplexity:
                yield f"{found.quant}: perplexity {found.change:+.3f} % at {bucket.bucket}"
        for rank in bucket.ranking:
            if rank.form in CONTROLS:
                continue
            where = f"{rank.form}: {rank.layer}"
            if self.kept is not None and not rank.kept >= self.kept:
                yield f"{where} keeps {rank.kept:.3f} % of the attention weight at {bucket.bucket}"
            if self.recall is not None and not rank.drop <= self.recall:
                yield f"{where} drops {rank.drop:.3f} points of recall at {bucket.bucket}"


def quality(
    model: str, build: BuildOptions, text: Path | None, tokens: int | None, budgets: Budgets,
    as_json: bool,
) -> None:  # fmt: skip
    """Prints the report. Raises NumericsError: a budget is exceeded."""
    if build.inputs or build.dynamic or build.phase:
        raise UsageError(
            "expected none of --input, --dynamic and --phase: a decoder's inputs and phases are "
            "known",
            hint="--bucket says how long sequences are",
        )
    if text is None and model != "demo":
        raise UsageError(
            "expected a text to judge on", hint="--text FILE; demo has a text that was held out"
        )
    check_model(model)
    report = run(model, build, text, tokens, quiet=as_json)
    exceeded = budgets.exceeded(report)
    if as_json:
        print_json({"ok": not exceeded, "quality": msgspec.to_builtins(report)})
    else:
        print_quality(report)
    if exceeded:
        more = f" and {len(exceeded) - 3} more" if len(exceeded) > 3 else ""
        raise NumericsError(
            f"expected what is lost within the budgets, found {'; '.join(exceeded[:3])}{more}",
            hint="another form loses less: index=mxfp8+rescore, kv=fp8 without rope",
        )


def run(
    model: str, build: BuildOptions, text: Path | None, tokens: int | None, *, quiet: bool
) -> QualityReport:
    """Builds and judges, with progress on a terminal."""
    from graphc.api import Options
    from graphc.quality import judge

    def told(folder: Path, decoder: Decoder) -> tuple[NDArray[np.int64], str]:
        return read_text(text, folder, decoder)

    must_run(build.target)
    question = judge.Question(model, build.dtype, build.quant, tokens or judge.TOKENS)
    with progress(quiet) as show, tempfile.TemporaryDirectory(prefix="graphc-quality-") as folder:
        options = Options(
            shapes=build.shapes, buckets=build.buckets, disable_pass=build.disable_pass,
            pass_options=build.pass_options, require_cached=build.require_cached, jobs=build.jobs,
            target=build.target, progress=show, tune=build.tune,
            precision=build.precision,
        )  # fmt: skip
        return judge.judge(question, options, Path(folder), told)


def read_text(text: Path | None, folder: Path, decoder: Decoder) -> tuple[NDArray[np.int64], str]:
    """Tokens of a file, or of what the embedded model was not trained on; and their source."""
    import numpy as np

    if text is None:
        from graphc.models.embedded.text import corpus

        begin = decoder.facts.begin
        held = corpus()[1]
        found = [token for content in held for token in (*begin, *content)]
        return np.array(found, np.int64), f"{len(held)} held-out files of Python's library"
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected a text in UTF-8: {error}", where=str(text)) from error
    return np.array(Tokens(folder, decoder.facts).encode(content), np.int64), str(text)


# Tables


def print_quality(report: QualityReport) -> None:
    """Perplexity, the choice of keys, and the worst layers, for each bucket."""
    click.echo(f"{report.model} on {report.text}")
    for note in report.notes:
        click.echo(f"note: {note}")
    for bucket in report.buckets:
        click.echo(f"\n{bucket.bucket}: {bucket.windows} sequences of {bucket.length} tokens\n")
        print_table(
            ("narrowed", "perplexity", "change %", "standard error"), perplexities(bucket), "lrrr"
        )
        if bucket.ranking:
            click.echo(
                f"\nchoice of {report.count} keys, percent of that by {report.dtype} keys; "
                f"relevant: the {report.relevant} of most attention weight\n"
            )
            print_table(RANKS, ranks(bucket), "llrrrrrr")
        click.echo("\nrelative rms error of results, percent; the worst\n")
        print_table(("narrowed", "part", "all", "by position"), errors(bucket)[:ROWS], "llrl")


RANKS = ("layer", "keys", "overlap", "predicted", "mass", "kept", "recall", "dropped")


def perplexities(bucket: BucketQuality) -> list[tuple[str, ...]]:
    return [
        (r.quant, f"{r.perplexity:.4f}", f"{r.change:+.4f}", f"{r.error:.4f}")
        for r in bucket.perplexity
    ]


def ranks(bucket: BucketQuality) -> list[tuple[str, ...]]:
    """The worst layers first, each with all its forms."""
    lost: dict[str, float] = {}
    for r in bucket.ranking:
        lost[r.layer] = max(lost.get(r.layer, 0.0), 100 - r.kept)
    ordered = sorted(bucket.ranking, key=lambda r: -lost[r.layer])
    return [
        (
            r.layer, r.form, f"{r.overlap:.3f}", f"{r.predicted:.3f}", f"{r.mass:.3f}",
            f"{r.kept:.3f} ± {r.kept_error:.3f}", f"{r.recall:.3f}",
            f"{r.drop:+.3f} ± {r.drop_error:.3f}",
        )
        for r in ordered
    ]  # fmt: skip


def errors(bucket: BucketQuality) -> list[tuple[str, ...]]:
    return [(r.quant, r.part, f"{r.error:.3f}", positions(r.by_position)) for r in bucket.errors]


def positions(found: Sequence[Stretch]) -> str:
    """ "0-255 1.2, 256-511 1.4"."""
    return ", ".join(f"{s.first}-{s.last - 1} {s.value:.3g}" for s in found)


def quality_options(function: Any) -> Any:
    """Adds the options of `--quality` to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = [
    click.option("--quality", is_flag=True, help="Judge what --quant costs; default: a set."),
    click.option(
        "--text", type=click.Path(path_type=Path, dir_okay=False), help="Text to judge on, UTF-8."
    ),
    click.option("--tokens", type=click.IntRange(1), help="Of the text, per bucket [65536]."),
    click.option(
        "--max-perplexity-change", type=float, metavar="PCT", help="Exit 5 if it is more."
    ),
    click.option(
        "--min-mass", type=float, metavar="PCT", help="Exit 5 if less attention weight is kept."
    ),
    click.option(
        "--max-recall-drop", type=float, metavar="POINTS",
        help="Exit 5 if more relevant keys are lost.",
    ),
]  # fmt: skip
