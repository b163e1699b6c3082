"""Which compilers made what the cache holds: its entries' keys say so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cache import entry
from graphc.store import LINKS


def makers(root: Path) -> list[tuple[str, str]]:
    """(identity, target) of each compiler that linked a library of the cache, most first. Without
    a library no plan can be made of its kernels, so these need not be looked at."""
    found: Counter[tuple[str, str]] = Counter()
    for digest in entry.digests(root, LINKS):
        try:
            key = entry.read_key(entry.folder(root, LINKS, digest))
            found[key["compiler"], key["target"]] += 1
        except (entry.Damage, OSError, KeyError):
            continue
    return sorted(found, key=lambda maker: (-found[maker], maker))
