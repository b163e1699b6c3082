"""Times and memory of this process, as `run` and `bench` print them."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
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
    try:
        # what getrusage says includes the memory of the parent from before exec
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and of its finished children."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + others.ru_utime + others.ru_stime


def timed(call: Callable[[], object], count: int) -> tuple[list[float], list[float]]:
    """Wall seconds, and CPU seconds of all threads of this process, of `count` calls."""
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(count):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        call()
        end_cpu, end = time.process_time(), time.perf_counter()
        wall.append(end - begin)
        cpu.append(end_cpu - begin_cpu)
    return wall, cpu


def median(times: list[float]) -> float:
    return statistics.median(times)
