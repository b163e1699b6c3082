"""The Graph: immutable nodes over torch operator overloads, each typed at birth.

A node's result types are the answer of the operator's own meta function (`graphc.ir.infer`), so
they cannot go stale. Values are referenced by identity; a pass makes a new Graph with `Builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from graphc.errors import InternalError
from graphc.ir.types import Symbol, TensorType, Type


@dataclass(frozen=True, eq=False)
class Value:
    """One tensor (or data-dependent number) in the graph.

    kind: "input", "weight", "state" or "node" (result `index` of `producer`).
    """

    kind: str
    name: str
    type: TensorType
    producer: Node | None = None
    index: int = 0

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Node:
    """One operator call.

    args/kwargs hold Values, Dims (sympy), Python scalars, dtypes, and tuples of these.
    `location` is the user's source line ("model.py:12"), `module` the part of the model that called
    it ("layers.0.self_attn KimiAttention"); neither is part of the canonical text.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    location: str = ""
    outputs: tuple[Value, ...] = ()
    module: str = ""

    @property
    def target(self) -> str:
        """ "aten.linear.default"."""
        return target_name(self.op)

    def argument(self, name: str) -> Any:
        """The argument of this schema name, its default when not given."""
        for position, parameter in enumerate(self.op._schema.arguments):
            if parameter.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if position < len(self.args):
                    return self.args[position]
                return parameter.default_value
        raise KeyError(f"{self.target} has no argument {name}")

    def inputs(self) -> Iterator[Value]:
        """Every Value among the arguments, in order."""
        yield from leaves(self.args)
        yield from leaves(self.kwargs)

    def __repr__(self) -> str:
        return f"{self.name} = {self.target}"


@cache
def target_name(op: torch._ops.OpOverload) -> str:
    """ "namespace.name.overload" of an operator."""
    return str(op)


def leaves(tree: Any) -> Iterator[Value]:
    """The Values inside nested tuples and mappings."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `function` to every leaf of nested tuples and mappings."""
    if isinstance(tree, (tuple, list)):
        return tuple(map_tree(function, item) for item in tree)
    if isinstance(tree, Mapping):
        return {key: map_tree(function, item) for key, item in tree.items()}
    return function(tree)


@dataclass(frozen=True)
class Guard:
    """A condition on the symbols that capture relied on: sympy relation and its text."""

    condition: Any
    text: str


@dataclass(frozen=True)
class Graph:
    """A static graph.

    weights/states map a Value to its (initial) tensor. `results` are the user's outputs: Values,
    Dims or constants. `state_updates` and `input_updates` are written after all nodes ran.
    """

    symbols: Mapping[str, Symbol]
    inputs: tuple[Value, ...]
    weights: Mapping[Value, torch.Tensor]
    states: Mapping[Value, torch.Tensor]
    nodes: tuple[Node, ...]
    results: tuple[Any, ...]
    state_updates: Mapping[Value, Value] = field(default_factory=dict)
    input_updates: Mapping[Value, Value] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()

    def uses(self) -> dict[Value, list[Node]]:
        """Nodes that read each Value (a node is listed once per Value)."""
        table: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs()):
                table.setdefault(value, []).append(node)
        return table

    def kept(self) -> set[Value]:
        """Values that leave the graph: results and updates."""
        return {
            *(v for v in self.results if isinstance(v, Value)),
            *self.state_updates.values(),
            *self.input_updates.values(),
        }


