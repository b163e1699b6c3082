"""Many processes build one model on one cache at once.

    python benchmarks/cache_race.py [--processes 8] [--rounds 3] [--wipes 10] [--kernels 20]

rounds  on an empty cache: every kernel, the precompiled header and the library are made exactly
        once in all, told by the builds and by a compiler that logs its calls
wipes   the same, and the cache's folder is removed once in the middle, at a random moment: every
        build gives the right results, the build after them leaves a cache in which everything is
        found, and in which nothing is damaged

Exit status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cache_model import Outcome, Subject  # noqa: E402
from benchmarks.documents import aligned  # noqa: E402
from cache.store import Store  # noqa: E402
from graphc.store import KERNELS  # noqa: E402

_LOGGING = """#!/bin/sh
echo "$*" >> {log}
exec {compiler} "$@"
"""


def logging_compiler(folder: Path) -> Path:
    """Makes $CXX a compiler that notes its calls; the file where."""
    program, log = folder / "logging-g++", folder / "calls"
    program.write_text(_LOGGING.format(log=log, compiler=os.environ.get("CXX") or "g++"))
    program.chmod(0o755)
    os.environ["CXX"] = str(program)
    return log


def compiles(log: Path) -> int:
    """Calls that compiled a kernel; begins a new log."""
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return sum("-c unit.cpp" in line for line in text.splitlines())


def together(subject: Subject, root: Path, processes: int, wipe: float | None) -> list[Outcome]:
    """That many builds at once; after `wipe` seconds the cache is removed."""
    builds = [subject.start(root) for _ in range(processes)]
    if wipe is not None:
        time.sleep(wipe)
        shutil.rmtree(root, ignore_errors=True)
    return [build.outcome() for build in builds]


def race(
    subject: Subject, folder: Path, first: Outcome | None, processes: int, wipe: float | None
) -> tuple[Outcome, list[str], list[str]]:
    """One round; a build of it to compare others with, its line of the table, what was wrong."""
    root, log = folder / "cache", folder / "calls"
    shutil.rmtree(root, ignore_errors=True)
    compiles(log)
    started = time.perf_counter()
    outcomes = together(subject, root, processes, wipe)
    seconds = time.perf_counter() - started
    calls = compiles(log)
    first = first or outcomes[0]
    wrong = [f"ended with {o.status}: {o.error[-2000:]}" for o in outcomes if o.status]
    if any(o.output != first.output or o.library != first.library for o in outcomes):
        wrong.append("other results")
    places = [place for outcome in outcomes for place in outcome.origins]
    made = Counter(p for o in outcomes for p, origin in o.origins.items() if origin != "hit")
    private = sum(origin == "private" for o in outcomes for origin in o.origins.values())
    kernels = len({place for place in places if place[0] == KERNELS})
    if wipe is None:
        if made.keys() != set(places) or set(made.values()) != {1}:
            wrong.append(f"not made exactly once: {made}")
        if calls != kernels:
            wrong.append(f"{calls} calls of the compiler for {kernels} kernels")
    else:
        wrong += _sound(subject, root, first)
    wrong += [f"left damaged: {finding.what}" for finding in Store(root).check()]
    row = [
        "wiped" if wipe is not None else "empty", str(processes), str(kernels), str(calls),
        str(private), f"{seconds:.1f}", str(len(wrong)),
    ]  # fmt: skip
    return first, row, wrong


def _sound(subject: Subject, root: Path, first: Outcome) -> list[str]:
    wrong = []
    for number in (1, 2):
        after = subject.build(root)
        if after.status or after.output != first.output:
            wrong.append(f"build {number} afterwards: {after.error[-2000:] or 'other results'}")
        if any("damaged" in note for note in after.notes):
            wrong.append(f"build {number} afterwards: {after.notes}")
        missing = [place for place, origin in after.origins.items() if origin != "hit"]
        if number == 2 and missing:
            wrong.append(f"still not in the cache: {missing}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wipes", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows: list[list[str]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="graphc-race-") as name:
        folder = Path(name)
        logging_compiler(folder)
        subject = Subject(options.kernels, folder)
        first, seconds = None, 5.0
        for number in range(options.rounds + options.wipes):
            wipe = rng.random() * seconds if number >= options.rounds else None
            first, row, found = race(subject, folder, first, options.processes, wipe)
            if number == 0:
                seconds = float(row[-2])
                wrong += subject.differences(first)
            rows.append(row)
            wrong += found
    head = ("cache", "processes", "kernels", "compiles", "not kept", "seconds", "violations")
    print("\n".join(aligned(head, rows)))
    print("\n".join(wrong[:20]))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
