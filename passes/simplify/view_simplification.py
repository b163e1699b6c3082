"""view_simplification: views, copies and casts that change nothing, or that merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import TensorType, same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_until_stable
from graphc.rewrite.facts import is_cast, operand, packet_of, rank, widened

aten = torch.ops.aten
#: what a rule found: how to make the new value
Make = Callable[[Builder], Value]

_RESHAPES = frozenset(("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten",
                       "aten.unflatten", "aten.view_as", "aten._reshape_alias"))  # fmt: skip
_AXIS_ORDERS = frozenset(("aten.permute", "aten.transpose", "aten.t", "aten.swapaxes",
                          "aten.movedim"))  # fmt: skip
_COPIES = frozenset(("aten.clone", "aten.contiguous", "aten.detach", "aten.alias",
                     "aten.lift_fresh_copy", "aten.lift_fresh"))  # fmt: skip
_EXPANDS = frozenset(("aten.expand", "aten.broadcast_to", "aten.expand_as"))


@dataclass(frozen=True)
class ViewSimplification:
    """Repeats until nothing changes: merged views make new neighbours."""

    name: ClassVar[str] = "view_simplification"

    def run(self, graph: Graph, log: Log) -> Graph:
        rules = (
            _Identity(), _Reshape(), _AxisOrder(), _Expand(), _Squeeze(), _Cast(), _Cat(),
            _SpreadLater(),
        )  # fmt: skip
        return apply_until_stable(graph, rules, log)


class _ViewRule(Rule[Make]):
    def rewrite(self, builder: Builder, found: Make, node: Node) -> Sequence[Value]:
        return [found(builder)]


def keep(value: Value) -> Make:
    """Stands for `value` itself."""

    def made(builder: Builder) -> Value:
        result = builder.of(value)
        assert isinstance(result, Value)
        return result

    return made


def same_shape(a: Value, b: Value) -> bool:
    return rank(a) == rank(b) and all(
        same(x, y) for x, y in zip(a.type.shape, b.type.shape, strict=True)
    )


def row_major(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.strides is None


class _Identity(_ViewRule):
    """Copies of row-major values, whole slices, views to the same shape, inactive dropout, and the
    choice of one entry out of one."""

    name = "no_op"
    roots = (
        _RESHAPES | _AXIS_ORDERS | _COPIES | _EXPANDS
        | {"aten.slice", "aten.narrow", "aten.dropout", "aten.squeeze", "aten.repeat",
           "aten.native_dropout", "aten.tile", "aten.index"}
    )  # fmt: skip

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        (result, *rest) = node.outputs
        source = node.args[0]
        if rest or not isinstance(source, Value) or not same_shape(source, result):
            return
        if source.type.dtype != result.type.dtype or not self._idle(node, source):
            return
        if result in facts.kept and source.kind in ("input", "state"):
            return  # the user's copy of something that is written later
        yield keep(source)

    @staticmethod
    def _idle(node: Node, source: Value) -> bool:
        name = packet_of(node.outputs[0])
        if name in ("aten.clone", "aten.contiguous"):
            return row_major(source) and row_major(node.outputs[0])
        if name == "aten.dropout":
            return not node.argument("train") or node.argument("p") == 0
        if name in _AXIS_ORDERS:
            return axis_order(node) == tuple(range(rank(source)))
        if name == "aten.index":
            return _one_of_one(node, source)
        if name in ("aten.slice", "aten.narrow"):
            return name == "aten.narrow" or node.argument("step") == 1
        return True


def _one_of_one(node: Node, source: Value) -> bool:
    """There is one index, and only the value 0 (or -1) that it can have."""
    chosen = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    return (
        len(chosen) == 1
        and chosen[0][1].type.shape == (1,)
        and chosen[0][1].type.dtype == "int64"
        and source.type.shape[chosen[0][0]] == 1
    )


def axis_order(node: Node) -> tuple[int, ...] | None:
    """The permutation that a transpose makes."""
    count = rank(node.args[0])
    order = list(range(count))
    name = packet_of(node.outputs[0])
    if name == "aten.permute":
        return tuple(int(d) % count for d in node.args[1])
    if name == "aten.movedim":
        if not isinstance(node.args[1], int):
            return None
        moved = order.pop(int(node.args[1]) % count)
        order.insert(int(node.args[2]) % count, moved)
        return tuple(order)
    if count < 2:
        return tuple(order)
    a, b = (0, 1) if name == "aten.t" else (int(node.args[1]) % count, int(node.args[2]) % count)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


class _AxisOrder(_ViewRule):
    """permute(permute(x)) is one permute; transpose, t and movedim are spelled permute."""

    name = "merged_permutes"
    roots = _AXIS_ORDERS

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        source, order = node.args[0], axis_order(node)
        if order is None:
            return
        if packet_of(source) in _AXIS_ORDERS:
            inner = axis_order(source.producer)
            if inner is not None:
                merged = tuple(inner[d] for d in order)
                yield lambda b: b.call1(aten.permute.default, operand(source), merged)
                return
        if packet_of(node.outputs[0]) != "aten.permute":
            yield lambda b: b.call1(aten.permute.default, source, order)


class _Reshape(_ViewRule):
    """view(view(x)) is one view; every reshape of a row-major value is spelled view."""

    name = "merged_views"
    roots = _RESHAPES

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        source, shape = node.args[0], tuple(node.outputs[0].type.shape)
        inner = source
        while (
            packet_of(inner) in _RESHAPES | {"aten.unsqueeze", "aten.squeeze"}
            and row_major(operand(inner))
        ):  # fmt: skip
            inner = operand(inner)
        plain = node.target == "aten.view.default" and tuple(node.args[1]) == shape
        if inner is not source:
            yield lambda b: b.call1(aten.view.default, inner, shape)
        elif not plain and row_major(source):
            yield lambda b: b.call1(aten.view.default, source, shape)


class _Expand(_ViewRule):
    """expand(expand(x)) is one expand."""

    name = "merged_expands"
    roots = _EXPANDS

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        source, shape = node.args[0], tuple(node.outputs[0].type.shape)
        if packet_of(source) in _EXPANDS:
            yield lambda b: b.call1(aten.expand.default, operand(source), shape)


class _SpreadLater(_ViewRule):
    """op(expand(x)) is expand(op(x)) where all other operands are single numbers: fewer elements
    are computed, and none is stored twice."""

    name = "spread_later"
    roots = frozenset(f"aten.{n}" for n in (
        "where", "masked_fill", "logical_not", "bitwise_not", "_to_copy", "to", "mul", "div",
        "add", "sub", "rsub", "eq", "ne",
    ))  # fmt: skip

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        tensors = [v for v in node.inputs() if rank(v) > 0]
        if len(tensors) != 1 or packet_of(tensors[0]) not in _EXPANDS:
            return
        spread, result = tensors[0], node.outputs[0]
        inner = operand(spread)
        if not same_shape(spread, result) or same_shape(inner, spread):
            return

        def made(builder: Builder) -> Value:
            args = tuple(inner if a is spread else a for a in node.args)
            value = builder.call1(node.op, *args, **dict(node.kwargs))
            return builder.call1(aten.expand.default, value, tuple(result.type.shape))

        yield made


class _Squeeze(_ViewRule):
    """squeeze(unsqueeze(x, d), d) and unsqueeze(squeeze(x, d), d) are x."""

    name = "cancelled_unsqueeze"
    roots = frozenset(("aten.squeeze", "aten.unsqueeze"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        other = {"aten.squeeze": "aten.unsqueeze", "aten.unsqueeze": "aten.squeeze"}
        source = node.args[0]
        if packet_of(source) != other[packet_of(node.outputs[0])]:
            return
        original = operand(source)
        if same_shape(original, node.outputs[0]) and self._dim(node) == self._dim(source.producer):
            yield keep(original)

    @staticmethod
    def _dim(node: Node) -> int | None:
        source, *rest = node.args
        dims: Any = rest[0] if rest else None
        if isinstance(dims, tuple):
            dims = dims[0] if len(dims) == 1 else None
        if dims is None:
            return None
        count = max(rank(source), rank(node.outputs[0]))
        return int(dims) % count


class _Cast(_ViewRule):
    """A cast to the same dtype, and a widening that is undone at once, are nothing."""

    name = "no_op_cast"
    roots = frozenset(("aten._to_copy", "aten.to", "prims.convert_element_type"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        result, source = node.outputs[0], node.args[0]
        if not isinstance(source, Value) or (result in facts.kept and source.kind != "node"):
            return
        if not (row_major(source) or source.type == result.type):
            return
        before = widened(source)
        for candidate in (source, before):
            if candidate.type.dtype == result.type.dtype and row_major(result):
                if candidate.type == result.type or is_cast(source):
                    yield keep(candidate)
                    return


class _Cat(_ViewRule):
    """cat of one tensor is that tensor."""

    name = "cat_of_one"
    roots = frozenset(("aten.cat",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Make | Refused]:
        parts = node.args[0]
        if len(parts) == 1 and row_major(parts[0]) and parts[0].kind == "node":
            yield keep(parts[0])
