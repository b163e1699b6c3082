"""linear_from_matmul: products with a constant matrix become aten.linear, bias included.

linear's weight is [out, in]: the layout that is packed for the kernels at build time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_until_stable
from graphc.rewrite.facts import operand, packet_of, rank
from passes.simplify.view_simplification import axis_order, same_shape

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearFromMatmul:
    """mm, matmul and addmm with a constant right side; then a constant bias behind a linear, and
    views that only flatten its rows move behind it, where they meet the views that undo them."""

    name: ClassVar[str] = "linear_from_matmul"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_until_stable(graph, [_Product(), _Bias(), _Flattened()], log)


@dataclass(frozen=True)
class _Linear:
    x: Value
    matrix: Value  # [in, out]
    bias: Value | None
    tensor: torch.Tensor  # [out, in]
    stored: Value | None  # the weight that already is [out, in]


class _Product(Rule[_Linear]):
    name = "constant_matrix"
    roots = frozenset(("aten.mm", "aten.matmul", "aten.addmm"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Linear | Refused]:
        bias: Value | None = None
        x, matrix = node.args[-2:]
        if packet_of(node.outputs[0]) == "aten.addmm":
            bias = node.args[0]
            assert bias is not None
            if node.argument("alpha") != 1 or node.argument("beta") != 1:
                return
            if facts.weight(bias) is None or bias.type.shape != matrix.type.shape[1:]:
                return
        if rank(x) < 2 or rank(matrix) != 2:
            return
        tensor, stored = facts.weight(matrix), None
        if tensor is None and packet_of(matrix) in ("aten.permute", "aten.t", "aten.transpose"):
            source = operand(matrix)
            tensor = facts.weight(source)
            if tensor is None or axis_order(matrix.producer) != (1, 0):
                return
            stored = source
        if tensor is not None:
            yield _Linear(x, matrix, bias, tensor if stored else tensor.t(), stored)

    def check(self, found: _Linear, facts: Facts) -> Refused | None:
        if not found.tensor.dtype.is_floating_point:
            return Refused(f"integer product over {found.tensor.dtype}")
        readers = facts.readers(found.matrix)
        if found.stored is None and any(packet_of(n.outputs[0]) not in self.roots for n in readers):
            return Refused("the matrix is also read elsewhere: a transposed copy would cost memory")
        return None

    def rewrite(self, builder: Builder, found: _Linear, node: Node) -> Sequence[Value]:
        weight = found.stored or transposed(builder, found.matrix, found.tensor)
        return builder.call(aten.linear.default, found.x, weight, found.bias)


def transposed(builder: Builder, matrix: Value, tensor: torch.Tensor) -> Value:
    """One new weight per matrix, however often it is used."""
    made: dict[Value, Value] = builder.__dict__.setdefault("_transposed", {})
    if matrix not in made:
        made[matrix] = builder.weight(matrix.name, tensor.contiguous())
    return made[matrix]


@dataclass(frozen=True)
class _Sum:
    linear: Node
    bias: Value


class _Bias(Rule[_Sum]):
    """linear(x, w) + b for a constant b of one row."""

    name = "bias"
    roots = frozenset(("aten.add",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Sum | Refused]:
        if node.target != "aten.add.Tensor" or node.argument("alpha") != 1:
            return
        for product, bias in (node.args[:2], node.args[1::-1]):
            if packet_of(product) != "aten.linear" or not isinstance(bias, Value):
                continue
            if product.producer.argument("bias") is not None or facts.weight(bias) is None:
                continue
            width = product.type.shape[-1:]
            if bias.type.shape[-1:] == width and bias.type.numel() == width[0]:
                if bias.type.dtype == product.type.dtype in ("float32", "float64"):
                    if same_shape(product, node.outputs[0]) and facts.only_reader(product):
                        yield _Sum(product.producer, bias)

    def rewrite(self, builder: Builder, found: _Sum, node: Node) -> Sequence[Value]:
        bias = found.bias
        if rank(bias) > 1:
            tensor = builder.graph.weights[bias]
            bias = builder.weight(bias.name, tensor.reshape(-1))
        return builder.call(aten.linear.default, *found.linear.args[:2], bias)


class _Flattened(Rule[Value]):
    """linear(view(x, (rows, in))) is view(linear(x), (rows, out))."""

    name = "flattened_rows"
    roots = frozenset(("aten.linear",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        flat = node.args[0]
        if packet_of(flat) not in ("aten.view", "aten._unsafe_view", "aten.reshape"):
            return
        x = operand(flat)
        if rank(flat) == 2 and rank(x) > 2 and x.type.strides is None:
            if same(x.type.shape[-1], flat.type.shape[-1]) and _undone(node, facts):
                yield x

    def rewrite(self, builder: Builder, found: Value, node: Node) -> Sequence[Value]:
        made = builder.call1(node.op, found, *node.args[1:], **dict(node.kwargs))
        return builder.call(aten.view.default, made, tuple(node.outputs[0].type.shape))


def _undone(node: Node, facts: Facts) -> bool:
    """Whether the result is seen in its unflattened shape everywhere."""
    readers = facts.readers(node.outputs[0])
    return bool(readers) and all(packet_of(r.outputs[0]) == "aten.view" for r in readers)
