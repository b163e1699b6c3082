"""Private temporary folders, which go when nobody refers to them any more."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

from cache import folder
from graphc.errors import GraphcError
from graphc.store import NoSpaceError, Workspace


class Area:
    """A private temporary folder, removed on `close` or when nobody refers to it any more."""

    def __init__(self, parent: Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(dir=parent, prefix=folder.WORK))
        self._end = weakref.finalize(self, _discard_own, self.path, os.getpid())

    def close(self) -> None:
        self._end()


def _discard_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child holds a copy of the Area, not the folder
        folder.discard(path)


def private_area(second: Path | None = None) -> Workspace:
    """A folder in the system's temporary folder; where that is impossible, in `second`.

    Raises:
        NoSpaceError, GraphcError: neither is possible.
    """
    try:
        return Area(None)
    except OSError as error:
        if second is not None:
            try:
                return Area(second)
            except OSError:
                pass  # the first error tells more
        if error.errno in folder.NO_SPACE:
            raise no_space(Path(tempfile.gettempdir())) from None
        raise GraphcError(
            f"no temporary folder can be made: {error.strerror}", hint="set TMPDIR"
        ) from None


def no_space(where: Path) -> NoSpaceError:
    """The error for a full disk at `where`."""
    return NoSpaceError(
        "no space left on the device",
        where=str(where),
        hint="free some space, or set GRAPHC_CACHE_DIR and TMPDIR to another disk",
    )
