"""A second tier of the cache behind a URL, shared by machines: read through, verified, optional.

Whatever goes wrong, a build goes on without it and says so once. Kernels are code, so an object is
used only if it is signed with the key that is configured; or, without a key, if nobody else can
write the tier (a folder of one's own), or the user declares to trust everyone who can.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cache.entry import is_digest
from cache.key import Key
from cache.remote_files import LARGEST, RemoteFiles, TierFailed
from cache.signed import Refused, SharedEntry, decode, encode
from cache.trust import distrusted
from graphc.store import KERNELS, LINKS

URL, WRITE, TRUST = "GRAPHC_REMOTE_CACHE", "GRAPHC_REMOTE_CACHE_WRITE", "GRAPHC_REMOTE_CACHE_TRUST"
KEY, KEY_FILE = "GRAPHC_REMOTE_CACHE_KEY", "GRAPHC_REMOTE_CACHE_KEY_FILE"
TIMEOUT = "GRAPHC_REMOTE_CACHE_TIMEOUT"

#: the precompiled header stays on its machine
SHARED = (KERNELS, LINKS)
#: look-ups at a time: each waits for the network
LANES = 8
#: which compilers made what is there, for builds on machines without one
COMPILERS = "compilers-v1"
_SECONDS, _CALLS = 10.0, 6  # a call is given up after so long, the tier after so many of these
_SHORTEST_KEY = 16
_MOST_COMPILERS = 64


@dataclass(frozen=True)
class Settings:
    """The environment's variables. `secret` is the key of signatures."""

    url: str
    trust: bool
    secret: bytes | None
    seconds: float


class Remote:
    """The shared tier that $GRAPHC_REMOTE_CACHE names. May be called from several threads; nothing
    is raised."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = dict(environ)
        self._url = environ.get(URL, "").strip()
        self._mutex = threading.Lock()
        self._settings: Settings | None = None
        self._files: RemoteFiles | None = None
        self._off = self._denied = False
        self._absent: set[str] = set()
        self._present: set[str] = set()
        self._refused: list[str] = []
        self._notes: list[str] = []

    def fetch(self, bucket: str, digest: str) -> SharedEntry | None:
        """The entry of that name, verified; None if there is none that can be used. What was not
        there is not looked for again."""
        name = place(bucket, digest)
        if bucket not in (*SHARED, COMPILERS) or name in self._absent:
            return None
        files = self._opened()
        if files is None:
            return None
        try:
            data = files.read(name)
            self._spent(files)
            if data is None:
                self._absent.add(name)
                return None
            return self._decoded(files, data, bucket, digest)
        except Refused as reason:
            self._absent.add(name)
            with self._mutex:
                self._refused.append(f"{bucket}/{digest[:12]}: {reason}")
        except TierFailed as reason:
            self._leave(f"it is left alone for the rest of this build: {reason}")
        return None

    @property
    def writes(self) -> bool:
        """Whether write-back is on, and was not denied."""
        return _is_on(self._environ, WRITE) and not self._denied

    def offer(
        self, bucket: str, key: Key, payload: Path, label: str, seconds: float, *, replace: bool
    ) -> None:
        """Stores an entry of this machine, if write-back is on; without `replace`, if there is none
        of that name."""
        name = place(bucket, key.digest)
        if not self.writes or bucket not in SHARED or name in self._present:
            return
        files, settings = self._opened(), self._settings
        if files is None or settings is None:
            return
        try:
            if replace or not files.has(name):
                data = payload.read_bytes()
                self._write(files, settings, bucket, key, data, label, seconds)
            self._present.add(name)
            if bucket == LINKS:
                self._tell_compiler(files, settings, key)
        except OSError:
            return  # of the payload: the folder was removed under the build
        except TierFailed as reason:
            if _is_denial(reason.__cause__):  # reading goes on
                self._deny(str(reason))
            else:
                self._leave(f"it is left alone for the rest of this build: {reason}")

    def state(self) -> str:
        """How the tier is used, on one line.

        Raises:
            TierFailed: it is not, or not any more; says why.
        """
        files, settings = self._opened(), self._settings
        if files is None or settings is None:
            raise TierFailed("; ".join(self.drain_notes()))
        compilers = len(files.names(COMPILERS))
        signed = "signed entries only" if settings.secret else "entries without signature"
        how = "read and written" if self.writes else "read"
        return f"{shown(self._url)}, {how}, {signed}, libraries of {compilers} compilers"

    def makers(self) -> list[tuple[str, str]]:
        """(identity, target) of each compiler whose libraries are there."""
        files = self._opened()
        if files is None:
            return []
        try:
            digests = files.names(COMPILERS)
        except TierFailed as reason:
            self._leave(f"it is left alone for the rest of this build: {reason}")
            return []
        digests = list(filter(is_digest, digests))[:_MOST_COMPILERS]
        found = [self.fetch(COMPILERS, digest) for digest in digests]
        return [(e.key["compiler"], e.key["target"]) for e in found if e is not None]

    def drain_notes(self) -> list[str]:
        """What a user should hear, once each."""
        with self._mutex:
            notes, self._notes = self._notes, []
            refused, self._refused = self._refused, []
        if refused:
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            notes.append(
                f"the shared cache {shown(self._url)} holds what is refused and made here instead: "
                f"{refused[0]}{more}"
            )
        return notes

    # -- inside --------------------------------------------------------------------------------

    def _opened(self) -> RemoteFiles | None:
        with self._mutex:
            if self._files is None and not self._off:
                try:
                    settings = read_settings(self._environ)
                    files = RemoteFiles(settings.url, settings.seconds)
                    if files.local is not None and not files.exists():
                        raise TierFailed("there is no such folder")
                    if settings.secret is None and not settings.trust:
                        _check_own(files)
                    self._settings, self._files = settings, files
                except TierFailed as reason:
                    self._off = True
                    self._notes.append(f"the shared cache {shown(self._url)} is not used: {reason}")
            return None if self._off else self._files

    def _leave(self, reason: str) -> None:
        with self._mutex:
            if not self._off:
                self._off = True
                self._notes.append(f"the shared cache {shown(self._url)} failed; {reason}")

    def _deny(self, reason: str) -> None:
        with self._mutex:
            if not self._denied:
                self._denied = True
                self._notes.append(
                    f"the shared cache {shown(self._url)} cannot be written from here (unset "
                    f"{WRITE}): {reason}"
                )

    def _spent(self, files: RemoteFiles) -> None:
        most = _CALLS * files.seconds
        if files.spent > most:
            self._leave(f"it is left alone after {most:g} s of waiting for it ({TIMEOUT})")

    def _decoded(self, files: RemoteFiles, data: bytes, bucket: str, digest: str) -> SharedEntry:
        assert self._settings is not None
        if len(data) > LARGEST:
            raise Refused(f"it has more than {LARGEST >> 20} MB")
        if files.local is not None and self._settings.secret is None and not self._settings.trust:
            name = Path(place(bucket, digest))
            for part in (name, *name.parents):
                reason = _not_own(Path(files.local).resolve() / part)
                if reason:
                    raise Refused(f"{part} {reason}")
        return decode(data, bucket, digest, self._settings.secret)

    def _write(
        self, files: RemoteFiles, settings: Settings, bucket: str, key: Key, data: bytes,
        label: str, seconds: float,
    ) -> None:  # fmt: skip
        if self._off or len(data) > LARGEST // 2:
            return
        entry = encode(bucket, key, data, label, seconds, settings.secret)
        files.write(place(bucket, key.digest), entry)
        self._spent(files)

    def _tell_compiler(self, files: RemoteFiles, settings: Settings, library: Key) -> None:
        try:
            fields = (("compiler", library["compiler"]), ("target", library["target"]))
        except KeyError:
            return
        key = Key(fields)
        if self.fetch(COMPILERS, key.digest) is None:
            self._write(files, settings, COMPILERS, key, b"", "compiler", 0.0)


def place(bucket: str, digest: str) -> str:
    """The name of an entry's object below the tier's URL."""
    if bucket == COMPILERS:  # few, and listed
        return f"{bucket}/{digest}"
    return f"{bucket}/{digest[:2]}/{digest}"


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings of the shared tier.

    Raises:
        TierFailed: one cannot be used; says which, and what to do.
    """
    text = environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(text) if text else _SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise TierFailed(f"expected seconds in {TIMEOUT}, found {text!r}")
    url = environ.get(URL, "").strip()
    return Settings(url, _is_on(environ, TRUST), _secret(environ), seconds)


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip() not in ("", "0")


