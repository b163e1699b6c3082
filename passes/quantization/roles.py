"""What the values of a graph are for: the roles of a precision policy, by who reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphc.ir.graph import Graph, Node, Value, leaves
from graphc.ir.types import TensorType, itemsize
from graphc.rewrite.rules import packet
from passes.quantization.narrowing import (
    ATTENTION,
    INDEXERS,
    KEPT,
    PRODUCTS,
    WIDE,
    is_creation,
    is_move,
    is_new,
    is_recurrence,
    sources,
)

_SOFTMAX = frozenset(("aten.softmax", "aten._softmax", "aten._safe_softmax"))
_CHOICES = frozenset(("aten.topk", "aten.sort", "aten.argsort", "aten.argmax"))
_NORMS = frozenset(
    f"aten.{name}"
    for name in ("rms_norm", "layer_norm", "native_layer_norm", "group_norm", "native_group_norm",
                 "mean", "var_mean")
)  # fmt: skip
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Use:
    """An operand of `node` and its role. floor: the dtype it must not have been narrower than; ""
    where formats of 16 bits are the model's affair. state: it is what `node` leaves in a state."""

    value: Value
    role: str
    node: Node
    floor: str = ""
    state: str = ""


class Roles:
    """The uses of a graph's values, node by node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.dtype = _dtype(graph)
        self._nodes = [(node, sources(node)) for node in graph.nodes]
        #: made of constants alone; made of products of two values that are not; made by softmax
        self._constant: set[Value] = set(graph.weights)
        self._scores: set[Value] = set()
        self._shares: set[Value] = set()
        #: the last operator that computes something new in what a value is made of: its position
        self._made: dict[Value, int] = {}
        #: what reads a value, or what is made of it element by element
        self._leads: dict[Value, frozenset[str]] = {}
        self._readers: dict[Value, list[tuple[Node, str]]] | None = None
        self._forward()
        self._backward()

    def uses(self) -> Iterator[Use]:
        """In the order of the graph; what is written to states last."""
        for node in self.graph.nodes:
            yield from self.of(node)
        for state, value in self.graph.state_updates.items():
            floors = [t.removeprefix("state:") for t in self._of(state) if t.startswith("state:")]
            if not floors and self._is_recurrent(state, value):
                floors = [self.dtype]
            if value.producer is not None:
                yield from (Use(value, "state", value.producer, f, state.name) for f in floors)

    def _is_recurrent(self, state: Value, value: Value) -> bool:
        """Whether a state that no operator has as its own is computed from one call to the next,
        and does not only take up rows."""
        if value.producer is not None and packet(value.producer) in KEPT:
            return False
        moved = {state: True}
        for node, given in self._nodes:
            parts = [moved[v] for v in given if v in moved]
            if parts and not is_new(node):
                moved.update((v, is_move(node) and all(parts)) for v in node.outputs)
        return not moved.get(value) or not self._of(state) & {"product", "cache", "index"}

    def of(self, node: Node) -> Iterator[Use]:
        """The operands of a node that have a role."""
        name = packet(node)
        if name in ATTENTION:
            yield from self._attention(node)
        elif name in INDEXERS or name == "graphc.pool_keys":
            yield from _named(node, ("query", "weights", "key", "pages", "gate", "bias"), "index")
        elif name in PRODUCTS:
            yield from self._product(node)
        elif is_recurrence(node):
            yield from self._recurrence(node)
        elif name == "graphc.route":
            yield from _named(node, ("logits", "bias"), "router", "float32")
        elif name == "graphc.residual_mix":
            yield from _named(node, ("candidates",), "residual", self.dtype)
        elif name in _SOFTMAX:
            if self.is_weighting(node):
                yield Use(node.args[0], "attention", node)
        elif name in _CHOICES:
            index = node.args[0] in self._scores
            yield Use(node.args[0], *(("index", node) if index else ("router", node, self.dtype)))
        elif self.is_residual(node):
            yield from (Use(v, "residual", node, self.dtype) for v in leaves(node.args[:2]))

    def is_residual(self, node: Node) -> bool:
        """Whether it adds what different operators made, and the sum is normalised."""
        if packet(node) != "aten.add" or node.outputs[0].type.dtype not in WIDE:
            return False
        if "norm" not in self._of(node.outputs[0]):
            return False
        made = [self._made.get(v, -1) if isinstance(v, Value) else -1 for v in node.args[:2]]
        return min(made) >= 0 and made[0] != made[1]

    def is_router(self, node: Node) -> bool:
        """Whether it is a product that gives scores of experts."""
        return bool(self._of(node.outputs[0]) & {"route", "experts"})

    def is_head(self, node: Node) -> bool:
        """Whether what it gives is the model's result, and nothing else."""
        return self._of(node.outputs[0]) == {"result"}

    def is_weighting(self, node: Node) -> bool:
        """Whether it is a softmax whose shares a product weighs something with."""
        return packet(node) in _SOFTMAX and "product" in self._of(node.outputs[0])

    def is_constant(self, value: Value) -> bool:
        """Whether it is made of weights and numbers alone."""
        return value in self._constant

    def readers_of(self, state: Value) -> list[tuple[Node, str]]:
        """The operators that read the content of a state, with the role it has there: "state",
        "index" or "cache"."""
        if self._readers is None:
            self._readers = self._find_readers()
        return self._readers.get(state, [])

    # -- by operator ------------------------------------------------------------------------

    def _attention(self, node: Node) -> Iterator[Use]:
        yield from _named(node, ("query", "attn_mask", "sinks"), "attention")
        yield from _named(node, ("key", "value", "pages", "rope"), "attention or cache")

    def _product(self, node: Node) -> Iterator[Use]:
        values = [v for v in node.inputs() if isinstance(v.type, TensorType)]
        if packet(node) == "graphc.experts":
            yield from _named(node, ("index",), "router", "float32")
            yield from _named(node, ("weight",), "router", self.dtype)
            yield from _named(node, ("x", "gate_up", "down"), "projections or cache")
            return
        if node.target.startswith("graphc.") or any(v in self._constant for v in values):
            role = "router" if self.is_router(node) else "projections or cache"
        elif self._is_ranking(node, values):
            role = "index"
        else:
            role = "attention or cache"
        yield from (Use(v, role, node) for v in values)

    def _is_ranking(self, node: Node, values: Sequence[Value]) -> bool:
        """Whether a product of two activations gives scores that only choose."""
        leads = self._of(node.outputs[0])
        weighs = "softmax" in leads or any(v in self._shares for v in values)
        return "choice" in leads and not weighs

    def _recurrence(self, node: Node) -> Iterator[Use]:
        names = [a.name for a in node.op._schema.arguments]
        if "state" in names:
            yield from _named(node, ("state",), "state", self._floor(node))
            for name in names:
                if name not in ("state", "slots", "weight"):
                    yield from _named(node, (name,), "state")
            if "weight" in names:
                yield from _named(node, ("weight",), "projections")
            return
        yield Use(node.args[0], "projections", node)
        yield from (Use(v, "state", node, self.dtype) for v in leaves(node.args[1]))
        yield from (Use(v, "projections", node) for v in leaves(node.args[2]))

    def _floor(self, node: Node) -> str:
        """Windows of convolutions hold inputs as they are; other states are sums."""
        return self.dtype if packet(node) == "graphc.short_convolution" else "float32"

    # -- how values hang together -----------------------------------------------------------

    def _of(self, value: Value) -> frozenset[str]:
        return self._leads.get(value, _NOTHING)

    def _forward(self) -> None:
        for value in (*self.graph.inputs, *self.graph.states):
            if getattr(value.type, "dtype", "") in WIDE:
                self._made[value] = 0
        for position, (node, given) in enumerate(self._nodes, 1):
            name = packet(node)
            if is_new(node) or name == "aten.embedding":
                constant = is_creation(node)
                if name in PRODUCTS and not any(v in self._constant for v in node.inputs()):
                    self._scores.update(node.outputs)
                made = position
            else:
                constant = all(v in self._constant for v in node.inputs())
                made = max((self._made.get(v, -1) for v in given), default=-1)
                for group in (self._scores, self._shares):
                    if any(v in group for v in given):
                        group.update(node.outputs)
            if name in _SOFTMAX:
                self._shares.update(node.outputs)
            if constant:
                self._constant.update(node.outputs)
            elif made >= 0:
                self._made.update((v, made) for v in node.outputs)

    def _find_readers(self) -> dict[Value, list[tuple[Node, str]]]:
        content = {state: {state} for state in self.graph.states}
        found: dict[Value, list[tuple[Node, str]]] = {}
        for node, given in self._nodes:
            for use in self.of(node):
                role = use.role.rpartition(" or ")[2]
                if role in ("state", "index", "cache"):
                    for state in content.get(use.value, ()):
                        found.setdefault(state, []).append((node, role))
            states = set().union(*(content.get(v, ()) for v in given))
            if states and not is_new(node):
                content.update((v, states) for v in node.outputs)
        return found

    def _backward(self) -> None:
        for value in self.graph.results:
            if isinstance(value, Value):
                self._leads[value] = frozenset(("result",))
        for node, given in reversed(self._nodes):
            for value, tags in self._read(node, given):
                self._leads[value] = self._of(value) | tags

    def _read(self, node: Node, given: Sequence[Value]) -> Iterator[tuple[Value, frozenset[str]]]:
        name = packet(node)
        if name == "graphc.route":
            yield node.args[0], frozenset(("route",))
        elif name == "graphc.experts":
            yield from ((use.value, frozenset(("experts",))) for use in
                        _named(node, ("index", "weight"), ""))  # fmt: skip
        elif is_recurrence(node):
            floor = frozenset((f"state:{self._floor(node)}",))
            state = node.args[0] if node.target.startswith("graphc.") else node.args[1]
            yield from ((value, floor) for value in leaves([state]))
        elif name in PRODUCTS:
            tags = frozenset(("product",))
            yield from ((v, tags) for v in node.inputs())
        elif name in ATTENTION or name in INDEXERS:
            tags = frozenset(("index" if name in INDEXERS else "cache",))
            yield from ((u.value, tags) for u in _named(node, ("key", "value", "pages"), ""))
        elif not is_new(node):
            tags = frozenset().union(*(self._of(v) for v in node.outputs))
            for group, tag in ((_SOFTMAX, "softmax"), (_CHOICES, "choice"), (_NORMS, "norm")):
                if name in group:
                    tags |= {tag}
            if name == "graphc.residual_mix":
                tags |= {"norm"}
            if tags:
                yield from ((v, tags) for v in given)


def _named(node: Node, names: Sequence[str], role: str, floor: str = "") -> Iterator[Use]:
    """The tensors among the arguments of these names."""
    for parameter in node.op._schema.arguments:
        if parameter.name in names:
            given: Any = node.argument(parameter.name)
            yield from (Use(v, role, node, floor) for v in leaves([given]))


def _dtype(graph: Graph) -> str:
    """The dtype a model computes in: that of most of its products, else its widest."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if packet(node) in PRODUCTS and node.outputs[0].type.dtype in WIDE:
            dtype = node.outputs[0].type.dtype
            counts[dtype] = counts.get(dtype, 0) + 1
    if counts:
        return max(counts, key=lambda dtype: (counts[dtype], itemsize(dtype)))
    values = (*graph.inputs, *graph.weights, *graph.states)
    floats = [v.type.dtype for v in values if getattr(v.type, "dtype", "") in WIDE]
    return max(floats, key=itemsize, default="float32")
