"""The files of a shared tier, through fsspec: every call has a deadline.

A call runs in a thread of its own and is given up when its time is over: not every file system can
be told to stop. fsspec is imported here and nowhere else, when the first call is made.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

#: of one object: a library of some thousand kernels has a few MB
LARGEST = 256 << 20
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)")
#: where a file that is written appears at once and whole
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "memory"}


class TierFailed(Exception):
    """Why a shared tier cannot be used."""


class RemoteFiles:
    """Files below a URL.

    Args:
        url: "s3://bucket/prefix", "file:///folder", ...
        seconds: after which a call is given up.

    Every method may raise TierFailed.
    """

    def __init__(self, url: str, seconds: float) -> None:
        match = _URL.fullmatch(url)
        if match is None or "::" in url or not match[2]:
            raise TierFailed("expected a URL such as s3://bucket/prefix or file:///folder")
        self.protocol, self.seconds = match[1], seconds
        self.spent = 0.0  # seconds during which at least one call was waited for
        self._waiting, self._since, self._mutex = 0, 0.0, threading.Lock()
        try:
            import fsspec  # takes its time on a cold disk, and is no answer to wait for

            fsspec.get_filesystem_class(match[1])
        except (ImportError, ValueError) as error:
            raise TierFailed(_reason(error)) from error
        self._fs, self._root = self._within(lambda: _opened(url, match[1], seconds))

    @property
    def local(self) -> str | None:
        """The folder, if it is one of this machine's file system."""
        return self._root if self.protocol in ("file", "local") else None

    def exists(self) -> bool:
        """Whether the folder of the URL is there. Where names have no folders (object stores),
        this says nothing."""
        return self._within(lambda: bool(self._fs.isdir(self._root)))

    def has(self, name: str) -> bool:
        """Whether there is a file."""
        return self._within(lambda: bool(self._fs.isfile(posixpath.join(self._root, name))))

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        path = posixpath.join(self._root, name)

        def read() -> bytes | None:
            try:
                # one byte more than allowed tells that there is more
                return bytes(self._fs.cat_file(path, start=0, end=LARGEST + 1))
            except (FileNotFoundError, IsADirectoryError) as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return None
            except OSError as error:
                if _code(error) == "InvalidRange":  # of an empty object
                    return b""
                raise

        return self._within(read)

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces a file, whole."""
        path = posixpath.join(self._root, name)

        def write() -> None:
            if self.protocol in _WHOLE:
                self._fs.pipe_file(path, data)
                return
            aside = f"{path}.{secrets.token_hex(8)}.tmp"
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            try:
                self._fs.pipe_file(aside, data)
                self._fs.mv(aside, path)
            except BaseException:
                if self._fs.exists(aside):
                    self._fs.rm_file(aside)
                raise

        self._within(write)

    def names(self, folder: str) -> list[str]:
        """The last parts of the names of the files in a folder; none if it is not there."""
        path = posixpath.join(self._root, folder)

        def names() -> list[str]:
            try:
                found: list[str] = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(posixpath.basename(name) for name in found)

        return self._within(names)

    def _within(self, call: Callable[[], T]) -> T:
        done: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(call())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True, name="graphc-shared-cache")
        with self._counted():
            thread.start()
            thread.join(self.seconds)
        if done:
            return done[0]
        if failed:
            raise TierFailed(_reason(failed[0])) from failed[0]
        raise TierFailed(f"no answer within {self.seconds:g} s")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._mutex:
            self._waiting += 1
            if self._waiting == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._mutex:
                self._waiting -= 1
                now = time.monotonic()
                self.spent, self._since = self.spent + now - self._since, now


def _opened(url: str, protocol: str, seconds: float) -> tuple[Any, str]:
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": min(3.0, seconds),
            "read_timeout": seconds,
            "retries": {"max_attempts": 0},
        }
    fs, root = fsspec.core.url_to_fs(url, **options)
    return fs, str(root)


def _code(error: BaseException) -> str:
    """What the server of an object store calls the error."""
    response = getattr(error.__cause__, "response", None)
    return str(response["Error"]["Code"]) if isinstance(response, dict) else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f'{error}; pip install "graphc[remote]"'
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
