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

from cache.trust import distrusted, foreign, own
from graphc.errors import UsageError

DEFAULT_LIMIT = 5 * 1000**3
_DAY = 24 * 3600.0
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
#: what a build keeps its own files in, in front of the name of a folder of the system's
WORK = "graphc-work-"
OWN_FOLDERS = ("tmp", "locks", "quarantine")
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
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700, parents=True)
        link, status = root.lstat(), root.stat()
    except OSError as error:  # no place for a cache: everything is a miss, nothing is kept
        return error.strerror or str(error)
    _trust(root, link, status)
    try:
        for name in OWN_FOLDERS:
            own_folder(root / name)
        tag = root / "CACHEDIR.TAG"
        if not os.path.lexists(tag):
            with contextlib.suppress(FileExistsError):
                write_synced(tag, b"Signature: 8a477f597d28d172789f06886806bc55\n")
        with tempfile.TemporaryFile(dir=root / "tmp") as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _trust(root: Path, link: os.stat_result, status: os.stat_result) -> None:
    hint = "set GRAPHC_CACHE_DIR to a folder of your own; kernels in it are run as your code"
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError("expected the cache to be a folder", where=str(root))
    if foreign(link):  # a link to somewhere else, made by somebody else
        status = link
    reason = distrusted(status)
    if not reason:
        return
    if not foreign(status):
        hint = f"run: chmod go-w {root}; or {hint}"
    raise UsageError(f"the cache folder {reason}", where=str(root), hint=hint)


def own_folder(path: Path) -> None:
    """Makes `path`, inside a trusted folder, a folder of the user's own with mode 0700: a link or
    what belongs to another is taken away, a mode is put right.

    Raises OSError.
    """
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and not foreign(status):
            lacking = own(status) and status.st_mode & 0o700 != 0o700
            if lacking or status.st_mode & 0o022:
                path.chmod(0o700)
            return
        discard(path)
    raise OSError(errno.EEXIST, "it is no folder of this user's, and cannot be removed", str(path))


def mend(path: Path) -> bool:
    """Gives a folder of the user's own, if it is one and no link, mode 0700; False if it is no
    such folder or has that mode."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and own(status):
            path.chmod(0o700)
            return stat.S_IMODE(status.st_mode) != 0o700
    return False


def sweep(root: Path, older_than: float = _DAY) -> int:
    """Removes what killed builds left in the cache's tmp/ and locks/ and in the system's temporary
    folder; the number of things removed."""
    removed = 0
    for place, start in ((root / "tmp", ""), (root / "locks", ""), (system_folder(), WORK)):
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for item in found:
                if not item.name.startswith(start):
                    continue
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    if foreign(status) or time.time() - status.st_mtime < older_than:
                        continue
                    discard(Path(item.path))
                    removed += 1
    return removed


def system_folder() -> Path:
    """Where temporary files go: $TMPDIR, /tmp."""
    return Path(tempfile.gettempdir())


def discard(path: Path) -> None:
    """Removes a file, link or folder, whatever its state; what cannot be removed stays."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return
    if not is_folder:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return
    _remove_tree(path)
    if os.path.lexists(path):
        _permit(path)
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(OSError):  # ignore_errors does not ignore every one
        shutil.rmtree(path, ignore_errors=True)


def _permit(path: Path) -> None:
    """Folders without permissions cannot be emptied."""
    with contextlib.suppress(OSError):
        path.chmod(0o700)
        for inner in path.iterdir():
            if stat.S_ISDIR(inner.lstat().st_mode):
                _permit(inner)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new private file and waits until the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
