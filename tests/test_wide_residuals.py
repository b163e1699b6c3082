"""Residual streams that stay float32: how much more exact whole plans are, and where they stay as
they were (the graphs themselves: tests/cases/wide_residuals*.txt)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphc.api import Options
from tests.built import Built

F = nn.functional
WIDTH, LAYERS, TOKENS = 96, 8, 33
WITHOUT = Options(jobs=1, disable_pass=("wide_residuals",))


class Layer(nn.Module):
    """A gated product behind a norm, chosen between two by a router in float32."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        share = F.linear(_float(y), _float(self.router.weight)).softmax(-1).to(x.dtype)
        made: torch.Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + share[..., :1] * made


def _float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm(width: int) -> nn.Module:
    return nn.RMSNorm(width, 1e-6)


class Stack(nn.Module):
    """Layers; what is read of them, and the stream itself."""

    def __init__(self, norm: Callable[[int], nn.Module], *, behind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.norm, self.behind = norm(WIDTH), behind
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = self.norm(layer(x)) if self.behind else layer(x)
        return self.norm(x), x


def _built(module: nn.Module, x: torch.Tensor, options: Options | None = None) -> tuple[Any, Any]:
    """Its results, and what the pass found."""
    built = Built(module, (x,), options=options)
    try:
        made, fallbacks = built(x), built.fallbacks
        records = [record for record in built.report.passes if record.name == "wide_residuals"]
    finally:
        built.close()
    assert not fallbacks
    return made, records


def _error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("norm", [_rms_norm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_is_smaller(dtype: torch.dtype, norm: Callable[[int], nn.Module]) -> None:
    module = Stack(norm).to(dtype).eval()
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        eager = module(x)
        exact = Stack(norm).to(dtype).double().eval()(x.double())
    narrow, none = _built(module, x, WITHOUT)
    wide, (record,) = _built(module, x)
    assert not none
    assert [m.rule for m in record.matches].count("wide_sum") == LAYERS
    for one, before, theirs, truth in zip(wide, narrow, eager, exact, strict=True):
        assert one.dtype == dtype
        assert _error(one, truth) < 0.7 * _error(before, truth)
        assert _error(one, truth) < 0.7 * _error(theirs, truth)


def test_no_stream_no_change() -> None:
    """A norm behind each sum: nothing is added to unnormalised sums. And float32 is wide enough."""
    module = Stack(nn.LayerNorm, behind=True).bfloat16().eval()
    x = torch.randn(1, TOKENS, WIDTH).bfloat16()
    _, (record,) = _built(module, x)
    assert "wide_sum" not in [match.rule for match in record.matches]
    assert {refusal.reason for refusal in record.refusals} == {
        "it is normalised, but not added to again"
    }
    _, records = _built(module.float(), x.float())
    assert not any(record.matches or record.refusals for record in records)
