"""Bounds of integers: what dtypes, casts, views, padding and zero points show."""

from __future__ import annotations

import pytest
import torch

from graphc.ir.integers import integer_range
from graphc.ir.parse import parse_graph

TEXT = """\
%0: i8[2,4] = input("x")
%1: i32[2,4] = aten._to_copy.default(%0, dtype=torch.int32)
%2: i32[4,2] = aten.view.default(%1, [4, 2])
%3: i32[4,4] = aten.constant_pad_nd.default(%2, [1, 1], {fill})
%4: i32[4,4] = aten.sub.Tensor(%3, 100)
%5: i32[4,4] = aten.add.Tensor(%4, %3)
%6: i32[4,4] = aten.mul.Tensor(%5, 2)
%7: i32[4,4] = aten.sub.Tensor(%5, %3, alpha=2)
return (%5, %6, %7)
"""


@pytest.mark.parametrize(("fill", "low", "high"), [(0, -128, 127), (200, -128, 200)])
def test_bounds_follow_the_arithmetic(fill: int, low: int, high: int) -> None:
    graph = parse_graph(TEXT.replace("{fill}", str(fill)))
    ranges = [integer_range(node.outputs[0]) for node in graph.nodes]
    assert ranges[:5] == [
        (-128, 127), (-128, 127), (low, high), (low - 100, high - 100),
        (2 * low - 100, 2 * high - 100),
    ]  # fmt: skip
    assert ranges[5:] == [None, None]  # a product; a factor of two
    for value in (-(1 << 40), 3):
        assert integer_range(value) == (value, value)


def test_constants_and_what_nothing_bounds() -> None:
    graph = parse_graph(
        '%0: i32[3] = input("x")\n%1: f32[3] = input("y")\n'
        "%2: i64[3] = aten._to_copy.default(%1, dtype=torch.int64)\nreturn (%2,)\n"
    )
    whole, real = graph.inputs
    assert integer_range(whole) is None and integer_range(real) is None
    assert integer_range(graph.results[0]) is None
    assert integer_range(whole, lambda _: torch.tensor([-7, 5])) == (-7, 5)
    assert integer_range(whole, lambda _: torch.tensor([])) == (0, 0)
