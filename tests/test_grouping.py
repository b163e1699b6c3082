"""Which nodes share a kernel: invariants on random graphs, and graphs that are easy to break."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphc.api import pipeline
from graphc.frontends.capture import capture
from graphc.ir.graph import Graph
from graphc.lowering.classify import native_operators
from graphc.lowering.expand import expand
from graphc.lowering.groups import Grouping, group_nodes, root
from graphc.lowering.lower import lower
from graphc.lowering.steps import FallbackStep, KernelStep, Lowered
from graphc.rewrite import run_passes
from tests.built import Built, Call, agree, results

F = torch.nn.functional


class RandomGraph:
    """A function of [4, 6, 8] tensors made of random elementwise operators, reductions, views,
    products, concatenations and gathers, with several readers a value. Magnitudes stay near 1."""

    def __init__(self, seed: int, count: int = 30) -> None:
        self.seed, self.count = seed, count

    def __call__(self, a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        r = random.Random(self.seed)
        values = [a, b, torch.tanh(a)]
        results: list[torch.Tensor] = []
        for _ in range(self.count):
            x = r.choice(values[-8:])
            y = r.choice(values)
            values.append(self._next(r, x, y, w))
            if r.random() < 0.15:
                results.append(r.choice(values[3:]) * 1.5 if r.random() < 0.5 else values[-1])
        return [*results, values[-1], values[len(values) // 2].sum(), r.choice(values[3:]).amax(1)]

    @staticmethod
    def _next(r: random.Random, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kind = r.randrange(22)
        if kind < 6:
            return (torch.sigmoid(x), torch.sin(x + y), x * 0.5 + y * 0.5, torch.maximum(x, y),
                    torch.where(x > y, x, -y), (x - y).abs() * 0.5)[kind]  # fmt: skip
        if kind < 11:
            axis = r.randrange(3)
            mean = x.mean(axis, keepdim=True)
            return (x - mean, torch.softmax(x, axis), y + x.amax(axis, keepdim=True) * 0.5,
                    F.layer_norm(x, (8,)), y * torch.sigmoid(x.sum((1, 2), keepdim=True)))[kind - 6]  # fmt: skip # noqa: E501
        if kind == 11:  # views there and back, with work on the other side
            return torch.cos(x.transpose(0, 2)).transpose(0, 2) + y
        if kind == 12:
            return (x.reshape(24, 8) * 0.9).view(4, 6, 8)
        if kind == 13:
            return x[:, :1].expand(4, 6, 8) * 0.5 + y
        if kind == 14:
            return torch.tanh(x @ w)
        if kind == 15:
            return torch.matmul(torch.softmax(x @ y.transpose(1, 2), -1), y)
        if kind == 16:
            return torch.cat([x[:2], torch.relu(y[2:])], 0)
        if kind == 17:
            return F.pad(x[..., 1:-1] * 0.5, (1, 1), value=0.25)
        if kind == 18:
            left, right = x.split(4, 2)
            return torch.cat([right + 1, left * y[..., :4]], 2)
        if kind == 19:
            return x[:, torch.tensor([5, 0, 3, 3, 1, 2])]
        if kind == 20:
            return F.gelu(F.linear(x, w)) + x
        return torch.tanh(x.cumsum(1)) * y.flip(2)


def arguments(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(4, 6, 8, generator=generator) for _ in range(2))
    return a, b, torch.randn(8, 8, generator=generator) * 0.3


def lowered(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Graph, Grouping, Lowered]:
    captured = capture(Call(function), args, keep=native_operators())
    graph, _ = run_passes(captured.graph, pipeline(), phase="forward")
    expanded = expand(graph)
    return expanded, group_nodes(expanded), lower(graph, "portable")


def check_invariants(graph: Graph, grouping: Grouping, made: Lowered) -> None:
    kinds = grouping.kinds
    computed = [n for n in graph.nodes if kinds[n][0] != "view"]
    # each node is in one group, each group is ordered once
    members = [m for g in grouping.order for m in g.members]
    assert sorted(m.name for m in members) == sorted(n.name for n in computed)
    assert len(set(grouping.order)) == len(grouping.order)
    # the groups of what a group reads are done before it
    done: set[int] = set()
    for group in grouping.order:
        for member in group.members:
            for value in member.inputs():
                source = root(value, kinds).producer
                if source is not None:
                    other = grouping.group_of[source]
                    assert other is group or id(other) in done, f"{member} before {source}"
        done.add(id(group))
    # members of a group are in the order of the graph
    position = {n: k for k, n in enumerate(graph.nodes)}
    for group in grouping.order:
        places = [position[m] for m in group.members]
        assert places == sorted(places)
    # every buffer that a Step reads was written by an earlier one, or came from outside
    given = {k for k, b in enumerate(made.buffers) if b.kind in ("input", "state", "weight")}
    for step in made.steps:
        if isinstance(step, FallbackStep):
            assert set(step.reads) <= given
            given |= {v.buffer for v in step.outputs if v is not None}
        elif isinstance(step, KernelStep):
            missing = set(step.reads) - given - set(step.writes)
            assert not missing, f"{step.label} reads {missing} before it is written"
            given |= set(step.writes)
    for what, number in made.results:
        assert what != "buffer" or number in given


@pytest.mark.parametrize("seed", range(24))
def test_invariants_of_random_graphs(seed: int) -> None:
    check_invariants(*lowered(RandomGraph(seed), *arguments(seed)))


@pytest.mark.parametrize("seed", range(100, 103))
def test_random_graphs_equal_eager(seed: int) -> None:
    args = arguments(seed)
    ours, fallbacks = results(RandomGraph(seed, 24), *args)
    agree(ours, RandomGraph(seed, 24)(*args), 2e-4, 2e-5)
    assert not fallbacks


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [*range(24, 40), *range(200, 212)])
def test_more_random_graphs_equal_eager(seed: int) -> None:
    args = arguments(seed)
    check_invariants(*lowered(RandomGraph(seed, 40), *args))
    ours, _ = results(RandomGraph(seed, 40), *args)
    agree(ours, RandomGraph(seed, 40)(*args), 5e-4, 5e-5)


def same(function: Callable[..., Any], *args: torch.Tensor, tolerance: float = 2e-5,
         native: bool = True) -> None:  # fmt: skip
    ours, fallbacks = results(function, *args)
    agree(ours, function(*args), tolerance, tolerance)
    if native:
        assert not fallbacks
    check_invariants(*lowered(function, *args))


def groups_of(function: Callable[..., Any], *args: torch.Tensor) -> list[list[str]]:
    _, grouping, _ = lowered(function, *args)
    return [[m.target.split(".")[1] for m in g.members] for g in grouping.order]


def test_a_chain_is_one_kernel() -> None:
    x = torch.randn(5, 7)
    assert len(groups_of(lambda x: torch.sigmoid(x * 2 + 1).relu() - x, x)) == 1


def test_normalisation_is_one_kernel() -> None:
    x, w = torch.randn(5, 64), torch.randn(64)
    function = lambda x, w: F.gelu(F.layer_norm(x + 1, (64,), w, w) * 0.5)  # noqa: E731
    assert len(groups_of(function, x, w)) == 1
    assert len(groups_of(lambda x, w: torch.softmax(x * 0.1, -1) * w, x, w)) == 1


def test_a_product_takes_its_epilogue() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    assert len(groups_of(lambda x, w: F.gelu(F.linear(x, w)) * 0.5 + x, x, w)) == 1


def test_diamonds() -> None:
    """Two paths from one value to another, one of them through another kernel."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        a = torch.sin(x)
        through_product = (a @ w).tanh()
        meet = a * 2 + through_product  # a must be in memory for the product
        s = a.sum(-1, keepdim=True)
        again = meet + s * torch.cos(s) + (meet @ w) * a
        t = torch.exp(-a.abs())
        return [again, t + t.cumsum(0) + a, (t * 2).amax(0) + t, meet]

    same(function, torch.randn(6, 8), torch.randn(8, 8) * 0.3)


