"""A graph for fixed lengths and other sizes of its states: one capture serves prefill (one
sequence, many tokens) and decode (many sequences, one token)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from graphc.errors import InternalError, UsageError
from graphc.ir.graph import Graph, Guard, Node, Value, make_node, map_tree, prune
from graphc.ir.infer import TypeContext
from graphc.ir.types import Dim, Symbol, TensorType, as_dim, tensor_type


def specialise(
    graph: Graph,
    sizes: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int]] | None = None,
    states: Mapping[str, tuple[int, ...]] | None = None,
) -> Graph:
    """The graph with some lengths fixed, others kept within a range, and states of other shapes.

    Args:
        sizes: lengths by symbol, each within the symbol's range.
        ranges: (minimum, maximum) by symbol; they may only narrow.
        states: shapes by name; such a state begins as zeros.

    Raises:
        UsageError: a length or range outside of what the graph holds for.
    """
    return _Specialiser(graph, sizes, ranges or {}, states or {}).run()


class _Specialiser:
    def __init__(
        self, graph: Graph, sizes: Mapping[str, int], ranges: Mapping[str, tuple[int, int]],
        states: Mapping[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.graph = graph
        self.symbols: dict[str, Symbol] = {}
        self.fixed: dict[sympy.Expr, sympy.Integer] = {}
        for name, info in graph.symbols.items():
            if name in sizes:
                _check(info, sizes[name], sizes[name])
                self.fixed[info.expr] = sympy.Integer(sizes[name])
                continue
            if name in ranges:
                low, high = ranges[name]
                _check(info, low, high)
                info = replace(info, minimum=low, maximum=high, hint=max(low, min(info.hint, high)))
            self.symbols[name] = info
        self.guards = tuple(self._guards())
        self.types = TypeContext.of(self.symbols, self.guards)
        self.shapes = states
        self.values: dict[Value, Any] = {}

    def _guards(self) -> Any:
        for guard in self.graph.guards:
            condition = guard.condition.xreplace(self.fixed)
            if condition in (False, sympy.false):
                raise UsageError(
                    f"the model was captured under the condition {guard.text}, which does not hold "
                    f"for {', '.join(f'{s} = {n}' for s, n in self.fixed.items())}"
                )
            if condition not in (True, sympy.true):
                yield Guard(condition, guard.text)

    def _dim(self, dim: Any) -> Dim:
        if isinstance(dim, int):
            return dim
        return as_dim(self._decided(sympy.sympify(dim).xreplace(self.fixed)))

    def _decided(self, expr: sympy.Expr) -> sympy.Expr:
        """The expression without minima and maxima that the ranges decide."""
        if not expr.has(Min, Max):
            return expr
        ranges = {s.expr: ValueRanges(s.minimum, s.maximum) for s in self.symbols.values()}
        clear: dict[sympy.Expr, sympy.Expr] = {}
        for found in expr.atoms(Min, Max):
            bounds = [(a, bound_sympy(a, ranges)) for a in found.args]
            for argument, own in bounds:
                others = [b for a, b in bounds if a is not argument]
                if isinstance(found, Min) and all(own.upper <= b.lower for b in others):
                    clear[found] = argument
                if isinstance(found, Max) and all(own.lower >= b.upper for b in others):
                    clear[found] = argument
        return expr.xreplace(clear)

    def _of(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self.values.get(item, item)
        return self._dim(item) if isinstance(item, sympy.Basic) else item

    def run(self) -> Graph:
        graph = self.graph
        inputs = tuple(self._leaf(v, v.type.shape) for v in graph.inputs)
        states: dict[Value, torch.Tensor] = {}
        for value, content in graph.states.items():
            shape = self.shapes.get(value.name)
            if shape is None:
                states[value] = content
                continue
            if len(shape) != content.dim() or bool(content.any()):
                raise InternalError(f"the state {value.name} cannot have the shape {shape}")
            # one zero seen many times: a state may be larger than memory
            states[self._leaf(value, shape)] = torch.zeros((), dtype=content.dtype).expand(shape)
        nodes = tuple(self._node(node) for node in graph.nodes)
        return prune(
            Graph(
                self.symbols, inputs, graph.weights, states, nodes,
                tuple(self._of(r) for r in graph.results),
                {self._of(s): self._of(v) for s, v in graph.state_updates.items()},
                {self._of(i): self._of(v) for i, v in graph.input_updates.items()},
                self.guards,
            )
        )  # fmt: skip

    def _leaf(self, value: Value, shape: tuple[Dim, ...]) -> Value:
        made = tuple(self._dim(d) for d in shape)
        type_ = TensorType(value.type.dtype, made)
        new = Value(value.kind, value.name, tensor_type(type_.dtype, made, type_.stride()))
        self.values[value] = new
        return new

    def _node(self, node: Node) -> Node:
        args, kwargs = map_tree(self._of, node.args), map_tree(self._of, dict(node.kwargs))
        types = self.types.infer(node.op, args, kwargs)
        new = make_node(node.op, args, kwargs, node.name, types, node.location, node.module)
        self.values.update(zip(node.outputs, new.outputs, strict=True))
        return new


def _check(info: Symbol, low: int, high: int) -> None:
    if low < info.minimum or high > info.maximum or low > high:
        asked = f"{low}" if low == high else f"{low} to {high}"
        raise UsageError(
            f"expected {info.name} within {info.minimum} to {info.maximum}, found {asked}"
        )
