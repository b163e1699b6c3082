"""Which nodes share a kernel.

Nodes are visited in order. An elementwise node or reduction joins the group that computes one of
its operands if both run over the same points; groups that meet at a node are merged. A product
kernel (GEMM, convolution) is the anchor of a group and takes elementwise followers as its
epilogue. Joining never makes a cycle between groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import Dim, same
from graphc.lowering.classify import kind, reduced_dims
from graphc.lowering.group_axes import Axes, axes_in_order, axes_through_view

_MEMBERS = 96  # nodes in one kernel: beyond, compile time grows faster than the gain
_LOADS = 28

_PRODUCTS = frozenset(f"aten.{n}" for n in ("linear.default", "addmm.default", "mm.default")) | {
    "graphc.integer_linear.default", "graphc.coded_linear.default", "graphc.experts.default",
    "graphc.quantized_linear.default", "graphc.residual_mix.default",
}  # fmt: skip
_BATCHED = frozenset(f"aten.{n}" for n in ("bmm.default", "baddbmm.default"))


def result_parts(node: Node) -> tuple[int, int, int] | None:
    """How many dims of a product's result are its batches (Z), rows (M) and columns (N); None for
    operators that take no epilogue."""
    rank = len(node.outputs[0].type.shape)
    name = node.target.split(".")[1]
    if node.target in _PRODUCTS:
        return (0, rank - 1, 1)
    if node.target in _BATCHED:
        return (1, 1, 1)
    if node.target == "aten.matmul.default":
        return (rank - 2, 1, 1) if rank >= 2 else None
    if name.startswith(("conv", "_convolution")):
        # rows are channels, columns are pixels; an unbatched input has no batch dim
        spatial = len(node.args[1].type.shape) - 2
        return (rank - 1 - spatial, 1, spatial)
    return None


_FLOAT = ("float32", "bfloat16", "float16")


@dataclass(eq=False)
class Group:
    """Nodes that become one kernel. axes maps each value held in registers to the domain axis of
    each of its dimensions (None: does not vary)."""

    number: int
    domain: list[Dim]
    reduced: frozenset[int] = frozenset()
    anchor: Node | None = None
    members: list[Node] = field(default_factory=list)
    axes: dict[Value, Axes] = field(default_factory=dict)
    depends: set[Group] = field(default_factory=set)
    loads: set[Value] = field(default_factory=set)

    @property
    def kept(self) -> frozenset[int]:
        """Axes that are not reduced."""
        return frozenset(range(len(self.domain))) - self.reduced


@dataclass
class Grouping:
    """The result: groups (loops), and what stands alone (templates, copies, fallbacks)."""

    group_of: dict[Node, Group]
    order: list[Group]
    kinds: dict[Node, tuple[str, str]]


def group_nodes(graph: Graph) -> Grouping:
    """Partitions the nodes of an expanded graph into kernels, in execution order."""
    return _Grouper(graph).run()


def root(value: Value, kinds: dict[Node, tuple[str, str]]) -> Value:
    """The value whose memory `value` is a view of."""
    while value.producer is not None and kinds[value.producer][0] == "view":
        value = value.producer.args[0]
    return value


class _Grouper:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds = {node: kind(node) for node in graph.nodes}
        self.group_of: dict[Node, Group] = {}
        self.count = 0
        self.position = {node: k for k, node in enumerate(graph.nodes)}

    def run(self) -> Grouping:
        for node in self.graph.nodes:
            what = self.kinds[node][0]
            if what == "view":
                self._alias(node)
            elif what == "create":
                self._create(node)
            elif what == "pointwise":
                self._pointwise(node)
            elif what == "reduce":
                self._reduce(node)
            else:
                self._alone(node)
        return Grouping(self.group_of, self._order(), self.kinds)

    # -- groups -------------------------------------------------------------------------------

    def _new(self, domain: Sequence[Dim], node: Node) -> Group:
        group = Group(self.count, list(domain))
        self.count += 1
        self._add(group, node)
        return group

    def _add(self, group: Group, node: Node) -> None:
        group.members.append(node)
        self.group_of[node] = group
        for value in node.inputs():
            source = root(value, self.kinds)
            if source.producer is None:
                group.loads.add(source)
                continue
            other = self.group_of[source.producer]
            if other is not group:
                group.depends.add(other)
                group.loads.add(source)

    def _reaches(self, start: Group, goal: Group) -> bool:
        """Whether `start` depends on `goal`, directly or not."""
        seen: set[Group] = set()
        stack = [start]
        while stack:
            group = stack.pop()
            if group is goal:
                return True
            if group in seen:
                continue
            seen.add(group)
            stack.extend(group.depends)
        return False

    def _external(self, group: Group, node: Node) -> list[Group]:
        """Groups that node's operands come from, other than `group`."""
        found: list[Group] = []
        for value in node.inputs():
            source = root(value, self.kinds)
            if source.producer is not None:
                other = self.group_of[source.producer]
                if other is not group:
                    found.append(other)
        return found

    def _acyclic(self, group: Group, node: Node) -> bool:
        return not any(self._reaches(other, group) for other in self._external(group, node))

    def _order(self) -> list[Group]:
        groups = list(
            dict.fromkeys(self.group_of[n] for n in self.graph.nodes if n in self.group_of)
        )
        done: set[Group] = set()
        ordered: list[Group] = []

        def visit(first: Group) -> None:
            stack: list[tuple[Group, bool]] = [(first, False)]
            while stack:
                group, ready = stack.pop()
                if group in done:
                    continue
                if ready:
                    done.add(group)
                    ordered.append(group)
                    continue
                stack.append((group, True))
                waiting = [g for g in group.depends if g not in done]
                waiting.sort(key=lambda g: -self.position[g.members[0]])
                stack.extend((g, False) for g in waiting)

        for group in sorted(groups, key=lambda g: max(self.position[m] for m in g.members)):
            visit(group)
        return ordered

    # -- nodes --------------------------------------------------------------------------------

    def _alone(self, node: Node) -> None:
        group = self._new((), node)
        if self.kinds[node][0] != "template" or result_parts(node) is None:
            return
        result = node.outputs[0]
        if result.type.dtype not in _FLOAT or len(node.outputs) != 1:
            return
        group.anchor = node
        group.domain = [d for d in result.type.shape if d != 1]
        group.axes[result] = axes_in_order(result.type.shape)

    def _alias(self, node: Node) -> None:
        """A view of a value in registers stays in registers if it only moves axes around."""
        source = node.args[0]
        base = root(source, self.kinds)
        if base.producer is None or base.producer not in self.group_of:
            return
        group = self.group_of[base.producer]
        axes = group.axes.get(source)
        if axes is None:
            return
        new = axes_through_view(node, source, axes)
        if new is not None:
            group.axes[node.outputs[0]] = new

    def _create(self, node: Node) -> None:
        value = node.outputs[0]
        group = self._new([d for d in value.type.shape if d != 1], node)
        group.axes[value] = axes_in_order(value.type.shape)

    def _pointwise(self, node: Node) -> None:
        result = node.outputs[0]
        candidates = self._candidates(node)
        joined: Group | None = None
        for group in candidates:
            if joined is None:
                axes = self._fit(node, group)
                if axes is None or not self._acyclic(group, node):
                    continue
                joined = group
                self._add(group, node)
                group.axes[result] = axes
            elif group is not joined:
                self._merge(node, joined, group)
        if joined is None:
            group = self._new([d for d in result.type.shape if d != 1], node)
            group.axes[result] = axes_in_order(result.type.shape)
            # an operand's group of the same points may join the new one
            for other in candidates:
                self._merge(node, group, other)

    def _candidates(self, node: Node) -> list[Group]:
        """Groups that hold an operand in registers, anchors and reductions first, newest first."""
        found: dict[Group, None] = {}
        for value in node.inputs():
            base = root(value, self.kinds)
            if base.producer is not None and base.producer in self.group_of:
                group = self.group_of[base.producer]
                if value in group.axes:
                    found[group] = None
        return sorted(
            found,
            key=lambda g: (g.anchor is None, not g.reduced, -len(g.domain), -g.number),
        )

    def _fit(self, node: Node, group: Group) -> Axes | None:
        """The axes of node's result in `group`, or None if it does not run over its points."""
        if len(group.members) >= _MEMBERS or len(group.loads) >= _LOADS:
            return None
        shape = node.outputs[0].type.shape
        axes: list[int | None] = [None] * len(shape)
        held: list[tuple[Value, Axes]] = []
        for value in node.inputs():
            base = root(value, self.kinds)
            if base.producer is None or self.group_of.get(base.producer) is not group:
                continue
            known = group.axes.get(value)
            if known is None:
                return None  # reads this group through memory
            held.append((value, known))
        for value, known in held:
            shift = len(shape) - len(value.type.shape)
            for dim, axis in enumerate(known):
                if axis is None:
                    continue
                if axes[shift + dim] not in (None, axis):
                    return None
                axes[shift + dim] = axis
        used = {a for a in axes if a is not None}
        if len(used) != sum(a is not None for a in axes):
            return None
        free = [a for a in range(len(group.domain)) if a not in used]
        for dim, size in enumerate(shape):
            if size == 1 or axes[dim] is not None:
                continue
            match = next((a for a in free if same(group.domain[a], size)), None)
            if match is None:
                return None
            free = free[free.index(match) + 1 :]
            axes[dim] = match
        for dim, size in enumerate(shape):
            axis = axes[dim]
            if axis is not None and not same(group.domain[axis], size):
                return None
        covered = frozenset(a for a in axes if a is not None)
        everything = frozenset(range(len(group.domain)))
        if covered == everything:
            if group.reduced and not group.kept and self._after_reduction(node, group):
                return None  # one row: a separate kernel can use all threads
            return tuple(axes)
        if group.reduced and covered == group.kept:
            return tuple(axes)
        return None

    def _after_reduction(self, node: Node, group: Group) -> bool:
        return any(
            set(group.axes.get(value, ())) - {None} <= group.kept
            for value in node.inputs()
            if value in group.axes
        )

    def _merge(self, node: Node, group: Group, other: Group) -> None:
        """Moves `other` into `group`, both meeting at `node` (already in `group`)."""
        if (
            other is group
            or other.anchor is not None
            or self.group_of[other.members[0]] is not other
        ):
            return
        if group.anchor is not None and other.reduced:
            return
        if len(group.members) + len(other.members) > _MEMBERS:
            return
        if len(group.loads | other.loads) > _LOADS:
            return
        shape = node.outputs[0].type.shape
        translation: dict[int, int] = {}
        own = group.axes[node.outputs[0]]
        for value in node.inputs():
            known = other.axes.get(value)
            base = root(value, self.kinds)
            if base.producer is None or self.group_of.get(base.producer) is not other:
                continue
            if known is None:
                return
            shift = len(shape) - len(value.type.shape)
            for dim, axis in enumerate(known):
                if axis is None:
                    continue
                mine = own[shift + dim]
                if mine is None or translation.setdefault(axis, mine) != mine:
                    return
        if len(translation) != len(other.domain):
            return
        if len(set(translation.values())) != len(translation):
            return
        reduced = frozenset(translation[a] for a in other.reduced)
        if reduced and group.reduced and reduced != group.reduced:
            return
        everything = frozenset(range(len(group.domain)))
        covered = frozenset(translation.values())
        total = reduced | group.reduced
        if covered != everything and covered != everything - total:
            return
        if total and not (everything - total):
            return
        if reduced and not group.reduced:
            # values of `group` must cover all points or the kept ones only
            for axes in group.axes.values():
                have = frozenset(a for a in axes if a is not None)
                if have != everything and have != everything - reduced and have:
                    return
        # no path between the two except the edge at node: whoever else reads `other`, a product or
        # an elementwise node that saw it along other axes, reads memory that must be complete
        for member in group.members:
            if member is not node and any(g is other for g in self._external(group, member)):
                return
        for between in list(group.depends):
            if between is not other and self._reaches(between, other):
                return
        if self._reaches(other, group):
            return
        for member in other.members:
            self.group_of[member] = group
        group.members = sorted({*group.members, *other.members}, key=lambda m: self.position[m])
        group.reduced = total
        for value, axes in other.axes.items():
            group.axes[value] = tuple(None if a is None else translation[a] for a in axes)
        group.depends |= other.depends
        group.depends.discard(other)
        group.depends.discard(group)
        group.loads |= other.loads
        group.loads = {
            v for v in group.loads
            if v.producer is None or self.group_of[v.producer] is not group
        }  # fmt: skip
        for third in set(self.group_of.values()):
            if other in third.depends:
                third.depends.discard(other)
                if third is not group:
                    third.depends.add(group)

    def _reduce(self, node: Node) -> None:
        source = node.args[0]
        assert isinstance(source, Value)
        dims = reduced_dims(node)
        shape = source.type.shape
        base = root(source, self.kinds)
        if base.producer is not None and base.producer in self.group_of:
            group = self.group_of[base.producer]
            axes = group.axes.get(source)
            if axes is not None and group.anchor is None and self._acyclic(group, node):
                removed = [axes[d] for d in dims if shape[d] != 1]
                everything = frozenset(range(len(group.domain)))
                if None not in removed and len(group.members) < _MEMBERS:
                    reduced = frozenset(a for a in removed if a is not None)
                    have = frozenset(a for a in axes if a is not None)
                    fits = have == everything and group.reduced in (frozenset(), reduced)
                    if fits and reduced and everything - reduced:
                        group.reduced = reduced
                        self._add(group, node)
                        self._reduced_axes(group, node, axes, dims)
                        return
        domain = [d for d in shape if d != 1]
        axes = axes_in_order(shape)
        group = self._new(domain, node)
        group.reduced = frozenset(a for a in (axes[d] for d in dims) if a is not None)
        self._reduced_axes(group, node, axes, dims)

    def _reduced_axes(self, group: Group, node: Node, axes: Axes, dims: Sequence[int]) -> None:
        for value in node.outputs:
            if len(value.type.shape) == len(axes):  # keepdim
                group.axes[value] = tuple(None if d in dims else a for d, a in enumerate(axes))
            else:
                group.axes[value] = tuple(a for d, a in enumerate(axes) if d not in dims)
