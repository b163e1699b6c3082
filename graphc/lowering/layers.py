"""Launches and intermediate bytes by kind of layer: the model as it is written in torch, and the
Steps that it became.

A kind is a class of modules; which module a node belongs to is known since capture (`Node.module`).
An operator that a hook put in the place of torch code counts as that code (`ops/written_out.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import Dim, TensorType, as_dim, itemsize, product
from graphc.lowering.program import evaluate
from graphc.lowering.steps import FallbackStep, KernelStep, Lowered
from graphc.lowering.work import traffic
from graphc.ops.written_out import written_out
from graphc.report import LayerRecord
from graphc.rewrite.driver import is_view

#: of nodes that no module called
_NOWHERE = "outside of modules"
_OWN = "graphc."
_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64",
          "int64": "i64", "int32": "i32"}  # fmt: skip


@dataclass
class _Sum:
    launches: int = 0
    nbytes: int = 0
    largest: int = 0
    tensor: str = ""
    modules: set[str] = field(default_factory=set)
    operators: dict[str, int] = field(default_factory=dict)

    def saw(self, nbytes: int, text: str) -> None:
        if nbytes > self.largest:
            self.largest, self.tensor = nbytes, text

    def named(self, node: Node) -> None:
        if node.target.startswith(_OWN):
            name = node.target.split(".")[1]
            self.operators[name] = self.operators.get(name, 0) + 1


class Layers:
    """The records of the programs of one lowered graph. `origin` is the graph before all passes,
    its lengths being those of the programs or wider."""

    def __init__(self, origin: Graph, lowered: Lowered) -> None:
        self.origin, self.lowered = origin, lowered
        self.sizes: dict[Dim, int] = {}
        self.limits: Mapping[str, int] = {}
        self.kinds = _kinds([*origin.nodes, *lowered.graph.nodes])

    def records(self, phase: str, bucket: str, limits: Mapping[str, int]) -> list[LayerRecord]:
        """One record a kind, in the order of the model."""
        self.sizes, self.limits = {}, limits
        before, after = self._before(), self._after()
        made: list[LayerRecord] = []
        for kind in dict.fromkeys([*before, *after]):
            old, new = before.get(kind, _Sum()), after.get(kind, _Sum())
            made.append(
                LayerRecord(
                    kind, phase, bucket, len(old.modules | new.modules), old.launches,
                    new.launches, old.nbytes, new.nbytes, old.largest, new.largest, old.tensor,
                    new.tensor, old.operators, new.operators, dict(limits),
                )
            )  # fmt: skip
        return made

    def _size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self.sizes:
            symbols = self.origin.symbols
            known = {
                str(s): self.limits.get(str(s), symbols[str(s)].hint if str(s) in symbols else 1)
                for s in dim.free_symbols
            }
            self.sizes[dim] = evaluate(dim, known)
        return self.sizes[dim]

    def _nbytes(self, type_: object) -> int:
        if not isinstance(type_, TensorType):
            return 0
        return self._size(as_dim(product(type_.shape))) * itemsize(type_.dtype)

    def _text(self, dtype: str, shape: Sequence[Dim]) -> str:
        sizes = ",".join(str(self._size(d)) for d in shape)
        return f"{_NAMES.get(dtype, dtype)}[{sizes}]"

    # -- the model --------------------------------------------------------------------------

    def _before(self) -> dict[str, _Sum]:
        kept = set(self.origin.state_updates.values())
        sums: dict[str, _Sum] = {}
        for node in self.origin.nodes:
            if is_view(node):
                continue
            one = sums.setdefault(self.kinds[node.name], _Sum())
            one.modules.add(node.module)
            one.named(node)
            inputs = {_root(v): self._nbytes(v.type) for v in node.inputs() if _made(v)}
            one.nbytes += sum(inputs.values())
            form = written_out(node, self._size)
            if form is not None:
                for position, step in enumerate(form):
                    one.launches += step.times
                    last = position == len(form) - 1  # who reads it counts it
                    one.nbytes += step.times * step.nbytes * (1 if last else 2)
                    one.saw(step.nbytes, self._text(step.dtype, step.shape))
                continue
            one.launches += 1
            for value in node.outputs:
                if value not in kept and isinstance(value.type, TensorType):
                    nbytes = self._nbytes(value.type)
                    one.nbytes += nbytes
                    one.saw(nbytes, self._text(value.type.dtype, value.type.shape))
        return sums

    # -- the plan ---------------------------------------------------------------------------

    def _after(self) -> dict[str, _Sum]:
        nodes = {node.name: node for node in self.lowered.graph.nodes}
        sums: dict[str, _Sum] = {}
        kind = ""
        told: set[str] = set()
        # a copy that a kernel needs is its own: it stands before it and has no nodes
        for step in reversed(self.lowered.steps):
            names = step.nodes if isinstance(step, KernelStep) else [step.node.name]
            own = [nodes[name] for name in names if name in nodes]
            places = [node for node in own if node.module]
            if places:
                kind = self.kinds[places[0].name]
            elif own or not kind:
                kind = _NOWHERE
            one = sums.setdefault(kind, _Sum())
            one.launches += 1
            one.modules |= {node.module for node in places if self.kinds[node.name] == kind}
            for node in own:
                if node.name not in told:
                    told.add(node.name)
                    one.named(node)
            self._moved(step, one)
        return sums

    def _moved(self, step: KernelStep | FallbackStep, one: _Sum) -> None:
        buffers = self.lowered.buffers
        if isinstance(step, FallbackStep):
            views = [view for view in step.outputs if view is not None]
            inputs = {_root(v): self._nbytes(v.type) for v in step.node.inputs() if _made(v)}
            one.nbytes += sum(inputs.values())
            one.nbytes += sum(self._nbytes(value.type) for value in step.node.outputs)
        else:
            moved = traffic(step, buffers)
            one.nbytes += self._size(moved.read) + self._size(moved.made)
            views = list(step.write_views)
        for view in views:
            if buffers[view.buffer].kind == "arena":
                nbytes = self._size(as_dim(product(view.shape) * itemsize(view.dtype)))
                one.saw(nbytes, self._text(view.dtype, view.shape))


def _kinds(nodes: Sequence[Node]) -> dict[str, str]:
    """The kind of each node's module: its class, and where modules of one class hold different
    operators of graphc (latent attention with an indexer and without), these too."""
    held: dict[str, set[str]] = {}
    for node in nodes:
        own = held.setdefault(node.module, set())
        if node.target.startswith(_OWN):
            own.add(node.target.split(".")[1])
    sorts: dict[str, set[str]] = {}
    for module, names in held.items():
        sorts.setdefault(module.rpartition(" ")[2], set()).add(", ".join(sorted(names)))
    kinds: dict[str, str] = {}
    for module, names in held.items():
        kind = module.rpartition(" ")[2]
        several = len(sorts[kind]) > 1 and names
        kinds[module] = f"{kind} ({', '.join(sorted(names))})" if several else kind
    return {node.name: kinds[node.module] or _NOWHERE for node in nodes}


def _made(value: Value) -> bool:
    return _root(value).producer is not None


def _root(value: Value) -> Value:
    """The value whose memory a value is a view of."""
    while value.producer is not None and is_view(value.producer):
        value = next(value.producer.inputs())
    return value
