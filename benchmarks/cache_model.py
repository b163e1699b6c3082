"""A model of many little kernels, built in processes of their own: what the cache campaigns use.

Each build goes the whole way, from the captured graph to a plan that is loaded and run. It happens
in a forked child, so that a crash or a kill is an outcome like others, and torch is imported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graphc import api
from graphc.frontends.capture import Captured, capture
from graphc.lowering.classify import native_operators
from graphc.runtime.session import load

Place = tuple[str, str]  # bucket and digest of an entry


class Little(torch.nn.Module):
    """`count` different kernels of one loop each, and a few others: float32 [3, 32]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.sin(x[:, i % 8 :] * (i + 1.5)) for i in range(self.count)]
        loops = [part - part.mean(-1, keepdim=True) for part in parts]
        return (*loops, torch.cumsum(x, -1), x @ x.transpose(0, 1))


@dataclass(frozen=True)
class Outcome:
    """How a build ended. status: exit status, negative for a signal. origins: what became of each
    entry that the build looked for. output, library: digests of results and of the library."""

    status: int
    seconds: float
    origins: dict[Place, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    output: str = ""
    library: str = ""
    error: str = ""
    difference: float = 0.0  # largest, of any result from eager torch's


class Subject:
    """The model, captured once; `build` builds it with the cache at `root`."""

    def __init__(self, count: int, scratch: Path) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.inputs = torch.randn(3, 32)
        self._scratch = scratch
        self._numbers = 0
        module = Little(count).eval()
        self._right = module(self.inputs)
        self._captured: Captured = capture(
            module, (self.inputs,), None, None, keep=native_operators()
        )

    def start(self, root: Path, before: Callable[[], None] | None = None) -> Running:
        """A build that has begun in another process, in which `before` is called first."""
        self._numbers += 1
        place = self._scratch / f"build{self._numbers}"
        (place / "tmp").mkdir(parents=True)
        reader, writer = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _child(lambda: self._work(root, place, before), writer)
        os.close(writer)
        return Running(process, reader, place)

    def build(self, root: Path, before: Callable[[], None] | None = None) -> Outcome:
        """A build from start to end."""
        return self.start(root, before).outcome()

    def differences(self, outcome: Outcome) -> list[str]:
        """What is wrong with the results of the build that others are compared with."""
        if outcome.status:
            return [outcome.error]
        wrong = not outcome.difference < 1e-5
        return [f"results differ from eager torch's by {outcome.difference}"] if wrong else []

    def _work(self, root: Path, place: Path, before: Callable[[], None] | None) -> object:
        os.environ["GRAPHC_CACHE_DIR"] = str(root)
        tempfile.tempdir = str(place / "tmp")
        plan = place / "plan"
        origins = _watched()
        if before is not None:
            before()
        report = api.build_captured(self._captured, plan)
        session = load(plan, threads=1)
        hasher, difference = hashlib.sha256(), 0.0
        for value, right in zip(session(self.inputs.numpy()), self._right, strict=True):
            hasher.update(value.tobytes())
            difference = max(difference, float(abs(value - right.numpy()).max()))
        library = hashlib.sha256((plan / "kernels.so").read_bytes()).hexdigest()
        return [list(origins.items()), report.notes, hasher.hexdigest(), library, difference]


class Running:
    """A build in another process."""

    def __init__(self, process: int, reader: int, place: Path) -> None:
        self._process, self._reader, self._place = process, reader, place
        self._started = time.perf_counter()

    def kill(self) -> None:
        """Ends it at once, with whatever it was doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)

    def outcome(self) -> Outcome:
        """Waits for its end."""
        with os.fdopen(self._reader, "rb") as file:
            text = file.read()
        _, code = os.waitpid(self._process, 0)
        seconds = time.perf_counter() - self._started
        status = os.waitstatus_to_exitcode(code)
        shutil.rmtree(self._place, ignore_errors=True)
        if status != 0:
            return Outcome(status, seconds, error=text.decode(errors="replace"))
        origins, notes, output, library, difference = json.loads(text)
        places = {(bucket, digest): origin for (bucket, digest), origin in origins}
        return Outcome(status, seconds, places, notes, output, library, "", difference)


def _child(work: Callable[[], object], writer: int) -> None:
    status, text = 1, ""
    try:
        text = json.dumps(work())
        status = 0
    except BaseException:
        text = traceback.format_exc()
    finally:
        with contextlib.suppress(OSError), os.fdopen(writer, "w") as file:
            file.write(text)
        os._exit(status)


def _watched() -> dict[Place, str]:
    """What becomes of each entry that this process looks for from now on."""
    from cache.store import Store

    found: dict[Place, str] = {}
    fetch, make = Store.fetch, Store.fetch_or_make

    def fetching(self: Store, bucket: str, *rest: object, **options: object) -> object:
        stored = fetch(self, bucket, *rest, **options)  # type: ignore[arg-type]
        if stored is not None:
            found[bucket, stored.key] = stored.origin
        return stored

    def making(self: Store, bucket: str, *rest: object, **options: object) -> object:
        stored = make(self, bucket, *rest, **options)  # type: ignore[arg-type]
        found[bucket, stored.key] = stored.origin
        return stored

    Store.fetch, Store.fetch_or_make = fetching, making  # type: ignore[method-assign, assignment]
    return found
