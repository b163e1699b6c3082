"""`graphc run PLAN --profile`: the time of each Step against the machine's roofline, and where the
time that could be saved is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from cache.folder import default_root
from cli.render import duration, print_table
from cli.roofline import UNMEASURED, bound_data, step_bytes
from graphc.plan import Program
from graphc.plan_io import WORK, own, read_work
from graphc.runtime.calibration import measured
from graphc.runtime.expressions import known
from graphc.runtime.roofline import step_bounds
from graphc.runtime.session import Session

#: rows of the tables
STEPS, FIXES = 20, 12
#: limits that are arithmetic, not memory
COMPUTE = ("fp32", "fp64", "bf16", "int8")
#: a Step shorter than this is mostly its own start
TINY_NS = 1500


def profile(
    session: Session, call: Callable[[], object], runs: int, lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Runs the model `runs` times (at least once) with a clock around each Step.

    Returns "steps": per Step the median nanoseconds `ns`, its work and bound, `gflops`, `gbs`,
    `share` of the run and `fraction` of the roofline; "fixes": kernels by the time they lose
    against it; "roofline": whether the machine's peaks are known.
    """
    times: list[list[int]] = []
    for _ in range(max(1, runs)):
        session.profiling = True  # starts counting anew
        call()
        times.append([step.nanoseconds for step in session.step_times()])
    session.profiling = False
    plan = session.plan
    facts = session.describe()
    index = next(
        k
        for k, p in enumerate(plan.programs)
        if (p.phase, p.bucket, p.limits) == (facts["phase"], facts["bucket"], facts["limits"])
    )
    peaks = measured(default_root())
    if own(plan, WORK) not in plan.files:  # built by an older graphc
        steps = [
            {"step": s.index, "label": s.label, "kernel": s.kernel} for s in session.step_times()
        ]
    else:
        work = read_work(session.folder, plan)
        steps = [
            bound_data(bound)
            for bound in step_bounds(plan, index, work, lengths, peaks, session.threads)
        ]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    for step, ns in zip(steps, medians, strict=True):
        _rates(step, round(ns), sum(medians))
    program = plan.programs[index]
    order = [lengths.get(symbol.name) for symbol in plan.symbols]
    for step in steps:
        step["hint"] = hint(program, step, order, session.threads)
    return {"steps": steps, "fixes": fixes(steps), "roofline": peaks is not None}


def _rates(step: dict[str, Any], ns: int, total: float) -> None:
    """Adds what follows from the measured time."""
    step["ns"] = ns
    step["share"] = ns / total if total else 0.0
    flops, nbytes = step.get("flops"), step_bytes(step) if "read_bytes" in step else None
    step["gflops"] = flops / ns if flops and ns else None
    step["gbs"] = nbytes / ns if nbytes is not None and ns else None
    least = step.get("least_s")
    step["fraction"] = least * 1e9 / ns if least is not None and ns else None
    step["lost_ns"] = None if least is None else max(0, ns - round(least * 1e9))


