"""Which pass breaks the tolerance first, and which node in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphc.ir.graph import Graph, Node, Value
from graphc.ir.run import run
from graphc.report import BisectRecord
from graphc.rewrite.numerics import Difference, Samples, compare, difference, runnable
from graphc.rewrite.rules import Log, Pass


def bisect(
    graph: Graph,
    passes: Sequence[Pass],
    *,
    rtol: float,
    atol: float,
    samples: Samples | int = 1,
) -> BisectRecord | None:
    """The first pass after which an output differs from the captured graph's by more than the
    tolerance, and the first node that differs after it; None if there is none.

    A node is compared with the node of the same name before the pass, or with the value that
    a rule says it replaced.
    """
    inputs, reference = runnable(graph, samples)
    for one in passes:
        log = Log()
        after = one.run(graph, log)
        if after is not graph:
            for sample, expected in zip(inputs, reference, strict=True):
                found = compare(expected.tensors(), run(after, sample).tensors())
                if not found.within(rtol, atol):
                    node = _first_node(graph, after, log, sample, (rtol, atol))
                    return _report(one.name, node, found)
        graph = after
    return None


def _report(name: str, node: Node | None, found: Difference) -> BisectRecord:
    return BisectRecord(
        pass_name=name,
        node="" if node is None else repr(node),
        where="" if node is None else node.location,
        output=found.output,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        expected=found.expected,
        found=found.found,
    )


def _first_node(
    before: Graph, after: Graph, log: Log, sample: Sequence[torch.Tensor],
    bounds: tuple[float, float],
) -> Node | None:  # fmt: skip
    old, new = _trace(before, sample), _trace(after, sample)
    by_name = {value.name: value for value in old}
    partner = {made: value for value, made in log.replaced if value in old}
    for one, other in _ends(before, after):
        partner.setdefault(other, one)
    unproven: set[Node] = set()
    for node in after.nodes:
        pairs = [(v, partner.get(v, by_name.get(v.name))) for v in node.outputs]
        twins = [(old[twin], new[v]) for v, twin in pairs if twin is not None and _tensor(new[v])]
        if not twins:
            unproven.add(node)
        elif not all(difference(a, b).within(*bounds) for a, b in twins):
            return _earliest(after, node, unproven)
    return None


def _ends(before: Graph, after: Graph) -> Iterator[tuple[Value, Value]]:
    """The computed values that leave both graphs in the same place."""
    pairs = [
        *zip(before.results, after.results, strict=True),
        *((v, after.state_updates[s]) for s, v in before.state_updates.items()),
        *((v, after.input_updates[i]) for i, v in before.input_updates.items()),
    ]
    for one, other in pairs:
        if isinstance(one, Value) and isinstance(other, Value) and one.producer is not None:
            yield one, other


def _tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _earliest(graph: Graph, node: Node, unproven: set[Node]) -> Node:
    """The first of the nodes behind `node` that could be compared with nothing; else `node`."""
    behind = {node}
    pending = [node]
    while pending:
        for value in pending.pop().inputs():
            source = value.producer
            if source in unproven and source not in behind:
                behind.add(source)
                pending.append(source)
    return next(n for n in graph.nodes if n in behind)


def _trace(graph: Graph, sample: Sequence[torch.Tensor]) -> dict[Value, Any]:
    known: dict[Value, Any] = {}

    def watch(node: Node, results: tuple[Any, ...]) -> None:
        known.update(zip(node.outputs, results, strict=False))

    run(graph, sample, watch=watch)
    return known