def test_groups_that_meet_are_merged() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a, b = torch.sin(x), torch.cos(y)
        c = torch.exp(-(x.square()))
        d = a + b
        return [d * c, a - b, (d * c).sum(-1), torch.softmax(d, -1) + torch.softmax(c, -1)]

    x, y = torch.randn(5, 33), torch.randn(5, 33)
    same(function, x, y)
    assert len(groups_of(lambda x, y: torch.sin(x) * torch.cos(y), x, y)) == 1


def test_reductions_feed_broadcasts() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        rows = x - x.mean(-1, keepdim=True)
        columns = rows / (rows.square().mean(-2, keepdim=True) + 0.1).sqrt()
        total = columns - columns.mean()
        both = total * x.amax((0, 2), keepdim=True) + x.sum((1, 2))[:, None, None] * 0.01
        return [rows, columns, total, both, both.softmax(1).sum(0), x.sum()]

    same(function, torch.randn(3, 9, 17), tolerance=1e-4)


def test_transposed_operands() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a = torch.tanh(x)
        made = [a + a.t(), a.t() * y, (a + y.t()).t() + a, a.sum(0) + a.t().sum(0), a @ a.t()]
        made += [a.t().softmax(-1) + y, torch.exp(a.t()).t() - y, (a * y).t().amax(1, keepdim=True)]
        square = a.unsqueeze(0) * y.t().unsqueeze(2)
        return [*made, square.sum(2), square.permute(2, 0, 1).contiguous()]

    same(function, torch.randn(7, 7), torch.randn(7, 7))


