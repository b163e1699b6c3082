"""The canonical text of a Graph: what is dumped, compared, stored and hashed.

Values are numbered by position, so the text does not depend on names that differ between runs; it
holds no source paths. `graphc.ir.parse` reads it back. The grammar is in docs/ir.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch

from graphc.errors import InternalError
from graphc.ir.content import raw_bytes
from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import UNBOUNDED, ScalarType, Symbol, Type, short_dtype


def print_graph(graph: Graph, *, contents: bool = True) -> str:
    """The text of a graph; with `contents`, weights and states carry a digest of their bytes."""
    numbers = number_values(graph)
    lines = [_symbol_line(s) for s in sorted(graph.symbols.values(), key=lambda s: s.name)]
    lines += [f"guard {guard}" for guard in sorted({g.text for g in graph.guards})]
    for value in graph.inputs:
        lines.append(f"%{numbers[value]}: {type_text(value.type)} = input({_text(value.name)})")
    for kind, table in (("weight", graph.weights), ("state", graph.states)):
        for value, tensor in table.items():
            mark = f", {content_digest(tensor)}" if contents else ""
            lines.append(
                f"%{numbers[value]}: {type_text(value.type)} = {kind}({_text(value.name)}{mark})"
            )
    lines += [node_line(node, numbers) for node in graph.nodes]
    for kind, updates in (("state", graph.state_updates), ("input", graph.input_updates)):
        for old, new in updates.items():
            lines.append(f"update {kind} %{numbers[old]} = %{numbers[new]}")
    lines.append(f"return {_sequence(graph.results, numbers)}")
    return "\n".join(lines) + "\n"


def number_values(graph: Graph) -> dict[Value, int]:
    """The number of each value: inputs, weights, states, then results in node order."""
    values = [*graph.inputs, *graph.weights, *graph.states]
    values += [v for node in graph.nodes for v in node.outputs]
    return {value: position for position, value in enumerate(values)}


def node_line(node: Node, numbers: Mapping[Value, int]) -> str:
    """One line: `%7: f32[1,T,64], %8: i64[1,T] = aten.op.overload(%3, 5, dim=-1)`."""
    arguments = [_argument(a, numbers) for a in node.args]
    arguments += [f"{k}={_argument(node.kwargs[k], numbers)}" for k in sorted(node.kwargs)]
    call = f"{node.target}({', '.join(arguments)})"
    if not node.outputs:
        return call
    left = ", ".join(f"%{numbers[v]}: {type_text(v.type)}" for v in node.outputs)
    return f"{left} = {call}"


def digest(graph: Graph) -> str:
    """SHA-256 of the canonical text, weights and initial states included; 64 hex digits."""
    return hashlib.sha256(print_graph(graph).encode()).hexdigest()


def content_digest(tensor: torch.Tensor) -> str:
    """16 hex digits over dtype, shape and bytes of a tensor."""
    hasher = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hasher.update(raw_bytes(tensor))
    return hasher.hexdigest()[:16]


def type_text(kind: Type) -> str:
    """A type as one word."""
    if isinstance(kind, ScalarType):
        return kind.kind if kind.expr is None else f"{kind.kind}({dim_text(kind.expr)})"
    text = f"{short_dtype(kind.dtype)}[{','.join(map(_packed, kind.shape))}]"
    if kind.strides is not None:
        text += f"@[{','.join(map(_packed, kind.strides))}]"
    return text


def _packed(dim: Any) -> str:
    return dim_text(dim).replace(" ", "")


@lru_cache(maxsize=100_000)
def dim_text(dim: Any) -> str:
    """A dimension's text, in the form that parsing it prints again."""
    if isinstance(dim, int):
        return str(int(dim))
    from graphc.ir.parse import parse_dim

    data = {str(s) for s in dim.free_symbols if s.is_nonnegative and not s.is_positive}
    for _ in range(4):
        text = str(dim)
        again = parse_dim(text, {name: Symbol(name, 0, 0, data=True) for name in data})
        if again == dim or str(again) == text:
            return text
        dim = again
    raise InternalError(f"expected a dimension with a stable text, found {dim}")


def _symbol_line(symbol: Symbol) -> str:
    high = "inf" if symbol.maximum >= UNBOUNDED else str(symbol.maximum)
    return f"symbol {symbol.name} in {symbol.minimum}..{high}{' data' if symbol.data else ''}"


def _sequence(items: tuple[Any, ...], numbers: Mapping[Value, int]) -> str:
    return f"({', '.join(_argument(i, numbers) for i in items)}{',' if len(items) == 1 else ''})"


def _argument(item: Any, numbers: Mapping[Value, int]) -> str:
    if isinstance(item, Value):
        return f"%{numbers[item]}"
    if item is None or isinstance(item, bool):
        return str(item)
    if isinstance(item, float):
        return _float(item)
    if isinstance(item, complex):
        return f"complex({_float(item.real)}, {_float(item.imag)})"
    if isinstance(item, (int, sympy.Expr)):
        return dim_text(item)
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return str(item)
    if isinstance(item, torch.device):
        return f"device({_text(str(item))})"
    if isinstance(item, (tuple, list)):
        return _sequence(tuple(item), numbers)
    raise InternalError(f"expected a graph argument, found {type(item).__name__}: {item!r}")


def _float(number: float) -> str:
    return repr(float(number)) if math.isfinite(number) else str(float(number))


def _text(text: str) -> str:
    return json.dumps(text)
