"""What look-ups came to, over all processes and builds: hits, misses by reason, losses by cause.

Two text files in the cache folder, both only ever appended to by single writes (`cache.journal`):

counts   `hit BUCKET COUNT SECONDS` (or `wait`, `remote`), `miss BUCKET REASON COUNT`,
         `lost CAUSE COUNT`
ledger   `made BUCKET KEY PARTS`: each key that ever had an entry, with one short digest for every
         part of it (source, compiler, ...); `lost KEY CAUSE`: what became of the entry. An
         entry that is gone without such a line was evicted.

The ledger tells why a key misses without reading the entries, and after they are gone. Losing
either file costs figures, never a build; the ledger is made again from the entries.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from cache import entry
from cache.journal import Journal, Words
from cache.key import Key
from graphc.store import PAYLOADS

FOLDER = "counters-v1"
#: how something was found
Kind = Literal["hit", "wait", "remote"]
#: bytes above which a file is folded
_COUNTS_LIMIT, _LEDGER_LIMIT = 1 << 18, 1 << 22
#: keys the ledger remembers when it is folded, the newest
KEPT = 20_000
_DIGITS = 32  # of a key, in the ledger

#: part of a key -> its fields; the rest is "other". In the order of causes: another compiler also
#: takes other flags, and is what is to be told then.
_PARTS = {
    "source": ("source", "objects", "model"),
    "compiler": ("compiler", "target"),
    "cpu": ("isa", "features", "machine"),
    "headers": ("abi", "graphc"),
    "flags": ("flags", "options"),
    "other": (),
}
#: why an entry is dropped
CAUSES = ("damaged", "removed")
#: every reason of a miss, and what it means
REASONS = {
    "empty": "the cache held no entry of this kind",
    "source": "no entry is of this source, or of this model",
    "compiler": "made with another compiler",
    "cpu": "made for other CPU features",
    "headers": "made with another version of graphc's own sources",
    "flags": "made with other flags or options",
    "other": "made of other files, or with other packages",
    "damaged": "the entry was damaged",
    "evicted": "the entry was evicted, or removed by hand",
    "removed": "the entry was removed by `graphc cache`",
}


@dataclass
class Counts:
    """All that was counted. `hits` and `misses` are by bucket, misses then by reason; `waits` are
    misses that another process filled meanwhile, `remotes` look-ups that only the shared tier could
    answer, which are neither; `lost` are entries by cause; `saved` are the seconds that making what
    was found had taken, by bucket; `since` is seconds since 1970, 0 if nothing was counted."""

    hits: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    remotes: Counter[str] = field(default_factory=Counter)
    misses: dict[str, Counter[str]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    saved: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    since: float = 0.0

    def found(self, kind: Kind) -> Counter[str]:
        """Look-ups that found something: "hit", "wait" or "remote", by bucket."""
        return {"hit": self.hits, "wait": self.waits, "remote": self.remotes}[kind]


class Counters:
    """The counters of the cache at `root`; they stand still where it is not `writable`. Nothing
    here raises OSError."""

    def __init__(self, root: Path, writable: bool) -> None:
        self._root, self._writable = root, writable
        place, scratch = root / FOLDER, root / "tmp"
        self._counts = Journal(place / "counts", scratch, _COUNTS_LIMIT, _folded_counts)
        self._ledger = Journal(place / "ledger", scratch, _LEDGER_LIMIT, _folded_ledger)

    def hit(self, bucket: str, seconds: float, kind: Kind = "hit") -> None:
        """An entry was found, which had taken `seconds` to make; "wait": only after a miss, while
        another process made it; "remote": in the shared tier."""
        self._add(f"{kind} {bucket} 1 {seconds:.3f}")

    def missed(self, bucket: str, keys: Sequence[Key]) -> None:
        """Keys were not found."""
        if not keys or not self._writable:
            return
        found = Counter(self.reasons(bucket, keys))
        lines = [f"miss {bucket} {reason} {count}" for reason, count in found.items()]
        self._add(*lines)

    def made(self, bucket: str, key: Key) -> None:
        """An entry was stored."""
        self._ledger.append(_made_line(bucket, key))

    def lost(self, digest: str, cause: str) -> None:
        """An entry was dropped, for one of `CAUSES`."""
        self._ledger.append(f"lost {digest[:_DIGITS]} {cause}")
        self._add(f"lost {cause} 1")

    def counts(self) -> Counts:
        """Everything counted so far."""
        return _count(self._counts.read())

    def evicted(self, held: Iterable[str]) -> int:
        """How many entries were made and are gone, without having been damaged or removed; `held`
        are the keys of those that are there."""
        ledger = _Ledger(self._ledger.read())
        return len(ledger.made.keys() - ledger.cause.keys() - {key[:_DIGITS] for key in held})

    def reasons(self, bucket: str, keys: Sequence[Key], *, made: bool = False) -> list[str]:
        """Why each of `keys` has no entry: one of `REASONS`; `made`: why it had none before it was
        made, as far as other entries tell."""
        ledger = _Ledger(self._ledger.read())
        if not ledger.known[bucket]:
            lines = list(_lines_of_entries(self._root, bucket))
            if self._writable:
                self._ledger.append(*lines)
            ledger.add(line.split() for line in lines)
        return [ledger.reason(bucket, key, made) for key in keys]

    def _add(self, *lines: str) -> None:
        if self._writable:
            self._counts.append(*lines, first=_since)


class _Ledger:
    """The ledger's lines, to look keys up in."""

    def __init__(self, lines: Iterable[Words]) -> None:
        self.known: Counter[str] = Counter()
        self.made: dict[str, Words] = {}  # first digits of the key -> its line
        self.cause: dict[str, str] = {}
        self._by_source: dict[tuple[str, str], list[Words]] = {}
        self.add(lines)

    def add(self, lines: Iterable[Words]) -> None:
        for words in lines:
            match words:
                case ["made", bucket, digest, source, *rest] if len(rest) == len(_PARTS) - 1:
                    self.cause.pop(digest, None)
                    if digest not in self.made:
                        self.known[bucket] += 1
                        self._by_source.setdefault((bucket, source), []).append(words)
                    self.made[digest] = words
                case ["lost", digest, cause] if cause in CAUSES:
                    self.cause[digest] = cause
                case _:
                    pass  # a line cut short, or of another version

    def reason(self, bucket: str, key: Key, made: bool) -> str:
        digest = key.digest[:_DIGITS]
        if digest in self.made and not made:
            return self.cause.get(digest, "evicted")
        if self.known[bucket] == (digest in self.made):
            return "empty"
        parts = _parts(key)
        names = list(_PARTS)[1:]
        differences: list[list[str]] = [
            [name for name, ours, theirs in zip(names, parts[1:], words[4:], strict=True)
             if ours != theirs]
            for words in self._by_source.get((bucket, parts[0]), ())
            if words[2] != digest
        ]  # fmt: skip
        if not differences:
            return "source"
        least = min(differences, key=lambda found: len(found))
        return least[0] if least else "other"  # none: the same fields in another order


