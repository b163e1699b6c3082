"""torch.compile(model, backend="graphc")."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphc import dynamo
from graphc.dynamo import graphc as backend

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend=backend, **options)


def test_torch_finds_the_backend() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entry = EntryPoint("graphc", table["torch_dynamo_backends"]["graphc"], "torch_dynamo_backends")
    assert entry.load() is backend


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x))) * scale
        return result


@torch.no_grad()
def test_two_shapes_and_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    build = dynamo._Compiled._build
    monkeypatch.setattr(
        dynamo._Compiled, "_build", lambda self, x: builds.append(1) or build(self, x)
    )
    net = Net().eval()
    fast = compiled(net)
    for rows in (3, 5, 7, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), net(x))
    assert len(builds) == 2  # for the first length, then for any
    torch.testing.assert_close(fast(x, scale=2.0), net(x, scale=2.0))


@torch.no_grad()
def test_bf16() -> None:
    net = Net().eval().to(torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    found = compiled(net)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, net(x), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.net(x)
            torch._dynamo.graph_break()
            return torch.tanh(x) + x.sum()

    module = Broken().eval()
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(module)(x), module(x))


@torch.no_grad()
def test_changed_weights_are_seen() -> None:
    net = Net().eval()
    fast = compiled(net)
    x = torch.randn(3, 8)
    fast(x)
    net.first.weight.mul_(2.0)
    torch.testing.assert_close(fast(x), net(x))
    net.second.weight = nn.Parameter(torch.randn(8, 16))
    torch.testing.assert_close(fast(x), net(x))
    torch.testing.assert_close(compiled(net, options={"freeze": False})(x), net(x))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net = Net().eval()
        fast = compiled(net)
        x = torch.randn(3, 8)
        torch.testing.assert_close(fast(x), net(x))
        net.first.weight.mul_(2.0)
        torch.testing.assert_close(fast(x), net(x))


@torch.no_grad()
def test_one_graph_of_several_modules() -> None:
    nets = [Net().eval() for _ in range(3)]
    for net in nets:
        net.first.weight.add_(torch.randn(16, 8))

    def forward(net: nn.Module, x: torch.Tensor) -> Any:
        return net(x)

    fast = compiled(forward)
    x = torch.randn(3, 8)
    for net in nets * 2:
        torch.testing.assert_close(fast(net, x), net(x))


@torch.no_grad()
def test_inputs_and_buffers_are_written() -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            x.mul_(2)
            return x + self.count

    one, other = Counting(), Counting()
    fast = compiled(one)
    x, y = torch.ones(3), torch.ones(3)
    for _ in range(3):
        torch.testing.assert_close(fast(x), other(y))
        torch.testing.assert_close(x, y)
    assert one.count.item() == 3


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.view(-1), x + 1),
        lambda x: (x + 1).chunk(2),
        lambda x: (lambda y: (y, y[1:], y.t()))(x * 2),
    ],
)
@pytest.mark.parametrize("rows", [(4,), (4, 6, 8)])
def test_results_share_memory_as_in_eager(
    function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], rows: tuple[int, ...]
) -> None:
    fast = compiled(function)
    for n in rows:
        x, y = torch.arange(4.0 * n).view(n, 4), torch.arange(4.0 * n).view(n, 4)
        found, wanted = fast(x), function(y)
        for change in range(len(found)):
            found[change].add_(10)
            wanted[change].add_(10)
            for a, b in zip((*found, x), (*wanted, y), strict=True):
                torch.testing.assert_close(a, b)


def test_gradients_are_refused() -> None:
    net = Net()
    with pytest.raises(Exception, match="has no gradients.*\n?.*"):
        compiled(net)(torch.randn(3, 8))


def test_autocast_and_unknown_options_are_refused() -> None:
    net = Net().eval().requires_grad_(False)
    with pytest.raises(Exception, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        compiled(net)(torch.randn(3, 8))
    with pytest.raises(Exception, match="no option 'fast'"):
        compiled(net, options={"fast": True})(torch.randn(3, 8))
