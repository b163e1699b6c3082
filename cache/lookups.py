"""Looking keys up only to tell: nothing is counted, dropped, noted or made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from cache import entry
from cache.key import Key
from cache.store import Store
from cache.why import Catalogue, Nearest
from graphc.store import PAYLOADS, Fields, Stored


@dataclass(frozen=True)
class Miss:
    """A key that misses, or missed. `reason` is one of `cache.counters.REASONS`; `made`: there is
    an entry now. `nearest` is the nearest other key, of those that have entries."""

    label: str
    bucket: str
    key: str
    reason: str
    made: bool
    nearest: Nearest | None


def look_up(store: Store, bucket: str, keys: Sequence[Fields]) -> list[Stored | None]:
    """For each key the entry that a build would take, None where it would find none that is sound.
    The files themselves are gone when this returns."""
    found: list[Stored | None] = []
    with contextlib.closing(store.workspace()) as area:
        for number, key in enumerate(Key(fields) for fields in keys):
            place = entry.folder(store.root, bucket, key.digest)
            target = area.path / f"{number}-{PAYLOADS[bucket]}"
            try:
                meta = entry.take(place, bucket, target)
            except (OSError, entry.Damage):
                found.append(None)
                continue
            found.append(Stored(target, meta.sha256, key.digest, "hit", area, meta.seconds))
            target.unlink()
    return found


def explain(store: Store, bucket: str, wanted: Sequence[tuple[str, Fields]]) -> list[Miss]:
    """Why each of `wanted`, labels and keys of one bucket, has no entry, or had none before it was
    made."""
    if not wanted:
        return []
    keys = [Key(fields) for _, fields in wanted]
    known = Catalogue(store.root, bucket)
    now = store.counters.reasons(bucket, keys)
    before = store.counters.reasons(bucket, keys, made=True)
    sound = look_up(store, bucket, [fields for _, fields in wanted])
    found: list[Miss] = []
    for number, ((label, _), key) in enumerate(zip(wanted, keys, strict=True)):
        made = sound[number] is not None
        reason = before[number] if made else now[number]
        if not made and entry.folder(store.root, bucket, key.digest).exists():
            reason = "damaged"
        near = known.nearest(key, without=key.digest)
        found.append(Miss(label, bucket, key.digest, reason, made, near))
    return found
