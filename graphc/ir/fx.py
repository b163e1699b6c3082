"""A Graph as torch.fx.GraphModule, for tools that want one."""

from __future__ import annotations

import operator
import re
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from graphc.errors import UnsupportedError
from graphc.ir.graph import Graph, Value, map_tree

_BINARY = {functions.FloorDiv: operator.floordiv, functions.Mod: operator.mod,
           functions.PythonMod: operator.mod, functions.CleanDiv: operator.floordiv}  # fmt: skip
_FOLDED = {sympy.Add: operator.add, sympy.Mul: operator.mul, functions.Max: torch.sym_max,
           functions.Min: torch.sym_min}  # fmt: skip


def to_fx(graph: Graph) -> torch.fx.GraphModule:
    """A module that takes the inputs in order and returns a tuple: the results, then the new
    contents of states, then of inputs. Weights and initial states are its buffers.

    Raises:
        UnsupportedError: a size is given by a function that has no Python form.
    """
    return _Maker(graph).make()


class _Maker:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.root = torch.nn.Module()
        self.fx = torch.fx.Graph()
        self.nodes: dict[Value, torch.fx.Node] = {}
        self.sizes: dict[sympy.Expr, torch.fx.Node] = {}

    def make(self) -> torch.fx.GraphModule:
        for value in self.graph.inputs:
            self.nodes[value] = self.fx.placeholder(value.name)
        leaves = (*self.graph.weights.items(), *self.graph.states.items())
        for number, (value, tensor) in enumerate(leaves):
            name = f"_{number}_" + re.sub(r"\W", "_", value.name)
            self.root.register_buffer(name, tensor)
            self.nodes[value] = self.fx.get_attr(name)
        for value in self.graph.inputs:
            self._sizes_of(value)
        for node in self.graph.nodes:
            args, kwargs = (
                map_tree(self._argument, node.args),
                map_tree(self._argument, node.kwargs),
            )
            made = self.fx.call_function(node.op, args, dict(kwargs), name=node.name)
            returns = node.op._schema.returns
            if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
                self.nodes[node.outputs[0]] = made
            else:
                for value in node.outputs:
                    item = self.fx.call_function(operator.getitem, (made, value.index))
                    self.nodes[value] = item
            for value in node.outputs:
                self._sizes_of(value)
        ends = (
            *self.graph.results,
            *self.graph.state_updates.values(),
            *self.graph.input_updates.values(),
        )
        self.fx.output(tuple(self._argument(e) for e in ends))
        module = torch.fx.GraphModule(self.root, self.fx)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def _sizes_of(self, value: Value) -> None:
        for position, dim in enumerate(getattr(value.type, "shape", ())):
            if isinstance(dim, sympy.Symbol) and dim not in self.sizes:
                self.sizes[dim] = self.fx.call_function(
                    torch.ops.aten.sym_size.int, (self.nodes[value], position)
                )

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self.nodes[item]
        return self._size(item) if isinstance(item, sympy.Expr) else item

    def _size(self, dim: sympy.Expr) -> Any:
        if isinstance(dim, sympy.Integer):
            return int(dim)
        if dim in self.sizes:
            return self.sizes[dim]
        parts = [self._size(a) for a in dim.args]
        if dim.func in _BINARY:
            made = self.fx.call_function(_BINARY[dim.func], tuple(parts))
        elif isinstance(dim, sympy.Pow) and isinstance(dim.args[1], sympy.Integer):
            made = self.fx.call_function(operator.pow, tuple(parts))
        elif type(dim) in _FOLDED:
            made = parts[0]
            for part in parts[1:]:
                made = self.fx.call_function(_FOLDED[type(dim)], (made, part))
        else:
            raise UnsupportedError(f"expected a size with a Python form, found {dim}")
        self.sizes[dim] = made
        return made
