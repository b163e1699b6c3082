"""Mixtures of experts and Attention Residuals against what bounds them.

    python benchmarks/kernels_experts.py [prefill decode mix] [--dtypes fp32,bf16] [--seconds 0.5]

prefill: the rate of a gated product of the same rows and sizes with one weight for all of them.
decode: a pure read of the weights of the tokens' experts. mix: a pure read of as many bytes as the
candidates and the result have. Everything runs through built plans, in turns; CPU time at one
thread, medians.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional as F

import graphc.ops  # noqa: F401
from benchmarks.kernels_common import DTYPES, Bench, reader, scratch_folder

Arguments = tuple[torch.Tensor, ...]


class Experts(nn.Module):
    """One layer of experts, after routing."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.graphc.experts(x, index, weight, self.gate_up, self.down)
        return made


class Dense(nn.Module):
    """The same work per row with one weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Mix(nn.Module):
    """Attention Residuals over candidates [count, T, D]; the result stays in the arena."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        candidates = list(whole.unbind(0))
        made: torch.Tensor = torch.ops.graphc.residual_mix(candidates, self.query, 1e-6)
        return made[..., :1]


def in_huge_pages(nbytes: int) -> torch.Tensor:
    area = mmap.mmap(-1, nbytes + (2 << 20))
    area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8).fill_(1)


def routed(tokens: int, slots: int, experts: int) -> Arguments:
    return torch.rand(tokens, experts).topk(slots).indices, torch.rand(tokens, slots)


def prefill(bench: Bench, dtype: str) -> None:
    """T = 2048, 16 experts, top-2 of 1024 x 512; and with 64 experts, top-8."""
    for experts, slots, tokens in ((16, 2, 2048), (64, 8, 512), (16, 2, 256)):
        width, hidden = 1024, 512
        kind = DTYPES[dtype]
        x = torch.randn(tokens, width).to(kind)
        sparse = (x, *routed(tokens, slots, experts))
        rows = (torch.randn(tokens * slots, width).to(kind),)
        one = bench.session(Experts(experts, width, hidden).to(kind), sparse)
        other = bench.session(Dense(width, hidden).to(kind), rows)
        found = bench.times(
            {"experts": partial(one.run, *sparse), "dense": partial(other.run, *rows)}
        )
        work = 6e-9 * tokens * slots * width * hidden
        print(
            f"prefill {dtype} T={tokens} E={experts} K={slots}: "
            f"{work / found['experts']:.1f} GFLOP/s, dense {work / found['dense']:.1f}, "
            f"{100 * found['dense'] / found['experts']:.1f} % of it",
            flush=True,
        )


def decode(bench: Bench, dtype: str) -> None:
    """1 to 8 tokens of 64 experts, top-8 of 1024 x 512: other experts in each run."""
    experts, slots, width, hidden = 64, 8, 1024, 512
    kind = DTYPES[dtype]
    module = Experts(experts, width, hidden).to(kind)
    example = (torch.randn(3, width).to(kind), *routed(3, slots, experts))
    tokens = torch.export.Dim("T", min=1, max=64)
    session = bench.session(module, example, ({0: tokens}, {0: tokens}, {0: tokens}))
    read, one = reader(bench.folder), 3 * width * hidden * kind.itemsize
    memory = in_huge_pages(experts * one)  # where a Session's weights are, too
    for count in (1, 2, 4, 8):
        ratios, rates = [], []
        for _ in range(int(60 * bench.seconds) + 5):
            inputs = (torch.randn(count, width).to(kind), *routed(count, slots, experts))
            touched = inputs[1].unique().tolist()
            begin = bench.clock()
            for e in touched:
                read(memory.data_ptr() + e * one, one)
            middle = bench.clock()
            session.run(*inputs)
            taken = bench.clock() - middle
            ratios.append((middle - begin) / taken)
            rates.append(1e-9 * len(touched) * one / taken)
        print(
            f"decode {dtype} T={count}: {median(rates):.1f} GB/s of touched weights, "
            f"{100 * median(ratios):.1f} % of a read of them",
            flush=True,
        )


def mix(bench: Bench, dtype: str) -> None:
    """Candidates in memory, of width 2048 and 7168."""
    read = reader(bench.folder)
    for count, tokens, width in ((9, 2048, 2048), (4, 2048, 2048), (9, 512, 7168)):
        whole = torch.randn(count + 1, tokens, width).to(DTYPES[dtype])
        session = bench.session(Mix(width).to(whole.dtype), (whole[1:],))
        nbytes = whole.numel() * whole.element_size()
        calls: dict[str, Callable[[], object]] = {
            "mix": partial(session.run, whole[1:]), "read": partial(read, whole.data_ptr(), nbytes),
        }  # fmt: skip
        found = bench.times(calls)
        print(
            f"mix {dtype} {count} x [{tokens}, {width}]: {1e-9 * nbytes / found['mix']:.1f} GB/s, "
            f"{100 * found['read'] / found['mix']:.1f} % of a read",
            flush=True,
        )


SECTIONS = {"prefill": prefill, "decode": decode, "mix": mix}


def main() -> int:
    """Prints one line a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    torch.manual_seed(0)
    with scratch_folder() as folder:
        bench = Bench(Path(folder), options.threads, options.seconds)
        for section in options.sections or SECTIONS:
            for dtype in options.dtypes.split(","):
                SECTIONS[section](bench, dtype)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
