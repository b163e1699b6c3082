"""Recurrent layers and grouped products against eager torch, on every ISA level."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.eager import ISAS, check, close, refused
from tests.kernel_harness import Constant, lookup, run_rule


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def parameters(
    kind: str, dtype: torch.dtype, i: int, h: int, layers: int, directions: int, bias: bool
) -> list[torch.Tensor]:
    n = GATES[kind] * h
    result = []
    for layer in range(layers):
        width = i if layer == 0 else directions * h
        for _ in range(directions):
            shapes: list[tuple[int, ...]] = [(n, width), (n, h)] + [(n,), (n,)] * bias
            result += [((torch.rand(s) - 0.5) / h**0.5 * 2).to(dtype) for s in shapes]
    return result


@pytest.mark.parametrize("kind", GATES)
def test_recurrent(isa: str, kind: str) -> None:
    for steps, batch, i, h, layers, directions, bias, first in (
        (5, 3, 7, 10, 1, 1, True, False), (4, 17, 33, 40, 2, 2, True, True),
        (6, 1, 16, 32, 2, 1, False, True), (1, 2, 3, 5, 1, 2, True, False),
    ):  # fmt: skip
        for dtype, scale in ((torch.float32, 4.0), (torch.bfloat16, 2.0)):
            x = torch.randn((batch, steps, i) if first else (steps, batch, i)).to(dtype)
            state = torch.randn(layers * directions, batch, h).to(dtype)
            hx: Any = [state, state * 0.5] if kind == "lstm" else state
            plain = parameters(kind, dtype, i, h, layers, directions, bias)
            for params in (plain, [Constant(p) for p in plain]):
                arguments = [x, hx, params, bias, layers, 0.0, False, directions == 2, first]
                check(isa, f"aten.{kind}.input", arguments, scale=scale)


def test_recurrent_accuracy(isa: str) -> None:
    """As close to float64 as eager torch, over many steps."""
    for kind in ("lstm", "gru"):
        x, state = torch.randn(60, 4, 24), torch.zeros(1, 4, 48)
        hx: Any = [state, state] if kind == "lstm" else state
        plain = parameters(kind, torch.float32, 24, 48, 1, 1, True)
        rest = [True, 1, 0.0, False, False, False]
        constants = [Constant(p) for p in plain]
        (ours, *_) = run_rule(f"aten.{kind}.input", [x, hx, constants, *rest], isa=isa)
        wide: Any = [state.double()] * 2 if kind == "lstm" else state.double()
        operator = lookup(f"aten.{kind}.input")
        exact = operator(x.double(), wide, [p.double() for p in plain], *rest)[0]
        eager = operator(x, hx, plain, *rest)[0]
        error = (ours.double() - exact).abs().max()
        assert error <= 1.5 * (eager.double() - exact).abs().max() + 1e-7


@pytest.mark.parametrize("kind", GATES)
def test_cells(isa: str, kind: str) -> None:
    for batch, dtype in ((3, torch.float32), (9, torch.float16), (20, torch.bfloat16)):
        weights = parameters(kind, dtype, 12, 20, 1, 1, True)
        state = torch.randn(batch, 20).to(dtype)
        hx: Any = [state, state * 0.5] if kind == "lstm" else state
        x = torch.randn(batch, 12).to(dtype)
        check(isa, f"aten.{kind}_cell.default", [x, hx, *weights], scale=4.0)
        check(isa, f"aten.{kind}_cell.default", [x, hx, *weights[:2]], scale=4.0)


def test_recurrent_refusals() -> None:
    x, state = torch.randn(3, 2, 4), torch.zeros(1, 2, 5)
    weights = parameters("gru", torch.float64, 4, 5, 1, 1, True)
    rest = [True, 1, 0.0, False, False, False]
    refused("aten.gru.input", [x.double(), state.double(), weights, *rest])
    weights = parameters("gru", torch.float32, 4, 5, 2, 1, True)
    layers = torch.zeros(2, 2, 5)
    refused("aten.gru.input", [x, layers, weights, True, 2, 0.5, True, False, False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_mm(isa: str, dtype: torch.dtype) -> None:
    for rows, k, n, ends in (
        (200, 64, 96, [0, 120, 121, 200]), (16, 32, 40, [3, 3, 10, 16]), (8, 16, 64, [0, 0, 0, 8]),
        (90, 64, 64, [20, 20, 40, 60]),
    ):  # fmt: skip
        x, w = torch.randn(rows, k).to(dtype), torch.randn(4, k, n).to(dtype) / 8
        expected = torch.zeros(rows, n)
        start = 0
        for e, stop in enumerate(ends):
            expected[start:stop] = x[start:stop].float() @ w[e].float()
            start = stop
        offs = torch.tensor(ends, dtype=torch.int32)
        for weight in (w, Constant(w)):
            ours = run_rule("aten._grouped_mm.default", [x, weight, offs], isa=isa)[0]
            close(ours, expected.to(dtype), 4.0)
