"""Operators over sequence state that are generated from definitions, beside those written by hand.

    python -m benchmarks.kernels_dsl [--dtypes fp32,bf16] [--only kda] [--threads 1]

KDA and Gated DeltaNet of graphc.dsl take turns with graphc::delta_rule on the same operands, 128
channels a head: tokens per second and head, and the share of the hand-written rate. Decoding is
one token over states in the cache (hot) and over more than any cache holds (cold). GLA has no
kernel by hand; it is shown beside the one of KDA. Times as in benchmarks/kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import graphc.dsl.operators  # noqa: F401  (the operators)
from benchmarks.kernels_common import DTYPES, Bench, chosen

CHANNELS = 128
OPS = torch.ops.graphc


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `tokens` new tokens with `heads` heads each, `steps` times over."""

    operator: str
    kind: str
    batch: int
    tokens: int
    heads: int
    steps: int = 1

    @property
    def name(self) -> str:
        return f"{self.operator} {self.kind} B={self.batch} T={self.tokens} H={self.heads}"


KINDS = (
    ("prefill", 1, 2048, 4), ("prefill", 1, 8192, 4), ("decode hot", 1, 1, 8, 16),
    ("decode cold", 64, 1, 32), ("verify cold", 64, 4, 32),
)  # fmt: skip
CASES = tuple(
    Case(operator, *kind)
    for operator in ("kda", "gated_delta_net", "gated_linear_attention") for kind in KINDS
)  # fmt: skip


class Layer(torch.nn.Module):
    """One operator over its own state, which stays in the plan."""

    def __init__(self, case: Case, by_hand: bool) -> None:
        super().__init__()
        self.case, self.by_hand = case, by_hand
        state = torch.zeros(case.batch, case.heads, CHANNELS, CHANNELS)
        self.state: torch.Tensor
        self.register_buffer("state", state)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        state = self.state
        for _ in range(self.case.steps):
            out, state = self.step(state, q, k, v, g, beta)
            v = out  # or the steps would be one
        self.state.copy_(state)
        return out

    def step(
        self, state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        g: torch.Tensor, beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The operator once."""
        scale = CHANNELS**-0.5
        if not self.by_hand and self.case.operator == "gated_linear_attention":
            found = OPS.gated_linear_attention(state, q, k, v, g, scale=scale)
        else:
            operator: Any = OPS.delta_rule if self.by_hand else getattr(OPS, self.case.operator)
            found = operator(state, q, k, v, g, beta, scale=scale, normalize=True)
        return found[0], found[1]


def operands(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decays and betas as a model makes them."""
    lead = (case.batch, case.tokens, case.heads)
    q, k, v = (torch.randn(*lead, CHANNELS).to(dtype) for _ in range(3))
    shape = lead if case.operator == "gated_delta_net" else (*lead, CHANNELS)
    return q, k, v, -torch.nn.functional.softplus(torch.randn(*shape) - 2), torch.rand(*lead)


def measure(bench: Bench, case: Case, dtype: torch.dtype) -> None:
    """Prints one line."""
    inputs = operands(case, dtype)
    calls = {}
    for by_hand in (True, False):
        session = bench.session(Layer(case, by_hand), inputs)
        calls["by hand" if by_hand else "generated"] = partial(session.run, *inputs)
    times = bench.times(calls)
    rates = {
        name: case.steps * case.batch * case.tokens * case.heads / t for name, t in times.items()
    }
    print(
        f"{case.name:48} {str(dtype)[6:]:9} generated {rates['generated'] / 1e3:8.0f}k/s  "
        f"by hand {rates['by hand'] / 1e3:8.0f}k/s  ratio "
        f"{rates['generated'] / rates['by hand']:.2f}",
        flush=True,
    )


def main() -> None:
    """The command line."""
    with chosen(__doc__, CASES) as (bench, cases, dtypes):
        for case in cases:
            for dtype in dtypes:
                measure(bench, case, DTYPES[dtype])


if __name__ == "__main__":
    main()
