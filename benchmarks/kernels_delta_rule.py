"""Linear attention with the delta rule: tokens of a head per second over a long prompt, and steps
of decoding as a share of scaling the same states in place, in the same run.

The states of a decoding step take more memory than caches hold. They are written by `copy_`: where
that is a copy of its own, it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import graphc.ops  # noqa: F401  (the operator)
from benchmarks.kernels_common import DTYPES, Bench, chosen

WIDTH = 128  # channels of keys and of values
SEQUENCES, HEADS = 32, 32  # of a decoding step: 64 MiB of states


@dataclass(frozen=True)
class Case:
    """`tokens` each of `batch` sequences, from states or (batch 1) from none; by_head: one decay a
    head (Gated DeltaNet), else one a key channel (Kimi Delta Attention)."""

    batch: int
    tokens: int
    heads: int
    by_head: bool = False

    @property
    def decoding(self) -> bool:
        return self.batch > 1

    @property
    def name(self) -> str:
        kind = "head" if self.by_head else "channel"
        return f"B={self.batch} T={self.tokens} H={self.heads} decay by {kind}"


CASES = (
    *(Case(1, tokens, 1, form) for form in (False, True) for tokens in (1024, 8192)),
    *(Case(1, 4096, 8, form) for form in (False, True)),
    *(Case(SEQUENCES, tokens, HEADS) for tokens in (1, 2, 4, 8)),
    Case(SEQUENCES, 1, HEADS, True),
)


class Layer(nn.Module):
    """The operator behind one projection: query, key and value are views of one tensor."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, joined: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        shape = (*joined.shape[:2], self.heads, WIDTH)
        query, key, value = (part.reshape(shape) for part in joined.chunk(3, -1))
        out, after = torch.ops.graphc.delta_rule(
            state, query, key, value, decay, beta, scale=WIDTH**-0.5, normalize=True
        )
        if state is not None:
            state.copy_(after)
        result: torch.Tensor = out
        return result


def measure(bench: Bench, case: Case, dtype: str) -> dict[str, Any]:
    shape = (case.batch, case.tokens, case.heads)
    joined = torch.randn(*shape[:2], 3 * case.heads * WIDTH).to(DTYPES[dtype])
    decay = -nn.functional.softplus(torch.randn(shape if case.by_head else (*shape, WIDTH)) - 2)
    inputs = [joined, decay, torch.rand(shape)]
    if case.decoding:
        inputs.append(torch.randn(case.batch, case.heads, WIDTH, WIDTH))
    session = bench.session(Layer(case.heads), tuple(inputs))
    calls: dict[str, Any] = {"ours": partial(session.run, *inputs)}
    if case.decoding:
        calls["scale"] = partial(inputs[-1].mul_, 0.9999)
    times = bench.times(calls)
    work = case.batch * case.tokens * case.heads
    row: dict[str, Any] = {"dtype": dtype, "case": case.name, "rate": work / times["ours"]}
    text = f"{row['rate'] / 1e6:7.3f} M tokens/s/head"
    if case.decoding:
        row["share"] = times["scale"] / times["ours"]
        text += f"  {100 * row['share']:5.1f} % of scaling the states"
    print(f"{dtype}  {case.name:40s} {1e3 * times['ours']:9.3f} ms {text}", flush=True)
    return row


def delta_rule(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Rate per case and dtype; of decoding steps also the share of an in-place scale."""
    return [measure(bench, case, dtype) for dtype in dtypes for case in cases]


def main() -> None:
    with chosen(__doc__, CASES) as (bench, cases, dtypes):
        delta_rule(bench, cases, dtypes)


if __name__ == "__main__":
    main()
