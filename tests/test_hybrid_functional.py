"""graphc.models.functional: the operators' arguments and results, and derivatives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import graphc.ops  # registers what the functions are compared with
from graphc.models import chunked_delta_rule, functional

OPS = torch.ops.graphc
assert graphc.ops


def close(ours: Tensor, theirs: Tensor, bound: float) -> None:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert ours.shape == theirs.shape and error < bound, error


def gates(kind: str, *shape: int) -> Tensor:
    """Log-decays of spec families: gentle, as trained, at a lower bound of -5, beyond it."""
    if kind == "gentle":
        return -0.01 * torch.rand(shape)
    if kind == "softplus":
        return -16 * torch.nn.functional.softplus(torch.randn(shape) - 3)
    if kind == "floor":
        return torch.full(shape, -4.999)
    return {"safe": -5, "hard": -20}[kind] * torch.rand(shape)


def rule_inputs(kind: str, length: int, heads: int = 2, width: int = 24) -> list[Tensor]:
    key = [torch.randn(2, length, 2, 32) for _ in range(2)]
    return [
        *key, torch.randn(2, length, heads, width), gates(kind, 2, length, heads, 32),
        torch.rand(2, length, heads),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 15, 33, 64, 65, 150])
@pytest.mark.parametrize("kind", ["gentle", "softplus", "safe", "floor", "hard"])
def test_delta_rule_is_the_recurrence(kind: str, length: int) -> None:
    """Against float64 token by token; a chunk is 32 tokens, or 64 where decays are unbounded."""
    state = torch.randn(2, 2, 32, 24)
    inputs = rule_inputs(kind, length)
    wide = [x.double() for x in inputs]
    for before in (None, state):
        first = None if before is None else before.double()
        want = OPS.delta_rule(first, *wide, scale=0.2, normalize=True)
        found = functional.delta_rule(before, *inputs, scale=0.2, normalize=True)
        for ours, theirs in zip(found, want, strict=True):
            assert ours.isfinite().all()
            close(ours, theirs, 1e-5)
        exact = functional.delta_rule(first, *wide, scale=0.2, normalize=True)
        for ours, theirs in zip(exact, want, strict=True):
            close(ours, theirs, 1e-13)


def test_delta_rule_groups_slots_and_decays_by_head() -> None:
    query, key = torch.randn(2, 2, 40, 2, 16).unbind()
    value, beta = torch.randn(2, 40, 6, 8), torch.rand(2, 40, 6)
    decay = gates("safe", 2, 40, 6)
    state, slots = torch.randn(5, 6, 16, 8), torch.tensor([3, 1], dtype=torch.int32)
    arguments = (state, query, key, value, decay, beta, slots)
    found = functional.delta_rule(*arguments, scale=0.5, normalize=True)
    want = OPS.delta_rule(*arguments, scale=0.5, normalize=True)
    close(found[0], want[0], 1e-5)
    close(found[1], want[1], 1e-5)
    for untouched in (0, 2, 4):
        assert torch.equal(found[1][untouched], state[untouched])


def test_delta_rule_golden() -> None:
    """Three tokens by hand: design/spec 1.7."""
    rows = lambda values: torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 2)  # noqa: E731
    out, state = functional.delta_rule(
        None, rows([[1, 0], [0, 1], [0.6, 0.8]]), rows([[1, 0], [0.6, 0.8], [0, 1]]),
        rows([[1, 2], [3, -1], [0.5, 0.5]]), rows([[-0.1, -0.2], [-0.5, 0], [-1, -0.25]]),
        torch.tensor([0.5, 1, 0.25], dtype=torch.float64).view(1, 3, 1), scale=2**-0.5,
    )  # fmt: skip
    close(out, rows([[0.3535533906, 0.7071067812], [1.5941246087, -0.7715487573],
                     [1.1268475806, -0.3228794947]]), 1e-9)  # fmt: skip
    close(state, torch.tensor([[[[0.7335846454, -0.0779243622], [1.4418154300, -0.5123324288]]]]),
          1e-7)  # fmt: skip


def recurrence(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        u = b[:, t].unsqueeze(-1) * (v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2))
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.cat([torch.stack(out, 1).flatten(), state.flatten()])


@pytest.mark.parametrize("kind", ["floor", "safe", "hard"])
def test_delta_rule_has_the_derivative_of_the_recurrence(kind: str) -> None:
    inputs = [torch.randn(2, 2, 32, 24), *rule_inputs(kind, 70)]
    inputs[2] = torch.nn.functional.normalize(inputs[2], dim=-1)
    wide = [x.double().requires_grad_() for x in inputs]
    want = recurrence(*wide)
    along = torch.randn_like(want)
    expected = torch.autograd.grad(want, wide, along)
    narrow = [x.requires_grad_() for x in inputs]
    for given, bound in ((wide, 1e-11), (narrow, 1e-4)):
        out, state = functional.delta_rule(*given, scale=1.0)
        made = torch.cat([out.flatten(), state.flatten()])
        found = torch.autograd.grad(made, given, along.to(made.dtype))
        for ours, theirs in zip(found, expected, strict=True):
            close(ours, theirs, bound)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_short_convolution(silu: bool, length: int) -> None:
    x, weight, bias = torch.randn(2, length, 6), torch.randn(6, 4), torch.randn(6)
    state, slots = torch.randn(3, 3, 6), torch.tensor([2, 0], dtype=torch.int32)
    for before, where in ((None, None), (state[:2], None), (state, slots)):
        for shift in (None, bias):
            found = functional.short_convolution(before, x, weight, shift, where, silu=silu)
            want = OPS.short_convolution(before, x, weight, shift, where, silu=silu)
            close(found[0], want[0], 1e-6)
            assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("count", [1, 16, 64, 400])
@pytest.mark.parametrize("past", [False, True])
def test_lightning_indexer_with_many_ties(count: int, past: bool) -> None:
    """Small integers: most scores are equal, many zero, many negative."""
    query, key = torch.randn(2, 300, 3, 8).round(), torch.randn(2, 320, 8).round()
    weights = torch.randn(2, 300, 3).round()
    start = torch.tensor([3, 20], dtype=torch.int32) if past else None
    found = functional.lightning_indexer(query, weights, key, start, count=count)
    assert torch.equal(found, OPS.lightning_indexer(query, weights, key, start, count=count))


@pytest.mark.parametrize("chosen", [False, True])
def test_latent_attention(chosen: bool) -> None:
    rows, query = torch.randn(2, 300, 24), torch.randn(2, 280, 4, 24)
    start = torch.tensor([3, 20], dtype=torch.int32)
    indices = None
    if chosen:
        scores = (torch.randn(2, 280, 3, 8), torch.randn(2, 280, 3), torch.randn(2, 300, 8))
        indices = functional.lightning_indexer(*scores, start, count=40)
    found = functional.latent_attention(query, rows, start, indices, latent=16, scale=0.2)
    pages, table = rows.view(60, 10, 24), torch.arange(60, dtype=torch.int32).view(2, 30)
    want = OPS.latent_attention(query, pages, table, start, indices, latent=16, scale=0.2)
    close(found, want, 1e-6)


def test_experts() -> None:
    """Also one that nobody chose, and the number that is no expert."""
    x, weight = torch.randn(50, 16), torch.randn(50, 3)
    index = torch.randint(0, 6, (50, 3))
    index[index == 2] = 5
    gate_up, down = torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    close(functional.experts(x, index, weight, gate_up, down),
          OPS.experts(x, index, weight, gate_up, down), 1e-6)  # fmt: skip


def test_route_golden_and_ties() -> None:
    logits, bias = torch.tensor([[2.0, -1, 0, 1]]), torch.tensor([0.0, 0, 3, 0])
    index, weight = functional.route(logits, bias, 2, groups=2, kept=1, eps=1e-20, scale=2.5)
    assert index.tolist() == [[2, 3]]
    close(weight, torch.tensor([[1.0153863430, 1.4846136570]]), 1e-6)
    index, weight = functional.route(torch.zeros(1, 5), torch.zeros(5), 3)
    assert index.tolist() == [[0, 1, 2]] and weight.tolist() == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_route(score: str) -> None:
    logits = torch.randn(40, 12).round()
    for bias in (None, torch.randn(12).round()):
        for rest in ((3,), (4, 3, 2, score, 1e-20, 2.5), (5, 1, 1, score)):
            found = functional.route(logits, bias, *rest)
            want = OPS.route(logits, bias, *rest)
            assert torch.equal(found[0], want[0])
            close(found[1], want[1], 1e-6)


def test_residual_mix_golden() -> None:
    """design/spec 3."""
    z = [torch.tensor(values, dtype=torch.float64) for values in ([3, 4], [0, 2], [1, 0])]
    found = functional.residual_mix(z, torch.ones(2, dtype=torch.float64), 0.0)
    close(found, torch.tensor([1.6704440823520725, 2.404532898822487], dtype=torch.float64), 1e-14)
    many = [torch.randn(2, 5, 8) for _ in range(4)]
    query = torch.randn(8)
    close(functional.residual_mix(many, query, 1e-5), OPS.residual_mix(many, query, 1e-5), 1e-6)


@pytest.mark.parametrize(
    "name",
    ["delta_rule", "short_convolution", "lightning_indexer", "experts", "residual_mix", "route"],
)
def test_arguments_are_the_operators(name: str) -> None:
    """So that the operator can take the function's place as it is: what it has more, it has as
    defaults."""
    schema = getattr(OPS, name).default._schema
    ours = inspect.signature(getattr(functional, name)).parameters
    assert [argument.name for argument in schema.arguments[: len(ours)]] == list(ours)
    for argument in schema.arguments:
        mine: Any = ours.get(argument.name)
        if mine is None:
            assert argument.has_default_value(), argument.name
            continue
        assert argument.kwarg_only == (mine.kind is inspect.Parameter.KEYWORD_ONLY)
        assert argument.has_default_value() == (mine.default is not inspect.Parameter.empty)


def test_the_bound_is_looked_at() -> None:
    assert chunked_delta_rule.decays_are_bounded(torch.full([2], -5.0))
    assert not chunked_delta_rule.decays_are_bounded(torch.tensor([-5.1, 0.0]))
