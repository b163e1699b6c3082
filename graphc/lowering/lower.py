"""Graph -> Steps: walks the groups in order, asks the rules, generates the loops.

The result (`Lowered`) is still symbolic; `graphc.lowering.program` turns it into the Program of a
bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sympy
import torch

import graphc.kernels
from graphc.errors import InternalError
from graphc.ir.content import raw_bytes
from graphc.ir.graph import Graph, Node, Value, map_tree
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
from graphc.lowering.context import RULES, Epilogue, Refuse, Unit, View
from graphc.lowering.expand import expand
from graphc.lowering.groups import Group, Grouping, group_nodes, result_parts, root
from graphc.lowering.in_place import Places, concatenated, find_places, permuted, updates
from graphc.lowering.layout import (
    channels_last_strides,
    channels_last_values,
    concatenation_windows,
)
from graphc.lowering.loop_axes import collapsible, result_axes
from graphc.lowering.loop_build import build_loop
from graphc.lowering.loop_codegen import generate
from graphc.lowering.loop_epilogue import generate_epilogue
from graphc.lowering.loops import Constant, Load, Loop, Store
from graphc.lowering.steps import (
    BufferInfo,
    ConstantInfo,
    FallbackStep,
    KernelStep,
    Lowered,
    label_of,
    used_constants,
)
from graphc.lowering.tuning import Choice, Tuning
from graphc.lowering.work import loop_flops


def lower(graph: Graph, isa: str, tuning: Tuning | None = None) -> Lowered:
    """Lowers a graph for an instruction set level ("avx512", "avx2", "portable"). `tuning` decides
    what rules leave to measurement; without it, their defaults hold."""
    expanded = expand(graph)
    return Lowering(expanded, isa, tuning).run()


class Lowering:
    """Implements graphc.lowering.context.LoweringContext."""

    def __init__(self, graph: Graph, isa: str, tuning: Tuning | None = None) -> None:
        self.graph = graph
        self.isa = isa
        self.tuning = tuning or Tuning()
        self._choices: dict[str, None] = {}  # keys of what the current rule asked
        self._bound = {s.name for s in graph.symbols.values() if not s.data}
        self.grouping: Grouping = group_nodes(graph)
        self.channels_last = channels_last_values(graph, self.grouping.kinds)
        self.windows = concatenation_windows(graph, self.grouping.kinds, self.channels_last)
        self.buffers: list[BufferInfo] = []
        self.steps: list[KernelStep | FallbackStep] = []
        self.constants: list[ConstantInfo] = []
        self.places: Places = find_places(graph, self.grouping)
        self.memory: dict[Value, View] = {}
        self.row_major_copies: dict[View, View] = {}
        self.fallbacks: list[tuple[str, str, str]] = []
        self.current: Group | None = None
        self._constant_ids: dict[str, View] = {}
        self._result_buffers: dict[Value, View] = {}
        self._headers: dict[str, str] = {}
        self._fused_behind = False  # the current rule took its group's epilogue

    # -- driver -------------------------------------------------------------------------------

    def run(self) -> Lowered:
        """Emits all Steps."""
        graph = self.graph
        for position, value in enumerate(graph.inputs):
            self.memory[value] = self._buffer("input", position, value.type, value.name)
        for position, value in enumerate(graph.states):
            self.memory[value] = self._buffer("state", position, value.type, value.name)
        self._plan_results()
        for group in self.grouping.order:
            self.current = group
            self._group(group)
        self.current = None
        results, types = self._results()
        self._updates()
        self.constants = used_constants(self.buffers, self.steps, self.constants)
        return Lowered(
            graph, self.buffers, self.steps, self.constants, results, types, self.fallbacks
        )

    def _updates(self) -> None:
        """Writes the new contents of states and inputs, all of them read before any is written:
        one may be another's old content (a swap), or its own seen differently."""
        pending = [(self.view(v), self.memory[target]) for target, v in updates(self.graph)]
        pending = [(source, target) for source, target in pending if source != target]
        overwritten = {target.buffer for _, target in pending}
        for position, (source, target) in enumerate(pending):
            if source.buffer in overwritten:
                type_ = TensorType(source.dtype, source.shape)
                kept = self._buffer("arena", -1, type_, "update")
                self._copy(source, kept)
                pending[position] = (kept, target)
        for source, target in pending:
            self._copy(source, target)

    def _buffer(self, kind: str, index: int, type_: TensorType, name: str) -> View:
        shape = type_.shape
        self.buffers.append(
            BufferInfo(kind, index, as_dim(product(shape) * itemsize(type_.dtype)), name)
        )
        return View(len(self.buffers) - 1, type_.dtype, shape, row_major(shape))

    def _plan_results(self) -> None:
        """A result that is a node's own value is written straight into the caller's buffer."""
        updated = set(self.graph.state_updates.values()) | set(self.graph.input_updates.values())
        for position, result in enumerate(self.graph.results):
            if not isinstance(result, Value) or result in self._result_buffers:
                continue
            producer = result.producer
            if producer is None or self.grouping.kinds[producer][0] in ("view", "fallback"):
                continue
            if not isinstance(result.type, TensorType) or result in updated:
                continue
            self._result_buffers[result] = self._buffer(
                "output", position, result.type, result.name
            )

    def _results(self) -> tuple[list[tuple[str, Any]], list[TensorType | None]]:
        made: list[tuple[str, Any]] = []
        types: list[TensorType | None] = []
        used: set[int] = set()
        inputs = {value: k for k, value in enumerate(self.graph.inputs)}
        mutated = set(self.graph.input_updates)
        for position, result in enumerate(self.graph.results):
            if isinstance(result, sympy.Expr):
                made.append(("dim", result))
                types.append(None)
                continue
            if not isinstance(result, Value):
                made.append(("constant", result))
                types.append(None)
                continue
            types.append(result.type)
            if result in inputs and result not in mutated:
                made.append(("input", inputs[result]))
                continue
            # a mutated input returned under its new value is the caller's own object
            changed = [i for i, v in self.graph.input_updates.items() if v is result]
            if changed:
                made.append(("input", inputs[changed[0]]))
                continue
            view = self.view(result)
            info = self.buffers[view.buffer]
            if (
                info.kind == "output"
                and info.index == position
                and view.buffer not in used
                and result in self._result_buffers
            ):
                used.add(view.buffer)
                made.append(("buffer", view.buffer))
                continue
            own = root(result, self.grouping.kinds).type.shape == result.type.shape
            if (
                info.kind == "external"
                and view.buffer not in used
                and own  # torch's tensor itself, not a view of another shape
                and self._whole(view)
            ):
                used.add(view.buffer)
                made.append(("buffer", view.buffer))
                continue
            target = self._buffer("output", position, result.type, result.name)
            self._copy(view, target)
            made.append(("buffer", target.buffer))
        return made, types

    def _whole(self, view: View) -> bool:
        total = as_dim(product(view.shape) * itemsize(view.dtype))
        return (
            view.offset == 0
            and total == self.buffers[view.buffer].nbytes
            and is_row_major(view.shape, view.strides)
        )

    def _group(self, group: Group) -> None:
        if group.anchor is not None:
            self._node(group.anchor, group)
            return
        first = group.members[0]
        what, reason = self.grouping.kinds[first]
        if what == "fallback":
            self._fallback(first, reason)
        elif what == "copy":
            if first not in self.places.parted:
                self._copies(first)
        elif what == "template":
            self._node(first, group)
        else:
            self._loop(group)

    def _loop(self, group: Group) -> None:
        stored = self._stored(group)
        if not stored:
            return
        loop = build_loop(self, group, stored, self.grouping)
        self._emit_loop(loop, [m.name for m in group.members], label_of(group.members))

    def _stored(self, group: Group) -> list[Value]:
        """Values of the group that others read through memory."""
        wanted: dict[Value, None] = {}
        members = set(group.members)
        own = {v for m in group.members for v in m.outputs}
        needed = self._needed_by_others(members, own)
        for member in group.members:
            for value in member.outputs:
                if value in needed:
                    wanted[value] = None
        return list(wanted)

    def _needed_by_others(self, members: set[Node], own: set[Value]) -> set[Value]:
        if not hasattr(self, "_readers"):
            kinds = self.grouping.kinds
            self._readers: dict[Value, set[Node]] = {}
            self._leaving: set[Value] = set()
            for node in self.graph.nodes:
                if kinds[node][0] == "view":
                    continue
                for value in node.inputs():
                    self._readers.setdefault(root(value, kinds), set()).add(node)
            for value in self.graph.kept():
                self._leaving.add(root(value, kinds))
        return {
            v
            for v in own
            if v in self._leaving or any(r not in members for r in self._readers.get(v, ()))
        }

    def _emit_loop(self, loop: Loop, names: Sequence[str], label: str) -> None:
        made = generate(loop)
        self.kernel(
            Unit(label, made.source), made.symbol, pointers=made.pointers,
            immediates=made.immediates, reads=made.reads, writes=made.writes, range=made.range,
            grain=made.grain, scratch=made.scratch, label=label, nodes=names,
            flops=loop_flops(loop),
        )  # fmt: skip

    def _node(self, node: Node, group: Group) -> None:
        """A template; if its rule refuses, torch does it and the epilogue becomes a loop."""
        mark = len(self.steps)
        before = dict(self.memory), dict(self.row_major_copies)
        self._fused_behind = False
        self._choices = {}
        try:
            RULES[node.target](self, node)
        except Refuse as refusal:
            # what the rule had begun is undone, copies it asked for included
            del self.steps[mark:]
            self.memory, self.row_major_copies = before
            self._fallback(node, str(refusal))
        else:
            for step in self.steps[mark:]:
                if isinstance(step, KernelStep):
                    step.choices = tuple(self._choices)
            for value in node.outputs:
                if value not in self.memory and value in self._stored(group):
                    raise InternalError(f"the rule for {node.target} made no {value.name}")
            if self._fused_behind:
                return
        rest = [m for m in group.members if m is not node]
        if rest:
            follower = Group(group.number, group.domain, members=rest, axes=dict(group.axes))
            for value in node.outputs:
                follower.axes.pop(value, None)
            for member in rest:
                self.grouping.group_of[member] = follower
            self._loop(follower)

    # -- copies -------------------------------------------------------------------------------

    def _copy(self, source: View, target: View) -> None:
        """A strided copy; shapes are equal."""
        domain = list(target.shape)
        load = Load(source.dtype, source, tuple(source.strides))
        loop = Loop(domain, stores=[Store(load, target, tuple(target.strides))])
        self._emit_loop(loop, [], "copy")

    def _fill(self, value: Any, target: View) -> None:
        from graphc.lowering.pointwise import literal

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

    def _window(self, cat: Node, place: int) -> View:
        """Where the `place`-th operand of a concatenation lies in its result."""
        target, parts = self.allocate(cat.outputs[0]), cat.args[0]
        dim = int(cat.argument("dim")) % max(len(target.shape), 1)
        before = [v.type.shape[dim] for v in parts[:place] if v.type.shape != (0,)]
        offset = target.offset
        for size in before:
            offset = as_dim(offset + size * target.strides[dim])
        return target.with_(shape=parts[place].type.shape, offset=offset)

    # -- fallback -----------------------------------------------------------------------------

    def _fallback(self, node: Node, reason: str) -> None:
        reads: list[int] = []

        def leaf(item: Any) -> Any:
            if isinstance(item, Value):
                view = self.view(item)
                reads.append(view.buffer)
                return view
            return item

        arguments, keywords = map_tree(leaf, node.args), map_tree(leaf, dict(node.kwargs))
        outputs: list[View | None] = []
        binds: list[tuple[str, int, int]] = []
        bound = set(self._bound)
        for position, value in enumerate(node.outputs):
            if not isinstance(value.type, TensorType):
                outputs.append(None)
                expr = getattr(value.type, "expr", None)
                if isinstance(expr, sympy.Symbol) and str(expr) not in bound:
                    binds.append((str(expr), position, -1))
                    bound.add(str(expr))
                continue
            view = self._external(value)
            outputs.append(view)
            for dim, size in enumerate(value.type.shape):
                if isinstance(size, sympy.Symbol) and str(size) not in bound:
                    if self.graph.symbols[str(size)].data:
                        binds.append((str(size), position, dim))
                        bound.add(str(size))
        self.steps.append(FallbackStep(node, arguments, keywords, outputs, reason, reads, binds))
        self._bound.update(name for name, _, _ in binds)
        self.fallbacks.append((f"{node.name} = {node.target}", reason, node.location))

    def _external(self, value: Value) -> View:
        planned = self._result_buffers.pop(value, None)
        if planned is not None:  # torch makes the result itself: no buffer of the caller's
            unused = self.buffers[planned.buffer]
            unused.kind, unused.index, unused.nbytes = "arena", -1, 0
        view = self._buffer("external", -1, value.type, value.name)
        self.memory[value] = view
        return view

    # -- LoweringContext ----------------------------------------------------------------------

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
        digest = hashlib.sha256(raw_bytes(data)).hexdigest()
        digest += f":{data.dtype}:{tuple(data.shape)}"
        if digest in self._constant_ids:
            return self._constant_ids[digest]
        self.constants.append(ConstantInfo(name, data, layout, origin or name))
        shape = tuple(int(s) for s in data.shape)
        view = self._buffer(
            "weight", len(self.constants) - 1, TensorType(dtype_name(data.dtype), shape), name
        )
        self._constant_ids[digest] = view
        return view

    def epilogue(
        self, node: Node, zmn: tuple[Dim, Dim, Dim], pointers: int, immediates: int,
        channels_last: bool = False,
    ) -> Epilogue:  # fmt: skip
        """The fused elementwise chain behind a product, as a gc_epilogue."""
        group = self.current
        assert group is not None
        self._fused_behind = group.anchor is node
        result = node.outputs[0]
        if group.anchor is not node:
            group = Group(-1, [d for d in result.type.shape if d != 1], anchor=node, members=[node])
            from graphc.lowering.groups import _in_order

            group.axes[result] = _in_order(result.type.shape)
            stored = [result]
        else:
            stored = self._stored(group)
        counts = result_parts(node)
        if counts is None:
            raise InternalError(f"{node.target} has no epilogue parts")
        parts = result_axes(result.type.shape, counts)
        if channels_last:
            parts = parts[0], parts[2], parts[1]
        loop = build_loop(self, group, stored, self.grouping)
        loop = collapsible(loop, parts, self._copied)
        name, source, arguments = generate_epilogue(loop, parts, pointers, immediates)
        return Epilogue(
            name, source, tuple(arguments.pointers), tuple(arguments.immediates),
            tuple(load.view for load in loop.loads()), tuple(s.view for s in loop.stores),
        )  # fmt: skip

    def _copied(self, source: View) -> View:
        """A row-major copy of a view."""
        type_ = TensorType(source.dtype, source.shape)
        target = self._buffer("arena", -1, type_, "copy")
        self._copy(source, target)
        return target

    def kernel(
        self,
        unit: Unit,
        symbol: str,
        *,
        pointers: Sequence[View],
        immediates: Sequence[Dim] = (),
        reads: Sequence[View] = (),
        writes: Sequence[View] = (),
        range: Dim = 1,
        grain: int = 1,
        scratch: Dim = 0,
        label: str = "",
        flops: Dim | None = None,
        units: Sequence[Unit] = (),
        nodes: Sequence[str] | None = None,
    ) -> None:
        """Emits one Step."""
        if nodes is None:
            nodes = [m.name for m in self.current.members] if self.current else []
        self.steps.append(
            KernelStep(
                symbol, unit, tuple(units), list(pointers), [as_dim(i) for i in immediates],
                as_dim(range), grain, as_dim(scratch),
                list(dict.fromkeys(v.buffer for v in reads)),
                list(dict.fromkeys(v.buffer for v in writes)), label or unit.name, list(nodes),
                flops, tuple(reads), tuple(writes),
            )
        )  # fmt: skip

    def choose(self, choice: Choice, *facts: Dim | str) -> Any:
        """The value of a choice, and a note of it on the Steps of the current rule."""
        key, value = self.tuning.decide(choice, (*facts, self.isa))
        self._choices[key] = None
        return value

    def static(self, dim: Dim) -> int | None:
        """The integer behind a dim, or None."""
        dim = as_dim(dim)
        return dim if isinstance(dim, int) else None

    def header(self, name: str) -> str:
        """Text of a file of graphc/kernels."""
        if name not in self._headers:
            self._headers[name] = (Path(graphc.kernels.__path__[0]) / name).read_text()
        return self._headers[name]
