"""What the commands print: tables, the lifetime chart, sizes and times, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphc.report import (
    BuildReport,
    CompileRecord,
    Interval,
    MemoryRecord,
    PassRecord,
    TargetRecord,
    matches_by_rule,
)

# rich is imported where it draws: `graphc run` counts its milliseconds from process start
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: columns of Steps and rows of buffers in a lifetime chart
CHART_COLUMNS = 60
CHART_ROWS = 24

_LEVELS = " ▁▂▃▄▅▆▇█"


def console() -> Console:
    """Standard output: as wide as the terminal, and wide enough to cut nothing in a file."""
    from rich.console import Console

    return Console(
        soft_wrap=False,
        highlight=False,
        width=None if sys.stdout.isatty() else 160,
    )


def print_json(data: object) -> None:
    """One indented JSON document; not-a-number and infinity as null."""
    click.echo(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(data: object) -> object:
    if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))):
        return None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def size(nbytes: int) -> str:
    """Bytes for people: "512 B", "1.5 KiB", "96.0 MiB"."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people: "12.3 µs", "4.56 ms", "1.23 s"."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: str = "") -> Table:
    """A plain table; `numbers` has an "r" at the place of each column aligned right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        right = numbers[index : index + 1] == "r"
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: str = ""
) -> None:
    """Prints a table, without the blanks that fill its last column."""
    out = console()
    with out.capture() as captured:
        out.print(table(columns, rows, numbers))
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_build(report: BuildReport, output: Path) -> None:
    """The end of a build: what was made, from what, and what didn't go natively."""
    click.echo(f"{report.model} -> {output}  ({duration(report.seconds)})")
    stages = ", ".join(f"{stage.name} {duration(stage.seconds)}" for stage in report.stages)
    click.echo(f"  stages    {stages}")
    for bucket in report.buckets:
        click.echo(f"  bucket    {bucket_line(bucket.phase, bucket.name, bucket.limits)}")
    for record in report.targets:
        click.echo(f"  kernels   {built_line(record)}")
    for memory in report.memory:
        click.echo(f"  arena     {memory.bucket}: {memory_line(memory)}")
    click.echo(f"  weights   {report.weights} in {size(report.weights_bytes)}")
    if report.tuning:
        click.echo(f"  tuned     {tuning_line(report)}")
    for note in report.notes:
        click.echo(f"  note      {note}")
    click.echo(f"  fallbacks {fallback_line(report)}")


def bucket_line(phase: str, name: str, limits: dict[str, int]) -> str:
    text = ", ".join(f"{symbol} <= {limit}" for symbol, limit in limits.items())
    return f"{phase} {name} ({text or 'fixed lengths'})"


def compiled(done: CompileRecord | TargetRecord) -> str:
    shared = f", {done.remote_hits} of them from the shared tier" if done.remote_hits else ""
    if not done.compiled:
        return f"nothing compiled: all {done.units} units from cache{shared}"
    return f"compiled {done.compiled} of {done.units} units, {done.hits} from cache{shared}"


def built_line(record: TargetRecord) -> str:
    """What a target took to build."""
    text = compiled(record)
    return f"{text}{f' in {duration(record.seconds)}' * bool(record.compiled)} ({record.name})"


def memory_line(memory: MemoryRecord) -> str:
    ratio = memory.arena_bytes / memory.lower_bound if memory.lower_bound else 1.0
    return (
        f"{size(memory.arena_bytes)}, {ratio:.3f} x the lower bound, "
        f"{size(memory.naive_bytes)} without reuse"
    )


def tuning_line(report: BuildReport) -> str:
    """What `--tune` decided, in a few words."""
    records = report.tuning
    changed = sum(record.winner != record.default for record in records)
    cached = sum(record.cached for record in records)
    return (
        f"{len(records)} choice{'s' * (len(records) != 1)}, {changed} unlike the default, "
        f"{cached} from cache"
    )


def fallback_line(report: BuildReport) -> str:
    counts: dict[str, int] = {}
    for fallback in report.fallbacks:
        counts[fallback.target] = counts.get(fallback.target, 0) + 1
    if not counts:
        return "none: the plan runs without torch"
    return ", ".join(f"{target} x{count}" for target, count in counts.items())


