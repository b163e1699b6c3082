"""Runs compiler processes so that an interruption leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphc.errors import CompileError
from graphc.store import NoSpaceError

#: variables that would add headers or change code behind the key's back
_HIDDEN = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "COMPILER_PATH",
           "LIBRARY_PATH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "CCC_OVERRIDE_OPTIONS",
           "GCC_COMPARE_DEBUG")  # fmt: skip
_NO_SPACE = ("No space left on device", "NoSpaceLeft", "Disk quota exceeded", "no space on device")


@dataclass(frozen=True)
class Done:
    """How a process ended. `output` is stderr and stdout together."""

    status: int
    output: str


class Cancelled(Exception):
    """The build was given up while this piece was waiting or running."""


class Runner:
    """Starts processes from several threads; `cancel` ends them all and refuses new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def run(self, command: Sequence[str], folder: Path) -> Done:
        """Runs `command` with `folder` as working and temporary folder.

        Raises:
            Cancelled: `cancel` was called.
            CompileError: the program cannot be started.
            NoSpaceError: it ran out of disk space.
        """
        environment = {k: v for k, v in os.environ.items() if k not in _HIDDEN}
        environment |= {"LC_ALL": "C", "TMPDIR": str(folder)}
        with self._lock:
            if self._cancelled:
                raise Cancelled
            try:
                # its own session: Ctrl-C reaches us alone, and we end the whole group
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise CompileError(f"the compiler cannot be started: {error}") from None
            self._running.add(process)
        try:
            output, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if self._cancelled:
            raise Cancelled
        text = output.decode(errors="replace")
        if process.returncode != 0 and any(mark in text for mark in _NO_SPACE):
            raise NoSpaceError(
                "no space left on the device while compiling",
                where=str(folder),
                hint="free some space, or set GRAPHC_CACHE_DIR and TMPDIR to another disk",
            )
        return Done(process.returncode, text)

    def cancel(self) -> None:
        """Ends every running process and its children."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for process in running:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
