"""merged_linear: linears that read one value become one product, and slices of it.

Queries, keys and values, or gate and up: x is packed and read once, and fewer steps are launched.
The slices are strided views; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log

aten = torch.ops.aten


@dataclass(frozen=True)
class MergedLinear:
    """Only with constant weights that nothing else reads; off with `merged_linear{enabled=no}`."""

    enabled: bool = True
    name: ClassVar[str] = "merged_linear"

    def run(self, graph: Graph, log: Log) -> Graph:
        groups = _groups(graph, log) if self.enabled else {}
        if not groups:
            return graph
        builder = Builder(graph)
        for node in graph.nodes:
            builder.location, builder.module = node.location, node.module
            if node in groups:
                _merge(groups[node], builder, log)
            elif not any(node in group for group in groups.values()):
                builder.copy(node)
        return builder.finish()


def _groups(graph: Graph, log: Log) -> dict[Node, list[Node]]:
    """The linears to merge, by the first of them."""
    facts = Facts(graph)
    found: dict[tuple[Value, str], list[Node]] = {}
    for node in graph.nodes:
        if node.target == "aten.linear.default" and len(node.args[1].type.shape) == 2:
            found.setdefault((node.args[0], node.args[1].type.dtype), []).append(node)
    groups: dict[Node, list[Node]] = {}
    for nodes in found.values():
        if len(nodes) < 2:
            continue
        kept = []
        for node in nodes:
            reason = _reason(node, facts)
            if reason:
                log.refused("merged_linear", node, reason)
            else:
                kept.append(node)
        if len(kept) > 1:
            groups[kept[0]] = kept
    return groups


def _reason(node: Node, facts: Facts) -> str:
    weight, bias = node.args[1], node.argument("bias")
    if facts.weight(weight) is None or (bias is not None and facts.weight(bias) is None):
        return "its weight is not constant"
    if len(facts.readers(weight)) > 1:
        return "its weight is also read elsewhere"
    if node.outputs[0] in facts.kept:
        return "its result is an output of the model"
    return ""


def _merge(nodes: list[Node], builder: Builder, log: Log) -> None:
    tables = builder.graph.weights
    weights = [tables[n.args[1]] for n in nodes]
    name = nodes[0].args[1].name
    weight = builder.weight(f"{name}_merged", torch.cat(weights))
    bias = None
    if any(n.argument("bias") is not None for n in nodes):
        parts = [
            w.new_zeros(w.shape[0]) if n.argument("bias") is None else tables[n.argument("bias")]
            for n, w in zip(nodes, weights, strict=True)
        ]
        bias = builder.weight(f"{name}_merged_bias", torch.cat(parts))
    whole = builder.call1(aten.linear.default, nodes[0].args[0], weight, bias)
    start = 0
    for node, part in zip(nodes, weights, strict=True):
        stop = start + part.shape[0]
        piece = builder.call1(aten.slice.Tensor, whole, -1, start, stop)
        builder.replace(node.outputs[0], piece)
        log.matched("merged_linear", node, [piece])
        start = stop
