"""Damaged things, moved aside so that somebody can look at them, with the reason beside each.

quarantine/<UTC time>-<name>-<random>/   the entry's folder (or file, or link) under its own name
                                         reason.txt: where it was and what is wrong

Nothing here is ever read back. The newest `KEPT` stay, without more than their reasons where they
are beyond `BYTES` in all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from cache.entry import move, remove_at
from cache.folder import discard, own_folder, write_synced

FOLDER = "quarantine"
KEPT = 32
BYTES = 64_000_000
REASON = "reason.txt"


def put_aside(root: Path, place: Path, reason: str) -> None:
    """Moves what stands at `place`, inside the cache, into the quarantine; if that is impossible
    (no space, say), removes it. A link is moved as it is. What cannot even be removed stays."""
    room = root / FOLDER
    cell: Path | None = None
    try:
        own_folder(room)
        for oldest in cells(root)[: 1 - KEPT]:
            discard(oldest)
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        cell = Path(tempfile.mkdtemp(dir=room, prefix=f"{when}-{place.name[:12]}-"))
        move(place, cell / place.name)
        text = f"{place.relative_to(root)}\n{reason}\n"
        write_synced(cell / REASON, text.encode(errors="backslashreplace"))
    except FileNotFoundError:
        pass  # another process was first
    except OSError:
        with contextlib.suppress(OSError):
            remove_at(root, place)
    if cell is not None and not os.path.lexists(cell / place.name):
        discard(cell)
    trim(root)


def cells(root: Path) -> list[Path]:
    """What the quarantine holds, oldest first."""
    try:
        return sorted(root.joinpath(FOLDER).iterdir())
    except OSError:
        return []


def trim(root: Path, limit: int = BYTES) -> None:
    """What is beyond `limit` bytes loses everything but its reason, the oldest first."""
    total = 0
    for cell in reversed(cells(root)):
        total += _size(cell)
        if total > limit:
            with contextlib.suppress(OSError):
                for inner in cell.iterdir():
                    if inner.name != REASON:
                        discard(inner)


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
