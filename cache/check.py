"""Verifies a whole cache: every entry, and the index against the entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cache import entry
from cache.folder import mend
from cache.index import Index, IndexDamaged, IndexUnavailable
from cache.quarantine import put_aside
from cache.tracker import Tracker
from graphc.store import PAYLOADS

Sizes = dict[str, tuple[str, int]]  # digest -> bucket and bytes


@dataclass(frozen=True)
class Finding:
    """What is wrong; `repaired` once it has been put right."""

    what: str
    repaired: bool = False


def check_entries(
    root: Path, put_right: Callable[[str, str], None] | None
) -> tuple[list[Finding], Sizes]:
    """Verifies every entry and the folders they are in.

    Args:
        put_right: called with bucket and digest of what is damaged; None repairs nothing.
    """
    fix = put_right is not None
    findings: list[Finding] = []
    sizes: Sizes = {}
    for bucket in PAYLOADS:
        findings += _check_folders(root, bucket, fix)
        for digest in entry.digests(root, bucket):
            place = entry.folder(root, bucket, digest)
            try:
                sizes[digest] = (bucket, entry.verify(place, bucket).bytes)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except (entry.Damage, OSError) as error:
                if put_right is not None:
                    put_right(bucket, digest)
                findings.append(Finding(f"{bucket}/{digest}: {error}", fix))
    return findings, sizes


def _check_folders(root: Path, bucket: str, fix: bool) -> Iterator[Finding]:
    for path, reason in entry.strays(root, bucket):
        if fix and not mend(path):
            put_aside(root, path, reason)
        yield Finding(f"{path.relative_to(root)}: {reason}", fix)


def check_index(root: Path, tracker: Tracker, sizes: Sizes, fix: bool) -> list[Finding]:
    """Compares the index with the entries that `check_entries` found sound."""
    index = tracker.index()
    if index is None:
        return [Finding("the index cannot be used")]
    try:
        return list(_differences(root, index, sizes, fix))
    except IndexUnavailable as error:
        return [Finding(f"the index cannot be used now: {error}")]
    except IndexDamaged as error:
        if fix:
            tracker.rebuild(str(error), index.file)
        return [Finding(f"the index is damaged: {error}", fix)]


def _differences(root: Path, index: Index, sizes: Sizes, fix: bool) -> Iterator[Finding]:
    rows = index.rows()
    for digest in sorted(sizes.keys() - rows.keys()):
        if fix:
            index.put(sizes[digest][0], digest, sizes[digest][1])
        yield Finding(f"the index does not know {digest}", fix)
    for digest in sorted(rows.keys() - sizes.keys()):
        bucket = rows[digest][0]
        if bucket in PAYLOADS and os.path.isdir(entry.folder(root, bucket, digest)):
            continue  # damaged, reported by `check_entries`
        if fix:
            index.forget(bucket, digest)
        yield Finding(f"the index names {digest}, which is not there", fix)
