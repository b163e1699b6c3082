"""wide_residuals: a residual stream of bfloat16 or float16 is summed and kept in float32.

x + f(norm(x)), layer after layer: each sum would be rounded, relative to a stream that grows, and
every later layer reads all these roundings. Kernels sum and normalise in float32 anyway; what
changes is the format in which the stream lies between two Steps. And what reads the result of a
norm in float32 (a router) gets it as it was before it was rounded for the products beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Log
from passes.precision.residual_stream import (
    NARROW,
    ResidualStreams,
    is_latest,
    is_mix,
    is_norm,
    is_one_view,
    is_rounding,
    is_widening,
    promotes,
)

aten = torch.ops.aten

_NORMALISING = (
    "aten.rms_norm.default", "aten.layer_norm.default", "graphc.residual_mix.default",
)  # fmt: skip
_REDUCTIONS = ("aten.sum.dim_IntList", "aten.mean.dim")


@dataclass(frozen=True)
class WideResiduals:
    """Sums that are normalised and added to, and those that follow from them, plain or in several
    streams that are mixed. What else reads them gets a rounded copy."""

    name: ClassVar[str] = "wide_residuals"

    def run(self, graph: Graph, log: Log) -> Graph:
        streams = ResidualStreams(graph)
        for node, reason in streams.refused.items():
            log.refused("wide_sum", node, reason)
        return _Widened(graph, streams, log).run()


class _Widened:
    """The graph with these sums in float32."""

    def __init__(self, graph: Graph, streams: ResidualStreams, log: Log) -> None:
        self.graph, self.streams, self.log = graph, streams, log
        self.builder = Builder(graph)
        #: values of the old graph in float32
        self.wide: dict[Value, Value] = {}
        #: values that are float32 in the old graph, and made of streams or by norms
        self.own: set[Value] = set()

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.builder.location, self.builder.module = node.location, node.module
            if node in self.streams.sums:
                self._keep(node, self._sum(node))
                self.log.matched("wide_sum", node, [self.wide[node.outputs[0]]])
            elif not self._reader(node):
                self.builder.copy(node)
                self._follow(node)
            if node in self.streams.begins:
                self._begin(node)
        return self.builder.finish() if self.log.matches else self.graph

    def _reader(self, node: Node) -> bool:
        """Whether it is made anew, because it reads what there is in float32."""
        first = node.args[0] if node.args else None
        result = node.outputs[0] if node.outputs else None
        if result is None or not any(v in self.wide for v in node.inputs()):
            return False
        if first in self.wide and is_widening(node):
            self.builder.replace(result, self.wide[first])
            self.log.matched("unrounded", node, [self.wide[first]])
            self.own.add(result)
        elif first in self.wide and is_norm(node, first):
            self._keep(node, self._norm(node))
        elif promotes(node):
            self.builder.replace(result, self._unrounded(node))
            self.own.add(result)
        elif latest := self._latest(node):
            self._mixture(node, latest)
        elif self._is_gained(node):
            self._keep(node, self._unrounded(node))
            self.log.matched("unrounded", node, [self.wide[result]])
        else:
            return False
        return True

    def _begin(self, node: Node) -> None:
        """The first value of a sum, as it is in registers of the Step that makes it."""
        for value in self.streams.ongoing.intersection(node.outputs):
            if value not in self.wide and value.type.dtype in NARROW:
                self.wide[value] = self._float(value)

    def _latest(self, node: Node) -> Value | None:
        """The last candidate of a mixture, if it is a sum that goes on, in float32."""
        ongoing = self.streams.ongoing.intersection(self.wide, node.inputs())
        return next((value for value in ongoing if is_latest(node, value)), None)

    def _mixture(self, node: Node, latest: Value) -> None:
        candidates = (*node.args[0][:-1], self.wide[latest])
        made = self.builder.call1(node.op, candidates, *node.args[1:], **node.kwargs)
        self.builder.replace(node.outputs[0], made)
        if made.type.dtype == "float32":
            self.own.add(node.outputs[0])

    def _unrounded(self, node: Node) -> Value:
        """The same of its operands in float32."""
        args = [self.wide.get(item, item) for item in node.args]
        return self.builder.call1(node.op, *args, **node.kwargs)

    def _is_gained(self, node: Node) -> bool:
        """Whether it is a norm, rounded already, times its gain: a weight for each column."""
        if node.target != "aten.mul.Tensor" or node.outputs[0].type.dtype not in NARROW:
            return False
        gains = [item for item in node.args if item in self.graph.weights]
        return any(len(gain.type.shape) == 1 for gain in gains)

    def _follow(self, node: Node) -> None:
        """What a node that stays as it is means for its result."""
        first = node.args[0] if node.args else None
        result = node.outputs[0] if node.outputs else None
        if result is None:
            return
        if node.target in _NORMALISING and result.type.dtype == "float32":
            self.own.add(result)
        elif is_rounding(node):
            if first in self.own:
                self.wide[result] = self.builder.of(first)
        elif first in self.wide and is_one_view(node):
            self.wide[result] = self.builder.call1(node.op, self.wide[first], *node.args[1:])
        elif node.args[1:] and node.args[1] in self.wide and is_mix(node, node.args[1]):
            matrix = self._float(self._exact(first))
            self.wide[result] = self.builder.call1(node.op, matrix, self.wide[node.args[1]])
        elif first in self.own and result.type.dtype == "float32":
            if is_one_view(node) or promotes(node) or node.target in _REDUCTIONS:
                self.own.add(result)

    def _keep(self, node: Node, wide: Value) -> None:
        """`wide` stands for the node's result; its rounded copy is dead if nobody wants it."""
        result = node.outputs[0]
        self.wide[result] = wide
        dtype = getattr(torch, result.type.dtype)
        self.builder.replace(result, self.builder.call1(aten._to_copy.default, wide, dtype=dtype))

    def _sum(self, node: Node) -> Value:
        """In float32 because one of the addends is: the stream so far, or else the one that is read
        here only, so that nothing else gets a float32 copy."""
        one, other = (self._exact(item) for item in node.args[:2])
        if _all_narrow(one, other):
            second = node.args[1]
            alone = isinstance(second, Value) and len(self.builder.readers(second)) == 1
            one, other = (one, self._float(other)) if alone else (self._float(one), other)
        return self.builder.call1(node.op, one, other, **node.kwargs)

    def _exact(self, item: Any) -> Any:
        """An addend before it was rounded, as far as that shows: it is in registers where it is
        added."""
        if not isinstance(item, Value):
            return item
        node = item.producer
        if item in self.wide:
            return self.wide[item]
        if node is None or item.type.dtype not in NARROW:
            return self.builder.of(item)
        if is_rounding(node):
            return self.builder.of(node.args[0])
        scaled = node.target == "aten.mul.Tensor" and len(self.builder.readers(item)) == 1
        if scaled or is_one_view(node):
            args = [self._exact(a) for a in node.args]
            if any(isinstance(a, Value) and a.type.dtype == "float32" for a in args):
                return self.builder.call1(node.op, *args, **node.kwargs)
        return self.builder.of(item)

    def _float(self, item: Any) -> Any:
        if not isinstance(item, Value) or item.type.dtype not in NARROW:
            return item
        return self.builder.call1(aten._to_copy.default, item, dtype=torch.float32)

    def _norm(self, node: Node) -> Value:
        dtype = getattr(torch, node.outputs[0].type.dtype)
        eps = node.argument("eps")
        eps = torch.finfo(dtype).eps if eps is None else float(eps)
        names = ("weight", "bias") if node.op is aten.layer_norm.default else ("weight",)
        parameters = [self._float(node.argument(name)) for name in names]
        x = self.wide[node.args[0]]
        return self.builder.call1(node.op, x, node.args[1], *parameters, eps)


def _all_narrow(*items: Any) -> bool:
    return all(item.type.dtype in NARROW for item in items if isinstance(item, Value))
