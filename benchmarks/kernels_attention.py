"""Attention over many queries: useful arithmetic (the visible half, where causal) as a share of the
machine's peak.

    python benchmarks/kernels_attention.py [--dtypes fp32,bf16] [--only "T=2048"] [--threads 1]

Times as in benchmarks/kernels.py: CPU time at one thread, else elapsed; medians.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.kernels_common import DTYPES, Bench, chosen


@dataclass(frozen=True)
class Case:
    """Self-attention of `heads` query heads and `shared` key heads over `length` positions."""

    heads: int
    shared: int
    width: int
    length: int
    causal: bool

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.heads}/{self.shared}x{self.width} T={self.length} {kind}"

    def flops(self) -> int:
        pairs = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return 4 * self.heads * pairs * self.width


CASES = (
    *(Case(12, 12, 32, length, False) for length in (16, 64, 256)),
    *(Case(16, 8, 128, length, True) for length in (128, 512, 2048)),
    Case(32, 8, 128, 2048, True),
    Case(16, 16, 64, 1024, False),
    Case(8, 1, 256, 1024, True),
)


class Attention(nn.Module):
    """`count` attentions, the result of one being the queries of the next."""

    def __init__(self, case: Case, count: int) -> None:
        super().__init__()
        self.case = case
        self.count = count

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            q = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.case.causal, enable_gqa=self.case.heads > self.case.shared
            )
        return q[..., :1]  # the results stay in the arena


def prefill(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Share of peak arithmetic per case and dtype."""
    table: list[dict[str, Any]] = []
    for dtype in dtypes:
        for case in cases:
            count = max(1, min(16, 1 << 28 >> max(0, case.flops().bit_length() - 1)))
            q, k, v = (
                torch.randn(1, heads, case.length, case.width).to(DTYPES[dtype])
                for heads in (case.heads, case.shared, case.shared)
            )
            session = bench.session(Attention(case, count), (q, k, v))
            run = functools.partial(session.run, q, k, v)
            seconds = bench.times({"": run})[""] / count
            rate = 1e-9 * case.flops() / seconds
            share = rate / bench.peak(dtype)
            table.append({"dtype": dtype, "case": case.name, "gflops": rate, "share": share})
            print(
                f"{dtype}  {case.name:30s} {1e3 * seconds:9.3f} ms {rate:7.1f} GFLOP/s"
                f" {100 * share:5.1f} % of peak",
                flush=True,
            )
    return table


def main() -> None:
    with chosen(__doc__, CASES) as (bench, cases, dtypes):
        prefill(bench, cases, dtypes)


if __name__ == "__main__":
    main()
