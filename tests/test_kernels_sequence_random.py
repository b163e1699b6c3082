"""Generated kernels of random expressions against the interpreter in float64: what is shared, taken
apart, made in place or left out differs from one to the next. They obey no law but that of chunks,
which the kernels and the reference cut in the same way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from graphc.dsl import Affine, K, SequenceOperator, V, log_decay, normalized, registry, rows, scores
from graphc.dsl.operator import column, number
from graphc.dsl.tiles import ONE, Tile, sigmoid, solve
from tests.eager import ISAS
from tests.kernel_harness import lookup, run_rule
from tests.test_kernels_delta_rule import error


class Choices:
    """Expressions of one chunk, each made of those before it."""

    def __init__(self, seed: int, c: Any, state: Tile) -> None:
        self.random = random.Random(seed)
        self.c, self.state = c, state
        self.keys: list[Tile] = [c.q, c.k]
        self.values: list[Tile] = [c.v, c.w]

    def pick(self, *makers: Callable[[], Tile]) -> Tile:
        return self.random.choice(makers)()

    def key(self) -> Tile:
        """Rows over K."""
        c, x = self.c, self.random.choice(self.keys)
        found = self.pick(
            lambda: x, lambda: x * c.beta, lambda: c.scale * x, lambda: 0.5 * x,
            lambda: x + self.random.choice(self.keys),
            lambda: normalized(self.random.choice([c.q, c.k])),
        )  # fmt: skip
        self.keys.append(found)
        return found

    def matrix(self, strict: bool) -> Tile:
        """[T, T]."""
        c = self.c
        found = scores(self.key(), self.key(), c.decay, strict=strict)
        return self.pick(
            lambda: 0.2 * found, lambda: found * c.beta * 0.3,
            lambda: found * scores(self.key(), self.key(), c.decay) * 0.3,
        )  # fmt: skip

    def value(self, depth: int) -> Tile:
        """Rows over V."""
        if depth == 0 or self.random.random() < 0.2:
            return self.random.choice(self.values)

        def less() -> Tile:
            return self.value(depth - 1)

        found = self.pick(
            lambda: (self.key() * self.c.decay.prefix) @ self.state,
            lambda: (self.key() * self.c.decay.prefix) @ self.state,
            lambda: self.matrix(False) @ less(), lambda: solve(self.matrix(True), less()),
            lambda: less() + less(), lambda: less() - less(), lambda: less() * self.c.beta,
            lambda: sigmoid(less()), lambda: less() * 0.5 + self.matrix(False) @ less(),
        )  # fmt: skip
        self.values.append(found)
        return found


def operator(seed: int) -> SequenceOperator:
    class Random(SequenceOperator):
        name = f"test_random_{seed}"
        q, k, v, w = rows(K), rows(K), rows(V), rows(V)
        decay, beta, scale = log_decay(K if seed % 2 else ONE), column(), number()

        def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
            some = Choices(seed, c, state)
            output = some.value(4) + 0.1 * some.value(4) - 0.3 * some.value(3)
            after = c.decay.total * state
            for _ in range(some.random.randrange(1, 3)):
                after = after + (some.key() * c.decay.suffix).T @ (0.2 * some.value(3))
            return output, after

        def summary(self, c: Any) -> Affine:
            return Affine(c.decay.total, (c.k * c.decay.suffix).T @ c.v)

        def compose(self, first: Affine, second: Affine) -> Affine:
            return Affine(second.factor * first.factor, first.offset)

    return Random()


@pytest.mark.parametrize("seed", range(5))
def test_random_expressions(seed: int) -> None:
    with mock.patch.object(registry, "check"):
        registry.define(operator(seed))
    torch.manual_seed(seed)
    name = f"graphc.test_random_{seed}.default"
    for tokens in (1, 5, 37):
        q, k = (0.3 * torch.randn(1, tokens, 2, 32) for _ in range(2))
        v, w = (torch.randn(1, tokens, 2, 48) for _ in range(2))
        g = -torch.rand(1, tokens, 2, 32) if seed % 2 else -torch.rand(1, tokens, 2)
        args = [torch.randn(1, 2, 32, 48), q, k, v, w, g, torch.rand(1, tokens, 2)]
        ours = run_rule(name, args, {"scale": 0.7}, isa=ISAS[-1])
        truth = lookup(name)(*(x.double() for x in args), scale=0.7)
        for a, b in zip(ours, truth, strict=True):
            assert error(a, b) <= 5e-6
