"""What graphc's kernels reach of what the machine can do, measured through built plans.

    python benchmarks/kernels.py [gemm gemv fusion] [--dtypes fp32,bf16] [--threads 1] [--json FILE]

Peaks of arithmetic are measured at the start (`graphc doctor --calibrate` shows the same figures);
bandwidth is compared with a pure read of the same mapped weights, in turns with the product. At one
thread times are CPU time, which is what an idle core would take while other work shares the
machine; with more they are elapsed time. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernels_product as product
from benchmarks.kernels_common import Bench, scratch_folder


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def shapes_of(text: str) -> tuple[product.Shape, ...]:
    """ "1024x4096,384x384" as (K, N) pairs."""
    pairs = [part.split("x") for part in text.split(",")]
    return tuple((int(k), int(n)) for k, n in pairs)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", help="gemm, gemv, fusion; default: all of them")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--shapes", type=shapes_of, default=product.SHAPES, metavar="KxN,...")
    parser.add_argument("--rows", type=numbers, default=(16, 64, 512, 2048))
    parser.add_argument("--few-rows", type=numbers, default=(1, 2, 4, 8))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.4, help="of measuring per figure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sections = options.sections or ["gemm", "gemv", "fusion"]
    if unknown := set(sections) - {"gemm", "gemv", "fusion"}:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    dtypes = options.dtypes.split(",")
    results: dict[str, Any] = {}
    with scratch_folder() as folder:
        bench = Bench(Path(folder), options.threads, options.seconds)
        results["threads"] = options.threads
        results["cpu"] = bench.peaks.cpu
        results["peak_gflops"] = {dtype: bench.peak(dtype) for dtype in dtypes}
        peaks = ", ".join(f"{d} {p:.0f} GFLOP/s" for d, p in results["peak_gflops"].items())
        print(f"{bench.peaks.cpu}, {options.threads} thread(s): {peaks}")
        if "gemm" in sections:
            table = product.gemm(bench, options.shapes, options.rows, dtypes)
            results["gemm"] = product.as_json(table)
        if "gemv" in sections:
            table = product.gemv(bench, options.shapes, options.few_rows, dtypes)
            results["gemv"] = product.as_json(table)
        if "fusion" in sections:
            deep = [s for s in options.shapes if s[0] >= 3072] or options.shapes
            rows = [m for m in options.rows if m in (16, 512)] or options.rows[:1]
            results["fusion"] = product.as_json(product.fusion(bench, deep, rows, dtypes))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
