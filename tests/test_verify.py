"""The verifier names the level, the node and the rule that a graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphc.errors import InternalError
from graphc.ir.graph import Graph, Value, make_node
from graphc.ir.parse import parse_graph
from graphc.ir.types import TensorType, symbol
from graphc.ir.verify import IllegalGraph, verify

aten = torch.ops.aten
GOOD = """\
symbol T in 2..64
%0: f32[T,4] = input("x")
%1: f32[3,4] = weight("w")
%2: f32[4] = state("s")
%3: f32[T,3] = aten.linear.default(%0, %1)
%4: f32[T,3] = aten.relu.default(%3)
update state %2 = %2
return (%4,)
"""


def swapped(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes[::-1])


def twice(graph: Graph) -> Graph:
    last = graph.nodes[-1]
    again = make_node(last.op, last.args, {}, last.name, [last.outputs[0].type])
    return replace(graph, nodes=(*graph.nodes, again))


def mutating(graph: Graph) -> Graph:
    value = graph.nodes[-1].outputs[0]
    node = make_node(aten.relu_.default, (value,), {}, "in_place", [value.type])
    return replace(graph, nodes=(*graph.nodes, node))


def random(graph: Graph) -> Graph:
    value = graph.nodes[-1].outputs[0]
    node = make_node(aten.bernoulli.default, (value,), {}, "drawn", [value.type])
    return replace(graph, nodes=(*graph.nodes, node))


def wrong_type(graph: Graph) -> Graph:
    value = graph.nodes[0].outputs[0]
    node = make_node(aten.abs.default, (value,), {}, "wrong", [TensorType("float32", (1, 3))])
    return replace(graph, nodes=(*graph.nodes, node))


def unknown_symbol(graph: Graph) -> Graph:
    node = make_node(
        aten.arange.default, (symbol("Q"),), {}, "far", [TensorType("int64", (symbol("Q"),))]
    )
    return replace(graph, nodes=(*graph.nodes, node))


def wrong_content(graph: Graph) -> Graph:
    (weight,) = graph.weights
    return replace(graph, weights={weight: torch.zeros(4, 3)})


def wrong_kind(graph: Graph) -> Graph:
    return replace(graph, inputs=(*graph.inputs, Value("weight", "v", TensorType("float32", (1,)))))


def wrong_update(graph: Graph) -> Graph:
    (state,) = graph.states
    return replace(graph, state_updates={state: graph.nodes[-1].outputs[0]})


def foreign_result(graph: Graph) -> Graph:
    return replace(graph, results=(Value("node", "gone", TensorType("float32", (1,))),))


@pytest.mark.parametrize(
    ("breaking", "rule", "node"),
    [
        (swapped, "defined before use", "v4"),
        (twice, "unique names", "v4"),
        (mutating, "functional", "in_place"),
        (random, "deterministic", "drawn"),
        (wrong_type, "types", "wrong"),
        (unknown_symbol, "known symbols", "far"),
        (wrong_content, "content type", ""),
        (wrong_kind, "leaf kind", ""),
        (wrong_update, "updates", ""),
        (foreign_result, "defined before use", ""),
    ],
)
def test_illegal(breaking: Callable[[Graph], Graph], rule: str, node: str) -> None:
    with pytest.raises(IllegalGraph) as caught:
        verify(breaking(parse_graph(GOOD)), deep=True)
    error = caught.value
    assert (error.level, error.rule, error.node) == ("traced", rule, node)
    assert isinstance(error, InternalError) and "bug in graphc" in str(error)


def test_legal() -> None:
    verify(parse_graph(GOOD), deep=True)
    verify(parse_graph(GOOD), "fused")


def test_types_of_trusted_nodes_are_believed() -> None:
    graph = wrong_type(parse_graph(GOOD))
    verify(graph)
    verify(graph, deep=True, trusted=graph.nodes)


def test_fused_graphs_hold_nothing_idle() -> None:
    idle = GOOD.replace("return (%4,)", "return (%3,)")
    verify(parse_graph(idle))
    with pytest.raises(IllegalGraph) as caught:
        verify(parse_graph(idle), "fused")
    assert (caught.value.rule, caught.value.node) == ("live", "v4")
    with pytest.raises(IllegalGraph, match="the operator does nothing"):
        verify(parse_graph(GOOD.replace("aten.relu", "aten.detach")), "fused")
    with pytest.raises(InternalError, match="expected a level"):
        verify(parse_graph(GOOD), "finished")
