"""activation: gelu, silu, hardswish and hardsigmoid written out become one operator.

gelu: 0.5 x (1 + erf(x / sqrt 2)), or with tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
(arXiv:1606.08415). silu: x sigmoid(x). hardswish: x clip(x + 3, 0, 6) / 6 (arXiv:1905.02244).
The arithmetic around erf, tanh and clip is read as a polynomial, so its spelling does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of
from passes.fusion.forms import Polynomial, close, matches, polynomial, quotient, shifted

aten = torch.ops.aten
_ARITHMETIC = frozenset(f"aten.{n}" for n in (
    "mul", "div", "add", "sub", "rsub", "neg", "pow", "square", "true_divide"
))  # fmt: skip
_ROOTS = frozenset(("aten.mul", "aten.div", "aten.true_divide"))
_TANH = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Activation:
    """x must be the same value everywhere; constants must agree to five digits."""

    name: ClassVar[str] = "activation"

    def run(self, graph: Graph, log: Log) -> Graph:
        graph = apply_rules(graph, [_Gelu(), _Silu(), _HardSwish(), _HardSigmoid()], log)
        return apply_rules(graph, [_HardSwish()], log)


@dataclass(frozen=True)
class _Call:
    op: torch._ops.OpOverload
    x: Value
    keywords: tuple[tuple[str, Any], ...] = ()


class _ActivationRule(Rule[_Call]):
    roots = _ROOTS

    def check(self, found: _Call, facts: Facts) -> Refused | None:
        if found.x.type.dtype not in ("float32", "float64", "bfloat16", "float16"):
            return Refused(f"it is computed in {found.x.type.dtype}")
        return None

    def rewrite(self, builder: Builder, found: _Call, node: Node) -> Sequence[Value]:
        return builder.call(found.op, found.x, **dict(found.keywords))


def _inside(value: Value, wanted: frozenset[str], depth: int = 5) -> Iterator[Value]:
    """Values made by `wanted` below a few arithmetic operations."""
    if packet_of(value) in wanted:
        yield value
    elif depth and packet_of(value) in _ARITHMETIC:
        for argument in value.producer.args[:2]:  # type: ignore[union-attr]
            if isinstance(argument, Value):
                yield from _inside(argument, wanted, depth - 1)


def _bases(value: Any, depth: int = 6) -> Iterator[Value]:
    """What arithmetic may be a polynomial in, nearest first."""
    if not isinstance(value, Value) or depth == 0:
        return
    yield value
    if packet_of(value) in _ARITHMETIC:
        for argument in value.producer.args[:2]:  # type: ignore[union-attr]
            yield from _bases(argument, depth - 1)


class _Gelu(_ActivationRule):
    name = "gelu"

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        result = node.outputs[0]
        curved = frozenset(("aten.erf", "aten.tanh"))
        for curve in dict.fromkeys(_inside(result, curved)):
            for x in dict.fromkeys(_bases(operand(curve))):
                outer = polynomial(result, (x, curve), facts)
                if outer is None or {k for k, c in outer.items() if c} != {(1, 0), (1, 1)}:
                    continue
                yield self._judge(curve, x, outer, polynomial(operand(curve), (x,), facts))

    @staticmethod
    def _judge(
        curve: Value, x: Value, outer: Polynomial, inner: Polynomial | None
    ) -> _Call | Refused:
        half: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
        if packet_of(curve) == "aten.erf":
            if matches(inner, {(1,): math.sqrt(0.5)}) and matches(outer, half):
                return _Call(aten.gelu.default, x)
            return Refused("the constants are not those of gelu with erf")
        if matches(inner, {(1,): _TANH, (3,): _TANH * 0.044715}) and matches(outer, half):
            return _Call(aten.gelu.default, x, (("approximate", "tanh"),))
        return Refused("the constants are not those of gelu with tanh")


def sigmoid_of(value: Any, facts: Facts) -> Value | None:
    """x of sigmoid(x) or 1 / (1 + exp(-x))."""
    if packet_of(value) == "aten.sigmoid":
        x = operand(value)
        return x if isinstance(x, Value) else None
    below = None
    divided = quotient(value)
    if divided is not None and facts.number(divided[0]) == 1:
        below = divided[1]
    elif packet_of(value) == "aten.reciprocal":
        below = operand(value)
    return _one_plus_exp(below, facts)


def _one_plus_exp(value: Any, facts: Facts) -> Value | None:
    """x of 1 + exp(-x)."""
    moved = shifted(value, facts)
    if moved is None or moved[1] != 1 or packet_of(moved[0]) != "aten.exp":
        return None
    negative = operand(moved[0])
    x = operand(negative) if packet_of(negative) == "aten.neg" else None
    return x if isinstance(x, Value) else None


class _Silu(_ActivationRule):
    name = "silu"

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        result = node.outputs[0]
        divided = quotient(result)
        if divided is not None:
            if _one_plus_exp(divided[1], facts) is divided[0] and divided[0] is not None:
                yield _Call(aten.silu.default, divided[0])
            return
        for x, gate in (node.args[:2], node.args[1::-1]):
            inner = sigmoid_of(gate, facts)
            if inner is None or not isinstance(x, Value):
                continue
            if inner is x:
                yield _Call(aten.silu.default, x)
                continue
            slope = polynomial(inner, (x,), facts)
            if slope is not None and {k for k, c in slope.items() if c} == {(1,)}:
                yield Refused(f"sigmoid of {slope[(1,)]:g} x, which is not silu")


def _clip(value: Any, facts: Facts) -> tuple[Value, float, float] | None:
    """(x, low, high) of a clip to two numbers."""
    name = packet_of(value)
    if name == "aten.relu6":
        return operand(value), 0.0, 6.0
    if name in ("aten.clamp", "aten.hardtanh"):
        keys = ("min", "max") if name == "aten.clamp" else ("min_val", "max_val")
        low, high = (facts.number(value.producer.argument(k)) for k in keys)
        if low is not None and high is not None:
            return operand(value), low, high
    pairs = {"aten.clamp_max": "aten.clamp_min", "aten.minimum": "aten.maximum"}
    for outer, inner in (*pairs.items(), *((b, a) for a, b in pairs.items())):
        if name == outer and packet_of(operand(value)) == inner:
            bounds = [facts.number(operand(v, 1)) for v in (value, operand(value))]
            if None not in bounds:
                low, high = sorted(b for b in bounds if b is not None)
                return operand(operand(value)), low, high
    return None


_CLIPS = frozenset(f"aten.{n}" for n in (
    "relu6", "clamp", "hardtanh", "clamp_max", "clamp_min", "minimum", "maximum"
))  # fmt: skip


class _HardSwish(_ActivationRule):
    name = "hardswish"

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        result = node.outputs[0]
        for x, gate in (node.args[:2], node.args[1::-1]):
            if packet_of(gate) == "aten.hardsigmoid" and operand(gate) is x:
                yield _Call(aten.hardswish.default, x)
                return
        for clip in dict.fromkeys(_inside(result, _CLIPS)):
            found = _clip(clip, facts)
            if found is None:
                continue
            moved = shifted(found[0], facts)
            if moved is None:
                continue
            x, shift = moved
            outer = polynomial(result, (x, clip), facts)
            if outer is None or {k for k, c in outer.items() if c} != {(1, 1)}:
                continue
            numbers = (shift, *found[1:])
            if numbers == (3.0, 0.0, 6.0) and matches(outer, {(1, 1): 1 / 6}):
                yield _Call(aten.hardswish.default, x)
            elif numbers == (3.0, 0.0, 6.0) and outer[(1, 1)] != 1:  # 1: a part of something
                yield Refused(f"the factor is {outer[(1, 1)]:g}, not 1/6")


class _HardSigmoid(_ActivationRule):
    """clip(x + 3, 0, 6) / 6 or clip(x / 6 + 0.5, 0, 1)."""

    name = "hardsigmoid"
    roots = _ROOTS | _CLIPS

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        result = node.outputs[0]
        whole = _clip(result, facts)
        if whole is not None and whole[1:] == (0.0, 1.0):
            for x in dict.fromkeys(_bases(whole[0])):
                if matches(polynomial(whole[0], (x,), facts), {(1,): 1 / 6, (0,): 0.5}):
                    if x is not whole[0]:
                        yield _Call(aten.hardsigmoid.default, x)
                        return
        if packet_of(result) not in _ROOTS:
            return
        for clip in dict.fromkeys(_inside(result, _CLIPS)):
            found = _clip(clip, facts)
            moved = None if found is None else shifted(found[0], facts)
            scaled = polynomial(result, (clip,), facts)
            if found is None or moved is None or scaled is None:
                continue
            if (moved[1], *found[1:]) == (3.0, 0.0, 6.0) and close(scaled.get((1,), 0.0), 1 / 6):
                if {k for k, c in scaled.items() if c} == {(1,)}:
                    yield _Call(aten.hardsigmoid.default, moved[0])
