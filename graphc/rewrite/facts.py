"""Questions that rules ask about a graph: who reads a value, is it constant, what is it made of."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import TensorType

_FILLED = {"aten.zeros": 0.0, "aten.zeros_like": 0.0, "aten.new_zeros": 0.0, "aten.ones": 1.0,
           "aten.ones_like": 1.0, "aten.new_ones": 1.0}  # fmt: skip
_FILL_ARGUMENT = {"aten.full": "fill_value", "aten.full_like": "fill_value",
                  "aten.new_full": "fill_value", "aten.scalar_tensor": "s"}  # fmt: skip
_SPREADING = frozenset(
    f"aten.{n}"
    for n in ("expand", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute",
              "transpose", "slice", "select", "clone", "alias", "detach", "contiguous",
              "lift_fresh_copy")
)  # fmt: skip
_CASTS = frozenset(("aten._to_copy", "aten.to", "prims.convert_element_type"))
#: floats in the order in which each holds every value of those before it
_WIDTH = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}


class Facts:
    """A graph, indexed. Values are those of this graph, never of one being built."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kept = graph.kept()
        self._uses = graph.uses()
        self._numbers: dict[Value, float | None] = {}

    def readers(self, value: Value) -> list[Node]:
        """Nodes that read it."""
        return self._uses.get(value, [])

    def only_reader(self, value: Value) -> bool:
        """Whether one node reads it and it does not leave the graph: then a rewrite of that node
        makes it dead. A question of profit only."""
        return len(self.readers(value)) == 1 and value not in self.kept

    def weight(self, item: Any) -> torch.Tensor | None:
        """The tensor of a constant."""
        return self.graph.weights.get(item) if isinstance(item, Value) else None

    def number(self, item: Any) -> float | None:
        """The number that an argument is in every element, or None."""
        if isinstance(item, bool):
            return float(item)
        if isinstance(item, (int, float)):
            return float(item)
        if isinstance(item, sympy.Expr):
            return float(item) if item.is_number else None
        if not isinstance(item, Value) or not isinstance(item.type, TensorType):
            return None
        if item not in self._numbers:
            self._numbers[item] = self._number(item)
        return self._numbers[item]

    def _number(self, value: Value) -> float | None:
        tensor = self.weight(value)
        if tensor is not None:
            return _uniform(tensor)
        if value.producer is None:
            return None
        node = value.producer
        name = packet_of(value)
        if name in _FILLED:
            return _FILLED[name]
        if name in _FILL_ARGUMENT:
            return self.number(node.argument(_FILL_ARGUMENT[name]))
        if name in _SPREADING:
            return self.number(node.args[0])
        if name in _CASTS:
            number = self.number(node.args[0])
            return None if number is None else rounded(number, value.type.dtype)
        return None


def rounded(number: float, dtype: str) -> float:
    """The number as this dtype holds it."""
    return float(torch.tensor(number, dtype=torch.float64).to(getattr(torch, dtype)).item())


def _uniform(tensor: torch.Tensor) -> float | None:
    if not 0 < tensor.numel() <= 4096 or tensor.is_complex():
        return None
    first = tensor.reshape(-1)[0]
    if tensor.numel() > 1 and not bool((tensor == first).all()):
        return None
    return float(first.item())


def packet_of(item: Any) -> str:
    """ "aten.mul" if a call of aten.mul.* made the value, "" for inputs, weights and numbers."""
    if isinstance(item, Value) and item.producer is not None:
        return item.producer.target.rpartition(".")[0]
    return ""


def operand(item: Any, index: int = 0) -> Any:
    """Argument `index` of the call that made the value."""
    return item.producer.args[index]


def is_cast(item: Any) -> bool:
    """Whether the value is another value in another dtype."""
    return packet_of(item) in _CASTS


def widened(item: Any) -> Any:
    """The value before exact conversions to wider floats: equal numbers."""
    while is_cast(item):
        source = operand(item)
        if _WIDTH.get(source.type.dtype, 9) >= _WIDTH.get(item.type.dtype, 0):
            return item
        item = source
    return item


def rank(value: Value) -> int:
    return len(value.type.shape)


def axes(dims: Any, count: int) -> tuple[int, ...]:
    """Dimension arguments (int, list or None for all) as sorted non-negative integers."""
    if dims is None or dims == ():
        return tuple(range(count))
    if isinstance(dims, (int, sympy.Integer)):
        dims = (dims,)
    return tuple(sorted(int(d) % count if count else 0 for d in dims))
