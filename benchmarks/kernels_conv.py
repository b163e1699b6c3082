"""Convolutions: arithmetic as a share of the machine's peak, and eager torch beside it.

    python benchmarks/kernels_conv.py [--dtypes fp32,bf16] [--only "3x3"] [--threads 1]

Each case is a chain of `count` convolutions with a bias and a relu, channels last between them;
what changes the layout at both ends is timed with it. Windows of 3 x 3 count all multiplications,
of which fp32 does 16 in 36 (conv_winograd.cpp): more than 100 % there. Times as in
benchmarks/kernels.py: CPU time at one thread, else elapsed; medians.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.kernels_common import DTYPES, Bench, geometric_mean, scratch_folder


@dataclass(frozen=True)
class Case:
    """[1, channels, size, size] through a kernel x kernel window; the same size comes out."""

    channels: int
    size: int
    kernel: int
    depthwise: bool = False
    between: int = 0  # channels of every second value, if they differ

    @property
    def name(self) -> str:
        kind = "depthwise " if self.depthwise else ""
        width = f"{self.channels}-{self.between}" if self.between else f"{self.channels}"
        return f"{kind}{self.kernel}x{self.kernel} {width} {self.size}x{self.size}"

    def flops(self) -> int:
        inner = 1 if self.depthwise else self.between or self.channels
        return 2 * self.size**2 * self.kernel**2 * self.channels * inner

    def module(self, count: int) -> nn.Module:
        layers: list[nn.Module] = []
        widths = [self.channels, self.between or self.channels]
        for k in range(count):
            a, b = widths[k % 2], widths[(k + 1) % 2]
            groups = a if self.depthwise else 1
            layers += [nn.Conv2d(a, b, self.kernel, 1, self.kernel // 2, groups=groups), nn.ReLU()]
        return nn.Sequential(*layers).eval()


CASES = (
    Case(64, 56, 1, between=256),
    Case(128, 28, 1, between=512),
    Case(256, 14, 1, between=1024),
    Case(512, 7, 1, between=2048),
    Case(64, 56, 3),
    Case(128, 28, 3),
    Case(256, 14, 3),
    Case(512, 7, 3),
    Case(24, 160, 3),
    Case(24, 80, 1, between=144),
    Case(96, 80, 3, depthwise=True),
    Case(240, 40, 5, depthwise=True),
)


def measure(bench: Bench, case: Case, dtype: str, count: int) -> tuple[float, float]:
    """Seconds per convolution: ours, eager torch's."""
    module = case.module(count).to(DTYPES[dtype])
    x = torch.randn(1, case.channels, case.size, case.size).to(DTYPES[dtype])
    session = bench.session(module, (x,))
    with torch.inference_mode():
        times = bench.times({"graphc": lambda: session.run(x), "eager": lambda: module(x)})
    return times["graphc"] / count, times["eager"] / count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="per case and implementation")
    parser.add_argument("--count", type=int, default=8, help="convolutions of one plan, even")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    with scratch_folder() as folder:
        bench = Bench(Path(folder), options.threads, options.seconds)
        for dtype in options.dtypes.split(","):
            shares: list[float] = []
            print(f"{dtype}: peak {bench.peak(dtype):.0f} GFLOP/s")
            for case in CASES:
                if options.only not in case.name:
                    continue
                ours, eager = measure(bench, case, dtype, options.count)
                rate = case.flops() / ours / 1e9
                peak = bench.peak("fp32" if case.depthwise else dtype)
                shares.append(rate / peak)
                print(
                    f"  {case.name:28s} {ours * 1e3:8.3f} ms {rate:7.1f} GFLOP/s "
                    f"{100 * rate / peak:5.1f} %   eager {eager / ours:5.2f}x",
                    flush=True,
                )
            if shares:
                print(f"  geometric mean {100 * geometric_mean(shares):.1f} %")


if __name__ == "__main__":
    main()
