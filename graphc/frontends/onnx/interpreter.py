"""Runs ONNX graphs as torch operations, keeping shape arithmetic symbolic.

Three ways to evaluate a node, tried in this order:

1. every input is a concrete `Static`: the handler runs on real tensors outside the capture, and
   the small results are Static again;
2. some items are symbolic lengths: the operator's `static` rule computes with symbols;
3. else the handler runs on tensors, and torch.export records what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphc.errors import GraphcError
from graphc.frontends.locations import part
from graphc.frontends.onnx.functions import function_body
from graphc.frontends.onnx.graph import Constant, OnnxGraph, OnnxNode
from graphc.frontends.onnx.registry import Operator, find_static
from graphc.frontends.onnx.values import (
    STATIC_LIMIT,
    Static,
    Value,
    float_items,
    int_items,
    outside_capture,
)


class Scope:
    """Values by name: those computed so far, the graph's constants, then the enclosing scope."""

    def __init__(self, graph: OnnxGraph, parent: Scope | None, interpreter: Interpreter) -> None:
        self.values: dict[str, Value] = {}
        self.graph = graph
        self.parent = parent
        self.interpreter = interpreter

    def __getitem__(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if name in self.graph.constants:
            return self.interpreter.constant(self.graph.constants[name])
        if self.parent is None:
            raise KeyError(name)
        return self.parent[name]


class Interpreter:
    """Executes nodes; `buffer` reads a buffer of the module that owns the weights."""

    def __init__(self, buffer: Callable[[str], torch.Tensor]) -> None:
        self.buffer = buffer
        self.real = False  # inside an evaluation on real tensors
        self.bodies: dict[tuple[int, tuple[Any, ...]], OnnxGraph] = {}

    def constant(self, constant: Constant) -> Value:
        if constant.static is not None:
            return constant.static
        if constant.buffer is not None:
            return self.buffer(constant.buffer)
        return constant.tensor

    def tensor(self, value: Value) -> torch.Tensor:
        """`value` as a tensor: a real one while folding, else part of the capture."""
        if isinstance(value, Static):
            if self.real:
                return value.real()
            return self.buffer(value.buffer) if value.buffer is not None else value.tensor()
        assert isinstance(value, torch.Tensor), f"a tensor expected, found {type(value).__name__}"
        return value

    def run(self, graph: OnnxGraph, inputs: Sequence[Value], parent: Scope | None) -> list[Value]:
        """The outputs of a graph for the given values of its inputs."""
        scope = Scope(graph, parent, self)
        scope.values.update(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            values = [
                scope[name] if name and index not in node.consumed else None
                for index, name in enumerate(node.inputs)
            ]
            results = self.execute(node, values, scope)
            scope.values.update(
                (name, result) for name, result in zip(node.outputs, results, strict=False) if name
            )
        return [scope[name] for name in graph.outputs]

    def execute(self, node: OnnxNode, values: list[Value], scope: Scope) -> list[Value]:
        """The outputs of one node."""
        node.interpreter = self
        try:
            with part(node.name or f"{node.op_type} of {node.outputs[0]}"):
                return self._execute(node, values, scope)
        except GraphcError:
            raise
        except GuardOnDataDependentSymNode as error:
            raise node.refuse(
                "a shape, axis or choice here depends on data that only a run knows",
                "bind the graph input it comes from with `fixed`",
            ) from error
        except Exception as error:
            if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
                raise node.refuse(f"torch cannot compute this: {error}") from error
            error.add_note(f"while running ONNX {node.where}")
            raise

    def _execute(self, node: OnnxNode, values: list[Value], scope: Scope) -> list[Value]:
        if node.operator is None:
            body = self._body(node, values)
            padded = values + [None] * (len(body.inputs) - len(values))
            return self.run(body, padded, None)
        entry = node.operator
        if entry.scoped:
            return self.call(entry, node, values, scope)
        present = [v for v in values if v is not None]
        if present and not self.real and all(isinstance(v, Static) for v in present):
            if all(v.concrete for v in present):
                folded = self._fold(entry, node, values)
                if folded is not None:
                    return folded
            else:
                rule = find_static(node.domain, node.op_type)
                if rule is not None:
                    result = rule(node, *values, **node.attributes)
                    if result is not NotImplemented:
                        return list(result) if isinstance(result, tuple) else [result]
        return self.call(entry, node, values)

    def _fold(self, entry: Operator, node: OnnxNode, values: list[Value]) -> list[Value] | None:
        """Results on real tensors, or None if one is too large to be Static."""
        self.real = True
        try:
            with outside_capture():
                results = self.call(entry, node, values)
                if any(isinstance(r, list) for r in results):
                    return None
                if any(isinstance(r, torch.Tensor) and r.numel() > STATIC_LIMIT for r in results):
                    return None
                return [Static.of_tensor(r) if isinstance(r, torch.Tensor) else r for r in results]
        finally:
            self.real = False

    def call(
        self, entry: Operator, node: OnnxNode, values: list[Value], scope: Scope | None = None
    ) -> list[Value]:
        """Converts the inputs as the handler declares and calls it."""
        unknown = set(node.attributes) - entry.attributes
        if unknown:
            raise node.refuse(f"attribute {', '.join(sorted(unknown))} is not supported")
        arguments: list[Any] = []
        for index, value in enumerate(values):
            if index < len(entry.inputs):
                kind = entry.inputs[index]
            elif entry.variadic is not None:
                kind = entry.variadic
            elif value is None:
                continue
            else:
                raise node.refuse(f"input number {index} is not supported")
            arguments.append(self._convert(kind, value, node, index))
        missing = entry.required - len(arguments)
        if missing > 0:
            raise node.invalid(f"{entry.required} inputs expected, found {len(arguments)}")
        if scope is not None:
            arguments.insert(0, scope)
        result = entry.handler(node, *arguments, **node.attributes)
        return list(result) if isinstance(result, tuple) else [result]

    def _convert(self, kind: str, value: Value, node: OnnxNode, index: int) -> Any:
        if kind in ("raw", "known") or value is None:
            return value
        if isinstance(value, list):
            raise node.refuse("a tensor is expected where the graph gives a sequence")
        if kind == "tensor":
            return self.tensor(value)
        what = f"input {node.inputs[index]!r}"
        if kind == "ints":
            return int_items(value, node.where, what)
        if kind == "floats":
            return float_items(value, node.where, what)
        items = int_items(value, node.where, what) if kind == "int" else self._bools(value, node)
        if len(items) != 1:
            raise node.invalid(f"{what} must have one element, found {len(items)}")
        return items[0]

    def _bools(self, value: Value, node: OnnxNode) -> list[bool]:
        if isinstance(value, Static):
            return [bool(item) for item in value.flat]
        if torch.compiler.is_exporting():
            raise node.refuse("a condition must be known when the model is captured")
        return [bool(item) for item in value.reshape(-1).tolist()]

    def _body(self, node: OnnxNode, values: list[Value]) -> OnnxGraph:
        types = tuple(None if v is None else v.dtype for v in values)
        key = (id(node), types)
        if key not in self.bodies:
            self.bodies[key] = function_body(node, values)
        return self.bodies[key]
