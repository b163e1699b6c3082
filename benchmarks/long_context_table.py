"""The table of benchmarks/long_context.py, and what its figures have to hold.

Time per token of prefill grows at most as the operations do; activations in the longest context
take at most 1.5 x those in the next shorter one; one token more costs at most 1.1 x what
its operations say. Memory is what is resident above the weights: pages are what a sequence
remembers, activations the rest that was not there before the first run (or, planned: the arena and
the scratch of all threads).
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
    """By context: time per token of its prompt over that in the smallest context, and the same of
    operations."""
    rows, clock = _rows(results), _clock(results)
    found = {
        context: (
            row["prefill"][clock] / row["prompt"],
            total(K31_MINI, row["prompt"]) / row["prompt"],
        )
        for context, row in rows.items()
    }
    time, work = found[min(found)] if found else (1.0, 1.0)
    return {context: (one / time, other / work) for context, (one, other) in found.items()}


def edge_costs(results: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """By n: time of n + 1 tokens over that of n, and the same of operations."""
    clock = _clock(results)
    return {
        int(n): (above[clock] / below[clock], total(K31_MINI, int(n) + 1) / total(K31_MINI, int(n)))
        for n, (below, above) in results.get("edges", {}).items()
    }


def short(results: dict[str, Any]) -> list[str]:
    """What does not hold."""
    rows, found = _rows(results), []
    for context, (time, work) in growth(results).items():
        if time > work:
            found.append(f"{context}: time per token {time:.3f} x, operations {work:.3f} x")
        if rows[context]["fallbacks"]:
            found.append(f"{context}: {rows[context]['fallbacks']} fallbacks")
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
    title = (
        f"{used.get('date')}, {results['threads']} thread(s) of {place.get('processor')}, "
        f"{('wall', 'CPU')[_clock(results)]} time; graphc {used.get('graphc')}."
    )
    lines = [title, "", *grid(*_lengths(results)), "", *grid(*_edges(results)), ""]
    verdict = (f"- {line}" for line in _verdict(results))
    return replaced(text, NAME, "\n".join([*lines, *verdict, ""]))


def _clock(results: dict[str, Any]) -> int:
    """Which of (wall, CPU) counts."""
    return 1 if results["threads"] == 1 else 0


def _verdict(results: dict[str, Any]) -> list[str]:
    return short(results) or ["all as it has to be"]


def _rows(results: dict[str, Any]) -> dict[int, dict[str, Any]]:
    rows = {int(context): row for context, row in results.get("contexts", {}).items()}
    return dict(sorted(rows.items()))


def _lengths(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = [
        "prompt", "bucket", "prefill s", "tokens/s", "GFLOP/s", "time a token",
        "operations a token", "decode ms", "peak MiB", "pages", "activations", "planned",
    ]  # fmt: skip
    lines, rows, clock = [], _rows(results), _clock(results)
    for context, (time, work) in growth(results).items():
        row, prompt = rows[context], rows[context]["prompt"]
        seconds, token = row["prefill"][clock], row["decode"][clock]
        memory = (row[key] / MIB for key in ("peak", "pages", "activations", "planned"))
        lines.append([
            str(prompt), row["bucket"], f"{seconds:.3g}", f"{prompt / seconds:.0f}",
            f"{total(K31_MINI, prompt) / seconds / 1e9:.0f}", f"{time:.2f} x", f"{work:.2f} x",
            f"{1e3 * token:.1f}", *(f"{mib:.1f}" for mib in memory),
        ])  # fmt: skip
    return head, lines


def _edges(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["prompts", "s", "s", "time", "operations"]
    lines, clock = [], _clock(results)
    for n, (time, work) in edge_costs(results).items():
        below, above = results["edges"][str(n)]
        cells = [f"{n}, {n + 1}", f"{below[clock]:.3f}", f"{above[clock]:.3f}"]
        lines.append([*cells, f"{time:.3f} x", f"{work:.4f} x"])
    return head, lines
