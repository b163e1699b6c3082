"""What the cache itself costs: opening it, a hit, a miss that is stored.

    python benchmarks/cache_hits.py [--entries 200] [--kilobytes 50]

CPU and wall time, medians of one process at one thread. A hit is `Store.fetch`: key, manifest and
payload verified, the private copy written, the index and the counters told. Below it, the same
bytes read from a file, digested and written without a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.documents import aligned  # noqa: E402
from cache.store import Store  # noqa: E402
from graphc.store import KERNELS, Fields  # noqa: E402


def timed(call: Callable[[int], object], numbers: range) -> list[str]:
    """Median CPU and wall time of a call with each number, and the longest, in milliseconds."""
    wall, cpu = [], []
    for number in numbers:
        start, used = time.perf_counter(), time.thread_time()
        call(number)
        cpu.append(time.thread_time() - used)
        wall.append(time.perf_counter() - start)
    return [f"{1e3 * value:.3f}" for value in (median(cpu), median(wall), max(wall))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--kilobytes", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graphc-hits-") as name:
        root, data = Path(name) / "cache", os.urandom(1000 * options.kilobytes)
        store = Store(root)
        area = store.workspace()

        def fields(number: int) -> Fields:
            return (("kind", "kernel"), ("source", f"{number}\n" + "int x = 1;\n" * 1000))

        def make(number: int) -> None:
            store.fetch_or_make(
                KERNELS, fields(number), lambda path: path.write_bytes(data), area, label="k"
            )

        def plain(number: int) -> None:
            copied = (Path(name) / "plain").read_bytes()
            hashlib.sha256(copied).hexdigest()
            (area.path / f"plain{number}").write_bytes(copied)

        (Path(name) / "plain").write_bytes(data)
        numbers = range(options.entries)
        rows = [
            ["stored", *timed(make, numbers)],
            ["opened", *timed(lambda _: Store(root), range(20))],
            ["hit", *timed(lambda n: store.fetch(KERNELS, fields(n), area), numbers)],
            ["missed", *timed(lambda n: store.fetch(KERNELS, fields(-1 - n), area), numbers)],
            ["copied without a cache", *timed(plain, numbers)],
        ]
        area.close()
    print("\n".join(aligned(("milliseconds", "CPU", "wall", "longest"), rows)))


if __name__ == "__main__":
    main()
