"""`graphc inspect PLAN --roofline`: the least time of each Step at the machine's measured peaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from cache.folder import default_root
from cli.plans import PlanFolder
from cli.render import bucket_line, duration, print_table
from graphc.errors import InputRejectedError
from graphc.plan_io import read_work
from graphc.runtime.calibration import measured
from graphc.runtime.machine import default_threads
from graphc.runtime.roofline import StepBound, choose_program, step_bounds, total

UNMEASURED = "not measured on this machine: graphc doctor --calibrate (a few seconds)"


def roofline(folder: PlanFolder, lengths: Mapping[str, int], threads: int | None) -> dict[str, Any]:
    """What `--json` prints: the program for these lengths and the bound of each of its Steps.

    Raises InputRejectedError if no program takes such lengths, DamagedError if the plan was built
    before there were rooflines.
    """
    plan, count = folder.plan, threads or default_threads()
    index = choose_program(plan, lengths)
    if index is None:
        raise InputRejectedError(
            f"expected lengths within a bucket, found {_text(lengths)}",
            where=str(folder.path),
            hint=f"graphc inspect {folder.path} buckets lists them",
        )
    peaks = measured(default_root())
    work = read_work(folder.path, plan)
    bounds = step_bounds(plan, index, work, lengths, peaks, count)
    program = plan.programs[index]
    return {
        "phase": program.phase,
        "bucket": program.bucket,
        "limits": dict(program.limits),
        "symbols": dict(lengths),
        "threads": count,
        "peaks": None if peaks is None else msgspec.to_builtins(peaks),
        "least_s": total(bounds) if peaks is not None else None,
        "steps": [bound_data(bound) for bound in bounds],
    }


def bound_data(bound: StepBound) -> dict[str, Any]:
    """A bound as plain data."""
    return {
        "step": bound.index,
        "kernel": bound.kernel,
        "label": bound.label,
        "place": bound.place,
        "arithmetic": bound.arithmetic,
        "flops": bound.flops,
        "kept_bytes": bound.kept,
        "read_bytes": bound.read,
        "written_bytes": bound.written,
        "least_s": bound.seconds,
        "limit": bound.limit,
    }


def print_roofline(data: dict[str, Any]) -> None:
    """Equal Steps as one row, the dearest first."""
    bucket = bucket_line(data["phase"], data["bucket"], data["limits"])
    click.echo(f"bucket     {bucket}" + (f" at {_text(data['symbols'])}" * bool(data["symbols"])))
    click.echo(f"threads    {data['threads']}")
    peaks = data["peaks"]
    click.echo(f"machine    {UNMEASURED if peaks is None else peaks['cpu']}")
    steps, known = data["steps"], data["least_s"]
    if known is not None:
        unknown = sum(step["least_s"] is None for step in steps)
        more = f"; {unknown} steps of unknown work" if unknown else ""
        click.echo(f"least time {duration(known)}, one step after the other{more}")
    click.echo()
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for step in steps:
        key = tuple(v for k, v in step.items() if k not in ("step", "label"))
        groups.setdefault(key, []).append(step)
    rows = []
    for same in sorted(groups.values(), key=lambda g: -len(g) * (g[0]["least_s"] or 0.0)):
        first, count = same[0], len(same)
        least = None if first["least_s"] is None else count * first["least_s"]
        rows.append(
            [
                count,
                operations(first["flops"]),
                amount(step_bytes(first)),
                "" if least is None else duration(least),
                f"{100 * least / known:.1f}%" if least and known else "",
                first["limit"],
                first["label"],
                first["place"],
            ]
        )
    columns = ["steps", "GFLOP each", "MB each", "least time", "share", "limit", "computes", "at"]
    print_table(columns, rows, "rrrrr")


def step_bytes(step: Mapping[str, Any]) -> int | None:
    """All bytes of a Step of `--json`, or None."""
    parts = [step["kept_bytes"], step["read_bytes"], step["written_bytes"]]
    return None if None in parts else sum(parts)


def operations(flops: int | None) -> str:
    """1e9 operations; empty for none or unknown."""
    return f"{flops / 1e9:.3g}" if flops else ""


def amount(nbytes: int | None) -> str:
    """1e6 bytes."""
    return "" if nbytes is None else f"{nbytes / 1e6:.3g}"


def _text(symbols: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in symbols.items())
