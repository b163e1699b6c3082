"""What the cache holds, entry by entry, and removing what is old or too much."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from cache import entry
from cache.store import Store
from graphc.errors import UsageError
from graphc.store import PAYLOADS

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@dataclass(frozen=True)
class Listed:
    """One entry. `seconds` is what making it took, `used` the time of its last use in seconds since
    1970."""

    key: str
    bucket: str
    label: str
    bytes: int
    seconds: float
    used: float


def listed(store: Store) -> list[Listed]:
    """Every entry that can be read, the one used last first."""
    used = store.used()
    found: list[Listed] = []
    for bucket in PAYLOADS:
        for digest in entry.digests(store.root, bucket):
            place = entry.folder(store.root, bucket, digest)
            try:
                meta = entry.read_meta(place)
                when = used.get(digest) or place.stat().st_mtime
            except (OSError, entry.Damage):
                continue
            found.append(Listed(digest, bucket, meta.label, meta.bytes, meta.seconds, when))
    return sorted(found, key=lambda item: -item.used)


def prune(
    store: Store, max_bytes: int | None, max_age: float | None, *, dry_run: bool = False
) -> list[Listed]:
    """Removes what was last used more than `max_age` seconds ago, then what was used longest ago
    until `max_bytes` are left; None bounds nothing. Gives what goes, what was used last first;
    `dry_run` leaves it there."""
    oldest = float("-inf") if max_age is None else time.time() - max_age
    room = float("inf") if max_bytes is None else max_bytes
    gone: list[Listed] = []
    full = False
    for item in listed(store):
        room -= item.bytes
        full = full or room < 0
        if full or item.used < oldest:
            gone.append(item)
            if not dry_run:
                store.remove(item.bucket, item.key)
    return gone


def parse_age(text: str, where: str = "") -> float:
    """Seconds of "30d", "12h", "2w", "90m", "45s"; `where` the text stands.

    Raises:
        UsageError: the text is no age.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"expected an age such as 30d, 12h or 2w, found {text!r}", where=where)
    return float(match[1]) * _SECONDS[match[2].lower()]
