"""Finds the C++ compiler and learns its identity.

Order: $CXX, g++ and clang++ on PATH, then the compiler inside the PyPI package `ziglang`
(`pip install "graphc[toolchain]"`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from graphc.cpu import architecture
from graphc.errors import CompileError

INSTALL = 'install g++ or clang++, or run: pip install "graphc[toolchain]"'
_OLDEST = {"gcc": 9, "clang": 10, "zig": 15}
_found: dict[tuple[str, str], Compiler] = {}


class NoCompilerError(CompileError):
    """This machine has no compiler, and $CXX does not ask for one."""


@dataclass(frozen=True)
class Compiler:
    """A usable C++17 compiler. `identity` and `target` go into keys, `command` never does."""

    command: tuple[str, ...]  # empty: known from the cache only (graphc.toolchain.recorded)
    kind: str  # "gcc" | "clang" | "zig"
    version: str  # full version text, without the program's name or path
    major: int  # of gcc or clang (zig: of its clang)
    target: str  # target triple

    @property
    def identity(self) -> str:
        return f"{self.kind} {self.version}"

    @staticmethod
    def discover() -> Compiler:
        """The compiler to use. The answer is kept for the process, per $CXX and PATH.

        Raises:
            NoCompilerError: there is none; says what was tried.
            CompileError: the one named by $CXX does not work.
        """
        request = (os.environ.get("CXX", ""), os.environ.get("PATH", ""))
        if request not in _found:
            _found[request] = _search(request[0])
        return _found[request]


def _search(cxx: str) -> Compiler:
    tried: list[str] = []
    if cxx.strip():
        try:
            command = tuple(shlex.split(cxx))
        except ValueError as error:
            raise CompileError(
                f"expected a command in CXX, found {cxx!r}: {error}",
                where="environment variable CXX",
            ) from None
        compiler = _probe(command, tried)
        if compiler is None:  # an explicit wish is never silently replaced by something else
            raise CompileError(
                f"the compiler named by CXX cannot be used: {tried[0]}",
                where="environment variable CXX",
                hint=f"correct or unset CXX; {INSTALL}",
            )
        return compiler
    candidates: list[tuple[str, ...] | None] = [("g++",), ("clang++",), _zig_command()]
    for candidate in candidates:
        if candidate is None:
            tried.append("the package ziglang: not installed")
            continue
        compiler = _probe(candidate, tried)
        if compiler is not None:
            return compiler
    raise NoCompilerError("no C++ compiler found; tried " + "; ".join(tried), hint=INSTALL)


def _zig_command() -> tuple[str, ...] | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    binary = Path(next(iter(spec.submodule_search_locations))) / "zig"
    if binary.is_file():
        return (str(binary), "c++")
    return (sys.executable, "-m", "ziglang", "c++")


def _probe(command: tuple[str, ...], tried: list[str]) -> Compiler | None:
    shown = shlex.join(command)
    program = shutil.which(command[0])
    if program is None:
        tried.append(f"{shown}: not found")
        return None
    # -v prints version and target in one start, for gcc as for clang
    try:
        done = subprocess.run(
            (program, *command[1:], "-v"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        tried.append(f"{shown}: {error}")
        return None
    compiler = parse_version((program, *command[1:]), done.stderr + done.stdout)
    if compiler is None:
        tried.append(f"{shown}: neither g++ nor clang++ (exit status {done.returncode})")
        return None
    if compiler.major < _OLDEST[compiler.kind]:
        tried.append(f"{shown}: {compiler.identity} is too old")
        return None
    return compiler


def parse_version(command: tuple[str, ...], text: str) -> Compiler | None:
    """Reads the answer to `-v`; None if it is no compiler we know."""
    target = re.search(r"^Target: (\S+)", text, re.MULTILINE)
    gcc = re.search(r"^gcc version ((\d+)\..*?)\s*$", text, re.MULTILINE)
    clang = re.search(r"^(.*\bclang version (\d+)\..*?)\s*$", text, re.MULTILINE)
    if clang is not None:
        if is_zig(command):
            return Compiler(command, "zig", _zig_version(clang[1]), int(clang[2]), _zig_target())
        triple = target[1] if target else ""
        return Compiler(command, "clang", clang[1], int(clang[2]), triple)
    if gcc is not None and target is not None:
        return Compiler(command, "gcc", gcc[1], int(gcc[2]), target[1])
    return None


def is_zig(command: tuple[str, ...]) -> bool:
    """Whether the command is zig's compiler driver (`zig c++`, `python -m ziglang c++`)."""
    return command[-1] == "c++" and (Path(command[0]).name == "zig" or "ziglang" in command)


def _zig_version(clang: str) -> str:
    try:
        return f"{importlib.metadata.version('ziglang')} {clang}"
    except importlib.metadata.PackageNotFoundError:
        return clang


def _zig_target() -> str:
    """Explicit, because zig's own default names the running kernel's version."""
    system = {"linux": "linux", "darwin": "macos"}.get(sys.platform, sys.platform)
    if system != "linux":
        return f"{architecture()}-{system}"
    library = "gnu" if platform.libc_ver()[0] == "glibc" else "musl"
    return f"{architecture()}-linux-{library}"