def print_passes(passes: Sequence[PassRecord]) -> None:
    """One line a pass, then its matches by rule and each refusal with reason and source line."""
    verified = any(record.max_abs is not None for record in passes)
    columns = ["pass", "phase", "operators", "matches", "refused", "launches", "traffic", "weights",
               "time"]  # fmt: skip
    rows = [
        [
            record.name,
            record.phase,
            f"{record.nodes_before} -> {record.nodes_after}",
            len(record.matches) or "",
            len(record.refusals) or "",
            f"-{record.launches_removed}" if record.launches_removed else "",
            f"-{size(record.bytes_removed)}" if record.bytes_removed else "",
            _less(record.weight_bytes_removed),
            duration(record.seconds),
            *([_error(record.max_abs), _error(record.max_rel)] if verified else []),
        ]
        for record in passes
    ]
    print_table([*columns, *(["max abs", "max rel"] if verified else [])], rows, "llrrrrrrrrr")
    for record in passes:
        if not record.matches and not record.refusals:
            continue
        click.echo(f"\n{record.name} ({record.phase})")
        for rule, count in matches_by_rule(record.matches).items():
            places = [match.where for match in record.matches if match.rule == rule and match.where]
            where = f"  at {places_text(places)}" if places else ""
            click.echo(f"  {rule}: {count}{where}")
            for match in record.matches:
                if match.rule == rule and match.detail:
                    click.echo(f"    {match.node}: {match.detail}")
        for refusal in record.refusals:
            where = f"  at {refusal.where}" if refusal.where else ""
            click.echo(f"  refused {refusal.rule} {refusal.node}: {refusal.reason}{where}")


def _less(nbytes: int) -> str:
    return "" if not nbytes else f"-{size(nbytes)}" if nbytes > 0 else f"+{size(-nbytes)}"


def places_text(places: Sequence[str], most: int = 3) -> str:
    """ "net.py:12 (4 times), net.py:30", the first `most` different ones."""
    counts: dict[str, int] = {}
    for place in places:
        counts[place] = counts.get(place, 0) + 1
    shown = [f"{p} ({n} times)" if n > 1 else p for p, n in list(counts.items())[:most]]
    more = [f"and {len(counts) - most} more"] if len(counts) > most else []
    return ", ".join([*shown, *more])


def range_text(minimum: int, maximum: int) -> str:
    """ "1 to 2048", "2 and above"."""
    # half of int64's range: a product with such a length would overflow; no length is so large
    return f"{minimum} and above" if maximum >= 2**61 else f"{minimum} to {maximum}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def lifetime_chart(memory: MemoryRecord) -> list[str]:
    """The arena over the Steps: bytes in use as a skyline, then one row a buffer, largest first."""
    steps = max(memory.steps, 1)
    columns = min(CHART_COLUMNS, steps)
    spans = [(c * steps // columns, (c + 1) * steps // columns - 1) for c in range(columns)]
    used = [_live(memory.intervals, first, last) for first, last in spans]
    top = max(memory.arena_bytes, 1)
    skyline = "".join(_LEVELS[min(8, -(-8 * live // top))] for live in used)
    lines = [f"{'in use':>34} {size(max(used, default=0)):>10} |{skyline}|"]
    ordered = sorted(memory.intervals, key=lambda i: (-i.nbytes, i.first))
    for interval in ordered[:CHART_ROWS]:
        bar = "".join(
            "█" if interval.first <= last and interval.last >= first else " "
            for first, last in spans
        )
        lines.append(f"{interval.name[-34:]:>34} {size(interval.nbytes):>10} |{bar}|")
    rest = ordered[CHART_ROWS:]
    if rest:
        lines.append(
            f"{f'{len(rest)} smaller buffers':>34} {size(sum(i.nbytes for i in rest)):>10} |"
            + " " * columns
            + "|"
        )
    lines.append(f"{'step':>34} {'':>10}  0{steps - 1:>{max(columns - 1, 1)}}")
    return lines


def _live(intervals: Sequence[Interval], first: int, last: int) -> int:
    """The most bytes alive at one Step of [first, last]."""
    starts = {first} | {i.first for i in intervals if first <= i.first <= last}
    return max(sum(i.nbytes for i in intervals if i.first <= s <= i.last) for s in starts)
