"""What the kernel benchmarks share: plans built through the product, times, the machine's peaks.

A timed call is Session.run of a plan that holds enough equal products for the cost of the call
itself to disappear. Results stay in the arena: fresh memory of each run would be page faults.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from graphc import api  # noqa: E402
from graphc.runtime.session import Session, load  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_READER = """#include "isa.h"
GC_EXPORT uint64_t gc_benchmark_read(const char* p, int64_t n) {
  gc::vi sum[4] = {};
  for (int64_t i = 0; i + 4 * GC_VBYTES <= n; i += 4 * GC_VBYTES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sum[j] ^= gc::load<gc::vi>(p + i + j * GC_VBYTES);
  const gc::vi all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  return (uint64_t)all[0] + all[1];
}
"""


class Named(Protocol):
    """A case that --only can choose."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


class Bench:
    """Builds plans in a temporary folder and knows the machine's peaks.

    threads: of the Sessions; times are CPU time at one thread, else elapsed time.
    """

    def __init__(self, folder: Path, threads: int, seconds: float) -> None:
        self.folder = folder
        self.threads = threads
        self.seconds = seconds
        self.peaks = api.calibrate()
        self._count = 0

    def peak(self, dtype: str) -> float:
        """GFLOP/s of arithmetic on registers, measured in this run or better before."""
        return self.peaks.gflops(dtype, self.threads)

    def session(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: Any = None
    ) -> Session:
        """The module built on example inputs and loaded."""
        self._count += 1
        plan = self.folder / f"plan{self._count}"
        copies = tuple(x.clone() for x in inputs)
        api.build_module(module.requires_grad_(False), copies, None, dynamic, output=plan)
        return load(plan, threads=self.threads)

    def clock(self) -> float:
        return time.process_time() if self.threads == 1 else time.perf_counter()

    def times(self, calls: Mapping[str, Callable[[], object]], least: int = 7) -> dict[str, float]:
        """Median seconds of each call; the calls take turns, for `seconds` in all per call."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
            call()
        end = time.perf_counter() + self.seconds * len(calls)
        while time.perf_counter() < end or len(next(iter(found.values()))) < least:
            for name, call in calls.items():
                start = self.clock()
                call()
                found[name].append(self.clock() - start)
        return {name: median(values) for name, values in found.items()}


def reader(folder: Path) -> Callable[[int, int], object]:
    """A function (address, bytes) that reads memory once, in order, as fast as one thread can."""
    from cache.store import Store
    from graphc.lowering.context import Unit
    from graphc.toolchain.compile import compile_units
    from graphc.toolchain.compiler import Compiler
    from graphc.toolchain.isa import Isa
    from graphc.toolchain.link import link

    store, compiler = Store(), Compiler.discover()
    try:
        objects = compile_units([Unit("benchmark_read", _READER)], Isa.detect(), compiler, store)
        link(objects.objects, folder / "read.so", compiler, store)
    finally:
        store.close()
    read: Any = ctypes.CDLL(str(folder / "read.so")).gc_benchmark_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    read.restype = ctypes.c_uint64
    return lambda address, nbytes: read(address, nbytes)


@contextlib.contextmanager
def chosen(text: str | None, cases: Sequence[C]) -> Iterator[tuple[Bench, list[C], list[str]]]:
    """What the command line of a benchmark over named cases asks for: bench, cases, dtypes."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    torch.manual_seed(0)
    with scratch_folder() as folder:
        bench = Bench(Path(folder), options.threads, options.seconds)
        yield bench, [c for c in cases if options.only in c.name], options.dtypes.split(",")


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="graphc-bench-")
