"""graphc.compile(module)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphc
from graphc import api


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": self.second(torch.relu(self.first(x))) * scale}


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found["y"], wanted["y"])


@torch.no_grad()
def test_a_plan_for_each_signature() -> None:
    net = Net().eval()
    fast = graphc.compile(net)
    for rows in (3, 5, 3):
        x = torch.randn(rows, 8)
        same(fast(x), net(x))
    same(fast(x, scale=2.0), net(x, scale=2.0))
    assert len(fast.sessions) == 3
    found = fast(x.numpy())["y"]
    assert isinstance(found, np.ndarray) and len(fast.sessions) == 3
    np.testing.assert_allclose(found, net(x)["y"].numpy(), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_one_plan_for_a_range() -> None:
    net = Net().eval()
    fast = graphc.compile(net, dynamic_shapes=({0: torch.export.Dim("rows", max=64)},))
    for rows in (3, 5, 64):
        x = torch.randn(rows, 8)
        same(fast(x), net(x))
    assert len(fast.sessions) == 1


@torch.no_grad()
def test_another_process_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    wanted = graphc.compile(Net().eval())(x)
    monkeypatch.setattr(api, "build_captured", None)
    same(graphc.compile(Net().eval())(x), wanted)
    other = Net().eval()
    other.first.weight.mul_(2)
    with pytest.raises(TypeError):  # other weights, another plan
        graphc.compile(other)(x)


@torch.no_grad()
def test_changed_weights_are_seen() -> None:
    net = Net().eval()
    fast = graphc.compile(net)
    x = torch.randn(3, 8)
    fast(x)
    net.first.weight.mul_(2)
    same(fast(x), net(x))
    net.second.bias = nn.Parameter(torch.randn(8))
    same(fast(x), net(x))


def test_training_and_gradients_are_refused() -> None:
    with pytest.raises(graphc.errors.UnsupportedError, match="training mode"):
        graphc.compile(Net())(torch.randn(3, 8))
    with pytest.raises(graphc.errors.UnsupportedError, match="no gradients"):
        graphc.compile(Net().eval())(torch.randn(3, 8, requires_grad=True))


@torch.no_grad()
def test_states_stay_in_one_plan() -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    fast = graphc.compile(Counting().eval())
    x = torch.zeros(3)
    assert [fast(x)[0].item() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(graphc.errors.UnsupportedError, match="buffers of its own"):
        fast(torch.zeros(4))
