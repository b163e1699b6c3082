"""What the user's code reads while it makes a model: files, environment variables, modules.

Python reports opened files, connections and processes to audit hooks (PEP 578); safetensors opens
files behind Python's back, so its door is watched by name. Reads of clocks are not seen.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from graphc.warm.identity import ROOT

_CONNECTS = frozenset({"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"})
_RUNS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"})
_LISTS = frozenset({"os.listdir", "os.scandir", "os.walk", "glob.glob"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: places of the system and its libraries, which versions stand for
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/lib/", "/lib/")

_watching: list[Watch] = []
_hooked = False


class Watch:
    """While inside, notes what is read. `unknown` is why not all of it can be known, "" if it can.

    files: read, as absolute paths. environment: variables that the user's own code asked for, with
    what it got (None: not set).
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.environment: dict[str, str | None] = {}
        self.unknown = ""
        self._written: set[str] = set()
        self._loaded = dict(sys.modules)

    def modules(self) -> dict[str, str]:
        """File by name of the user's own modules: those loaded inside, and what these import."""
        waiting = [n for n, m in sys.modules.items() if self._loaded.get(n) is not m]
        made: dict[str, str] = {}
        while waiting:
            name = waiting.pop()
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if name in made or not isinstance(file, str):
                continue
            if is_users(file) and os.path.isfile(file):
                made[name] = os.path.realpath(file)
                waiting += _imported(Path(file), getattr(module, "__package__", "") or "")
        return made

    def stale(self) -> str:
        """The file of a module of the user's that was loaded before, and may have changed since."""
        begin = _process_start()
        for name, file in self.modules().items():
            same = self._loaded.get(name) is sys.modules.get(name)
            if same and os.stat(file).st_mtime > begin:
                return file
        return ""

    def read(self) -> list[str]:
        """Files that were read and not written, and are still there."""
        return sorted(f for f in self.files - self._written if os.path.isfile(f))

    def _say(self, reason: str) -> None:
        self.unknown = self.unknown or reason

    def event(self, name: str, args: tuple[Any, ...]) -> None:
        """One audit event."""
        if name == "open":
            self._opened(*args[:3])
        elif name in _CONNECTS:
            self._say("it opens a network connection")
        elif name in _RUNS and _of_user():
            self._say("it runs another program")
        elif name in _LISTS and _of_user():
            self._say("it lists a folder")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a number: opened before by name
        name = os.path.abspath(os.fsdecode(path))
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (
            mode is None and isinstance(flags, int) and flags & _WRITES
        ):
            self._written.add(name)
        elif not name.endswith(".pyc") and not name.startswith(_SYSTEM) and is_users(name):
            self.files.add(name)


def _hook(name: str, args: tuple[Any, ...]) -> None:
    for watch in _watching:
        watch.event(name, args)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Watches what is read inside."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # for good, which costs little: Python has no way to take it back
        _hooked = True
    is_users(__file__)  # learns now where Python keeps its own: that asks for variables, too
    watch = Watch()
    with _doors(watch), _chance(watch), _variables(watch):
        _watching.append(watch)
        try:
            yield watch
        finally:
            _watching.remove(watch)


@contextlib.contextmanager
def _doors(watch: Watch) -> Iterator[None]:
    """safetensors' own way to a file."""
    import safetensors

    whole = safetensors.safe_open

    def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
        watch.event("open", (filename, "r", 0))
        return whole(filename, *args, **kwargs)

    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("safetensors", "transformers", "accelerate")
        and getattr(module, "__dict__", {}).get("safe_open") is whole
    ]
    for module in holders:
        module.safe_open = opened  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("safe_open") is opened:
                module.safe_open = whole  # type: ignore[attr-defined]


@contextlib.contextmanager
def _chance(watch: Watch) -> Iterator[None]:
    """Random numbers of no fixed seed. (torch's own begin with one.)"""
    import numpy as np

    seeded: set[str] = set()
    doors = (("random", random), ("numpy.random", np.random))
    whole = {name: module.seed for name, module in doors}

    def seed_of(name: str) -> Any:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if any(value is not None for value in (*args, *kwargs.values())):
                seeded.add(name)
            return whole[name](*args, **kwargs)

        return seed

    before = _states()
    for name, module in doors:
        module.seed = seed_of(name)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in doors:
            module.seed = whole[name]  # type: ignore[attr-defined]
        after = _states()
        drawn = [name for name in before if before[name] != after[name] and name not in seeded]
        if drawn:
            watch._say(f"it draws random numbers of no fixed seed ({drawn[0]})")


def _states() -> dict[str, object]:
    import numpy as np

    _, keys, position, *rest = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy.random": (bytes(np.asarray(keys)), position, *rest),
    }


@contextlib.contextmanager
def _variables(watch: Watch) -> Iterator[None]:
    """Environment variables that the user's own code asks for."""
    kind = type(os.environ)
    whole = kind.__getitem__

    def get(self: Any, key: Any) -> Any:
        if isinstance(key, str) and _of_user():
            try:
                watch.environment[key] = whole(self, key)
            except KeyError:
                watch.environment[key] = None
        return whole(self, key)

    kind.__getitem__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__ = whole  # type: ignore[method-assign]


def _imported(file: Path, package: str) -> Iterator[str]:
    """Names that modules may have which the import statements of a source file load."""
    try:
        tree = ast.parse(file.read_bytes()) if file.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:  # with the packages around them
            words = name.split(".")
            yield from (".".join(words[:count]) for count in range(1, len(words) + 1))


@cache
def _process_start() -> float:
    """When this process began, in seconds since 1970; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        running = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (running - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _of_user() -> bool:
    """Whether the nearest code that is not of Python's library is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False  # Python looks for a module
        kind = _kind(frame.f_code.co_filename)
        if kind != "library" and frame.f_code.co_filename != __file__:
            return kind == "user"
        frame = frame.f_back
    return False


@cache
def _kind(file: str) -> str:
    """ "library" of Python, "user", or "package": installed, or our own."""
    if file.startswith("<"):
        return "library"
    if not is_users(file):
        real = os.path.realpath(file)
        inside = any(real.startswith(place) for place in _installed())
        own = any(real.startswith(place) for place in _own())
        return "package" if inside or own else "library"
    return "user"


@cache
def is_users(file: str) -> bool:
    """Whether a file belongs to the user: neither Python's, nor of an installed package, nor
    ours."""
    real = os.path.realpath(file)
    return not any(real.startswith(place) for place in (*_library(), *_installed(), *_own()))


@cache
def _library() -> tuple[str, ...]:
    paths = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return tuple({os.path.realpath(path) + os.sep for path in paths})


@cache
def _installed() -> tuple[str, ...]:
    import site

    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    with contextlib.suppress(AttributeError):
        paths.add(site.getusersitepackages())
    return tuple({os.path.realpath(path) + os.sep for path in paths})


@cache
def _own() -> tuple[str, ...]:
    return tuple(str(Path(ROOT / name)) + os.sep for name in ("graphc", "passes", "cache", "cli"))
