"""Peers against each other: a process for each, and samples of all in turn.

Every peer lives in a fresh process of its own, pinned to the same cores with the same number of
threads; only one of them works at a time. A busy moment of the machine then hits all alike, and no
thread pool stands in another's way.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

import cli
from cli.jobs import Job, Unavailable
from cli.measure import median
from cli.peers import OURS, PEERS

#: calls of one sample at most, and the length of a call (s) from which on it needs no warm one
_CALLS = 200
_LONG = 2.0

Hold = Callable[[], AbstractContextManager[object]]


class Worker:
    """One peer's process. `ask` raises Unavailable with what the peer said, or how it ended."""

    def __init__(
        self, job: Job, *, nice: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.job = job
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        count = str(job.threads)
        variables = os.environ | {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count),
            "GRAPHC_THREADS": count,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "PYTHONPATH": os.pathsep.join([str(Path(cli.__file__).parents[1]), *_python_path()]),
            **(environment or {}),
        }
        command = [sys.executable, "-m", "cli.worker"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", str(nice), *command] if nice else command,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables,
                text=True,
            )  # fmt: skip
        self._send(job)

    def _send(self, data: object) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(msgspec.json.encode(data).decode() + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def ask(self, op: str, **request: object) -> dict[str, Any]:
        self._send({"op": op, **request})
        stdout: IO[str] | None = self.process.stdout
        assert stdout
        line = stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"], lasting=answer["lasting"])
        return answer

    def _ended(self) -> Unavailable:
        status = self.process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return Unavailable(f"its process ended ({status}): {lines[-1][:200] if lines else ''}")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):
            assert self.process.stdin
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def _python_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


@dataclass
class Entry:
    """What is known of one peer: facts of `worker.load`, seconds per call."""

    facts: dict[str, Any] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians and minima in seconds, and the facts."""
        return {
            **self.facts,
            "wall_s": median(self.wall),
            "wall_min_s": min(self.wall),
            "cpu_s": median(self.cpu),
            "cpu_min_s": min(self.cpu),
            "samples": len(self.wall),
        }


def cores(threads: int) -> list[int]:
    """The cores that all peers are pinned to: the first ones this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(threads))
    return sorted(os.sched_getaffinity(0))[:threads]


def prepare(
    job: Job, key: str, *, nice: int = 0, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The artefacts of a job, made by a process of its own unless those of the same key are there.

    The process runs with `nice`ness and `environment` on top of this one's.

    Raises:
        Unavailable: the peer isn't installed or can't take the model.
    """
    peer = (PEERS | OURS)[job.peer]
    record = Path(job.folder) / "built.json"
    stamp = f"{key} {_versions(peer.packages)}"
    if record.exists():
        known: dict[str, Any] = msgspec.json.decode(record.read_bytes())
        if known.pop("key", "") == stamp:
            if "unavailable" in known:
                raise Unavailable(known["unavailable"])
            return known
    if peer.build is None:
        return {}
    worker = Worker(job, nice=nice, environment=environment)
    try:
        built = worker.ask("build")
    except Unavailable as error:
        if error.lasting:
            record.write_bytes(msgspec.json.encode({"key": stamp, "unavailable": str(error)}))
        raise
    finally:
        worker.close()
    record.write_bytes(msgspec.json.encode({"key": stamp, **built}))
    return built


def _versions(packages: Sequence[str]) -> str:
    found = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return " ".join(found)


def race(
    jobs: dict[str, Job],
    *,
    rounds: int,
    seconds: float,
    hold: Hold = contextlib.nullcontext,
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Loads every job and times all in turn.

    Args:
        rounds: samples of each peer; fewer, at least two, of one whose calls are long.
        seconds: about how long each peer is timed for.
        hold: entered around the timing (a lock of a shared machine), again for each round if all
            of it takes longer than a minute.

    Returns:
        What was measured by name, and the reasons of those left out.
    """
    entries: dict[str, Entry] = {}
    skipped: dict[str, str] = {}
    workers: dict[str, Worker] = {}
    with _closing(workers):
        for name, job in jobs.items():
            try:
                workers[name] = Worker(job)
                entries[name] = Entry(workers[name].ask("load"))
            except Unavailable as error:
                skipped[name] = str(error)
                entries.pop(name, None)
                if name in workers:
                    workers.pop(name).close()
        counts = {n: _samples(e.facts["call_s"], rounds, seconds) for n, e in entries.items()}
        whole = sum(n * c * entries[name].facts["call_s"] for name, (n, c) in counts.items())
        nothing: Hold = contextlib.nullcontext
        outer, inner = (hold, nothing) if whole < 60 else (nothing, hold)
        with outer():
            _sample(workers, entries, skipped, counts, inner)
    return entries, skipped


def _sample(
    workers: dict[str, Worker],
    entries: dict[str, Entry],
    skipped: dict[str, str],
    counts: dict[str, tuple[int, int]],
    hold: Hold,
) -> None:
    for turn in range(max((n for n, _ in counts.values()), default=0)):
        with hold():
            for name, worker in list(workers.items()):
                times, calls = counts[name]
                if turn >= times:
                    continue
                try:
                    warm = 0 if entries[name].facts["call_s"] > _LONG else 1
                    sample = worker.ask("time", calls=calls, warm=warm)
                except Unavailable as error:
                    skipped[name] = str(error)
                    del workers[name], entries[name]
                    worker.close()
                    continue
                entries[name].wall += sample["wall_s"]
                entries[name].cpu += sample["cpu_s"]
                if worker.job.threads > 1:
                    time.sleep(0.02)  # its threads spin for a while before they sleep


def _samples(call: float, rounds: int, seconds: float) -> tuple[int, int]:
    """(rounds, calls in each)"""
    most = max(2, min(rounds, int(seconds / call)))
    return most, max(1, min(_CALLS, int(seconds / most / call)))


@contextlib.contextmanager
def _closing(workers: dict[str, Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers.values():
            worker.close()
