"""dead_code: drops nodes and weights that nobody reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphc.ir.graph import Graph, prune
from graphc.rewrite import Log


@dataclass(frozen=True)
class DeadCode:
    """Operators are functional, so a call without readers has no effect; assertions stay."""

    name: ClassVar[str] = "dead_code"

    def run(self, graph: Graph, log: Log) -> Graph:
        after = prune(graph)
        if len(after.nodes) == len(graph.nodes) and len(after.weights) == len(graph.weights):
            return graph
        live = set(after.nodes)
        for node in graph.nodes:
            if node not in live:
                log.matched("dead_code", node)
        return after
