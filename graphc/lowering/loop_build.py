"""Group -> Loop: graph nodes become scalars over the group's domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy

from graphc.errors import InternalError
from graphc.ir.graph import Node, Value
from graphc.ir.types import Dim, as_dim, product
from graphc.lowering import pointwise
from graphc.lowering.classify import REDUCTIONS, reduced_dims
from graphc.lowering.group_axes import Axes
from graphc.lowering.groups import Group, Grouping
from graphc.lowering.loops import (
    Accumulator,
    Compute,
    Constant,
    Load,
    Loop,
    Position,
    Reduce,
    Scalar,
    Size,
    Store,
)
from graphc.lowering.pointwise_operands import operand_dtypes, operands

if TYPE_CHECKING:
    from graphc.lowering.lower import Lowering


def build_loop(
    lowering: Lowering, group: Group, stored: Sequence[Value], grouping: Grouping
) -> Loop:
    """The loop that computes `stored`; memory for them is allocated here."""
    return _LoopBuilder(lowering, group, grouping).build(stored)


class _LoopBuilder:
    def __init__(self, lowering: Lowering, group: Group, grouping: Grouping) -> None:
        self.lowering = lowering
        self.group = group
        self.grouping = grouping
        self.scalars: dict[Value, Scalar] = {}
        self.loads: dict[tuple[Any, ...], Load] = {}
        self.own = {v for m in group.members for v in m.outputs}

    def build(self, stored: Sequence[Value]) -> Loop:
        for node in self.group.members:
            if node is self.group.anchor:
                self.scalars[node.outputs[0]] = Accumulator("float32")
                continue
            what = self.grouping.kinds[node][0]
            if what == "create":
                self.scalars[node.outputs[0]] = self._create(node)
            elif what == "reduce":
                self._reduce(node)
            else:
                self.scalars[node.outputs[0]] = self._pointwise(node)
        stores: list[Store] = []
        for value in stored:
            view = self.lowering.allocate(value)
            strides: list[Dim] = [0] * len(self.group.domain)
            for dim, axis in enumerate(self.group.axes[value]):
                if axis is not None:
                    strides[axis] = view.strides[dim]
            stores.append(Store(self.scalars[value], view, tuple(strides)))
        return Loop(
            list(self.group.domain), self.group.reduced, stores,
            [m.name for m in self.group.members],
        )  # fmt: skip

    def _held(self, value: Value) -> Scalar | None:
        """The scalar of a value in registers (possibly seen through views)."""
        base = value
        while base not in self.scalars:
            producer = base.producer
            if producer is None or self.grouping.kinds[producer][0] != "view":
                return None
            base = producer.args[0]
        return self.scalars[base] if value in self.group.axes else None

    def _operand(self, item: Any, node: Node, axes: Axes, dtype: str) -> Scalar:
        """An argument as a scalar; `axes` are those of the node's result."""
        if isinstance(item, Value):
            held = self._held(item)
            if held is not None:
                return held
            return self._load(item, axes)
        if isinstance(item, sympy.Expr):
            return Size(dtype, as_dim(item))
        return Constant(dtype, pointwise.literal(item, dtype))

    def _load(self, value: Value, axes: Axes) -> Load:
        view = self.lowering.view(value)
        shift = len(axes) - len(view.shape)
        strides: list[Dim] = [0] * len(self.group.domain)
        for dim, size in enumerate(view.shape):
            axis = axes[shift + dim]
            if axis is not None and size != 1:
                strides[axis] = view.strides[dim]
        key = (view.buffer, view.offset, view.dtype, tuple(strides))
        if key not in self.loads:
            self.loads[key] = Load(view.dtype, view, tuple(strides))
        return self.loads[key]

    def _pointwise(self, node: Node) -> Scalar:
        result = node.outputs[0]
        axes = self.group.axes[result]
        items = operands(node)
        dtypes = operand_dtypes(node, items)
        scalars = tuple(
            self._operand(item, node, axes, dtype)
            for item, dtype in zip(items, dtypes, strict=True)
        )
        row = pointwise.ROWS[node.target]
        names = [f"{{{k}}}" for k in range(len(items))]
        template = row.expression(node, *names)
        return Compute(result.type.dtype, template, scalars, tuple(dtypes), row.heavy)

    def _create(self, node: Node) -> Scalar:
        result = node.outputs[0]
        dtype = result.type.dtype
        axes = self.group.axes[result]
        name = node.target.split(".")[1]
        if name in ("zeros", "zeros_like", "new_zeros", "empty"):
            return Constant(dtype, pointwise.literal(0, dtype))
        if name in ("ones", "ones_like", "new_ones"):
            return Constant(dtype, pointwise.literal(1, dtype))
        if name in ("full", "full_like", "scalar_tensor", "new_full"):
            key = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value"}
            value = node.argument(key.get(name, "s"))
            return self._operand(value, node, axes, dtype)
        start: Any = 0
        step: Any = 1
        if node.target == "prims.iota.default":
            start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
        elif node.target == "aten.arange.start":
            start = node.args[0]
        elif node.target == "aten.arange.start_step":
            start = node.args[0]
            step = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
        if isinstance(start, int) and isinstance(step, float):
            start = float(start)
        if isinstance(step, int) and isinstance(start, float):
            step = float(step)
        if pointwise.is_float(dtype):
            start = float(start) if isinstance(start, int) else start
            step = float(step) if isinstance(step, int) else step
        elif isinstance(start, float):
            start, step = int(start), int(step)
        return Position(dtype, axes[0] if axes else None, start, step)

    def _reduce(self, node: Node) -> None:
        source = node.args[0]
        assert isinstance(source, Value)
        dims = reduced_dims(node)
        kind = REDUCTIONS[node.target]
        held = self._held(source)
        axes = self.group.axes.get(source)
        if held is None or axes is None:
            result_axes = self._source_axes(node, source, dims)
            held = self._load(source, result_axes)
        value = node.outputs[0]
        arg = held
        if kind in ("sum", "prod", "mean") and value.type.dtype != source.type.dtype:
            # torch converts before it sums (bool and integers to int64, or the dtype asked for)
            arg = Compute(value.type.dtype, "{0}", (held,), (value.type.dtype,))
        if all(source.type.shape[d] == 1 for d in dims):
            self.scalars[value] = _trivial(kind, arg, value.type.dtype)
            if len(node.outputs) == 2:
                self.scalars[node.outputs[1]] = Constant("int64", "(int64_t)0")
            return
        if kind == "mean":
            count = product([source.type.shape[d] for d in dims])
            scalar: Scalar = Reduce(value.type.dtype, "mean", arg, as_dim(count))
        else:
            scalar = Reduce(value.type.dtype, kind, arg)
        self.scalars[value] = scalar
        if len(node.outputs) == 2:
            index = node.outputs[1]
            self.scalars[index] = Reduce(index.type.dtype, f"arg{kind}", held)

    def _source_axes(self, node: Node, source: Value, dims: Sequence[int]) -> Axes:
        """The axes of a reduction's operand that comes from memory: its dims in order."""
        axes: list[int | None] = []
        count = 0
        for size in source.type.shape:
            if size == 1:
                axes.append(None)
            else:
                axes.append(count)
                count += 1
        if count != len(self.group.domain):
            raise InternalError(f"{node} reduces over another domain than its group")
        return tuple(axes)


def _trivial(kind: str, arg: Scalar, dtype: str) -> Scalar:
    """A reduction over dims of size 1 only: the element itself, its truth, or position 0."""
    if kind in ("argmax", "argmin"):
        return Constant("int64", "(int64_t)0")
    if kind in ("any", "all"):
        return Compute(dtype, "{0}", (arg,), ("bool",))
    return Compute(dtype, "{0}", (arg,), (dtype,))
