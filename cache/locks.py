"""Locks between processes (and threads): one file a lock, gone when nobody holds it.

The lock is the kernel's (`flock`), so it goes with its holder, however that ends. A file that
was removed while its lock was held, with the whole cache say, locks nothing any more: whoever gets
a lock looks whether its file is still the one at the path, and tries again otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from cache.folder import discard

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_BUSY = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


class Lock:
    """A lock that is held until `release`."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle

    def release(self) -> None:
        """Removes the file, if it is still ours, and lets others in."""
        try:
            if _same(self._handle, self._path):
                os.unlink(self._path)
        except OSError:
            pass  # it stays, free; swept after a day
        finally:
            os.close(self._handle)


def acquire(
    path: Path,
    *,
    seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
    waiting: Callable[[], None] = lambda: None,
) -> Lock | None:
    """The lock, or None when `seconds` passed or `cancelled()` before it was free.

    Args:
        waiting: called now and then while another process, or thread, holds the lock.

    Raises:
        OSError: there is no such folder, it cannot be written, or its file system has no locks.
    """
    end = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while True:
        lock = _attempt(path)
        if lock is not None:
            return lock
        if cancelled() or time.monotonic() >= end:
            return None
        waiting()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _attempt(path: Path) -> Lock | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        discard(path)  # a link or folder in the lock's place
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same(handle, path):
            return Lock(path, handle)
    except OSError as error:
        if error.errno not in _BUSY:
            os.close(handle)
            raise
    os.close(handle)
    return None


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
