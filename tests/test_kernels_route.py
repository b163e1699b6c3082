"""Routing of tokens to experts against its reference, on every ISA level."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphc.ops  # noqa: F401
from tests.built import Built
from tests.eager import ISAS, close, refused
from tests.kernel_harness import lookup, run_rule

ROUTE = "graphc.route.default"


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def same(isa: str, arguments: list[Any], **keywords: Any) -> None:
    """The same experts in the same order, with equal weights."""
    index, weight = run_rule(ROUTE, arguments, keywords, isa=isa, symbols={(0, 0): "T"})
    expected = lookup(ROUTE)(*arguments, **keywords)
    assert torch.equal(index, expected[0])
    close(weight, expected[1], 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_route(isa: str, dtype: torch.dtype) -> None:
    for tokens, experts, count, groups, kept in (
        (1, 4, 1, 1, 1), (2, 8, 2, 1, 1), (33, 64, 6, 1, 1), (5, 256, 8, 8, 4), (3, 896, 16, 1, 1),
        (7, 37, 5, 1, 1), (9, 42, 8, 7, 3), (4, 6, 6, 3, 1), (2, 130, 4, 65, 65), (0, 8, 2, 2, 1),
    ):  # fmt: skip
        logits = torch.randn(tokens, experts).to(dtype) * 2
        bias = torch.randn(experts)
        for keywords in (
            {}, {"score": "softmax", "eps": 0.0}, {"eps": 1e-20, "scale": 2.5}, {"scale": 0.5},
        ):  # fmt: skip
            for b in (bias, None):
                arguments = [logits, b, count, groups, kept]
                same(isa, arguments, **keywords)


def test_ties(isa: str) -> None:
    """Equal experts come by number, equal groups too, and minus infinity is a score like others."""
    same(isa, [torch.zeros(3, 40), None, 7])
    same(isa, [torch.zeros(3, 40), None, 12, 10, 2])
    logits = torch.randint(-2, 3, (50, 64)).float()
    same(isa, [logits, torch.randint(0, 2, (64,)).float(), 8, 8, 3], eps=1e-20)
    few = torch.full((64,), -torch.inf)
    few[[9, 40]] = 0.0
    same(isa, [logits, few, 5, 8, 3])
    same(isa, [logits, few, 5])


def test_extremes(isa: str) -> None:
    logits = torch.randn(6, 48)
    logits[1, 3], logits[2, 7:9], logits[3, 5], logits[4] = torch.nan, torch.inf, -torch.inf, -200.0
    logits[5, ::2] = 1e30
    for score in ("sigmoid", "softmax"):
        same(isa, [logits, None, 6, 4, 2], score=score)
        same(isa, [logits, torch.randn(48), 6], score=score, eps=1e-20)


def test_golden(isa: str) -> None:
    logits, bias = torch.tensor([[2.0, -1.0, 0.0, 1.0]]), torch.tensor([0.0, 0.0, 3.0, 0.0])
    keywords: dict[str, Any] = {"eps": 1e-20, "scale": 2.5}
    index, weight = run_rule(ROUTE, [logits, bias, 2, 2, 1], keywords, isa=isa)
    assert index.tolist() == [[2, 3]]
    close(weight, torch.tensor([[1.0153863430, 1.4846136570]]))


def test_in_memory(isa: str) -> None:
    wide = torch.randn(20, 100)
    bias = torch.randn(80)[::2]
    for logits in (wide[:, 7:47], torch.randn(40, 20).t()):
        same(isa, [logits, bias, 4, 5, 2], eps=1e-20)
    whole = lookup(ROUTE)(wide, None, 6)
    for parts in (1, 20):
        pieces = run_rule(ROUTE, [wide, None, 6], isa=isa, parts=parts)
        assert torch.equal(pieces[0], whole[0])


def test_refusals() -> None:
    logits = torch.randn(3, 8)
    refused(ROUTE, [logits.double(), None, 2])
    refused(ROUTE, [logits, torch.zeros(8, dtype=torch.float64), 2])


# ---------------------------------------------------------------- as models write it


class Router(nn.Module):
    """A router of transformers: (weights, experts)."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.data = torch.randn(tensor.shape) * (0.1 if tensor.dim() == 1 else 0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights, experts = self.router(x)
        return weights, experts


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepseek_v32.modeling_deepseek_v32", "DeepseekV32TopkRouter"),
        ("kimi_linear.modeling_kimi_linear", "KimiLinearTopkRouter"),
        ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeTopKRouter"),
    ],
)
def test_routers_of_transformers(module: str, name: str) -> None:
    """One Step behind the product; the same experts, each with its weight."""
    pytest.importorskip("transformers")
    config = SimpleNamespace(
        num_experts_per_tok=4, num_local_experts=32, num_experts=32, hidden_size=48, n_group=4,
        topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    found = importlib.import_module(f"transformers.models.{module}")
    model = Router(getattr(found, name)(config)).requires_grad_(False)
    length = torch.export.Dim("T", min=1, max=64)
    built = Built(model, (torch.randn(7, 48),), dynamic=({0: length},))
    try:
        assert not built.fallbacks
        assert [kernel.label for kernel in built.report.kernels] == ["linear", "route"]
        for tokens in (1, 7, 40):
            x = torch.randn(tokens, 48)
            weights, experts = built(x)
            theirs = model(x)
            order, expected = experts.argsort(-1), theirs[1].argsort(-1)
            assert torch.equal(experts.gather(1, order), theirs[1].gather(1, expected))
            close(weights.gather(1, order), theirs[0].gather(1, expected), 8.0)
    finally:
        built.close()
