"""What the executor itself costs: dispatch of a Step, fork and join, shared work on busy cores.

    python benchmarks/executor.py [--rounds 15] [--json FILE]

* dispatch: a program of 2000 Steps that do nothing, with 3 buffers and 2 integers each.
* fork/join: a region of two chunks that wait for each other, so both threads must come.
* shared Steps: programs of Steps of a given length whose later units cost more, at 1 and 2
  threads, wall time: with idle cores (the best round), and beside as many busy processes as there
  are cores (the mean).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from graphc.plan import (  # noqa: E402
    ABI_VERSION,
    FORMAT_VERSION,
    Buffer,
    Kernel,
    Machine,
    Plan,
    Program,
    Step,
)
from graphc.runtime.native import Frame, Library, NativeProgram, thread_pool  # noqa: E402

SOURCE = r"""
#include "executor.cpp"
GC_EXPORT void nothing(const gc_args*, int64_t, int64_t) {}
// unit i of imm[1] takes imm[0] * (0.5 + i / imm[1]) dependent multiplications
GC_EXPORT void uneven(const gc_args* args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    int64_t n = args->imm[0] / 2 + args->imm[0] * i / args->imm[1];
    double x = 1.5;
    for (int64_t k = 0; k < n; k++) x = x * x - 1.25;
    ((volatile double*)args->ptr[0])[8 * i] = x;
  }
}
static std::atomic<int64_t> inside;
static void meet(const gc_args*, int64_t, int64_t) {
  int64_t both = (inside.fetch_add(1) / 2 + 1) * 2;
  while (inside.load(std::memory_order_acquire) < both) relax();
}
GC_EXPORT double fork_join(gc_pool* pool, int64_t times) {
  char scratch[128];
  gc_job job = {meet, nullptr, nullptr, scratch, 0, 2, 1, 1, nullptr, nullptr, 0};
  int64_t begin = nanoseconds();
  for (int64_t i = 0; i < times; i++) pool->run(pool, &job);
  return (double)(nanoseconds() - begin) / (double)times;
}
"""
UNITS = 64


def compile_library(folder: Path) -> Path:
    """The executor with the kernels above, in one shared library."""
    source, target = folder / "bench.cpp", folder / "bench.so"
    source.write_text(SOURCE)
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-fPIC", "-shared",
         f"-I{ROOT / 'graphc/kernels'}", f"-I{ROOT / 'graphc/runtime'}", str(source), "-o",
         str(target), "-lpthread", "-ldl"],
        check=True,
    )  # fmt: skip
    return target


class Runner:
    """A program of `steps` equal Steps, bound to memory of its own."""

    def __init__(
        self, library: Library, symbol: str, steps: int, units: int, work: int, threads: int
    ) -> None:
        expressions: list[list[int | str]] = [[0], [units], [work], [64 * UNITS]]
        kernel = Kernel(symbol, [(0, 0), (1, 0), (2, 0)], [2, 1], 1, 1, 0, [], [])
        program = Program(
            phase="", bucket="", limits={}, expressions=expressions, input_shapes=[],
            output_shapes=[], guards=[],
            buffers=[Buffer("arena", -1, 0, 3), Buffer("arena", -1, 64, 3),
                     Buffer("input", 0, 0, 3)],
            steps=[Step(kernel=kernel)] * steps, arena_bytes=0, lower_bound=0, naive_bytes=0,
        )  # fmt: skip
        plan = Plan(
            format=FORMAT_VERSION, abi=ABI_VERSION, version="", model="",
            machine=Machine("", [], ""), symbols=[], inputs=[], outputs=[], arguments=None,
            keywords=None, results=None, mutated_inputs=[], states=[], weights=[],
            programs=[program], files={}, uses_torch=False,
        )  # fmt: skip
        self.steps = steps
        self.native = NativeProgram(library, plan, program)
        self.memory = np.zeros(64 * UNITS + 4096, np.uint8)
        address = self.memory.ctypes.data
        self.inputs = np.array([address], np.uint64)
        self.frame = Frame(
            symbols=self.native.symbols_address, inputs=self.inputs.ctypes.data, arena=address,
            scratch=address, scratch_stride=64, pool=thread_pool(library, threads),
        )  # fmt: skip

    def nanoseconds(self, least: float = 0.0) -> float:
        """Wall time per Step of as many runs as take `least` seconds."""
        runs, begin = 0, time.perf_counter()
        while not runs or time.perf_counter() - begin < least:
            self.native.run(ctypes.addressof(self.frame), 0, self.steps)
            runs += 1
        return 1e9 * (time.perf_counter() - begin) / (runs * self.steps)


def compare(runners: dict[str, Runner], rounds: int, least: float = 0.0) -> dict[str, list[float]]:
    """Nanoseconds per Step, interleaved; each learns first."""
    for runner in runners.values():
        for _ in range(5):
            runner.nanoseconds(least / 5)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            times[name].append(runner.nanoseconds(least))
    return times


def scaling(library: Library, rounds: int, busy: bool) -> list[dict[str, float]]:
    """Shared Steps of several lengths, 1 thread against 2: the best round where cores are idle,
    the mean of all where they are not."""
    rows = []
    for work in (4, 16, 64, 256, 2048, 16384):
        steps = max(4, 16384 // work)
        runners = {str(n): Runner(library, "uneven", steps, UNITS, work, n) for n in (1, 2)}
        found = compare(runners, rounds, least=0.04)
        one, two = (mean(found[n]) if busy else min(found[n]) for n in ("1", "2"))
        rows.append({"step_us": one / 1e3, "two_threads_us": two / 1e3, "speedup": one / two})
    return rows


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        library = Library(compile_library(Path(scratch)))
        runners = {
            "dispatch": Runner(library, "nothing", 2000, 1, 0, 1),
            "dispatch, 2 threads": Runner(library, "nothing", 2000, 1, 0, 2),
        }
        found = compare(runners, 20 * options.rounds)
        results |= {name: median(values) for name, values in found.items()}
        fork_join = library._library.fork_join
        fork_join.restype, fork_join.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_int64]
        pool = thread_pool(library, 2)
        samples = [fork_join(pool, 100) for _ in range(40 * options.rounds)]
        results["fork/join"] = median(samples)
        for name in ("dispatch", "dispatch, 2 threads", "fork/join"):
            print(f"{name:<22}{results[name]:8.1f} ns")
        busy = [sys.executable, "-c", "while True: pass"]
        for name, count in (("idle", 0), ("busy", os.cpu_count() or 1)):
            others = [subprocess.Popen(busy) for _ in range(count)]
            try:
                results[name] = scaling(library, options.rounds, busy=count > 0)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            print(f"shared Steps, {name} cores: microseconds at 1 and 2 threads, speed-up")
            for row in results[name]:
                print(f"  {row['step_us']:10.2f}{row['two_threads_us']:10.2f}{row['speedup']:8.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
