"""`graphc inspect PLAN fusion`: every fusion with its count, launches and intermediate bytes by
kind of layer, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from cli.render import bucket_line, print_table, size
from graphc.report import BuildReport, LayerRecord, PassRecord, matches_by_rule


def fusion(report: BuildReport) -> dict[str, Any]:
    """What `--json` prints: `operators` in the model from the start, `passes` that matched or
    refused, `layers`."""
    passes = [record for record in report.passes if record.matches or record.refusals]
    return {
        "operators": captured(report.layers),
        "passes": [_pass_data(record) for record in passes],
        "layers": [msgspec.to_builtins(record) for record in report.layers],
    }


def captured(layers: Sequence[LayerRecord]) -> list[dict[str, Any]]:
    """Operators of graphc in the model as it was captured, and among the Steps, by program."""
    rows: dict[tuple[str, int], list[int]] = {}
    programs = _programs(layers)
    for number, records in enumerate(programs):
        for record in records:
            for place, counts in enumerate((record.captured, record.operators)):
                for name, count in counts.items():
                    rows.setdefault((name, number), [0, 0])[place] += count
    return [
        {
            "operator": name,
            "phase": programs[number][0].phase,
            "bucket": programs[number][0].bucket,
            "limits": programs[number][0].limits,
            "captured": old,
            "steps": new,
        }
        for (name, number), (old, new) in sorted(rows.items())
    ]


def _programs(layers: Sequence[LayerRecord]) -> list[list[LayerRecord]]:
    """The records of each program: a bucket has several where keys are chosen."""
    found: dict[tuple[object, ...], list[LayerRecord]] = {}
    for record in layers:
        key = (record.phase, record.bucket, tuple(record.limits.items()))
        found.setdefault(key, []).append(record)
    return list(found.values())


def _pass_data(record: PassRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "kind": record.kind,
        "phase": record.phase,
        "rules": matches_by_rule(record.matches),
        "launches_removed": record.launches_removed,
        "bytes_removed": record.bytes_removed,
        "reads_removed": record.reads_removed,
        "passes_removed_per_site": passes_per_site(record),
        "refusals": msgspec.to_builtins(record.refusals),
    }


def passes_per_site(record: PassRecord) -> float | None:
    """How many times less a site's result is read or written: 2.0 where a value of its size is no
    longer written by one operator and read by the next."""
    total = sum(match.nbytes for match in record.matches)
    return (record.bytes_removed + record.reads_removed) / total if total else None


def print_fusion(report: BuildReport) -> None:
    """The three tables."""
    _print_passes([r for r in report.passes if r.matches and r.kind != "simplify"])
    _print_operators(report.layers)
    _print_layers(report.layers)
    _print_refusals(report.passes)


def _print_passes(records: Sequence[PassRecord]) -> None:
    rows = []
    for record in records:
        sites = passes_per_site(record)
        rows.append(
            [
                record.name,
                record.phase,
                ", ".join(f"{n} {rule}" for rule, n in matches_by_rule(record.matches).items()),
                -record.launches_removed or "",
                _signed(-record.bytes_removed - record.reads_removed),
                "" if sites is None else f"{-sites:+.1f}",
            ]
        )
    columns = ["fusion", "phase", "sites", "launches", "traffic", "passes a site"]
    print_table(columns, rows, "lllrrr")


def _print_operators(layers: Sequence[LayerRecord]) -> None:
    """A line an operator: how many, where that is the same in all programs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in captured(layers):
        found.setdefault(row["operator"], []).append(row)
    rows = []
    for name, counts in found.items():
        cells = []
        for key in ("captured", "steps"):
            if len({row[key] for row in counts}) == 1:
                cells.append(str(counts[0][key] or ""))
            else:
                each = dict.fromkeys(f"{r[key]} {r['phase']} {r['bucket']}" for r in counts)
                cells.append(", ".join(each))
        rows.append([name, *cells])
    if rows:
        click.echo()
        print_table(["operator", "captured", "in the plan"], rows, "lrr")


def _print_layers(layers: Sequence[LayerRecord]) -> None:
    for own in _programs(layers):
        line = bucket_line(own[0].phase, own[0].bucket, own[0].limits)
        click.echo(f"\n{line}: the model written out in torch -> this plan")
        rows = [
            [
                record.kind,
                record.modules,
                f"{record.launches_before} -> {record.launches_after}",
                f"{size(record.bytes_before)} -> {size(record.bytes_after)}",
                f"{record.tensor_before or '-'} -> {record.tensor_after or '-'}",
            ]
            for record in own
        ]
        columns = ["kind of layer", "modules", "launches", "intermediate bytes", "largest tensor"]
        print_table(columns, [*rows, _total(own)], "lrrrl")


def _total(records: Sequence[LayerRecord]) -> list[object]:
    launches = [sum(getattr(r, f"launches_{w}") for r in records) for w in ("before", "after")]
    nbytes = [sum(getattr(r, f"bytes_{w}") for r in records) for w in ("before", "after")]
    return [
        "all", "", f"{launches[0]} -> {launches[1]}", f"{size(nbytes[0])} -> {size(nbytes[1])}", "",
    ]  # fmt: skip


def _print_refusals(records: Sequence[PassRecord]) -> None:
    rows = [
        [record.name, record.phase, refusal.rule, refusal.reason, refusal.where]
        for record in records
        for refusal in record.refusals
    ]
    click.echo()
    if not rows:
        click.echo("refused    nothing")
        return
    counted: dict[tuple[str, ...], int] = {}
    for row in rows:
        counted[tuple(row)] = counted.get(tuple(row), 0) + 1
    print_table(
        ["refused", "phase", "rule", "times", "because", "at"],
        [[*key[:3], times, *key[3:]] for key, times in counted.items()],
        "lllr",
    )


def _signed(nbytes: int) -> str:
    return "" if not nbytes else f"-{size(-nbytes)}" if nbytes < 0 else f"+{size(nbytes)}"