def fixes(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of one kernel together, those first that lose most time against their roofline (where
    that is unknown: that take most time)."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for step in steps:
        groups.setdefault(step["kernel"], []).append(step)
    made = [_fix(kernel, same) for kernel, same in groups.items()]
    made.sort(key=lambda fix: -float(fix["ns"] if fix["lost_ns"] is None else fix["lost_ns"]))
    return made


def _fix(kernel: str, same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ns = sum(step["ns"] for step in same)
    lost = [step["lost_ns"] for step in same]
    least = [step["least_s"] for step in same if step.get("least_s") is not None]
    fraction = sum(least) * 1e9 / ns if ns and len(least) == len(same) else None
    hints = dict.fromkeys(step["hint"] for step in sorted(same, key=lambda s: -s["ns"]))
    why = next((text for text in hints if text), "")
    if not why and fraction is not None and fraction > 0.85:
        limit = same[0]["limit"]
        memory = limit not in COMPUTE
        why = f"at the speed of {limit}: only fewer bytes would help" if memory else "near the peak"
    return {
        "kernel": kernel,
        "labels": list(dict.fromkeys(step["label"] for step in same)),
        "steps": len(same),
        "ns": ns,
        "lost_ns": None if None in lost else sum(lost),
        "share": sum(step["share"] for step in same),
        "fraction": fraction,
        "places": list(dict.fromkeys(step["place"] for step in same if step.get("place"))),
        "hint": why,
    }


def hint(
    program: Program,
    step: Mapping[str, Any],
    lengths: Sequence[int | None],
    threads: int,
) -> str:
    """Why a Step takes the time it takes, where its form tells; "" otherwise."""
    what = program.steps[step["step"]]
    if what.fallback is not None:
        return f"runs through torch: {what.fallback.reason}"
    kernel = what.kernel
    assert kernel is not None
    kinds = {program.buffers[number].kind for number in kernel.reads}
    if kinds == {"weight"}:
        return "computed from weights alone: could be done at build"
    if kernel.label.endswith((".pack", ".arrange")):
        return "rearranges an operand at run time, for the product that reads it"
    if kernel.label == "copy" or kernel.symbol.startswith(("gc_linear_copy", "gc_mapped_copy")):
        return "a copy: what follows wants another layout"
    units = known(program.expressions[kernel.range], lengths)
    if threads > 1 and units is not None and step["ns"] >= TINY_NS:
        pieces = -(-units // max(kernel.grain, 1))
        if pieces < threads:
            return f"work for {max(pieces, 1)} of {threads} threads"
    if step["ns"] < TINY_NS and (step["fraction"] is None or step["fraction"] < 0.5):
        return "tiny: mostly its start"
    return ""


def print_profile(result: Mapping[str, Any]) -> None:
    """The Steps that take longest, then the kernels that lose most time."""
    steps, measured_ = result["steps"], result["roofline"]
    total = sum(step["ns"] for step in steps)
    least = [step.get("least_s") for step in steps]
    click.echo(f"\nsteps         {len(steps)} in {duration(total * 1e-9)}", nl=False)
    if measured_ and total:
        floor = sum(one or 0.0 for one in least)
        click.echo(f", at the machine's peaks {duration(floor)} ({_percent(floor * 1e9 / total)})")
    else:
        click.echo(f"; roofline {UNMEASURED}" if not measured_ else "")
    slowest = sorted(steps, key=lambda step: -step["ns"])[:STEPS]
    rows = [
        [
            step["step"], duration(step["ns"] * 1e-9), _percent(step["share"]), _rate(step),
            _percent(step["fraction"]), step.get("limit", ""), step["label"],
            step.get("place", ""),
        ]
        for step in slowest
    ]  # fmt: skip
    columns = ["step", "time", "share", "rate", "of peak", "limit", "computes", "at"]
    print_table(columns, rows, "rrrrr")
    if len(steps) > len(slowest):
        rest = sum(step["ns"] for step in steps) - sum(step["ns"] for step in slowest)
        click.echo(f"and {len(steps) - len(slowest)} shorter ones in {duration(rest * 1e-9)}")
    click.echo(
        "\nwhat to fix, by the time lost against the roofline" if measured_ else "\nby kernel"
    )
    table = [
        [
            duration(worth * 1e-9),
            _percent(fix["share"]), _percent(fix["fraction"]), fix["steps"], fix["kernel"],
            ", ".join(fix["places"][:2] or fix["labels"][:1]), fix["hint"],
        ]
        for fix in result["fixes"][:FIXES]
        if (worth := fix["ns"] if fix["lost_ns"] is None else fix["lost_ns"]) >= 0.005 * total
    ]  # fmt: skip
    heading = "lost" if measured_ else "time"
    print_table([heading, "share", "of peak", "steps", "kernel", "at", "why"], table, "rrrr")


def _rate(step: Mapping[str, Any]) -> str:
    """GFLOP/s of what arithmetic bounds (not measured: of what does much with a byte), GB/s of the
    rest."""
    compute = step.get("limit") in COMPUTE
    if not step.get("limit"):
        compute = (step["gflops"] or 0.0) > 4 * (step["gbs"] or 0.0)
    if step["gflops"] is not None and compute:
        return f"{step['gflops']:.3g} GFLOP/s"
    return "" if step["gbs"] is None else f"{step['gbs']:.3g} GB/s"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%" if value < 0.1 else f"{100 * value:.0f}%"
