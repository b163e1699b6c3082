"""common_subexpressions: equal calls on equal arguments are made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch

from graphc.ir.graph import Builder, Graph, Value, has_effect
from graphc.ir.text import content_digest
from graphc.rewrite import Log


@dataclass(frozen=True)
class CommonSubexpressions:
    """Also merges equal small weights of at most `weight_bytes` (lifted constants).

    Views of inputs and states are merged like everything else: the graph's values never change.
    """

    weight_bytes: int = 4096
    name: ClassVar[str] = "common_subexpressions"

    def run(self, graph: Graph, log: Log) -> Graph:
        builder = Builder(graph)
        merged = self._merge_weights(graph, builder)
        seen: dict[Any, tuple[Value, ...]] = {}
        for node in graph.nodes:
            key = (node.op, _key(node.args, builder), _key(node.kwargs, builder))
            if key in seen:
                for old, new in zip(node.outputs, seen[key], strict=True):
                    builder.replace(old, new)
                log.matched("equal_call", node, seen[key])
                merged = True
                continue
            made = builder.copy(node)
            if not has_effect(node):
                seen[key] = made
        return builder.finish() if merged else graph

    def _merge_weights(self, graph: Graph, builder: Builder) -> bool:
        first: dict[Any, Value] = {}
        merged = False
        for value, tensor in graph.weights.items():
            if tensor.numel() * tensor.element_size() > self.weight_bytes:
                continue
            kept = first.setdefault((str(value.type), content_digest(tensor)), value)
            merged = merged or kept is not value
            builder.replace(value, kept)
        return merged


def _key(item: Any, builder: Builder) -> Any:
    """Equal only for arguments that mean the same: 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(item, Value):
        return builder.of(item)
    if isinstance(item, tuple):
        return ("tuple", *(_key(i, builder) for i in item))
    if isinstance(item, Mapping):
        return tuple((k, _key(item[k], builder)) for k in sorted(item))
    if isinstance(item, sympy.Expr):
        return ("dim", item)
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return ("torch", str(item))
    return (type(item).__name__, repr(item))
