"""The table of benchmarks/dense.py: ratios to the best peer, judged by the marks of the project.

Marks: every row at least as fast as the best peer of the same precision, at one thread by CPU time
and at more by wall time; the geometric mean at least 1.35 x; some rows more (`mark`). Peers of a
decode step are judged by their best formulation: what a careful user would write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.documents import aligned, grid, marks, replaced

OURS = "graphc"
#: where the table stands in a document
NAME = "dense"
BEGIN, END = marks(NAME)
GEOMETRIC_MEAN = 1.35
#: of a decode step in bf16: over the careful formulations, over attention as people write it
CAREFUL, AS_WRITTEN = 2.4, 6.0
#: relative error from which on a result is wrong, not imprecise
WRONG = 0.1


@dataclass(frozen=True)
class Judged:
    """A row: milliseconds by runtime, the peer to beat, how many times faster graphc is, the mark
    to reach, error of graphc over that of eager torch, CPU seconds of builds, and what else is
    short. `peers`: a row in which only peers take part."""

    workload: str
    dtype: str
    threads: int
    milliseconds: dict[str, float]
    best: str
    ratio: float | None
    mark: float
    error: float | None
    build: dict[str, float]
    short: list[str]
    peers: bool = False


#: bf16 layers of the hybrid family, and how many times faster they have to be
LAYERS = {
    "kda_prefill:2048": 6.0, "kda_prefill:8192": 15.0, "kda_step": 2.0,
    "dsa_prefill:2048": 3.3, "dsa_prefill:8192": 7.0, "dsa_step:8192": 4.0,
}  # fmt: skip
#: what else such a layer may be written as, for peers alone
FORMS = {
    "kda_prefill": ("_operator",), "kda_step": ("_operator",), "dsa_prefill": ("_blocks",),
    "dsa_step": ("_absorbed", "_split"),
}  # fmt: skip


def mark(workload: str, dtype: str) -> float:
    """How many times faster than the best peer a row has to be."""
    if workload == "lnres":
        return 1.8
    if workload == "prefill:8192" and dtype == "bf16":
        return 1.6
    if workload.startswith("step") and dtype == "bf16":
        return CAREFUL
    if dtype == "bf16" and workload in LAYERS:
        return LAYERS[workload]
    return 1.0


def judge(results: dict[str, Any]) -> list[Judged]:
    """Every row of the JSON of dense.py, in its order."""
    rows = results["rows"]
    return [_judge(key, rows) for key, row in rows.items() if row["runtimes"]]


def _times(row: dict[str, Any], threads: int) -> dict[str, float]:
    clock = "cpu_s" if threads == 1 else "wall_s"
    return {name: 1e3 * item[clock] for name, item in row["runtimes"].items()}


def _peers(key: str, rows: dict[str, Any], threads: int) -> dict[str, float]:
    times = _times(rows[key], threads) if key in rows else {}
    return {
        name: value
        for name, value in times.items()
        if name != OURS and not wrong(rows[key]["runtimes"][name])
    }


def wrong(item: dict[str, Any]) -> bool:
    """Whether a runtime computes something else: it does not count then."""
    return "mismatch" in item or item.get("error", 0.0) > WRONG


def _judge(key: str, rows: dict[str, Any]) -> Judged:
    workload, dtype, count = key.split()
    threads = int(count)
    runtimes = rows[key]["runtimes"]
    times = _times(rows[key], threads)
    own = _peers(key, rows, threads)
    rivals = dict(own)
    if workload.startswith("step"):
        size = workload.partition(":")[2]
        rivals = {}
        for kind in ("step_cat", "step_split"):
            for name, value in _peers(f"{kind}:{size} {dtype} {count}", rows, threads).items():
                rivals[f"{name} ({kind.removeprefix('step_')})"] = value
    if workload.partition(":")[0] in FORMS:
        rivals |= _other_forms(workload, dtype, count, rows)
    best = min(rivals, key=lambda name: rivals[name], default="")
    ours = times.get(OURS)
    ratio = rivals[best] / ours if best and ours else None
    errors = {name: item["error"] for name, item in runtimes.items() if "error" in item}
    error = None
    if OURS in errors and errors.get("eager"):
        error = errors[OURS] / errors["eager"]
    wanted = mark(workload, dtype)
    peers = any(
        workload.startswith(f"{family}{form}") for family in FORMS for form in FORMS[family]
    )
    short = [] if ours or peers else ["graphc did not run"]
    if ratio is not None and ratio < wanted:
        short.append(f"{ratio:.2f} < {wanted:g}")
    if workload.startswith("step:") and dtype == "bf16" and own and ours:
        written = min(own.values()) / ours
        if written < AS_WRITTEN:
            short.append(f"as written {written:.2f} < {AS_WRITTEN:g}")
    if error is not None and error > 1.005:  # two results rounded alike differ by a hair
        short.append(f"error {error:.2f} > 1")
    if wrong(runtimes.get(OURS, {})):
        short.append(runtimes[OURS].get("mismatch", "wrong"))
    build = {
        name: item.get("cold_cpu_s", item["build_cpu_s"])
        for name, item in runtimes.items()
        if name != OURS or "cold_cpu_s" in item
    }
    if OURS in build and "compile" in build and build[OURS] > build["compile"] / 2:
        short.append(f"build {build[OURS]:.1f} s > {build['compile'] / 2:.1f} s")
    return Judged(workload, dtype, threads, times, best, ratio, wanted, error, build, short, peers)


def _other_forms(workload: str, dtype: str, count: str, rows: dict[str, Any]) -> dict[str, float]:
    """Peers of a layer written in other ways; a layer in bf16 has to beat those in fp32 too, which
    are faster for some."""
    family, colon, size = workload.partition(":")
    found: dict[str, float] = {}
    for form in ("", *FORMS[family]):
        for other in {dtype, "fp32"}:
            notes = [form.removeprefix("_")] + ([other] if other != dtype else [])
            said = ", ".join(note for note in notes if note)
            key = f"{family}{form}{colon}{size} {other} {count}"
            for name, value in _peers(key, rows, int(count)).items():
                found[f"{name} ({said})" if said else name] = value
    return found


def summaries(rows: list[Judged]) -> list[str]:
    """Geometric mean and worst row by number of threads."""
    import math

    lines = []
    for threads in sorted({row.threads for row in rows}):
        done = [row for row in rows if row.threads == threads and row.ratio]
        dense = [row for row in done if row.workload.partition(":")[0] not in FORMS]
        if not done:
            continue
        mean = math.exp(sum(math.log(row.ratio or 1.0) for row in dense) / max(1, len(dense)))
        worst = min(done, key=lambda row: (row.ratio or 0) / row.mark)
        state = "ok" if mean >= GEOMETRIC_MEAN or not dense else f"short of {GEOMETRIC_MEAN}"
        good = sum(not row.short for row in done)
        lines.append(
            f"{threads} thread(s), {len(done)} rows: geometric mean {mean:.2f} x ({state}), "
            f"{good} ok, furthest from its mark: {worst.workload} {worst.dtype} "
            f"at {worst.ratio:.2f} x of {worst.mark:g} x"
        )
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.{digits}g}"


def _cells(rows: list[Judged]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for row in rows for name in row.milliseconds))
    peers = [name for name in names if name != OURS]
    building = any(OURS in row.build for row in rows)
    head = ["workload", "dtype", "threads", f"{OURS} ms", *peers, "best peer", "ratio", "error"]
    head += ["build s", "compile's"] if building else []
    lines = []
    for row in rows:
        line = [row.workload, row.dtype, str(row.threads)]
        line += [_number(row.milliseconds.get(name)) for name in (OURS, *peers)]
        line += [row.best, _number(row.ratio), _number(row.error, 2)]
        if building:
            line += [_number(row.build.get(name)) for name in (OURS, "compile")]
        lines.append([*line, "; ".join(row.short) or ("peers" if row.peers else "ok")])
    return [*head, "mark"], lines


def table(results: dict[str, Any]) -> str:
    """For a terminal."""
    rows = judge(results)
    head, lines = _cells(rows)
    return "\n".join([*aligned(head, lines), "", *summaries(rows)])


def markdown(results: dict[str, Any]) -> str:
    """For docs/benchmarks.md (see `written`)."""
    rows = judge(results)
    head, lines = _cells(rows)
    place, used = results.get("machine", {}), dict(results.get("versions", {}))
    date = used.pop("date", "")
    listed = ", ".join(f"{name} {version}" for name, version in used.items())
    return "\n".join(
        [
            f"{date}, {place.get('cores')} cores of {place.get('processor')}; {listed}.",
            "",
            *grid(head, lines),
            "",
            *(f"- {line}" for line in summaries(rows)),
            "",
        ]
    )


def written(text: str, results: dict[str, Any]) -> str:
    """A document with the table between its two marks, or the table alone if it has none."""
    return replaced(text, NAME, markdown(results))
