"""constant_folding: what depends on weights alone is computed now, in eager torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch

from graphc.ir.graph import Builder, Graph, Node, Value, has_effect, map_tree
from graphc.ir.run import call
from graphc.ir.types import TensorType, itemsize
from graphc.rewrite import Facts, Log
from graphc.rewrite.driver import is_view

#: views whose elements share memory: computing them would only make weights larger
_SPREADING = ("aten.expand", "aten.broadcast_to", "aten.expand_as", "aten.as_strided",
              "aten.unfold")  # fmt: skip


@dataclass(frozen=True)
class ConstantFolding:
    """A folded tensor of more than `limit_bytes` may be at most `growth` times its inputs.

    Calls without inputs (arange, full) are computed only for the sake of what reads them: a loop
    nest makes them more cheaply than memory gives them.
    """

    limit_bytes: int = 1 << 20
    growth: float = 4.0
    name: ClassVar[str] = "constant_folding"

    def run(self, graph: Graph, log: Log) -> Graph:
        return _Folding(self, graph, log).run()


class _Folding:
    def __init__(self, options: ConstantFolding, graph: Graph, log: Log) -> None:
        self.options = options
        self.graph = graph
        self.facts = Facts(graph)
        self.log = log
        self.builder = Builder(graph)
        self.known: dict[Value, torch.Tensor] = dict(graph.weights)
        self.folded: dict[Value, Node] = {}
        self.placed: set[Value] = set()

    def run(self) -> Graph:
        for node in self.graph.nodes:
            results = self._evaluate(node)
            if results is None:
                self._place(node.inputs())
                self.builder.copy(node)
            else:
                self.known.update(zip(node.outputs, results, strict=True))
                if not list(node.inputs()):
                    self.builder.copy(node)
                else:
                    self.folded.update(dict.fromkeys(node.outputs, node))
        self._place(self.graph.kept())
        if not self.placed:
            return self.graph
        after = self.builder.finish()
        self.log.settle(self.graph, after)
        return after

    def _place(self, values: Iterable[Value]) -> None:
        """Makes weights of the folded values that are needed."""
        for value in dict.fromkeys(values):
            if value in self.folded and value not in self.placed:
                self.placed.add(value)
                tensor = self.known[value].contiguous()
                weight = self.builder.weight(value.name, tensor)
                self.builder.replace(value, weight)
                self.log.matched("constant", self.folded[value], [weight])

    def _evaluate(self, node: Node) -> tuple[torch.Tensor, ...] | None:
        if has_effect(node) or not all(v in self.known for v in node.inputs()):
            return None
        if torch.Tag.nondeterministic_seeded in node.op.tags or _symbolic(node):
            return None
        if not all(isinstance(v.type, TensorType) for v in node.outputs):
            return None
        if not self._worthwhile(node):
            return None

        def real(item: Any) -> Any:
            return self.known[item] if isinstance(item, Value) else item

        with torch.no_grad():
            try:
                made = call(node.op, map_tree(real, node.args), map_tree(real, node.kwargs))
            except RuntimeError as error:
                self.log.refused("constant", node, f"eager torch refuses: {error}".split("\n")[0])
                return None
        return made if all(isinstance(t, torch.Tensor) for t in made) else None

    def _worthwhile(self, node: Node) -> bool:
        if node.target.startswith(_SPREADING):
            return all(self._static_bytes(v) <= 64 for v in node.outputs)
        inputs = sum(self._size(v) for v in dict.fromkeys(node.inputs()))
        size = sum(self._static_bytes(v) for v in node.outputs)
        if not list(node.inputs()):
            return size <= self.options.limit_bytes
        if is_view(node) and not self._sole(node):
            # another reader keeps the original: a large copy beside it would cost memory
            return size <= 4096
        if size <= self.options.limit_bytes or size <= self.options.growth * inputs:
            return True
        self.log.refused("constant", node, f"the result would take {size} bytes, {inputs} now")
        return False

    def _sole(self, node: Node) -> bool:
        """Whether the memory looked at is not read in another form."""
        return all(len(self.facts.readers(v)) == 1 for v in node.inputs())

    def _size(self, value: Value) -> int:
        tensor = self.known[value]
        return tensor.numel() * tensor.element_size()

    @staticmethod
    def _static_bytes(value: Value) -> int:
        count = value.type.numel()
        assert isinstance(count, int)
        return count * itemsize(value.type.dtype)


def _symbolic(node: Node) -> bool:
    """Whether a symbol takes part in the arguments or types."""

    def walk(item: Any) -> bool:
        if isinstance(item, tuple):
            return any(walk(i) for i in item)
        if isinstance(item, Mapping):
            return any(walk(i) for i in item.values())
        return isinstance(item, sympy.Expr)

    shapes = tuple(v.type.shape for v in node.outputs if isinstance(v.type, TensorType))
    return walk(node.args) or walk(node.kwargs) or walk(shapes)
