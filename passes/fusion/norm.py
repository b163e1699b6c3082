"""What the two norm passes share: x / sqrt(mean(z^2) + eps), and gain and bias behind a norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphc.ir.graph import Builder, Node, Value
from graphc.rewrite import Facts, Refused, Rule
from graphc.rewrite.facts import packet_of, rank
from passes.fusion.forms import (
    addends,
    describe_dims,
    over_root,
    reduction,
    same_sizes,
    shifted,
    squared,
    trailing,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Normalised:
    """x / sqrt(spread(z) over dims + eps). kind: "mean" or "sum" of squares, or "var0"/"var1"
    (variance over n or n - 1)."""

    x: Value
    z: Value
    kind: str
    dims: tuple[int, ...]
    eps: float
    outside: bool


def normalised(value: Value, facts: Facts) -> Iterator[Normalised]:
    """Every reading of a value as something divided by a root of a mean of squares."""
    for x, inside, outside in over_root(value, facts):
        moved = None if outside else shifted(inside, facts)
        for a, eps in ([moved] if moved else []) + [(inside, 0.0)]:
            spread = _spread(a, facts)
            if spread is not None:
                yield Normalised(x, *spread, eps, outside)
                break


def _spread(value: Value, facts: Facts) -> tuple[Value, str, tuple[int, ...]] | None:
    if packet_of(value) in ("aten.var",):
        node = value.producer
        assert node is not None
        if not node.argument("keepdim"):
            return None
        correction = node.argument("correction")
        correction = 1 if correction is None else correction
        dims = node.argument("dim")
        count = rank(node.args[0])
        dims = tuple(range(count)) if not dims else tuple(sorted(int(d) % count for d in dims))
        return node.args[0], f"var{int(correction)}", dims
    found = reduction(value, facts)
    if found is None or found.kind not in ("mean", "sum") or not found.keep:
        return None
    z = squared(found.x, facts)
    return None if z is None else (z, found.kind, found.dims)


def refuse(found: Normalised) -> Refused | None:
    """What no norm operator computes."""
    if found.outside:
        return Refused("eps is added outside of the root")
    if found.kind == "sum":
        return Refused("the squares are summed, not averaged")
    if not trailing(found.dims, rank(found.z)):
        return Refused(f"it is taken over {describe_dims(found.dims)}, not the last ones")
    if found.eps < 0:
        return Refused(f"eps is {found.eps}")
    return None


def shape_of(found: Normalised) -> tuple[Any, ...]:
    """The normalised shape, as the operators want it."""
    return tuple(found.z.type.shape[d] for d in found.dims)


def cast(builder: Builder, value: Value, dtype: str) -> Value:
    """The value in this dtype."""
    value = builder.of(value)
    if value.type.dtype == dtype:
        return value
    return builder.call1(aten._to_copy.default, value, dtype=getattr(torch, dtype))


@dataclass(frozen=True)
class Affine:
    """A norm and the parameter behind it."""

    norm: Node
    parameter: Value


class AffineRule(Rule[Affine]):
    """norm(x) * gain, norm(x) + bias: the parameter moves into the operator.

    In float32 and float64 only: narrower floats are rounded between the two, and the loop that
    computes the norm takes the multiplication in anyway.
    """

    norms: frozenset[str]

    def candidates(
        self, pair: Sequence[Any], node: Node, facts: Facts
    ) -> Iterator[Affine | Refused]:
        for norm, parameter in (pair, pair[::-1]):
            if packet_of(norm) not in self.norms or not isinstance(parameter, Value):
                continue
            if not self.free(norm.producer):
                continue
            dtypes = {norm.type.dtype, parameter.type.dtype, node.outputs[0].type.dtype}
            if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
                continue
            shape = tuple(norm.producer.args[1])
            own = tuple(parameter.type.shape)
            while len(own) > len(shape) and own[0] == 1:
                own = own[1:]
            if not same_sizes(own, shape):
                continue
            if not facts.only_reader(norm):
                yield Refused("the value before it is read elsewhere")
                continue
            yield Affine(norm.producer, parameter)

    def free(self, norm: Node) -> bool:
        """Whether the parameter's place is still empty."""
        raise NotImplementedError

    @staticmethod
    def flat(builder: Builder, found: Affine) -> Value:
        """The parameter in the normalised shape."""
        shape = tuple(found.norm.args[1])
        if rank(found.parameter) == len(shape):
            return found.parameter
        tensor = builder.graph.weights.get(found.parameter)
        if tensor is not None:
            return builder.weight(found.parameter.name, tensor.reshape(shape))
        return builder.call1(aten.view.default, found.parameter, shape)


class GainRule(AffineRule):
    """norm(x) * gain."""

    name = "gain"
    roots = frozenset(("aten.mul",))

    def free(self, norm: Node) -> bool:
        bias = norm.argument("bias") if packet_of(norm.outputs[0]) == "aten.layer_norm" else None
        return norm.argument("weight") is None and bias is None

    def pattern(self, node: Node, facts: Facts) -> Iterator[Affine | Refused]:
        yield from self.candidates(node.args[:2], node, facts)

    def rewrite(self, builder: Builder, found: Affine, node: Node) -> Sequence[Value]:
        norm, gain = found.norm, self.flat(builder, found)
        eps = norm.argument("eps")
        if packet_of(norm.outputs[0]) == "aten.rms_norm":
            return builder.call(norm.op, *norm.args[:2], gain, eps)
        return builder.call(norm.op, *norm.args[:2], gain, None, eps)


class BiasRule(AffineRule):
    """layer_norm(x) + bias."""

    name = "bias"
    roots = frozenset(("aten.add",))

    def free(self, norm: Node) -> bool:
        return norm.argument("bias") is None

    def pattern(self, node: Node, facts: Facts) -> Iterator[Affine | Refused]:
        pair = addends(node.outputs[0])
        if pair is not None:
            yield from self.candidates(pair, node, facts)

    def rewrite(self, builder: Builder, found: Affine, node: Node) -> Sequence[Value]:
        norm = found.norm
        weight = norm.argument("weight")
        bias = self.flat(builder, found)
        return builder.call(norm.op, *norm.args[:2], weight, bias, norm.argument("eps"))
