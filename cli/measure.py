"""Times and memory of this process, as `run` and `bench` print them."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_LOADED = time.monotonic()


def since_process_start() -> float:
    """Seconds since this process was started, interpreter and imports included (to 10 ms: the
    kernel counts starts in clock ticks); since this module was loaded where /proc is missing."""
    try:
        import os

        # the second field is a name in parentheses that may hold spaces
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _LOADED


def peak_memory() -> int:
    """The most bytes of memory this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of each call, one of each per round, in turn: a busy moment hits all alike."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)
