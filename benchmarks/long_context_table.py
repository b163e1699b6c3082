"""The table of benchmarks/long_context.py, and what its figures have to hold.

Time per token of prefill grows at most as the operations do; activations of the longest prompt take
at most 1.5 x those of the next shorter one; a prompt of one token more costs at most 1.1 x what its
operations say. Memory is what is resident above the weights: pages are what a sequence remembers,
activations the rest that was not there before the prompt (or, planned: the arena and the scratch
of all threads, which may have been touched in part before).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.documents import aligned, grid, replaced
from benchmarks.hybrid_arithmetic import total
from graphc.models.hybrid_config import K31_MINI

NAME = "long context"
MEMORY_GROWTH, EDGE = 1.5, 1.1
MIB = 2.0**20


def growth(results: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """By length: time per token over that of the shortest prompt, and the same of operations."""
    rows = _rows(results)
    first = min(rows, default=0)

    return {
        length: (
            row["prefill_s"] / rows[first]["prefill_s"] * first / length,
            total(K31_MINI, length) / total(K31_MINI, first) * first / length,
        )
        for length, row in rows.items()
    }


def edge_costs(results: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """By n: time of n + 1 tokens over that of n, and the same of operations."""
    return {
        int(n): (above[0] / below[0], total(K31_MINI, int(n) + 1) / total(K31_MINI, int(n)))
        for n, (below, above) in results.get("edges", {}).items()
    }


def short(results: dict[str, Any]) -> list[str]:
    """What does not hold."""
    rows, found = _rows(results), []
    for length, (time, work) in growth(results).items():
        if time > work:
            found.append(f"{length}: time per token {time:.2f} x, operations {work:.2f} x")
        if rows[length]["fallbacks"]:
            found.append(f"{length}: {rows[length]['fallbacks']} fallbacks")
    for one, other in list(pairwise(sorted(rows)))[-1:]:
        memory = [max(rows[n][key] for key in ("activations", "planned")) for n in (one, other)]
        if memory[1] > MEMORY_GROWTH * memory[0]:
            found.append(f"{other}: activations {memory[1] / memory[0]:.2f} x of {one}")
    for n, (time, work) in edge_costs(results).items():
        if time > EDGE * work:
            found.append(f"{n + 1} tokens: {time:.2f} x of {n}, operations {work:.4f} x")
    return found


def table(results: dict[str, Any]) -> str:
    """For a terminal."""
    parts = [aligned(*_lengths(results)), aligned(*_edges(results))]
    return "\n".join([*parts[0], "", *parts[1], "", *_verdict(results)])


def written(text: str, results: dict[str, Any]) -> str:
    """The document `text` with the tables in their place."""
    place, used = results.get("machine", {}), dict(results.get("versions", {}))
    threads = {row["threads"] for row in _rows(results).values()}
    title = (
        f"{used.get('date')}, {', '.join(map(str, sorted(threads)))} thread(s) of "
        f"{place.get('processor')}; graphc {used.get('graphc')}."
    )
    lines = [title, "", *grid(*_lengths(results)), "", *grid(*_edges(results)), ""]
    verdict = (f"- {line}" for line in _verdict(results))
    return replaced(text, NAME, "\n".join([*lines, *verdict, ""]))


def _verdict(results: dict[str, Any]) -> list[str]:
    return short(results) or ["all as it has to be"]


def _rows(results: dict[str, Any]) -> dict[int, dict[str, Any]]:
    rows = {int(length): row for length, row in results.get("lengths", {}).items()}
    return dict(sorted(rows.items()))


def _lengths(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = [
        "prompt", "bucket", "prefill s", "CPU s", "tokens/s", "GFLOP/s", "time a token",
        "operations a token", "decode ms", "peak MiB", "pages", "activations", "planned",
    ]  # fmt: skip
    lines = []
    for length, (time, work) in growth(results).items():
        row = _rows(results)[length]
        seconds = row["prefill_s"]
        memory = (row[key] / MIB for key in ("peak", "pages", "activations", "planned"))
        lines.append([
            str(length), row["bucket"], f"{seconds:.3g}", f"{row['prefill_cpu_s']:.3g}",
            f"{length / seconds:.0f}", f"{total(K31_MINI, length) / seconds / 1e9:.0f}",
            f"{time:.2f} x", f"{work:.2f} x", f"{row['decode_ms']:.1f}",
            *(f"{mib:.1f}" for mib in memory),
        ])  # fmt: skip
    return head, lines


def _edges(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["prompts", "s", "s", "time", "operations"]
    lines = []
    for n, (time, work) in edge_costs(results).items():
        below, above = results["edges"][str(n)]
        cells = [f"{n}, {n + 1}", f"{below[0]:.3f}", f"{above[0]:.3f}"]
        lines.append([*cells, f"{time:.3f} x", f"{work:.4f} x"])
    return head, lines
