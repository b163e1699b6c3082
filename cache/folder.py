"""The cache's folder: where it is, whether it may be trusted, and writing files into it safely."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from graphc.errors import UsageError

DEFAULT_LIMIT = 5 * 1000**3
_DAY = 24 * 3600.0
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$GRAPHC_CACHE_DIR, or the user's cache folder for graphc."""
    wanted = environ.get("GRAPHC_CACHE_DIR", "")
    return Path(wanted).expanduser() if wanted else Path(platformdirs.user_cache_dir("graphc"))


def size_limit(environ: Mapping[str, str] = os.environ) -> int:
    """$GRAPHC_CACHE_SIZE in bytes, 5 GB by default.

    Raises:
        UsageError: the value is no size.
    """
    text = environ.get("GRAPHC_CACHE_SIZE", "").strip()
    if not text:
        return DEFAULT_LIMIT
    where = "environment variable GRAPHC_CACHE_SIZE"
    wanted = parse_size(text, where)
    if not wanted:
        raise UsageError(f"expected a size such as 5G or 500M, found {text!r}", where=where)
    return wanted


def parse_size(text: str, where: str = "") -> int:
    """Bytes of "2G", "500M", "1500000"; `where` the text stands.

    Raises:
        UsageError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"expected a size such as 5G or 500M, found {text!r}", where=where)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def open_root(root: Path) -> str:
    """Makes the folder (mode 0700) if it is missing; says why it cannot be written, "" if it can.

    Raises:
        UsageError: the folder could hold code planted by someone else, or is no folder.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError("expected the cache to be a folder", where=str(root)) from None
    except OSError as error:  # no place for a cache: everything is a miss, nothing is kept
        return error.strerror or str(error)
    try:
        status = root.stat()
    except OSError as error:
        return error.strerror or str(error)
    _trust(root, status)
    try:
        for name in ("tmp", "locks"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        tag = root / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n", encoding="ascii")
        with tempfile.TemporaryFile(dir=root / "tmp") as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _trust(root: Path, status: os.stat_result) -> None:
    hint = "set GRAPHC_CACHE_DIR to a folder of your own; kernels in it are run as your code"
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError("expected the cache to be a folder", where=str(root))
    # root can replace anything anyway, and provides read-only caches in images
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"the cache folder belongs to another user (uid {status.st_uid})",
            where=str(root),
            hint=hint,
        )
    if status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"the cache folder is writable by everyone (mode {stat.S_IMODE(status.st_mode):04o})",
            where=str(root),
            hint=f"run: chmod 700 {root}; or {hint}",
        )


def sweep(root: Path, older_than: float = _DAY) -> int:
    """Removes what interrupted builds left in tmp/; the number of things removed."""
    removed = 0
    try:
        leftovers = list((root / "tmp").iterdir())
    except OSError:
        return 0
    for path in leftovers:
        try:
            if time.time() - path.lstat().st_mtime < older_than:
                continue
        except OSError:
            continue
        discard(path)
        removed += 1
    return removed


def discard(path: Path) -> None:
    """Removes a file or folder, whatever its state."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new private file and waits until the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the disk has the folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot; the SHA-256 check finds what a crash then loses
    finally:
        os.close(handle)
