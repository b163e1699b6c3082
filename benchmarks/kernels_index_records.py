"""The Lightning Indexer over keys in MXFP8 against the same over bf16, in turns: time of bf16 over
time of MXFP8, plain and with candidates chosen again by second terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import graphc.ops  # noqa: F401
from benchmarks.kernels_common import DTYPES, Bench, chosen
from benchmarks.kernels_sparse import PAGE, TOTAL, Case, filled, operands
from graphc.ops.records import record_format
from graphc.quantization import RESCORE

CASES = (
    Case(8, 64, 1024, 64, 512),
    *(Case(*size, 16384, 64) for size in ((8, 64), (8, 128), (16, 128), (64, 128))),
    *(Case(*size, length, 1, cold=True) for size in ((8, 64), (8, 128), (16, 128), (64, 128))
      for length in (8191, 131071)),
)  # fmt: skip


class Calls(nn.Module):
    """One choice per cache."""

    def __init__(self, count: int, **options: object) -> None:
        super().__init__()
        self.options = {"count": count, **options}

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        query, weights, table, start, *caches = inputs
        choose = torch.ops.graphc.paged_lightning_indexer
        return [choose(query, weights, pages, table, start, **self.options) for pages in caches]


def records(pages: torch.Tensor, form: str, terms: int) -> torch.Tensor:
    """The pages with their rows as records."""
    rows, found = pages.float(), record_format(form)
    made = [found.encode(rows)]
    if terms == 2:
        made.append(found.encode(rows - found.decode(made[0], torch.float32)))
    made = [found.spread(x) for x in made]
    whole = torch.stack(made, 1) if terms == 2 else made[0]
    return filled(tuple(whole.shape), torch.uint8).copy_(whole)


def measure(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> None:
    """One line per dtype and case."""
    for dtype in dtypes:
        for case in cases:
            kind = DTYPES[dtype]
            count = max(1, TOTAL // (case.rows * case.width * kind.itemsize)) if case.cold else 1
            inputs = operands(case, kind, count)
            form = f"mxfp8_floor:{case.width}@16"
            calls: dict[str, Callable[[], object]] = {
                "bf16": partial(bench.session(Calls(case.count), inputs).run, *inputs)
            }
            for name, terms in (("mxfp8", 1), ("rescore", 2)):
                caches = [records(x, form, terms) for x in inputs[4:]]
                again = {"candidates": int(RESCORE * case.count)} if terms == 2 else {}
                module = Calls(case.count, format=form, **again)
                own = (*inputs[:4], *caches)
                calls[name] = partial(bench.session(module, own).run, *own)
            times = bench.times(calls)
            plain = times.pop("bf16")
            ratios = ", ".join(f"{name} {plain / t:5.2f} x" for name, t in times.items())
            each = 1e6 * plain / count / case.queries
            rate = 1e-9 * count * case.operations() / plain
            share = 100 * rate / bench.peak(dtype)
            print(f"{dtype}  {case.name:50s} {each:9.1f} us, {share:5.1f} % of the peak; {ratios}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    assert PAGE == 64
    with chosen(__doc__, CASES) as asked:
        measure(*asked)
