"""Doubly stochastic matrices, executed for real."""

from __future__ import annotations

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import sinkhorn  # noqa: F401
from tests.kernel_harness import available_isas, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
NAME = "graphc.sinkhorn.default"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("side", [1, 2, 3, 4, 8])
def test_as_close_to_float64_as_eager(isa: str, side: int) -> None:
    torch.manual_seed(3)
    for tokens in (0, 1, 5, 16, 700):
        x = torch.softmax(3 * torch.randn(2, tokens, side, side), -1) + 1e-6
        for rounds in (1, 2, 20):
            (got,) = run_rule(NAME, [x, rounds, 1e-6], isa=isa)
            exact = torch.ops.graphc.sinkhorn(x.double(), rounds, 1e-6)
            eager = torch.ops.graphc.sinkhorn(x, rounds, 1e-6)
            assert got.shape == x.shape
            torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-7)
            if tokens == 700:
                error, usual = ((y.double() - exact).square().mean() ** 0.5 for y in (got, eager))
                assert error <= 1.02 * usual


def test_rows_and_columns_add_up_to_one() -> None:
    x = torch.rand(40, 4, 4) + 0.1
    (got,) = run_rule(NAME, [x, 50, 0.0], isa=ISAS[0], symbols={(0, 0): "T"})
    for dim in (1, 2):
        torch.testing.assert_close(got.sum(dim), torch.ones(40, 4))


def test_strided_matrices() -> None:
    x = torch.rand(7, 30)[:, 2:11].unflatten(1, (3, 3)).transpose(1, 2)
    (got,) = run_rule(NAME, [x, 3, 1e-6], isa=ISAS[0])
    torch.testing.assert_close(got, torch.ops.graphc.sinkhorn(x, 3, 1e-6))


def test_refusals() -> None:
    for x in (torch.rand(2, 9, 9), torch.rand(2, 3, 4), torch.rand(2, 4, 4).double()):
        with pytest.raises(Refuse):
            lower(NAME, [x, 2, 1e-6], isa=ISAS[0])
