"""coded_linear: products of few rows read their bf16 weights in 12 bits each, exactly.

A product of few rows takes as long as its weight is read from memory. The exponents of a weight
lie close together, so four bits tell sign and upper exponent of nearly all, and a quarter of the
bytes is saved (graphc.ops.coded_linear). For many rows arithmetic sets the pace, and spelling the
weights out would cost: such products keep the plain form, and so do weights that others read too.
Only CPUs with dot products of bf16 are fast enough for memory to be what limits one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import product
from graphc.ops.coded_linear import coded_linear, encode
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules


@dataclass(frozen=True)
class CodedLinear:
    """Only up to `rows` rows, and with weights of at least `least` bytes that become at most
    `share` of them; off with `coded_linear{enabled=no}`."""

    enabled: bool = True
    rows: int = 8  # beyond, arithmetic takes longer than reading
    least: int = 1 << 17  # smaller ones are near
    share: float = 0.85
    name: ClassVar[str] = "coded_linear"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_CodedLinear(self, graph)], log) if self.enabled else graph


@dataclass(frozen=True)
class _Found:
    node: Node
    weight: Value


class _CodedLinear(Rule[_Found]):
    name = "coded_linear"
    roots = frozenset(("aten.linear",))

    def __init__(self, options: CodedLinear, graph: Graph) -> None:
        self.options = options
        self.ranges = {
            s.expr: ValueRanges(sympy.Integer(s.minimum), sympy.Integer(s.maximum))
            for s in graph.symbols.values()
        }
        self.coded: dict[Value, torch.Tensor] = {}
        self.made: dict[Value, Value] = {}

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        weight, bias = node.args[1], node.argument("bias")
        data = facts.weight(weight)
        if data is None or data.dtype != torch.bfloat16 or data.ndim != 2:
            return
        if data.nbytes < self.options.least or self._rows(node) > self.options.rows:
            return
        if bias is not None and bias.type.dtype != "bfloat16":
            yield Refused("its bias is of another dtype")
            return
        if weight in facts.kept or any(not self._few(r) for r in facts.readers(weight)):
            yield Refused("its weight is also read otherwise")
            return
        if weight not in self.coded:
            self.coded[weight] = encode(data)
        if self.coded[weight].nbytes > self.options.share * data.nbytes:
            yield Refused("its exponents lie far apart")
            return
        yield _Found(node, weight)

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        weight = found.weight
        if weight not in self.made:
            self.made[weight] = builder.weight(f"{weight.name}_coded", self.coded[weight])
        x, features = node.args[0], weight.type.shape[0]
        return builder.call(coded_linear, x, self.made[weight], features, *node.args[2:])

    def _few(self, node: Node) -> bool:
        return node.target == "aten.linear.default" and self._rows(node) <= self.options.rows

    def _rows(self, node: Node) -> Any:
        """The most rows the product can have."""
        rows = product(node.outputs[0].type.shape[:-1])
        return rows if isinstance(rows, int) else bound_sympy(rows, self.ranges).upper
