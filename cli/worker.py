"""A process that serves one peer: `python -m cli.worker`, started by cli.race.

It reads a Job, then requests, one JSON line each from stdin, and answers each with one JSON line:

    {"op": "build"}              makes the artefacts               {"cpu_s", "wall_s"}
    {"op": "load"}               loads and calls it twice          {"load_cpu_s", "call_s", ...}
    {"op": "time", "calls": n}   n timed calls after a warm one    {"wall_s": [..], "cpu_s": [..]}

or with {"unavailable": reason, "lasting": whether it will say so again}. It ends when stdin does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cli.jobs import Array, Job
    from cli.peers import Loaded


def main() -> None:
    """Serves until stdin ends."""
    # what libraries print to stdout must not get between the answers
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(data: dict[str, Any]) -> None:
        channel.write(msgspec.json.encode(data).decode() + "\n")
        channel.flush()

    raw = msgspec.json.decode(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        # before numpy and torch are loaded: they size their pools by it
        os.sched_setaffinity(0, raw["cpus"])
    sys.path[1:1] = raw["path"]
    from cli.jobs import Job, Unavailable

    server = _Server(msgspec.convert(raw, Job))
    for line in sys.stdin:
        request = msgspec.json.decode(line)
        try:
            answer(getattr(server, request.pop("op"))(**request))
        except Unavailable as error:
            answer({"unavailable": str(error), "lasting": error.lasting})
        except Exception as error:
            import traceback

            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            told = f"{type(error).__name__}: {first[:300]}"
            answer({"unavailable": told, "lasting": False})
    channel.flush()
    os._exit(0)  # without the clean-up of whatever pools the peer has


class _Server:
    def __init__(self, job: Job) -> None:
        from cli.peers import OURS, PEERS

        self.job = job
        self.peer = (PEERS | OURS)[job.peer]
        self.loaded: Loaded | None = None

    def build(self) -> dict[str, Any]:
        """The artefacts of the peer, made now."""
        from cli.measure import cpu_seconds

        note = Path(self.job.folder) / "build-cpu"
        note.unlink(missing_ok=True)
        begin, begin_cpu = time.perf_counter(), cpu_seconds()
        if self.peer.build is not None:
            self.peer.build(self.job)
        spent = cpu_seconds() - begin_cpu
        # the note leaves out imports and the loading of the module, which all torch peers have
        counted = float(note.read_text()) if note.exists() else spent
        note.write_text(repr(counted))
        return {"cpu_s": counted, "whole_cpu_s": spent, "wall_s": time.perf_counter() - begin}

    def load(self) -> dict[str, Any]:
        """Loads it and calls it twice, then once on every further draw of the reference."""
        from cli.jobs import flat, load_inputs
        from cli.measure import cpu_seconds, peak_memory, timed

        begin = cpu_seconds()
        loaded = self.loaded = self.peer.load(self.job)
        ready = cpu_seconds()
        before = _resident()
        result = flat(loaded.call())
        first = cpu_seconds()
        compare, summary = (_by_row, _middle) if self.job.by_row else (_compare, _summary)
        compared = [compare(result, true)] if (true := self._reference(0)) else []
        wall, _ = timed(loaded.call, 1)
        facts = {
            "load_cpu_s": ready - begin,
            "first_cpu_s": first - ready,
            "call_s": wall[0],
            "resident_bytes": before,
            "peak_bytes": peak_memory(),
        }
        while compared and (true := self._reference(len(compared))):
            loaded.write(load_inputs(self.job, len(compared)))
            compared.append(compare(flat(loaded.call()), true))
        if len(compared) > 1:
            loaded.write(load_inputs(self.job))
        return facts | summary(compared)

    def _reference(self, draw: int) -> list[Array]:
        """The results of a draw in float64; none if there are none."""
        import numpy as np

        path = Path(self.job.reference) if self.job.reference else None
        if path is None or not path.exists():
            return []
        with np.load(path) as file:
            count = sum(name.startswith(f"{draw}.") for name in file.files)
            return [file[f"{draw}.{i}"] for i in range(count)]

    def time(self, calls: int, warm: int) -> dict[str, Any]:
        """Seconds of each of `calls` calls, after `warm` that bring its data into the caches."""
        from cli.measure import timed

        assert self.loaded is not None, "not loaded"
        for _ in range(warm):
            self.loaded.call()
        wall, cpu = timed(self.loaded.call, calls)
        return {"wall_s": wall, "cpu_s": cpu}


def _compare(result: list[Array], wanted: list[Array]) -> list[float] | str:
    """The relative error of each floating-point result in the L2 norm, or what is wrong."""
    import numpy as np

    if [w.shape for w in wanted] != [r.shape for r in result]:
        return "its results have other shapes"
    errors = []
    for found, true in zip(result, wanted, strict=True):
        if true.dtype.kind != "f":
            if not np.array_equal(found, true):
                return "integer results differ"
            continue
        exact = true.astype(np.float64).ravel()
        difference = float(np.linalg.norm(found.astype(np.float64).ravel() - exact))
        scale = float(np.linalg.norm(exact))
        if not np.isfinite(difference) and np.isfinite(scale):
            return "results that are not finite"
        errors.append(difference / scale if scale else difference)
    return errors


def _by_row(result: list[Array], wanted: list[Array]) -> list[float] | str:
    """The relative errors of all rows of the floating-point results, or what is wrong."""
    import numpy as np

    whole = _compare(result, wanted)
    if isinstance(whole, str):
        return whole
    errors: list[float] = []
    for found, true in zip(result, wanted, strict=True):
        if true.dtype.kind == "f":
            exact = true.astype(np.float64).reshape(-1, true.shape[-1])
            difference = found.astype(np.float64).reshape(exact.shape) - exact
            scale = np.linalg.norm(exact, axis=1)
            errors += (np.linalg.norm(difference, axis=1) / np.where(scale, scale, 1.0)).tolist()
    return errors


def _middle(compared: list[list[float] | str]) -> dict[str, Any]:
    """The median over the rows of all draws."""
    from cli.measure import median

    if not compared:
        return {}
    wrong = [found for found in compared if isinstance(found, str)]
    if wrong:
        return {"mismatch": wrong[0]}
    rows = [e for found in compared if not isinstance(found, str) for e in found]
    return {"error": median(rows) if rows else 0.0, "draws": len(compared)}


def _summary(compared: list[list[float] | str]) -> dict[str, Any]:
    """Root mean square over the draws, of the result where that is largest."""
    if not compared:
        return {}
    wrong = [found for found in compared if isinstance(found, str)]
    if wrong:
        return {"mismatch": wrong[0]}
    draws = [found for found in compared if not isinstance(found, str)]
    means = [
        (sum(e * e for e in column) / len(column)) ** 0.5 for column in zip(*draws, strict=True)
    ]
    return {"error": max(means, default=0.0), "draws": len(draws)}


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
