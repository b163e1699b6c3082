"""Generated loop nests: time, memory traffic, and eager torch's time, in turns.

    python benchmarks/kernels_loops.py [--dtypes fp32,bf16] [--rows 2048] [--columns 1024]
                                       [--only NAME] [--threads 1] [--seconds 0.5]

GB/s counts each input and result once: what one read and one write per fused group would move.
The figure of `copy` is the machine's own, at the same sizes. Results stay in the arena.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.kernels_common import DTYPES, Bench, scratch_folder

Function = Callable[..., torch.Tensor]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


#: name -> (tensors it reads, what it computes)
CASES: dict[str, tuple[int, Function]] = {
    "add": (2, lambda x, y: x + y),
    "gelu": (1, F.gelu),
    "gelu_tanh": (1, lambda x: F.gelu(x, approximate="tanh")),
    "silu_mul": (2, lambda x, y: F.silu(x) * y),
    "tanh": (1, torch.tanh),
    "softmax": (1, lambda x: x.softmax(-1)),
    "softmax_columns": (1, lambda x: x.softmax(0)),
    "mean_columns": (1, lambda x: x.mean(0, keepdim=True).expand(8, -1)),
    "layer_norm": (1, _norm),
    "rms_norm": (1, lambda x: F.rms_norm(x, x.shape[-1:])),
    "norm_gelu_residual": (2, lambda x, r: F.gelu(_norm(x + r)) + r),
    "transpose": (1, lambda x: x.t().contiguous()),
}


class Loops(nn.Module):
    """One case; the first column leaves."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)[..., :1]


def measure(
    bench: Bench, names: Sequence[str], dtype: str, rows: int, columns: int
) -> list[dict[str, Any]]:
    """One row per case: milliseconds of graphc, of eager torch and of a copy, and GB/s."""
    table: list[dict[str, Any]] = []
    source = torch.randn(rows, columns).to(DTYPES[dtype])
    target = torch.empty_like(source)
    for name in names:
        reads, function = CASES[name]
        args = tuple(torch.randn(rows, columns).to(source.dtype) for _ in range(reads))
        session = bench.session(Loops(function), args)
        with torch.inference_mode():
            seconds = bench.times(
                {
                    "graphc": lambda s=session, a=args: s.run(*a),
                    "eager": lambda f=function, a=args: f(*a),
                    "copy": lambda: target.copy_(source),
                }
            )
            written = 0 if name == "mean_columns" else 1
        moved = (reads + written) * source.nbytes
        table.append(
            {"case": name, "dtype": dtype, "gbps": 1e-9 * moved / seconds["graphc"],
             "copy_gbps": 2e-9 * source.nbytes / seconds["copy"],
             **{f"{k}_ms": 1e3 * v for k, v in seconds.items()}}
        )  # fmt: skip
        row = table[-1]
        print(
            f"{dtype}  {name:20s} {row['graphc_ms']:8.3f} ms {row['gbps']:6.1f} GB/s   "
            f"eager {row['eager_ms']:8.3f} ms   copy {row['copy_gbps']:6.1f} GB/s",
            flush=True,
        )
    return table


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring per figure")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    names = [name for name in CASES if options.only in name]
    with scratch_folder() as folder:
        bench = Bench(Path(folder), options.threads, options.seconds)
        for dtype in options.dtypes.split(","):
            measure(bench, names, dtype, options.rows, options.columns)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
