"""Whether what lies in the cache can only have been written by its user.

Kernels are code that runs as the user. A file or folder is trusted if it belongs to the user (or
to root, who can replace anything anyway and provides read-only caches in images), nobody else may
write to it, and no symbolic link leads to it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class Distrusted(Exception):
    """Why a file or folder cannot be used."""


def foreign(status: os.stat_result) -> bool:
    """Whether it belongs to somebody other than the user and root."""
    return hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0)


def own(status: os.stat_result) -> bool:
    """Whether it belongs to the user."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def distrusted(status: os.stat_result) -> str:
    """Why a file or folder of this status isn't trusted, "" if it is."""
    if foreign(status):
        return f"belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if status.st_mode & stat.S_IWOTH:
        return f"is writable by everyone (mode {mode:04o})"
    if status.st_mode & stat.S_IWGRP:
        return f"is writable by its group (mode {mode:04o})"
    return ""


def open_folder(path: str | Path, above: int | None = None) -> int:
    """An open folder, relative to another open one if given; the caller closes it.

    Raises:
        Distrusted: it is a link, no folder, or not trusted.
        OSError: it cannot be opened; FileNotFoundError if it is not there.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Distrusted("is a symbolic link or no folder") from None
        if error.errno == errno.EACCES:
            raise Distrusted("may not be opened") from None
        raise
    try:
        if reason := distrusted(os.fstat(handle)):
            raise Distrusted(reason)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_file(path: str | Path, above: int | None = None) -> int:
    """A file open for reading, relative to an open folder if given; the caller closes it. Pipes and
    the like are not waited for.

    Raises:
        Distrusted: it is a link, no regular file, or not trusted.
        OSError: it cannot be opened; FileNotFoundError if it is not there.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Distrusted("is a symbolic link") from None
        if error.errno in (errno.EACCES, errno.ENXIO):  # ENXIO: a socket
            raise Distrusted("may not be opened") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Distrusted("is no regular file")
        if reason := distrusted(status):
            raise Distrusted(reason)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_file(path: str | Path, above: int | None = None) -> bytes:
    """All of a file. Raises as `open_file`, and OSError if it cannot be read."""
    with os.fdopen(open_file(path, above), "rb", buffering=0) as file:
        return file.readall()
