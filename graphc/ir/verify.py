"""Is a Graph legal? One function per level, each rule with a name that the error carries.

"traced" is what a frontend makes and what holds between passes; "fused" is what lowering takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
import torch

from graphc.errors import InternalError
from graphc.ir.graph import Graph, Node, Value, has_effect
from graphc.ir.infer import TypeContext
from graphc.ir.parse import agree, looks
from graphc.ir.types import TensorType

LEVELS = ("traced", "fused")

#: what passes must have removed before lowering: calls without a meaning of their own
_TRANSPARENT = frozenset(
    ("aten.dropout.default", "aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
)


class IllegalGraph(InternalError):
    """A graph that breaks a rule of its level.

    level: "traced" or "fused". node: the node's name (empty if the graph as a whole). rule: the
    name of the broken rule.
    """

    def __init__(self, level: str, rule: str, node: Node | None, what: str) -> None:
        self.level = level
        self.rule = rule
        self.node = "" if node is None else node.name
        where = "" if node is None else f"{node!r}" + (f" ({node.location})" * bool(node.location))
        super().__init__(f"expected a legal {level} graph ({rule}): {what}", where=where)


def verify(
    graph: Graph, level: str = "traced", *, deep: bool = False, trusted: Iterable[Node] = ()
) -> None:
    """Checks a graph.

    Args:
        deep: infer every node's types again and compare.
        trusted: nodes whose types were compared before.

    Raises:
        IllegalGraph: the first broken rule.
    """
    if level not in LEVELS:
        raise InternalError(f"expected a level of {LEVELS}, found {level}")
    _leaves(graph, level)
    _names(graph, level)
    _order(graph, level)
    _operators(graph, level)
    _ends(graph, level)
    if deep:
        _types(graph, level, frozenset(trusted))
    if level == "fused":
        _live(graph)


def _leaves(graph: Graph, level: str) -> None:
    for kind, values in (
        ("input", graph.inputs), ("weight", tuple(graph.weights)), ("state", tuple(graph.states)),
    ):  # fmt: skip
        for value in values:
            if value.kind != kind or value.producer is not None:
                raise IllegalGraph(level, "leaf kind", None, f"{value} is listed as {kind}")
    for value, tensor in (*graph.weights.items(), *graph.states.items()):
        shape = tuple(int(s) for s in tensor.shape)
        if shape != value.type.shape or str(tensor.dtype) != f"torch.{value.type.dtype}":
            raise IllegalGraph(level, "content type", None, f"{value} holds {shape} {tensor.dtype}")


def _names(graph: Graph, level: str) -> None:
    seen: set[str] = set()
    leaves = [v.name for v in (*graph.inputs, *graph.weights)]
    for name, node in [(n, None) for n in leaves] + [(n.name, n) for n in graph.nodes]:
        if name in seen:
            raise IllegalGraph(level, "unique names", node, f"two values are called {name}")
        seen.add(name)


def _order(graph: Graph, level: str) -> None:
    known: set[Value] = {*graph.inputs, *graph.weights, *graph.states}
    for node in graph.nodes:
        for value in node.inputs():
            if value not in known:
                raise IllegalGraph(level, "defined before use", node, f"reads {value} too early")
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                raise IllegalGraph(level, "producer", node, f"{value} names another producer")
        known.update(node.outputs)
    for value in graph.kept():
        if value not in known:
            raise IllegalGraph(level, "defined before use", None, f"{value} leaves, but is unknown")


def _operators(graph: Graph, level: str) -> None:
    lengths = {s.expr for s in graph.symbols.values()}
    for node in graph.nodes:
        if node.op._schema.is_mutable:
            raise IllegalGraph(level, "functional", node, "the operator changes its argument")
        if torch.Tag.nondeterministic_seeded in node.op.tags and _draws(node):
            raise IllegalGraph(level, "deterministic", node, "the operator draws random numbers")
        for dim in _dims(node):
            if unknown := dim.free_symbols - lengths:
                raise IllegalGraph(level, "known symbols", node, f"uses {unknown}")
        if level == "fused" and node.target in _TRANSPARENT:
            raise IllegalGraph(level, "meaningful", node, "the operator does nothing")


def _draws(node: Node) -> bool:
    for name in ("dropout_p", "p", "train"):
        try:
            if not node.argument(name):
                return False
        except KeyError:
            continue
    return True


def _dims(node: Node) -> Iterable[sympy.Expr]:
    def walk(item: object) -> Iterable[sympy.Expr]:
        if isinstance(item, sympy.Expr):
            yield item
        elif isinstance(item, tuple):
            for part in item:
                yield from walk(part)

    yield from walk(node.args)
    yield from walk(tuple(node.kwargs.values()))
    for value in node.outputs:
        if isinstance(value.type, TensorType):
            yield from walk(value.type.shape)


def _ends(graph: Graph, level: str) -> None:
    for table, leaves in (
        (graph.state_updates, set(graph.states)), (graph.input_updates, set(graph.inputs)),
    ):  # fmt: skip
        for old, new in table.items():
            if old not in leaves:
                raise IllegalGraph(level, "updates", None, f"{old} is no state or input")
            if old.type.dtype != new.type.dtype or len(old.type.shape) != len(new.type.shape):
                raise IllegalGraph(level, "updates", None, f"{old} cannot become {new}")


def _types(graph: Graph, level: str, trusted: frozenset[Node]) -> None:
    context = TypeContext.of(graph.symbols, graph.guards)
    for node in graph.nodes:
        tags = node.op.tags
        if node in trusted or not node.outputs:
            continue
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            continue
        inferred = context.infer(node.op, node.args, node.kwargs)
        for value, found in zip(node.outputs, inferred, strict=True):
            if not agree(value.type, found, strides=looks(node.op)):
                what = f"carries {value.type}, inferred {found}"
                raise IllegalGraph(level, "types", node, what)


def _live(graph: Graph) -> None:
    read = graph.kept()
    for node in graph.nodes:
        read.update(node.inputs())
    for node in graph.nodes:
        if not has_effect(node) and not any(v in read for v in node.outputs):
            raise IllegalGraph("fused", "live", node, "nobody reads its results")
    for value in graph.weights:
        if value not in read:
            raise IllegalGraph("fused", "live", None, f"nobody reads the weight {value}")
