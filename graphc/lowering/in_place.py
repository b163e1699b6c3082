"""What is not copied: updates written where an input or a state lives, concatenations that
attention reads in parts.

A value that is an input's or a state's next content may be written straight into its memory where
nothing reads the old content afterwards: a chain of partial writes (index_copy, index_put, ...)
then touches only what it writes, and a new value needs no copy at the end. Whatever is not surely
safe goes the copying way of `Lowering._updates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same, torch_dtype
from graphc.lowering.context import View
from graphc.lowering.expand import expansion
from graphc.lowering.groups import Grouping, root

#: operators whose rule starts from their first argument and writes a part of it, if need be in
#: place, and the result that is its new content
PARTIAL: dict[str, int] = {
    **dict.fromkeys(
        (
            "aten.index_copy.default", "aten.index_add.default", "aten.index_fill.int_Scalar",
            "aten.index_put.default", "aten._unsafe_index_put.default", "aten.scatter.src",
            "aten.scatter.value", "aten.scatter_add.default", "aten.slice_scatter.default",
            "aten.select_scatter.default", "graphc.append_pages.default",
            "graphc.append_records.default", "graphc.append_ring.default",
            "graphc.pool_keys.default",
        ),
        0,
    ),
    "graphc.delta_rule.default": 1,
    "graphc.short_convolution.default": 1,
}  # fmt: skip
ATTENTION = frozenset(("aten.scaled_dot_product_attention.default", "graphc.attention.default"))


@expansion("copy.default")
def _copy(builder: Builder, node: Node) -> Sequence[Value]:
    """A copy of its source: what it overwrites is not read. New content that a partial write
    made is no copy: it may be written where the old one lives."""
    result, source = node.outputs[0].type, builder.of(node.args[1])
    if source.type.dtype != result.dtype:
        source = builder.call1(
            torch.ops.aten._to_copy.default, source, dtype=torch_dtype(result.dtype)
        )
    if source.type.shape != result.shape:
        source = builder.call1(torch.ops.aten.expand.default, source, result.shape)
    made = source.producer
    if made is not None and PARTIAL.get(made.target) == source.index:
        return [source]
    return [builder.call1(torch.ops.aten.clone.default, source)]


@dataclass
class Places:
    """homes: values that are written where an input or state lives; parted: concatenations that
    are not made unless something asks for them whole."""

    homes: dict[Value, Value] = field(default_factory=dict)
    parted: set[Node] = field(default_factory=set)


def find_places(graph: Graph, grouping: Grouping) -> Places:
    """Reads the places off a graph whose Steps are in the order of `grouping`."""
    finder = _Finder(graph, grouping)
    places = Places(parted=finder.parted)
    if not _may_stop(graph):
        finder.homes(places.homes)
    return places


def updates(graph: Graph) -> Iterator[tuple[Value, Value]]:
    """(input or state, its next content) where that changes."""
    for table in (graph.state_updates, graph.input_updates):
        for target, value in table.items():
            if value is not target:
                yield target, value


def _may_stop(graph: Graph) -> bool:
    """Whether a run may be given up half way, its inputs as they were: sizes known only from data,
    and assertions."""
    return any(s.data for s in graph.symbols.values()) or any(
        node.target.startswith("aten._assert") for node in graph.nodes
    )


class _Finder:
    def __init__(self, graph: Graph, grouping: Grouping) -> None:
        self.graph, self.kinds, self.group_of = graph, grouping.kinds, grouping.group_of
        self.place = {group: k for k, group in enumerate(grouping.order)}
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            if self.kinds[node][0] != "view":
                for source in dict.fromkeys(root(v, self.kinds) for v in node.inputs()):
                    self.readers.setdefault(source, []).append(node)
        self.leaving = {root(value, self.kinds) for value in graph.kept()}
        self.parted = {node for node in graph.nodes if self._is_parted(node)}

    # -- concatenations -----------------------------------------------------------------------

    def _is_parted(self, node: Node) -> bool:
        if node.target != "aten.cat.default" or self.kinds[node][0] != "copy":
            return False
        result = node.outputs[0]
        readers = self.readers.get(result, [])
        if result in self.leaving or not readers:
            return False
        if any(v.type.dtype != result.type.dtype for v in node.inputs()):
            return False
        return all(self._reads_parts(reader, node) for reader in readers)

    def _reads_parts(self, reader: Node, cat: Node) -> bool:
        if reader.target not in ATTENTION or self.kinds[reader][0] != "template":
            return False
        others = [v for v in reader.inputs() if v not in reader.args[1:3]]
        if any(root(v, self.kinds) is cat.outputs[0] for v in others):
            return False
        for value in reader.args[1:3]:
            if root(value, self.kinds) is cat.outputs[0] and concatenated(value, -2) is not cat:
                return False
        return True

    # -- updates ------------------------------------------------------------------------------

    def homes(self, homes: dict[Value, Value]) -> None:
        for target, value in updates(self.graph):
            if value in homes or value.producer is None:
                continue
            chain = self._chain(target, value)
            if chain is not None:
                homes.update(dict.fromkeys(chain, target))
            elif self._fresh(target, value):
                homes[value] = target

    def _chain(self, target: Value, value: Value) -> list[Value] | None:
        """The values of partial writes that lead from the old content to the new one."""
        chain: list[Value] = []
        here = value
        while here is not target:
            node = here.producer
            if node is None or PARTIAL.get(node.target) != here.index:
                return None
            if self.kinds[node][0] != "template":
                return None
            if not _alike(here, target) or any(v.type.dtype == "bool" for v in _indices(node)):
                return None
            chain.append(here)
            here = node.args[0]
        chain.reverse()
        for before, after in zip([target, *chain], chain, strict=False):
            node = after.producer
            assert node is not None
            memory = {target, *chain}
            if any(root(v, self.kinds) in memory for v in _beside(node)):
                return None
            if before in self.leaving or not self._done(before, node):
                return None
        return chain

    def _fresh(self, target: Value, value: Value) -> bool:
        """Whether a new value may be made in the target's memory from the start."""
        node = value.producer
        assert node is not None
        if self.kinds[node][0] in ("view", "fallback") or not _alike(value, target):
            return False
        if node.target == "aten.cat.default" and node in self.parted:
            return False
        if target in self.leaving or not self._done(target, node):
            return False
        return not any(root(v, self.kinds) is target for v in self._inputs_of_group(node))

    def _inputs_of_group(self, node: Node) -> Iterator[Value]:
        for member in self.group_of[node].members:
            yield from member.inputs()

    def _done(self, value: Value, writer: Node) -> bool:
        """Whether all that reads `value`, the writer apart, has run when the writer begins."""
        begin = self.place[self.group_of[writer]]
        for reader in self.readers.get(value, []):
            late = self.readers[reader.outputs[0]] if reader in self.parted else [reader]
            for node in late:
                if node is not writer and self.place[self.group_of[node]] >= begin:
                    return False
        return True


