"""Graph -> Steps: walks the groups in order, asks the rules, generates the loops.

The result (`Lowered`) is still symbolic; `graphc.lowering.program` turns it into the Program of a
bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sympy

import graphc.kernels
from graphc.errors import InternalError
from graphc.ir.graph import Graph, Node, Value, map_tree
from graphc.ir.types import (
    Dim,
    TensorType,
    as_dim,
    is_row_major,
    itemsize,
    product,
)
from graphc.lowering.context import RULES, Epilogue, Refuse, Unit, View
from graphc.lowering.expand import expand
from graphc.lowering.group_axes import axes_in_order
from graphc.lowering.groups import Group, group_nodes, result_parts, root
from graphc.lowering.in_place import updates
from graphc.lowering.loop_axes import collapsible, result_axes
from graphc.lowering.loop_build import build_loop
from graphc.lowering.loop_codegen import generate
from graphc.lowering.loop_epilogue import generate_epilogue
from graphc.lowering.loop_finish import generate_finish
from graphc.lowering.loops import Loop
from graphc.lowering.steps import (
    FallbackStep,
    KernelStep,
    Lowered,
    label_of,
    used_constants,
)
from graphc.lowering.tuning import Choice, Tuning
from graphc.lowering.value_memory import ValueMemory
from graphc.lowering.work import loop_flops


def lower(graph: Graph, isa: str, tuning: Tuning | None = None) -> Lowered:
    """Lowers a graph for an instruction set level ("avx512", "avx2", "portable"). `tuning` decides
    what rules leave to measurement; without it, their defaults hold."""
    expanded = expand(graph)
    return Lowering(expanded, isa, tuning).run()


class Lowering(ValueMemory):
    """Implements graphc.lowering.context.LoweringContext."""

    def __init__(self, graph: Graph, isa: str, tuning: Tuning | None = None) -> None:
        super().__init__(graph, group_nodes(graph))
        self.isa = isa
        self.tuning = tuning or Tuning()
        self._choices: dict[str, None] = {}  # keys of what the current rule asked
        self._bound = {s.name for s in graph.symbols.values() if not s.data}
        self.steps: list[KernelStep | FallbackStep] = []
        self.fallbacks: list[tuple[str, str, str]] = []
        self.current: Group | None = None
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
            group.axes[result] = axes_in_order(result.type.shape)
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
        finish = generate_finish(loop, parts, arguments)
        return Epilogue(
            name, source, tuple(arguments.pointers), tuple(arguments.immediates),
            tuple(load.view for load in loop.loads()), tuple(s.view for s in loop.stores), finish,
        )  # fmt: skip

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
