"""Build, load and run of whole models: in this process and in a fresh one without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphc.api import Options, build_captured
from graphc.errors import CacheMissError, InputRejectedError, UsageError
from graphc.frontends.capture import capture
from graphc.lowering.classify import native_operators
from graphc.runtime.session import load
from graphc.toolchain.isa import Isa
from tests.built import Built, Call, agree, results
from tests.kernel_build import TARGET_OF, available_isas

F = nn.functional


class Block(nn.Module):
    """One transformer layer with grouped-query attention, a mask, RMS norm and a gated MLP."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2 * self.groups, self.size).transpose(1, 2).chunk(2, 1)
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LanguageModel(nn.Module):
    """Embedding, a block, and the embedding again as the output projection."""

    def __init__(self, words: int = 8192, width: int = 32, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = Block(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


def model(kind: type[nn.Module], *args: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args).eval()


def length(name: str = "T", low: int = 1, high: int = 64) -> Any:
    return torch.export.Dim(name, min=low, max=high)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = model(LanguageModel)
    tokens = torch.randint(0, 320, (1, 7))
    built = Built(module, (tokens,), dynamic=({1: length()},),
                  folder=tmp_path_factory.mktemp("plan"))  # fmt: skip
    yield built, module
    built.close()


def test_symbolic_lengths(language: Any) -> None:
    built, module = language
    assert not built.fallbacks
    for t in (7, 1, 2, 33, 64):
        tokens = torch.randint(0, 320, (1, t))
        agree(built(tokens), module(tokens), 2e-5, 2e-5, f"T={t}")
    with pytest.raises(InputRejectedError):
        built(torch.zeros(1, 65, dtype=torch.int64))


def test_tied_weights_are_stored_once(language: Any) -> None:
    built, module = language
    unique = sum(p.numel() * p.element_size() for p in module.parameters())
    assert (built.plan / "weights.bin").stat().st_size <= 1.05 * unique


def test_a_fresh_process_needs_no_torch(language: Any) -> None:
    built, module = language
    tokens = np.arange(9, dtype=np.int64)[None]
    code = (
        "import json, sys, numpy as np\n"
        "from graphc.runtime.session import load\n"
        f"session = load({str(built.plan)!r}, threads=1)\n"
        "y = session.run(np.arange(9, dtype=np.int64)[None])\n"
        "heavy = [m for m in ('torch', 'sympy', 'onnx', 'graphc.ir') if m in sys.modules]\n"
        "print(json.dumps([heavy, np.asarray(y).tolist()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, y = json.loads(done.stdout)
    assert heavy == []
    expected = module(torch.from_numpy(tokens))
    torch.testing.assert_close(torch.tensor(y), expected, rtol=2e-5, atol=2e-5)


def test_the_second_build_compiles_nothing(language: Any) -> None:
    built, module = language
    tokens = torch.randint(0, 320, (1, 9))
    again = Built(module, (tokens,), dynamic=({1: length()},),
                  options=Options(jobs=1, require_cached=True))  # fmt: skip
    try:
        assert again.report.compile.compiled == 0
        assert again.report.compile.hits == again.report.compile.units
        assert (again.plan / "plan.json").exists() or any(again.plan.iterdir())
        assert torch.equal(again(tokens), built(tokens))
    finally:
        again.close()


def test_require_cached_refuses_what_is_not(tmp_path: Path) -> None:
    module = Call(lambda x: torch.sin(x) * 0.123456 + 0.654321)
    with pytest.raises(CacheMissError):
        Built(module, (torch.randn(3),), options=Options(require_cached=True), folder=tmp_path)


def test_threads_do_not_change_a_bit(language: Any) -> None:
    built, _ = language
    tokens = torch.randint(0, 320, (1, 61))
    two = load(built.plan, threads=2)
    for _ in range(3):
        assert torch.equal(two.run(tokens, as_torch=True), built(tokens))


@pytest.mark.parametrize("isa", [i for i in available_isas() if i != "avx512"])
def test_instruction_sets_agree(language: Any, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = language
    monkeypatch.setenv("GRAPHC_CPU", TARGET_OF[isa])
    assert Isa.detect().level == isa
    tokens = torch.randint(0, 320, (1, 12))
    other = Built(module, (tokens,), dynamic=({1: length()},))
    try:
        assert other.report.compile.isa.startswith(isa)
        agree(other(tokens), module(tokens), 2e-5, 2e-5)
    finally:
        other.close()


def test_a_pass_switched_off(language: Any) -> None:
    built, module = language
    tokens = torch.randint(0, 320, (1, 5))
    names = [p.name for p in built.report.passes]
    options = Options(jobs=1, disable_pass=tuple(dict.fromkeys(names)))
    plain = Built(module, (tokens,), dynamic=({1: length()},), options=options)
    try:
        assert not plain.report.passes
        agree(plain(tokens), module(tokens), 2e-5, 2e-5)
    finally:
        plain.close()
    with pytest.raises(UsageError):
        captured = capture(module, (tokens,), keep=native_operators())
        build_captured(captured, built.folder / "x", Options(disable_pass=("no-such-pass",)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    module = model(LanguageModel, 64, 32, False).to(dtype)
    tokens = torch.randint(0, 64, (2, 40))
    ours, fallbacks = results(module, tokens)
    with torch.no_grad():
        exact = model(LanguageModel, 64, 32, False).to(dtype).double()(tokens)
        theirs = (module(tokens).double() - exact).abs().mean()
        assert float((ours.double() - exact).abs().mean()) <= 1.1 * float(theirs)
    assert ours.dtype is dtype and not fallbacks


class Counter(nn.Module):
    """A state that grows with each run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        self.count.add_(1)
        return self.total / self.count


def test_states(tmp_path: Path) -> None:
    built, module = Built(Counter(), (torch.ones(3, 4),)), Counter()
    try:
        for seed in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            agree(built(x), module(x), 1e-6, 1e-6)
        built.session.save_states(tmp_path / "states.npz")
        after = built(x)
        built.session.reset()
        assert float(built.session.states["total"].sum()) == 0
        built.session.load_states(tmp_path / "states.npz")
        assert torch.equal(built(x), after)
    finally:
        built.close()


class Exchange(nn.Module):
    """States that become each other's old content."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(9.0).view(3, 3))
        self.register_buffer("b", torch.zeros(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.a.clone()
        self.a.copy_(self.b.t())
        self.b.copy_(old.t())
        return x + self.a


def test_states_that_change_places() -> None:
    built, module = Built(Exchange(), (torch.ones(3, 3),)), Exchange()
    try:
        for _ in range(4):
            x = torch.randn(3, 3)
            agree(built(x), module(x), 1e-6, 1e-6)
            agree(torch.from_numpy(built.session.states["b"].copy()), module.b, 1e-6, 1e-6)
    finally:
        built.close()


def mutating(*functions: Any) -> None:
    """Inputs are changed as eager torch changes them, call after call."""
    for function in functions:
        given = [torch.arange(9.0).view(3, 3) + 1, torch.randn(3, 3)]
        built = Built(Call(function), tuple(x.clone() for x in given))
        try:
            ours, theirs = [x.clone() for x in given], [x.clone() for x in given]
            for _ in range(2):
                agree(built(*ours), function(*theirs), 1e-6, 1e-6)
                agree(ours, theirs, 1e-6, 1e-6, "inputs")
        finally:
            built.close()


def test_mutated_inputs() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    def transpose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_(x.t().clone())
        return y + 1

    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
        return kept.sum()

    def shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:] = x[:-1].clone()
        y[:, 0] = x[0]
        return x.sum(0)

    def before(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        old = x.view(-1)[2:].clone()
        x.mul_(2)
        return [old, x, x.t()]

    mutating(add, transpose, swap, shift, before)


class Network(nn.Module):
    """Convolutions with batch norm, pooling, a residual, a depthwise and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8), nn.SiLU())
        self.c = nn.ConvTranspose2d(8, 8, 2, 2)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 5)
        for norm in (self.a[1], self.b[1]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = self.pool(F.relu(self.c(h + self.b(h))))
        h = F.avg_pool2d(h, 2) + F.adaptive_avg_pool2d(h, 1)
        return torch.log_softmax(self.head(h.mean((2, 3))), -1)


def test_convolutional_network() -> None:
    module, x = model(Network), torch.randn(2, 3, 16, 16)
    ours, fallbacks = results(module, x)
    agree(ours, module(x), 2e-5, 2e-5)
    assert not fallbacks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y)
        return [z, h, c, last]


def test_recurrent_network() -> None:
    module, x = model(Recurrent), torch.randn(2, 9, 6)
    ours, fallbacks = results(module, x)
    agree(ours, module(x), 2e-5, 2e-5)
    assert not fallbacks


class Experts(nn.Module):
    """Two of four experts a token, as grouped products over tokens sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.shape[0]
        weight, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        tokens = order // 2
        counts = (chosen.reshape(-1)[:, None] == torch.arange(4)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        h = F.silu(torch._grouped_mm(x[tokens].bfloat16(), self.up.bfloat16(), offs=ends))
        y = torch._grouped_mm(h, self.down.bfloat16(), offs=ends).float()
        y = y * weight.reshape(-1)[order][:, None]
        return torch.zeros(t, 16).index_add(0, tokens, y)


def test_mixture_of_experts() -> None:
    module = model(Experts)
    built = Built(module, (torch.randn(9, 16),), dynamic=({0: length(low=2)},))
    try:
        for t in (9, 2, 40):
            x = torch.randn(t, 16)
            agree(built(x), module(x), 3e-2, 3e-2, f"T={t}")
    finally:
        built.close()


def test_integer_model() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        h = (x * 3 + 1) % 7
        hist = torch.zeros(7, dtype=torch.int64).index_add(0, h, torch.ones_like(h))
        values, order = torch.sort(h, stable=True)
        return [table[h], hist, values, order, h.cumsum(0), (h << 2) | 1, table.to(torch.int8) @ (
            table.t().to(torch.int8))]  # fmt: skip

    x, table = torch.arange(20), torch.randint(-5, 5, (7, 3), dtype=torch.int32)
    ours, _ = results(function, x, table)
    agree(ours, function(x, table), 0.0, 0.0)


def test_results_that_are_inputs_constants_and_views() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"same": x, "view": x.t(), "twice": (y + 1, y + 1), "number": x.shape[0],
                "fixed": torch.arange(3), "part": (x * 2)[1:], "whole": x * 2}  # fmt: skip

    x, y = torch.randn(3, 4), torch.randn(2)
    ours, _ = results(function, x, y)
    agree(ours, function(x, y), 1e-6, 1e-6)
