"""Why a key missed: the nearest stored key, and the fields in which the two differ."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache import entry
from cache.key import Key

_SHOWN = 60


@dataclass(frozen=True)
class FieldDiff:
    """One field that differs; None where a key has no such field."""

    name: str
    wanted: str | None
    found: str | None

    def line(self) -> str:
        """The difference on one line, "field: found -> wanted"."""
        if self.found is None or self.wanted is None:
            state = "new" if self.found is None else "gone"
            return f"{self.name}: {state}"
        if self.name.startswith("header "):
            return f"{self.name}: changed"
        if "\n" in self.wanted or "\n" in self.found:
            return f"{self.name}: {_lines(self.found, self.wanted)}"
        return f"{self.name}: {_words(self.found, self.wanted)}"


@dataclass(frozen=True)
class Nearest:
    """The stored key with the fewest differing fields, and those fields."""

    digest: str
    label: str
    diffs: tuple[FieldDiff, ...]


class Catalogue:
    """The keys of a bucket, read once, to find the nearest of any number of keys."""

    def __init__(self, root: Path, bucket: str) -> None:
        self._root, self._bucket = root, bucket
        self._by_source: dict[str, list[tuple[str, Key]]] = {}
        for digest in entry.digests(root, bucket):
            try:
                key = entry.read_key(entry.folder(root, bucket, digest))
            except (OSError, entry.Damage):
                continue
            self._by_source.setdefault(_source(key), []).append((digest, key))
        self._lines = {source: frozenset(source.splitlines()) for source in self._by_source}

    def nearest(self, key: Key, without: str = "") -> Nearest | None:
        """The nearest of all keys, except that with digest `without`."""
        wanted = _source(key)
        lines = frozenset(wanted.splitlines())
        costs = sorted(
            (0.0 if source == wanted else _cost(lines, self._lines[source]), source)
            for source in self._by_source
        )
        best: tuple[str, Key] | None = None
        least = float("inf")
        for cost, source in costs:
            if cost + (source != wanted) >= least:
                break  # none of what follows is nearer
            for digest, other in self._by_source[source]:
                distance = cost + len(diff(key, other))
                if digest != without and distance < least:
                    best, least = (digest, other), distance
        if best is None:
            return None
        digest, other = best
        try:
            label = entry.read_meta(entry.folder(self._root, self._bucket, digest)).label
        except (OSError, entry.Damage):
            label = ""
        return Nearest(digest, label, diff(key, other))


def diff(wanted: Key, found: Key) -> tuple[FieldDiff, ...]:
    """The fields in which two keys differ, in the order of `wanted`."""
    left, right = dict(wanted.fields), dict(found.fields)
    names = [*left, *(name for name in right if name not in left)]
    return tuple(
        FieldDiff(name, left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    )


def one_line(found: Nearest | None) -> str:
    """The differences to the nearest entry, on one line."""
    if found is None:
        return "the cache holds no entry of this kind"
    if not found.diffs:
        return "stored now"
    name = f" ({found.label})" if found.label else ""
    return f"nearest {found.digest[:12]}{name}: " + "; ".join(d.line() for d in found.diffs)


def _cost(lines: frozenset[str], others: frozenset[str]) -> float:
    """What another source adds to the number of differing fields: as much as a change of compiler
    and instruction set together, so the same kernel for another machine is nearer than another
    kernel for this one."""
    alike = len(lines & others) / (len(lines | others) or 1)
    return 5 + 5 * (1 - alike)


def _source(key: Key) -> str:
    return dict(key.fields).get("source", "")


def _words(found: str, wanted: str) -> str:
    """Only the words that differ, for values that are lists of flags or features."""
    old, new = found.split(" "), wanted.split(" ")
    if len(old) < 4 and len(new) < 4:
        return f"{_short(found)} -> {_short(wanted)}"
    parts = [f"-{w}" for w in _without(old, new)] + [f"+{w}" for w in _without(new, old)]
    return _short(" ".join(parts) or "another order", 200)


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    gone = set(others)
    return [word for word in words if word not in gone]


def _lines(found: str, wanted: str) -> str:
    changes = [
        line
        for line in difflib.unified_diff(found.splitlines(), wanted.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and not line.startswith(("---", "+++"))
    ]
    if not changes:
        return "line ends differ"
    return f"{len(changes)} lines differ, first {_short(changes[0])!r}"


def _short(text: str, limit: int = _SHOWN) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
