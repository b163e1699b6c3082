"""A text file that many processes append lines to, and that is folded to fewer lines now and then.

A line is one write at the file's end, so processes never wait for each other's lines. Whoever finds
the file too long folds it: reads it, writes the folded lines aside and renames, with an exclusive
lock on it, while appending takes a shared one. A lock that can't be had soon is done without, at
worst losing a line to a fold that runs right then.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cache.folder import discard

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Words = list[str]

_PATIENCE = 0.05  # seconds an append waits for a fold
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class Journal:
    """The file at `path`, in a folder of its own which is made when needed.

    Args:
        scratch: a folder on the same disk for what a fold writes aside.
        limit: bytes above which it is folded.
        fold: the lines that stand for given ones, which come as words.

    No method raises OSError: what can't be written is lost, what can't be read is not there.
    """

    def __init__(
        self, path: Path, scratch: Path, limit: int, fold: Callable[[Iterable[Words]], list[str]]
    ) -> None:
        self.path, self._scratch, self._limit, self._fold_lines = path, scratch, limit, fold

    def append(self, *lines: str, first: Callable[[], str] | None = None) -> None:
        """Adds lines; before them, in an empty file, what `first` gives."""
        if not lines:
            return
        try:
            with self._locked(os.O_WRONLY | os.O_APPEND | os.O_CREAT, exclusive=False) as handle:
                size = os.fstat(handle).st_size
                if size == 0 and first is not None:
                    lines = (first(), *lines)
                size += os.write(handle, "".join(f"{line}\n" for line in lines).encode())
        except OSError:
            return
        if size > self._limit:
            self._fold()

    def read(self) -> list[Words]:
        """The lines as words; those that are no text are left out."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | _NO_LINKS)
            with os.fdopen(handle, "rb") as file:
                return [line.split() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            return []

    def _fold(self) -> None:
        new = ""
        try:
            with self._locked(os.O_RDWR, exclusive=True):
                lines = self._fold_lines(self.read())
                handle, new = tempfile.mkstemp(dir=self._scratch, prefix="fold-")
                with os.fdopen(handle, "w") as file:
                    file.writelines(f"{line}\n" for line in lines)
                os.replace(new, self.path)
        except OSError:
            if new:
                discard(Path(new))

    @contextlib.contextmanager
    def _locked(self, flags: int, exclusive: bool) -> Iterator[int]:
        """The open file, locked, and still the one at the path.

        Raises:
            OSError: it can't be opened; or an exclusive lock is not to be had.
        """
        handle = self._open(flags)
        try:
            _lock(handle, exclusive)
            while os.fstat(handle).st_nlink == 0:  # folded between open and lock
                if exclusive:
                    raise FileNotFoundError(self.path)
                again = self._open(flags)
                os.close(handle)
                handle = again
                _lock(handle, exclusive)
            yield handle
        finally:
            os.close(handle)

    def _open(self, flags: int) -> int:
        flags |= os.O_CLOEXEC | _NO_LINKS
        try:
            return os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            return os.open(self.path, flags, 0o600)


def _lock(handle: int, exclusive: bool) -> None:
    if fcntl is None:
        return
    kind = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, kind)
            return
        except OSError as error:  # held, or a file system without locks
            if exclusive:
                raise
            if not isinstance(error, BlockingIOError) or time.monotonic() > end:
                return
        time.sleep(0.001)