def test_a_chain_longer_than_a_kernel() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        kept = [x]
        for k in range(150):
            x = torch.sin(x) + kept[k // 2] * 0.5 if k % 3 else x * 0.9 + 0.1
            kept.append(x)
        return [x, kept[40], kept[97].sum(0)]

    x = torch.randn(6, 9)
    same(function, x, tolerance=1e-4)
    assert len(groups_of(function, x)) > 1


def test_many_operands() -> None:
    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total * 0.5 + torch.tanh(x)
        return total

    same(function, *[torch.randn(4, 5) for _ in range(50)])


def test_copies_and_gathers_between() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        a = torch.sin(x)
        parts = a.split([2, 3, 1], 1)
        joined = torch.cat([parts[2], parts[0] * 2, parts[1].exp()], 1)
        padded = F.pad(joined, (1, 2, 0, 1), value=-1.0)
        picked = padded[:, i] + 1
        stacked = torch.stack([a, joined, a - joined], 1)
        u, v = stacked.unbind(1)[:2]
        return [padded * 2, picked, stacked.sum(1), u + v, torch.cat([a, a]).tanh(), parts[1]]

    same(function, torch.randn(4, 6), torch.tensor([3, 0, 8, 1]))


def test_a_value_with_many_readers_is_stored_once() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h = F.gelu(x)
        return [h @ w, w @ h.t(), h.cumsum(0), h.flip(0) + 1, h, h[1:] * 2, h.view(-1)[3:]]

    same(function, torch.randn(6, 6), torch.randn(6, 6))


def test_sizes_that_depend_on_data() -> None:
    """Native code, then a fallback whose result size is read from data, then native code."""

    class Select(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            scores = torch.sin(x).sum(-1)
            chosen = torch.nonzero(scores > 0).squeeze(-1)
            picked = torch.tanh(x[chosen]) * 2 + 1
            masked = torch.masked_select(scores, scores > 0.1)
            return [picked, picked.sum(0), masked.exp(), picked @ picked.t(), scores + 1]

    module = Select()
    built = Built(module, (torch.randn(9, 5),))
    try:
        assert built.fallbacks
        for seed in range(6):
            x = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
            x = x.abs() if seed == 4 else -x.abs() * 0.1 if seed == 5 else x
            agree(built(x), module(x), 2e-5, 2e-5, f"seed {seed}")
    finally:
        built.close()


def test_nothing_dead_is_computed() -> None:
    x = torch.randn(4, 4)
    names = [n for g in groups_of(lambda x: (torch.sin(x) * 0 + x, torch.exp(x))[1], x) for n in g]
    assert names == ["exp"]
