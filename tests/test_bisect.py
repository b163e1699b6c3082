"""bisect names the pass and the node that break the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.parse import parse_graph
from graphc.rewrite import Facts, Log, Pass, Rule, apply_rules, bisect
from passes import PIPELINE

aten = torch.ops.aten
TEXT = """\
%0: f32[4,8] = input("x")
%1: f32[4,8] = aten.tanh.default(%0)
%2: f32[4,8] = aten.mul.Tensor(%1, 1.0)
%3: f32[4,8] = aten.sigmoid.default(%2)
%4: f32[4,8] = aten.add.Tensor(%3, %1)
%5: f32[4,8] = aten.exp.default(%4)
return (%1, %5)
"""


class _Approximate(Rule[float]):
    """sigmoid(x) as 0.5 + factor * x: right near zero, wrong elsewhere."""

    name = "approximate"
    roots = frozenset(("aten.sigmoid",))

    def pattern(self, node: Node, facts: Facts) -> Any:
        yield 0.25

    def rewrite(self, builder: Builder, found: float, node: Node) -> Sequence[Value]:
        half = builder.call1(aten.mul.Scalar, node.args[0], found, name="quarter")
        return builder.call(aten.add.Scalar, half, 0.5, name="half_more")


@dataclass(frozen=True)
class Broken:
    name: ClassVar[str] = "broken"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Approximate()], log)


@dataclass(frozen=True)
class Silent:
    """Swaps an operator without telling the log."""

    name: ClassVar[str] = "silent"

    def run(self, graph: Graph, log: Log) -> Graph:
        builder = Builder(graph)
        for node in graph.nodes:
            if node.target == "aten.exp.default":
                made = builder.call1(aten.exp2.default, node.args[0], name="swapped")
                builder.replace(node.outputs[0], made)
            else:
                builder.copy(node)
        return builder.finish()


def passes(*extra: Pass) -> list[Pass]:
    first = [p for p in PIPELINE if p.name == "arithmetic"]
    return [*first, *extra, *(p for p in PIPELINE if p.name == "dead_code")]


def test_sound_passes() -> None:
    graph = parse_graph(TEXT)
    assert bisect(graph, PIPELINE, rtol=1e-5, atol=1e-6, samples=2) is None


def test_the_rule_that_is_wrong() -> None:
    found = bisect(parse_graph(TEXT), passes(Broken()), rtol=1e-4, atol=1e-5)
    assert found is not None
    assert found.pass_name == "broken" and found.output == "result 1"
    assert found.node in ("quarter = aten.mul.Scalar", "half_more = aten.add.Scalar")
    assert found.max_abs > 0.01 and found.expected != found.found


def test_the_node_that_nobody_reported() -> None:
    found = bisect(parse_graph(TEXT), passes(Silent()), rtol=1e-4, atol=1e-5)
    assert found is not None
    assert (found.pass_name, found.node) == ("silent", "swapped = aten.exp2.default")


def test_the_tolerance_decides() -> None:
    graph = parse_graph(TEXT)
    assert bisect(graph, passes(Broken()), rtol=1.0, atol=10.0) is None
    small = [[torch.zeros(4, 8)]]
    assert bisect(graph, passes(Broken()), rtol=1e-4, atol=1e-5, samples=small) is None
