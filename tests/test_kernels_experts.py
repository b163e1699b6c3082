"""Mixtures of experts and Attention Residuals against float64, on every ISA level."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphc.ops  # noqa: F401
from graphc.runtime.session import load
from tests.built import Built
from tests.eager import ISAS, close, refused
from tests.kernel_harness import Constant, lookup, lower, run_rule

EXPERTS = "graphc.experts.default"
MIX = "graphc.residual_mix.default"


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(experts: int, width: int, hidden: int, dtype: torch.dtype) -> list[Constant]:
    made = (
        torch.randn(experts, 2 * hidden, width) / width**0.5,
        torch.randn(experts, width, hidden) / hidden**0.5,
    )
    return [Constant(w.to(dtype)) for w in made]


def routed(tokens: int, slots: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, and weights."""
    index = torch.rand(tokens, experts).topk(slots).indices
    return index, torch.rand(tokens, slots)


def double(argument: Any) -> Any:
    if isinstance(argument, Constant):
        return argument.tensor.double()
    if isinstance(argument, list):
        return [double(item) for item in argument]
    floats = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.double() if floats else argument


def plain(argument: Any) -> Any:
    return argument.tensor if isinstance(argument, Constant) else argument


def accurate(isa: str, name: str, arguments: list[Any], parts: int = 3, **keywords: Any) -> None:
    """As close to float64 as eager torch. Products of few rows sum up in another order, which in
    float32 may add two roundings of the result."""
    operator = lookup(name)
    exact = operator(*map(double, arguments), **keywords)
    eager = operator(*map(plain, arguments), **keywords)
    (ours,) = run_rule(name, arguments, keywords, isa=isa, parts=parts)
    assert ours.dtype == eager.dtype
    assert ours.shape == eager.shape
    if exact.numel():
        unit = 2 * torch.finfo(torch.float32).eps * rms(exact)
        assert rms(ours.double() - exact) <= 1.02 * rms(eager.double() - exact) + unit


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 300])
def test_experts(isa: str, dtype: torch.dtype, tokens: int) -> None:
    for experts, slots, width, hidden in ((4, 1, 64, 32), (8, 2, 72, 40), (64, 8, 33, 21)):
        x = torch.randn(tokens, width).to(dtype)
        index, weight = routed(tokens, slots, experts)
        made = weights(experts, width, hidden, dtype)
        accurate(isa, EXPERTS, [x, index, weight, *made])
        narrow = [x, index.int(), weight.to(dtype), *made]
        accurate(isa, EXPERTS, narrow, parts=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_uneven_experts(isa: str, dtype: torch.dtype) -> None:
    made = weights(6, 48, 50, dtype)
    x = torch.randn(200, 48).to(dtype)
    weight = torch.rand(200, 2)
    alone = torch.tensor([4, 6]).expand(200, 2).contiguous()  # all to one; 6 is no expert
    accurate(isa, EXPERTS, [x, alone, weight, *made])
    nobody = torch.tensor([6, 1 << 40]).expand(200, 2).contiguous()
    (ours,) = run_rule(EXPERTS, [x, nobody, weight / 0, *made], isa=isa)
    assert not ours.any()
    index = torch.cat([alone[:150], torch.tensor([[0, 5]] * 49), torch.tensor([[-1, 2]])])
    accurate(isa, EXPERTS, [x, index, weight, *made])
    twice = torch.tensor([3, 3]).expand(200, 2).contiguous()
    accurate(isa, EXPERTS, [x, twice, weight, *made])


def test_untouched_experts(isa: str) -> None:
    """The weights of an expert without tokens take no part."""
    made = weights(5, 40, 24, torch.float32)
    for constant in made:
        constant.tensor[[0, 2, 4]] = float("nan")
    x, weight = torch.randn(9, 40), torch.rand(9, 2)
    index = torch.tensor([1, 3]).repeat(9, 1)
    (ours,) = run_rule(EXPERTS, [x, index, weight, *made], isa=isa)
    assert ours.isfinite().all()


def test_experts_in_memory(isa: str) -> None:
    """Strided operands; a symbolic number of tokens; nothing depends on how a range is cut."""
    index, weight = routed(90, 3, 8)
    made = weights(8, 64, 48, torch.float32)
    wide = torch.randn(90, 100)
    for x in (wide[:, 20:84], torch.randn(64, 90).t(), wide[:, :64].contiguous()):
        accurate(isa, EXPERTS, [x, index, weight, *made])
    turned = index.t().contiguous().t()
    arguments = [wide[:, :64], turned, weight.t().contiguous().t(), *made]
    symbols = {(0, 0): "T", (1, 0): "T", (2, 0): "T"}
    results = [
        run_rule(EXPERTS, arguments, isa=isa, symbols=symbols, parts=parts)[0]
        for parts in (1, 2, 5, 40, 1000)
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    accurate(isa, EXPERTS, arguments)


def test_no_tokens(isa: str) -> None:
    made = weights(4, 64, 32, torch.float32)
    index, weight = routed(0, 2, 4)
    accurate(isa, EXPERTS, [torch.randn(0, 64), index, weight, *made])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(isa: str, activation: str) -> None:
    index, weight = routed(20, 2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(20, 32).to(dtype) * 3
        arguments = [x, index, weight, *weights(4, 32, 40, dtype)]
        for caps in ({}, {"gate_cap": 2.0}, {"gate_cap": 4.0, "up_cap": 1.5}):
            accurate(isa, EXPERTS, arguments, activation=activation, **caps)


def test_situ() -> None:
    """A capped silu is SiTU: b tanh(g / b) sigmoid(g) b2 tanh(u / b2)."""
    x, one = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    gate_up = torch.tensor([[[3.0, -2.0], [5.0, 0.5]]], dtype=torch.float64)
    made = lookup(EXPERTS)(
        x, torch.zeros(2, 1, dtype=torch.int64), one, gate_up,
        torch.ones(1, 2, 1, dtype=torch.float64), gate_cap=2.0, up_cap=4.0,
    )  # fmt: skip
    g, u = gate_up[0]
    expected = 2 * torch.tanh(g / 2) * torch.sigmoid(g) * 4 * torch.tanh(u / 4)
    torch.testing.assert_close(made, expected[:, None].expand(2, 2))


def test_limits(isa: str) -> None:
    """The gate from above only, the other factor on both sides; NaN stays."""
    rows = [[-9.0, 9.0], [9.0, -9.0], [0.5, 1.5], [torch.nan, 1.0], [1.0, torch.nan]]
    x, one = torch.tensor(rows), torch.ones(5, 1)
    arguments = [x, torch.zeros(5, 1, dtype=torch.int64), one, Constant(torch.eye(2)[None]),
                 Constant(torch.ones(1, 2, 1))]  # fmt: skip
    (ours,) = run_rule(EXPERTS, arguments, {"limit": 2.0}, isa=isa)
    silu = torch.nn.functional.silu
    wanted = silu(torch.tensor([-9.0, 2.0, 0.5])) * torch.tensor([2.0, -2.0, 1.5])
    torch.testing.assert_close(ours[:3], wanted[:, None].expand(3, 2))
    assert ours[3:].isnan().all()
    index, weight = routed(300, 2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(300, 32).to(dtype) * 3
        arguments = [x, index, weight, *weights(4, 32, 40, dtype)]
        accurate(isa, EXPERTS, arguments, limit=1.2)


def test_experts_followers(isa: str) -> None:
    """The sum takes elementwise work behind it."""
    index, weight = routed(5, 2, 4)
    arguments = [torch.randn(5, 32), index, weight, *weights(4, 32, 40, torch.float32)]
    (ours,) = run_rule(EXPERTS, arguments, isa=isa, epilogue="x > 0 ? x : 0")
    close(ours, lookup(EXPERTS)(*map(plain, arguments)).relu(), 4.0)


def test_experts_refusals() -> None:
    index, weight = routed(5, 2, 4)
    made = weights(4, 32, 40, torch.float32)
    x = torch.randn(5, 32)
    refused(EXPERTS, [x, index, weight, *map(plain, made)])
    refused(EXPERTS, [x, index, weight.double(), *made])
    refused(EXPERTS, [x, index, weight, *made], gate_cap=-1.0)
    refused(EXPERTS, [x, index, weight, *made], limit=0.0)
    wide = [Constant(c.tensor.double()) for c in made]
    refused(EXPERTS, [x.double(), index, weight, *wide])


# ---------------------------------------------------------------- attention residuals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_residual_mix(isa: str, dtype: torch.dtype) -> None:
    for count, shape in (
        (1, (3, 40)), (2, (70, 64)), (2, (2, 30, 33)), (9, (40, 200)), (9, (20, 1, 1030)),
        (2, (1,)), (20, (20, 96)), (2, (0, 16)), (1, (100,)),
    ):  # fmt: skip
        candidates = [torch.randn(shape).to(dtype) * (j + 1) for j in range(count)]
        query = torch.randn(shape[-1]) / shape[-1] ** 0.5 * 3
        # each number of candidates is a kernel to compile, and so is each kind of query
        for q in (query, query.to(dtype)) if count == 2 else (query.to(dtype),):
            arguments = [candidates, q, 1e-6]
            if len(shape) > 1:
                accurate(isa, MIX, arguments)
            exact = lookup(MIX)(*map(double, arguments))
            close(run_rule(MIX, arguments, isa=isa)[0], exact.to(dtype), 4.0)


def test_residual_mix_in_memory(isa: str) -> None:
    x = torch.randn(3, 4, 5, 48)
    candidates = [x[0, 1], x[1].transpose(0, 1)[:, 2, :][:4].expand(5, 4, 48)[:, 0]]
    query = torch.randn(96)[::2]
    accurate(isa, MIX, [candidates, query, 1e-5])
    accurate(isa, MIX, [[x[0], x[1], x[:, :, :, :48][2]], query, 1e-5])
    accurate(isa, MIX, [[x[..., :32], x[..., 10:42]], query[:32], 1e-5])
    accurate(isa, MIX, [[x.transpose(0, 1), x.transpose(0, 1) * 2], query, 1e-5])
    turned = torch.randn(48, 6).t()
    (ours,) = run_rule(MIX, [[turned, turned * 2], query, 0.0], isa=isa, epilogue="x * 2")
    close(ours, 2 * lookup(MIX)([turned, turned * 2], query, 0.0), 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_residual_mix_with_its_norm(isa: str, dtype: torch.dtype) -> None:
    for count, shape in ((1, (3, 40)), (5, (30, 33)), (3, (7, 2500)), (3, (5, 1)), (2, (0, 16))):
        candidates = [torch.randn(shape).to(dtype) * (j + 1) for j in range(count)]
        query = torch.randn(shape[-1]) / shape[-1] ** 0.5 * 3
        gain = (torch.rand(shape[-1]) + 0.5).to(dtype)
        arguments = [candidates, query, 1e-6, 1e-5, gain]
        exact = lookup(MIX)(*map(double, arguments))
        close(run_rule(MIX, arguments, isa=isa)[0], exact.to(dtype), 4.0)
        if dtype == torch.float32:
            accurate(isa, MIX, arguments)
        elif shape == (7, 2500):
            (wide,) = run_rule(MIX, arguments, {"dtype": torch.float32}, isa=isa)
            close(wide, exact.float(), 16.0)
        else:
            continue
        (plain,) = run_rule(MIX, arguments[:4], isa=isa)
        close(plain, lookup(MIX)(*map(double, arguments[:4])).to(dtype), 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_residual_mix_of_a_wider_sum(isa: str, dtype: torch.dtype) -> None:
    """The last candidate is float32, and not rounded."""
    for count, shape in ((2, (3, 40)), (4, (30, 33)), (3, (7, 2500)), (2, (5, 1)), (3, (0, 16))):
        candidates = [torch.randn(shape).to(dtype) * (j + 1) for j in range(count)]
        candidates[-1] = torch.randn(shape)
        query = (torch.randn(shape[-1]) / shape[-1] ** 0.5 * 3).to(dtype)
        for arguments in ([candidates, query, 1e-6], [candidates, query, 1e-6, 1e-5, query]):
            exact = lookup(MIX)(*map(double, arguments))
            (ours,) = run_rule(MIX, arguments, {"dtype": torch.float32}, isa=isa)
            close(ours, exact.float(), 16.0)


def test_residual_mix_golden(isa: str) -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    (ours,) = run_rule(MIX, [list(z[:, None]), torch.ones(2), 0.0], isa=isa)
    close(ours, torch.tensor([[1.6704440824, 2.4045328988]]))


def test_residual_mix_extremes(isa: str) -> None:
    """Scores far apart, and what is not a number."""
    z = torch.randn(4, 3, 64)
    z[1, 0], z[2, 1, 5] = 0.0, float("nan")
    arguments = [list(z), torch.randn(64) * 1e4, 1e-6]
    (ours,) = run_rule(MIX, arguments, isa=isa)
    close(ours, lookup(MIX)(*arguments), 100.0)


def test_residual_mix_refusals() -> None:
    x = torch.randn(3, 8)
    refused(MIX, [[x.double(), x.double()], torch.ones(8, dtype=torch.float64), 1e-6])
    refused(MIX, [[x, x.bfloat16()], torch.ones(8), 1e-6])
    refused(MIX, [[x.bfloat16(), x, x.bfloat16()], torch.ones(8), 1e-6])
    refused(MIX, [[x.bfloat16(), x.half()], torch.ones(8), 1e-6])


class Blocks(nn.Module):
    """Attention Residuals as the paper writes them, and the norm of the sub-layer behind."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.gain = nn.Parameter(torch.randn(96) / 5), nn.Parameter(torch.rand(96) + 1)
        self.scale, self.out = nn.Parameter(torch.rand(96) + 1), nn.Linear(96, 40)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        blocks = torch.stack([a, b, c])
        keys = nn.functional.rms_norm(blocks, (96,), self.gain, 1e-6)
        scores = torch.einsum("d, n b t d -> n b t", self.query, keys)
        x = torch.einsum("n b t, n b t d -> b t d", scores.softmax(0), blocks)
        made: torch.Tensor = self.out(nn.functional.rms_norm(x, (96,), self.scale, 1e-5))
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_out_residuals_in_a_plan(dtype: torch.dtype) -> None:
    """Two Steps, mix and product, nearer to float64 than eager torch."""
    module = Blocks().requires_grad_(False).to(dtype)

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, tokens, 96).to(dtype) for _ in range(3))

    built = Built(module, inputs(5), dynamic=({1: torch.export.Dim("T", min=1, max=64)},) * 3)
    try:
        assert not built.fallbacks and len(built.report.kernels) == 2
        given = inputs(33)
        exact = copy.deepcopy(module).double()(*(x.double() for x in given))
        ours, eager = built(*given), module(*given)
        assert _error(ours, exact) <= 1.05 * _error(eager, exact)
    finally:
        built.close()


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_ranges() -> None:
    """No more units than there can be: each block of rows belongs to one expert."""
    index, weight = routed(300, 2, 8)
    made = weights(8, 64, 32, torch.float32)
    context = lower(EXPERTS, [torch.randn(300, 64), index, weight, *made], isa=ISAS[0])
    gate = next(s for s in context.steps if s.symbol.startswith("gc_experts_gate"))
    assert gate.range == 2 * (8 + (600 - 8) // 84)


# ---------------------------------------------------------------- through a plan


class Layer(nn.Module):
    """A mix of residuals, experts, and what is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(48) / 7)
        self.gate_up = nn.Parameter(torch.randn(8, 64, 48) / 7)
        self.down = nn.Parameter(torch.randn(8, 48, 32) / 6)
        self.shared = nn.Linear(48, 48)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        x = torch.ops.graphc.residual_mix([a, b, a * b], self.query, 1e-6)
        y = torch.ops.graphc.experts(x, index, weight, self.gate_up, self.down)
        made: torch.Tensor = a + (y + self.shared(x)).relu()
        return made


def test_in_a_plan() -> None:
    """Any number of tokens, what follows in the same Steps, the same bits at two threads."""
    module = Layer().requires_grad_(False)

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        index, weight = routed(tokens, 2, 8)
        return torch.randn(tokens, 48), torch.randn(tokens, 48), index, weight

    length = {0: torch.export.Dim("T", min=1, max=64)}
    built = Built(module, inputs(7), dynamic=(length,) * 4)
    try:
        assert not built.fallbacks
        labels = [kernel.label for kernel in built.report.kernels]
        assert len(labels) == 7, labels  # a * b, mix, linear, and four Steps of the experts
        two = load(built.plan, threads=2)
        for tokens in (7, 1, 2, 33, 64):
            arguments = inputs(tokens)
            ours = built(*arguments)
            close(ours, module(*arguments), 8.0)
            assert torch.equal(two.run(*arguments, as_torch=True), ours)
    finally:
        built.close()
