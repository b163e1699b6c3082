"""Runs a Graph in eager torch: the meaning that every pass must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphc.errors import InputRejectedError, InternalError
from graphc.ir.graph import Graph, Node, Value, map_tree
from graphc.ir.types import TensorType

#: called with each node and its results
Watch = Callable[[Node, tuple[Any, ...]], None]


@dataclass(frozen=True)
class Outcome:
    """What a run gives: the user's results, and the new contents of states and inputs by name."""

    results: tuple[Any, ...]
    states: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that leaves the graph, by a name ("result 0", "state cache")."""
        named = {f"result {i}": r for i, r in enumerate(self.results)}
        named |= {f"state {name}": t for name, t in self.states.items()}
        named |= {f"input {name}": t for name, t in self.inputs.items()}
        return {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}


def run(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    states: Mapping[str, torch.Tensor] | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Runs the graph; its arguments are not changed.

    Args:
        states: contents by name; their initial values where not given.

    Raises:
        InputRejectedError: the sizes of the inputs contradict each other.
    """
    sizes = bind(graph, inputs)
    known: dict[Value, Any] = dict(graph.weights)
    known.update(zip(graph.inputs, inputs, strict=True))
    known.update({v: (states or {}).get(v.name, t) for v, t in graph.states.items()})

    def real(item: Any) -> Any:
        if isinstance(item, Value):
            return known[item]
        return evaluate(item, sizes) if isinstance(item, sympy.Basic) else item

    with torch.no_grad():
        for node in graph.nodes:
            results = call(node.op, map_tree(real, node.args), map_tree(real, node.kwargs))
            for value, result in zip(node.outputs, results, strict=len(node.outputs) > 0):
                known[value] = result
                _bind_data(value, result, sizes)
            if watch is not None:
                watch(node, results)
    return Outcome(
        tuple(real(r) for r in graph.results),
        {s.name: known[v] for s, v in graph.state_updates.items()},
        {i.name: known[v] for i, v in graph.input_updates.items()},
    )


def call(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Calls an operator; lists of results are flattened."""
    result = op(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def bind(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
    """The size of each symbol, read off the inputs.

    Raises:
        InputRejectedError: wrong number of inputs, wrong rank, or sizes that contradict.
    """
    if len(inputs) != len(graph.inputs):
        raise InputRejectedError(f"expected {len(graph.inputs)} inputs, found {len(inputs)}")
    sizes: dict[sympy.Symbol, int] = {}
    pairs: list[tuple[Any, int, str]] = []
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        if len(value.type.shape) != tensor.dim():
            raise InputRejectedError(f"expected {value}, found {tuple(tensor.shape)}")
        pairs += [
            (d, int(s), str(value)) for d, s in zip(value.type.shape, tensor.shape, strict=True)
        ]
    for dim, size, _ in pairs:
        if isinstance(dim, sympy.Symbol):
            sizes.setdefault(dim, size)
    for dim, size, _ in pairs:  # a symbol that appears only inside an expression
        free = [s for s in getattr(dim, "free_symbols", ()) if s not in sizes]
        if len(free) == 1:
            solutions = sympy.solve(dim.xreplace(sizes) - size, free[0])
            if len(solutions) == 1 and solutions[0].is_Integer:
                sizes[free[0]] = int(solutions[0])
    for dim, size, name in pairs:
        if evaluate(dim, sizes) != size:
            raise InputRejectedError(f"expected size {dim} of {name}, found {size}")
    return sizes


def evaluate(dim: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """A Dim as a number."""
    if isinstance(dim, int):
        return dim
    number = dim.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    if number.free_symbols:
        raise InternalError(f"expected sizes for {number.free_symbols} of {dim}")
    return int(number) if number.is_integer else float(number)


def _bind_data(value: Value, result: Any, sizes: dict[sympy.Symbol, int]) -> None:
    """Sizes that only the data tell become known with the result that has them."""
    if isinstance(value.type, TensorType):
        for dim, size in zip(value.type.shape, result.shape, strict=True):
            if isinstance(dim, sympy.Symbol):
                sizes.setdefault(dim, int(size))
    elif isinstance(value.type.expr, sympy.Symbol):
        sizes.setdefault(value.type.expr, int(result))