def _parts(key: Key) -> list[str]:
    """One short digest for each of `_PARTS`."""
    part_of = {name: part for part, names in _PARTS.items() for name in names}
    hashers = {part: hashlib.sha256() for part in _PARTS}
    for name, value in key.fields:
        default = "headers" if name.startswith("header ") else "other"
        hashers[part_of.get(name, default)].update(f"{len(name)} {name}{value}".encode())
    return [hasher.hexdigest()[:8] for hasher in hashers.values()]


def _made_line(bucket: str, key: Key) -> str:
    return " ".join(["made", bucket, key.digest[:_DIGITS], *_parts(key)])


def _lines_of_entries(root: Path, bucket: str) -> Iterable[str]:
    for digest in entry.digests(root, bucket):
        try:
            yield _made_line(bucket, entry.read_key(entry.folder(root, bucket, digest)))
        except entry.Damage:
            continue


def _since() -> str:
    return f"since {time.time():.0f}"


def _count(lines: Iterable[Words]) -> Counts:
    made = Counts()
    for words in lines:
        try:
            match words:
                case ["hit" | "wait" | "remote" as kind, bucket, count, seconds] if (
                    bucket in PAYLOADS
                ):
                    made.found(kind)[bucket] += int(count)
                    made.saved[bucket] += float(seconds)
                case ["miss", bucket, reason, count] if bucket in PAYLOADS and reason in REASONS:
                    made.misses.setdefault(bucket, Counter())[reason] += int(count)
                case ["lost", cause, count] if cause in CAUSES:
                    made.lost[cause] += int(count)
                case ["since", when]:
                    made.since = float(when)
                case _:
                    pass
        except ValueError:
            continue  # half a line, of a crash or a full disk
    return made


def _folded_counts(lines: Iterable[Words]) -> list[str]:
    counts = _count(lines)
    made = [f"since {counts.since:.0f}"]
    saved = dict(counts.saved)  # the first line of a bucket takes them
    for kind in get_args(Kind):
        for bucket, count in counts.found(kind).items():
            made.append(f"{kind} {bucket} {count} {saved.pop(bucket, 0.0):.3f}")
    for bucket, reasons in counts.misses.items():
        made += [f"miss {bucket} {reason} {count}" for reason, count in reasons.items()]
    return made + [f"lost {cause} {count}" for cause, count in counts.lost.items()]


def _folded_ledger(lines: Iterable[Words]) -> list[str]:
    ledger = _Ledger(lines)
    made: list[str] = []
    for digest in list(ledger.made)[-KEPT:]:
        made.append(" ".join(ledger.made[digest]))
        if digest in ledger.cause:
            made.append(f"lost {digest} {ledger.cause[digest]}")
    return made