class Builder:
    """Makes a new Graph from an old one: copy nodes, replace values, call new operators.

    `of(value)` is the new Value that stands for an old one.
    """

    def __init__(self, graph: Graph) -> None:
        from graphc.ir.infer import TypeContext

        self.graph = graph
        self.types = TypeContext.of(graph.symbols, graph.guards)
        self._map: dict[Value, Value] = {}
        self._nodes: list[Node] = []
        self._weights: dict[Value, torch.Tensor] = dict(graph.weights)
        self._names: set[str] = {node.name for node in graph.nodes}
        self._names |= {v.name for v in (*graph.inputs, *graph.weights, *graph.states)}
        self._counter = 0
        self._uses: dict[Value, list[Node]] | None = None
        #: source line and module that calls without their own are given
        self.location = ""
        self.module = ""

    def of(self, value: Any) -> Any:
        """The new Value for an old one (identity for what was not replaced)."""
        if not isinstance(value, Value):
            return value
        while value in self._map:
            value = self._map[value]
        return value

    def replace(self, old: Value, new: Value) -> None:
        """From now on `old` is spelled `new`."""
        if old is not new:
            self._map[old] = new

    def readers(self, value: Value) -> list[Node]:
        """Nodes of the old graph that read `value`."""
        if self._uses is None:
            self._uses = self.graph.uses()
        return self._uses.get(value, [])

    def fresh(self, stem: str) -> str:
        """An unused node name starting with `stem`."""
        while True:
            self._counter += 1
            name = f"{stem}_g{self._counter}"
            if name not in self._names:
                self._names.add(name)
                return name

    def weight(self, stem: str, tensor: torch.Tensor) -> Value:
        """A new constant."""
        from graphc.ir.infer import type_of

        value = Value("weight", self.fresh(stem), type_of(tensor))
        self._weights[value] = tensor
        return value

    def call(
        self,
        op: torch._ops.OpOverload,
        *args: Any,
        location: str = "",
        name: str = "",
        **kwargs: Any,
    ) -> tuple[Value, ...]:
        """Appends a call; its result types are inferred now. Old Values in args are renamed."""
        new_args = map_tree(self.of, tuple(args))
        new_kwargs = map_tree(self.of, kwargs)
        types = self.types.infer(op, new_args, new_kwargs)
        name = name or self.fresh(op._schema.name.split("::")[-1])
        where = location or self.location
        node = make_node(op, new_args, new_kwargs, name, types, where, self.module)
        self._nodes.append(node)
        return node.outputs

    def call1(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Value:
        """`call` of an operator with one result."""
        (value,) = self.call(op, *args, **kwargs)
        return value

    def copy(self, node: Node) -> tuple[Value, ...]:
        """Keeps an old node (its arguments renamed). A view of a value whose strides have changed
        becomes a reshape where torch could not view it any more."""
        op = node.op
        args, kwargs = map_tree(self.of, node.args), map_tree(self.of, node.kwargs)
        if all(a is b for a, b in zip(leaves(args), leaves(node.args), strict=True)) and all(
            a is b for a, b in zip(leaves(kwargs), leaves(node.kwargs), strict=True)
        ):
            self._nodes.append(node)
            return node.outputs
        if any(
            a.type != b.type
            for a, b in zip(
                (*leaves(args), *leaves(kwargs)),
                (*leaves(node.args), *leaves(node.kwargs)),
                strict=True,
            )
        ):
            try:
                types: Sequence[Type] = self.types.infer(op, args, kwargs)
            except InternalError:
                if node.target not in ("aten.view.default", "aten._unsafe_view.default"):
                    raise
                op = torch.ops.aten.reshape.default
                types = self.types.infer(op, args, kwargs)
        else:
            types = tuple(v.type for v in node.outputs)
        new = make_node(op, args, kwargs, node.name, types, node.location, node.module)
        self._nodes.append(new)
        for old, fresh in zip(node.outputs, new.outputs, strict=True):
            self._map[old] = fresh
        return new.outputs

    def finish(self) -> Graph:
        """The new graph, without nodes that nobody reads and without unread weights."""
        old = self.graph
        results = tuple(self.of(r) for r in old.results)
        states = {s: self.of(v) for s, v in old.state_updates.items()}
        inputs = {i: self.of(v) for i, v in old.input_updates.items()}
        return prune(
            Graph(
                old.symbols, old.inputs, self._weights, old.states, tuple(self._nodes), results,
                states, inputs, old.guards,
            )
        )  # fmt: skip


def make_node(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str,
    types: Sequence[Any],
    location: str = "",
    module: str = "",
) -> Node:
    """A node and its result Values (named name, name.1, name.2, ...)."""
    node = Node(op, args, kwargs, name, location, module=module)
    outputs = tuple(
        Value("node", name if i == 0 else f"{name}.{i}", t, node, i) for i, t in enumerate(types)
    )
    object.__setattr__(node, "outputs", outputs)
    return node


def prune(graph: Graph) -> Graph:
    """Drops nodes whose results nobody reads, and weights nobody reads. Operators are functional
    at this level, so a call without readers has no effect."""
    live: set[Value] = set(graph.kept())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(v in live for v in node.outputs) or has_effect(node):
            kept.append(node)
            live.update(node.inputs())
    weights = {v: t for v, t in graph.weights.items() if v in live}
    return Graph(
        graph.symbols, graph.inputs, weights, graph.states, tuple(reversed(kept)), graph.results,
        graph.state_updates, graph.input_updates, graph.guards,
    )  # fmt: skip


def has_effect(node: Node) -> bool:
    """Whether a call matters without readers: assertions on data, and calls that define a size
    known only from data."""
    if node.target.startswith(("aten._assert_async", "aten.sym_constrain")):
        return True
    return any(getattr(v.type, "expr", None) is not None for v in node.outputs)
