"""Tables inside documents: what a benchmark writes stands between two comments of its name."""

from __future__ import annotations

from collections.abc import Sequence


def marks(name: str) -> tuple[str, str]:
    """The comments around the table `name`."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replaced(text: str, name: str, content: str) -> str:
    """A document with `content` in place of the table `name`; `content` alone if it has none."""
    first, last = marks(name)
    before, begin, after = text.partition(first)
    _, end, rest = after.partition(last)
    return f"{before}{first}\n{content}{last}{rest}" if begin and end else content


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines of a table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The same for a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]
