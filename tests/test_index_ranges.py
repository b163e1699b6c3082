"""Inputs that are used as indices: what is found in a graph, and what the boundary rejects."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphc.errors import InputRejectedError
from graphc.frontends.capture import capture
from graphc.lowering.classify import native_operators
from graphc.lowering.index_ranges import index_ranges
from graphc.runtime.ranges import check_ranges
from graphc.runtime.tensors import Input


class Lookup(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(10, 4))
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self.table, ids)


def found(function: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> set[tuple[int, int, int]]:
    graph = capture(Lookup(function), (ids,), keep=native_operators()).graph
    return {(k, low, end) for k, low, end, _ in index_ranges([graph])}


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda table, ids: F.embedding(ids, table), {(0, 0, 10)}),
        (
            lambda table, ids: F.embedding(ids.t().reshape(-1), table),
            {(0, 0, 10)},
        ),
        (
            lambda table, ids: F.embedding(ids.to(torch.int32), table),
            {(0, 0, 10)},
        ),
        (lambda table, ids: table[ids], {(0, -10, 10)}),
        (lambda table, ids: table[:, ids], {(0, -4, 4)}),
        (lambda table, ids: torch.gather(table, 1, ids), {(0, 0, 4)}),
        (lambda table, ids: torch.index_select(table, 0, ids.flatten()), {(0, 0, 10)}),
        (lambda table, ids: torch.take(table, ids), {(0, -40, 40)}),
        (lambda table, ids: torch.index_fill(table, 1, ids.flatten(), 0.0), {(0, -4, 4)}),
        (lambda table, ids: torch.scatter(table, 1, ids, 2.0), {(0, 0, 4)}),
        # values that no lookup sees, or that are computed first
        (lambda table, ids: table[ids[:, :2]], set()),
        (lambda table, ids: table[ids.clamp(0, 9)], set()),
        (lambda table, ids: table + ids.sum(), set()),
    ],
)
def test_found(
    function: Callable[[Tensor, Tensor], Tensor], expected: set[tuple[int, int, int]]
) -> None:
    assert found(function, IDS) == expected


def test_only_what_every_side_of_a_model_checks() -> None:
    both = [
        capture(Lookup(f), (IDS,), keep=native_operators()).graph
        for f in (lambda table, ids: table[ids], lambda table, ids: table + ids.sum())
    ]
    assert index_ranges(both[:1]) and not index_ranges(both)


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize(("low", "wrong"), [(0, -1), (0, 10), (-10, -11), (-10, 10)])
def test_rejected(low: int, wrong: int, as_torch: bool) -> None:
    tensor = SimpleNamespace(name="ids", dtype="int32", text=["2", "3"], shape=[0, 0])
    plan: Any = SimpleNamespace(ranges=[(0, low, 10, "an index of embedding")], inputs=[tensor])
    slot = Input(tensor, mutated=False)  # type: ignore[arg-type]
    values = np.array([[low, 9, 0], [1, 2, 3]], np.int32)

    def check(values: Any) -> None:
        check_ranges(plan, [slot.bind(torch.from_numpy(values) if as_torch else values)])

    check(values)
    check(values[:0])  # nothing to look up
    check(np.asfortranarray(values))
    values[1, 2] = wrong
    with pytest.raises(InputRejectedError, match=rf"found {wrong} at \[1, 2\]"):
        check(values)