def _alike(value: Value, target: Value) -> bool:
    a, b = value.type, target.type
    return (
        a.dtype == b.dtype and len(a.shape) == len(b.shape)
        and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    )  # fmt: skip


def _beside(node: Node) -> Iterator[Value]:
    """The operands other than `self`."""
    values = iter(node.inputs())
    next(values)
    yield from values


def _indices(node: Node) -> Iterator[Value]:
    if "index_put" in node.target:
        yield from (v for v in node.argument("indices") if isinstance(v, Value))


def concatenated(value: Value, dim: int) -> Node | None:
    """The concatenation along `dim` (negative) of which `value` is a permutation at most."""
    node = value.producer
    if node is None:
        return None
    rank = len(value.type.shape)
    if node.target == "aten.cat.default":
        return node if int(node.argument("dim")) % rank == dim % rank else None
    order = permutation(node)
    return None if order is None else concatenated(node.args[0], order[dim] - rank)


def permutation(node: Node) -> list[int] | None:
    """The source dimension of each dimension, if the node only permutes them."""
    rank = len(node.outputs[0].type.shape)
    order = list(range(rank))
    if node.target == "aten.permute.default":
        return [int(d) % rank for d in node.args[1]]
    if node.target == "aten.transpose.int":
        a, b = (int(d) % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
        return order
    return None


def permuted(views: list[View], cat: Node, value: Value) -> list[View]:
    """Views of what is concatenated, with the dimensions of `value`, a permutation of it."""
    orders: list[list[int]] = []
    while value.producer is not cat:
        node = value.producer
        assert node is not None
        order = permutation(node)
        assert order is not None
        orders.append(order)
        value = node.args[0]
    for order in reversed(orders):
        views = [
            view.with_(
                shape=tuple(view.shape[d] for d in order),
                strides=tuple(view.strides[d] for d in order),
            )
            for view in views
        ]
    return views