def _secret(environ: Mapping[str, str]) -> bytes | None:
    text, file = environ.get(KEY, ""), environ.get(KEY_FILE, "")
    if text and file:
        raise TierFailed(f"expected {KEY} or {KEY_FILE}, found both")
    if not text and not file:
        return None
    secret = text.encode()
    if file:
        path = Path(file).expanduser()
        try:
            if path.stat().st_mode & 0o022:
                raise TierFailed(f"others can write the file of {KEY_FILE}; run: chmod 600 {path}")
            secret = path.read_bytes()
        except OSError as error:
            raise TierFailed(f"the file of {KEY_FILE} cannot be read: {error}") from None
    secret = secret.strip()
    if len(secret) < _SHORTEST_KEY:
        raise TierFailed(
            f"expected a key of at least {_SHORTEST_KEY} bytes, found {len(secret)}; "
            "make one: openssl rand -hex 32"
        )
    return secret


def _check_own(files: RemoteFiles) -> None:
    """Without a key only a tier that nobody else can write is used.

    Raises:
        TierFailed: others could, as far as one can tell from here.
    """
    advice = (
        f"set {KEY_FILE} to the key that its entries are signed with, or {TRUST}=1 to run code of "
        "everyone who can write there"
    )
    if files.protocol == "memory":
        return
    if files.local is None:
        raise TierFailed(f"who can write there cannot be told from here; {advice}")
    reason = _not_own(Path(files.local).resolve())
    if reason:
        raise TierFailed(f"the folder {reason}; {advice}")


def _not_own(path: Path) -> str:
    """Why others could have written a file or folder; "" if they could not."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    return distrusted(status)


def _is_denial(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and (
        isinstance(error, PermissionError) or error.errno == errno.EROFS
    )


def shown(url: str) -> str:
    """A URL without the password that may be in it."""
    head, sign, rest = url.partition("://")
    user, at, host = rest.rpartition("@") if "@" in rest.partition("/")[0] else ("", "", rest)
    return f"{head}{sign}{'...' + at if user else ''}{host}"
