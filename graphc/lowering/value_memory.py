"""Where the values of a graph lie while it is lowered: buffers, views of them, constants, copies.

A value gets memory when it is about to be written (`allocate`): a buffer of its own, the caller's,
a window of a concatenation, or the place of an old state. What is read (`view`) may be made on the
way: views of views, weights, a concatenation, a row-major copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from graphc.distinct import Distinct
from graphc.errors import InternalError
from graphc.ir.content import raw_bytes
from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import (
    Dim,
    TensorType,
    as_dim,
    dim_max,
    dtype_name,
    is_dense,
    is_row_major,
    itemsize,
    product,
    row_major,
)
from graphc.lowering import views
from graphc.lowering.context import View
from graphc.lowering.groups import Grouping
from graphc.lowering.in_place import Places, concatenated, find_places, permuted
from graphc.lowering.layout import (
    channels_last_strides,
    channels_last_values,
    concatenation_windows,
)
from graphc.lowering.loops import Constant, Load, Loop, Store
from graphc.lowering.pointwise import literal
from graphc.lowering.steps import BufferInfo, ConstantInfo


class ValueMemory:
    """The part of a Lowering that gives values memory; it emits loops for copies."""

    def __init__(self, graph: Graph, grouping: Grouping) -> None:
        self.graph = graph
        self.grouping = grouping
        self.channels_last = channels_last_values(graph, grouping.kinds)
        self.windows = concatenation_windows(graph, grouping.kinds, self.channels_last)
        self.places: Places = find_places(graph, grouping)
        self.buffers: list[BufferInfo] = []
        self.constants: list[ConstantInfo] = []
        self.memory: dict[Value, View] = {}
        self.row_major_copies: dict[View, View] = {}
        self._constant_views: Distinct[View] = Distinct()
        self._result_buffers: dict[Value, View] = {}  # results that go straight to the caller

    def _emit_loop(self, loop: Loop, names: Sequence[str], label: str) -> None:
        raise NotImplementedError

    def _buffer(self, kind: str, index: int, type_: TensorType, name: str) -> View:
        shape = type_.shape
        self.buffers.append(
            BufferInfo(kind, index, as_dim(product(shape) * itemsize(type_.dtype)), name)
        )
        return View(len(self.buffers) - 1, type_.dtype, shape, row_major(shape))

    # -- reading ------------------------------------------------------------------------------

    def view(self, value: Any) -> View:
        """The strided view of a value, computing views and weights on demand."""
        if value in self.memory:
            return self.memory[value]
        if value in self.graph.weights:
            made = self.constant(value.name, self.graph.weights[value], origin=value.name)
            self.memory[value] = made
            return made
        producer = value.producer
        if producer in self.places.parted:
            self._copies(producer)
            return self.memory[value]
        if producer is not None and self.grouping.kinds[producer][0] == "view":
            base = self.view(producer.args[0])
            made_view = views.apply(producer, base)
            if made_view is None:
                base = self._row_major(base)
                made_view = views.apply(producer, base)
                if made_view is None:
                    raise InternalError(f"cannot view through {producer}")
            self.memory[value] = made_view.with_(dtype=value.type.dtype)
            return self.memory[value]
        raise InternalError(f"{value.name} is read before it is in memory")

    def parts(self, value: Any, dim: int) -> list[View]:
        """What a value is concatenated of, if only attention reads it; else its view."""
        cat = None if value in self.memory else concatenated(value, dim)
        if cat is None or cat not in self.places.parted or cat.outputs[0] in self.memory:
            return [self.view(value)]
        parts = [self.view(part) for part in cat.args[0] if part.type.shape != (0,)]
        return permuted(parts, cat, value)

    def _row_major(self, view: View) -> View:
        if is_row_major(view.shape, view.strides):
            return view
        if view not in self.row_major_copies:
            self.row_major_copies[view] = self._copied(view)
        return self.row_major_copies[view]

    def contiguous(self, value: Any) -> View:
        """Row-major view of a value; a copy Step is emitted when it is not."""
        return self._row_major(self.view(value))

    # -- writing ------------------------------------------------------------------------------

    def allocate(self, value: Value) -> View:
        """Memory for a value that is about to be written."""
        if value in self.memory:
            return self.memory[value]
        if value in self.places.homes:
            view = self.memory[self.places.homes[value]]
            self.row_major_copies = {  # those of the old content are stale
                seen: copy
                for seen, copy in self.row_major_copies.items()
                if seen.buffer != view.buffer
            }
        elif value in self._result_buffers:
            view = self._result_buffers[value]
        elif value in self.windows:
            node, place = self.windows[value]
            view = self._window(node, place)
        else:
            view = self._buffer("arena", -1, value.type, value.name)
            if value in self.channels_last:
                order = channels_last_strides(value.type.shape, value.type.dtype)
                view = view.with_(strides=order)
                nbytes = product((value.type.shape[0], order[0], itemsize(value.type.dtype)))
                self.buffers[view.buffer].nbytes = nbytes
            strides, producer = value.type.strides, value.producer
            if producer is not None and producer.target.endswith("attention.default"):
                # attention results are read as [B, T, H, D] by what follows: torch's own layout
                # makes that a view
                if strides is not None and is_dense(value.type.shape, strides):
                    view = view.with_(strides=strides)
        self.memory[value] = view
        return view

    def outputs(self, node: Node) -> tuple[View, ...]:
        """Row-major views for the results of `node`."""
        return tuple(self.allocate(v) for v in node.outputs)

    def workspace(self, shape: Sequence[Dim], dtype: str) -> View:
        """Temporary arena memory."""
        return self._buffer("arena", -1, TensorType(dtype, tuple(shape)), "workspace")

    def _window(self, cat: Node, place: int) -> View:
        """Where the `place`-th operand of a concatenation lies in its result."""
        target, parts = self.allocate(cat.outputs[0]), cat.args[0]
        dim = int(cat.argument("dim")) % max(len(target.shape), 1)
        before = [v.type.shape[dim] for v in parts[:place] if v.type.shape != (0,)]
        offset = target.offset
        for size in before:
            offset = as_dim(offset + size * target.strides[dim])
        return target.with_(shape=parts[place].type.shape, offset=offset)

    # -- constants ----------------------------------------------------------------------------

    def weight(self, value: Any) -> torch.Tensor | None:
        """The constant behind a value (through views)."""
        if not isinstance(value, Value):
            return None
        if value in self.graph.weights:
            return self.graph.weights[value]
        producer = value.producer
        if producer is not None and self.grouping.kinds[producer][0] == "view":
            base = self.weight(producer.args[0])
            if base is not None and not any(isinstance(d, sympy.Expr) for d in value.type.shape):
                args = [base, *producer.args[1:]]
                with torch.no_grad():
                    made: torch.Tensor = producer.op(
                        *[list(a) if isinstance(a, tuple) else a for a in args], **producer.kwargs
                    )
                return made
        return None

    def constant(self, name: str, data: torch.Tensor, layout: str = "", origin: str = "") -> View:
        """Stores a constant once per distinct content."""
        data = data.detach().contiguous()
        content, kind = raw_bytes(data), (data.dtype, tuple(data.shape))
        known = self._constant_views.find(content, kind)
        if known is not None:
            return known
        self.constants.append(ConstantInfo(name, data, layout, origin or name))
        shape = tuple(int(s) for s in data.shape)
        view = self._buffer(
            "weight", len(self.constants) - 1, TensorType(dtype_name(data.dtype), shape), name
        )
        self._constant_views.note(content, view, kind)
        return view

    # -- copies -------------------------------------------------------------------------------

    def _copy(self, source: View, target: View) -> None:
        """A strided copy; shapes are equal."""
        domain = list(target.shape)
        load = Load(source.dtype, source, tuple(source.strides))
        loop = Loop(domain, stores=[Store(load, target, tuple(target.strides))])
        self._emit_loop(loop, [], "copy")

    def _fill(self, value: Any, target: View) -> None:
        scalar = Constant(target.dtype, literal(value, target.dtype))
        loop = Loop(list(target.shape), stores=[Store(scalar, target, tuple(target.strides))])
        self._emit_loop(loop, [], "fill")

    def _copies(self, node: Node) -> None:
        result = node.outputs[0]
        target = self.allocate(result)
        if node.target == "aten.cat.default":
            for place, part in enumerate(node.args[0]):
                source = self.view(part)
                written = self.windows.get(part) == (node, place) and source.buffer == target.buffer
                if part.type.shape != (0,) and not written:
                    self._copy(source, self._window(node, place))
            return
        source = self.view(node.args[0])
        pads = list(node.args[1])
        value = node.argument("value")
        self._fill(0 if value is None else value, target)
        shape, offset_in, offset_out = list(source.shape), source.offset, target.offset
        for k in range(len(pads) // 2):
            dim = len(shape) - 1 - k
            before, after = pads[2 * k], pads[2 * k + 1]
            # a negative width crops; the sign of a symbolic one is known only at run time
            offset_in = as_dim(offset_in + dim_max(-before, 0) * source.strides[dim])
            offset_out = as_dim(offset_out + dim_max(before, 0) * target.strides[dim])
            shape[dim] = as_dim(shape[dim] - dim_max(-before, 0) - dim_max(-after, 0))
        self._copy(
            source.with_(shape=tuple(shape), offset=offset_in),
            target.with_(shape=tuple(shape), offset=offset_out),
        )

    def _copied(self, source: View) -> View:
        """A row-major copy of a view."""
        type_ = TensorType(source.dtype, source.shape)
        target = self._buffer("arena", -1, type_, "copy")
        self._copy(source, target)
        return target
