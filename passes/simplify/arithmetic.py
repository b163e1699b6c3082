"""arithmetic: operations that return their argument bit by bit.

x * 1, x / 1, x - 0, x ** 1, -(-x), and x + 0 for integers (for floats, -0.0 + 0.0 is 0.0, so only
x + -0.0). NaN and infinities pass through all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_until_stable
from graphc.rewrite.facts import operand, packet_of
from passes.simplify.view_simplification import same_shape


@dataclass(frozen=True)
class Arithmetic:
    """Exact identities only."""

    name: ClassVar[str] = "arithmetic"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_until_stable(graph, [_Neutral(), _Twice(), _Masked()], log)


class _ToArgument(Rule[Value]):
    """The result is one of the arguments."""

    def check(self, found: Value, facts: Facts) -> Refused | None:
        return None

    def rewrite(self, builder: Builder, found: Value, node: Node) -> Sequence[Value]:
        if same_shape(found, node.outputs[0]):
            return [found]
        # the constant side only made it larger
        shape = tuple(node.outputs[0].type.shape)
        return builder.call(torch.ops.aten.expand.default, found, shape)


def _alike(source: object, node: Node) -> bool:
    result = node.outputs[0]
    return (
        isinstance(source, Value)
        and source.type.dtype == result.type.dtype
        and same_shape(source, result)
    )


class _Neutral(_ToArgument):
    """The other operand is the neutral element."""

    name = "neutral_element"
    roots = frozenset(f"aten.{n}" for n in ("mul", "div", "true_divide", "add", "sub", "pow"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        if len(node.args) < 2 or node.target.endswith("_mode"):
            return
        operation = packet_of(node.outputs[0]).removeprefix("aten.")
        pairs = [(node.args[0], node.args[1])]
        if operation in ("mul", "add"):
            pairs.append((node.args[1], node.args[0]))
        for source, other in pairs:
            number = facts.number(other)
            if number is not None and _alike(source, node):
                if self._neutral(operation, number, source.type.dtype):
                    yield source
                    return

    @staticmethod
    def _neutral(operation: str, number: float, dtype: str) -> bool:
        if operation in ("mul", "div", "true_divide", "pow"):
            return number == 1
        if number != 0:
            return False
        floating = getattr(torch, dtype).is_floating_point
        if operation == "sub":
            return not floating or math.copysign(1.0, number) > 0
        return not floating or math.copysign(1.0, number) < 0


class _Twice(_ToArgument):
    """neg(neg(x)), and logical_not twice on a bool, are x; min/max style repeats are once."""

    name = "undone"
    roots = frozenset(("aten.neg", "aten.logical_not", "aten.bitwise_not", "aten.relu"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        source = node.args[0]
        name = packet_of(node.outputs[0])
        if packet_of(source) != name:
            return
        original = source if name == "aten.relu" else operand(source)
        if _alike(original, node):
            yield original


class _Masked(_ToArgument):
    """A mask that is constant picks one side everywhere."""

    name = "constant_mask"
    roots = frozenset(("aten.where", "aten.masked_fill", "aten.bitwise_and", "aten.logical_and",
                       "aten.bitwise_or", "aten.logical_or"))  # fmt: skip

    def pattern(self, node: Node, facts: Facts) -> Iterator[Value | Refused]:
        name = packet_of(node.outputs[0]).removeprefix("aten.")
        if name == "where" and len(node.args) == 3:
            choice = facts.number(node.args[0])
            if choice is not None and _alike(node.args[1 if choice else 2], node):
                yield node.args[1 if choice else 2]
        elif name == "masked_fill":
            if facts.number(node.args[1]) == 0 and _alike(node.args[0], node):
                yield node.args[0]
        elif node.outputs[0].type.dtype == "bool":
            neutral = 1.0 if name.endswith("and") else 0.0
            for source, other in (node.args[:2], node.args[1::-1]):
                if facts.number(other) == neutral and isinstance(source, Value):
                    if source.type.dtype == "bool":
                        yield source
                        return
