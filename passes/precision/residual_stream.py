"""Where a graph has residual streams: sums that are normalised, and added to again."""

from __future__ import annotations

from collections.abc import Iterator

from graphc.ir.graph import Graph, Node, Value
from graphc.rewrite import Facts
from graphc.rewrite.driver import is_view
from graphc.rewrite.facts import is_cast

NARROW = ("bfloat16", "float16")
_NORMS = ("aten.rms_norm.default", "aten.layer_norm.default")
_ELEMENTWISE = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))
#: parallel streams, at most, that a matrix for each token mixes (hyper-connections)
_STREAMS = 16


class ResidualStreams:
    """sums: the nodes; refused: sums that are normalised and no more, with the reason. ongoing:
    values that Attention Residuals read as the sum so far, and that are added to again; begins: the
    nodes that make the first of them, which are no sums."""

    def __init__(self, graph: Graph) -> None:
        self.facts = Facts(graph)
        self.sums: set[Node] = set()
        self.refused: dict[Node, str] = {}
        further: dict[Node, list[Node]] = {}
        normalised: set[Node] = set()
        candidates = [node for node in graph.nodes if _is_sum(node)]
        for node in candidates:
            readers = list(self._readers(node.outputs[0]))
            further[node] = [reader for reader, _ in readers if _is_sum(reader)]
            if any(_computes_wide(reader, value) for reader, value in readers):
                normalised.add(node)
        leading: set[Node] = set()  # to a sum that is normalised
        for node in reversed(candidates):
            if node in normalised or any(n in leading for n in further[node]):
                leading.add(node)
        for node in candidates:
            behind = [n for n in further[node] if n in leading]
            if node in self.sums or (node in normalised and behind):
                self.sums |= {node, *behind}
            elif node in normalised:
                self.refused[node] = "it is normalised, but not added to again"
        addends = {v for node in self.sums for v in node.args[:2] if isinstance(v, Value)}
        self.ongoing = {
            v for v in addends
            if v.producer is not None and any(is_latest(n, v) for n in self.facts.readers(v))
        }  # fmt: skip
        self.begins = {v.producer for v in self.ongoing if v.producer is not None} - self.sums

    def _readers(self, value: Value) -> Iterator[tuple[Node, Value]]:
        """Who reads a value as it is, through views, or mixed with the streams beside it; and what
        it reads."""
        for node in self.facts.readers(value):
            if is_one_view(node) or is_mix(node, value):
                yield from self._readers(node.outputs[0])
            else:
                yield node, value


def _is_sum(node: Node) -> bool:
    return node.target == "aten.add.Tensor" and node.outputs[0].type.dtype in NARROW


def _computes_wide(node: Node, value: Value) -> bool:
    scales = promotes(node) and node.target == "aten.mul.Tensor"
    return is_norm(node, value) or is_widening(node) or scales or is_latest(node, value)


def is_norm(node: Node, value: Value) -> bool:
    """Whether it normalises this value."""
    return node.target in _NORMS and node.args[0] is value


def is_latest(node: Node, value: Value) -> bool:
    """Whether it is a mixture in which this value is the last of several candidates: the sum of the
    layers since the last block."""
    if node.target != "graphc.residual_mix.default":
        return False
    candidates = node.args[0]
    return candidates[-1] is value and value not in candidates[:-1]


def is_widening(node: Node) -> bool:
    """Whether it is its argument in float32, and no more."""
    return _is_cast_to(node, ("float32",))


def is_rounding(node: Node) -> bool:
    """Whether it is its argument, a float32, in a narrower format, and no more."""
    return _is_cast_to(node, NARROW) and node.args[0].type.dtype == "float32"


def _is_cast_to(node: Node, dtypes: tuple[str, ...]) -> bool:
    result = node.outputs[0]
    return is_cast(result) and result.type.dtype in dtypes and set(node.kwargs) <= {"dtype"}


def promotes(node: Node) -> bool:
    """Whether it computes, element by element, in float32 because one of its operands is."""
    return node.target in _ELEMENTWISE and node.outputs[0].type.dtype == "float32"


def is_one_view(node: Node) -> bool:
    """Whether it sees its argument in another way, and gives one tensor."""
    return is_view(node) and len(node.outputs) == 1


def is_mix(node: Node, value: Value) -> bool:
    """Whether it is a matrix for each token times a few streams side by side."""
    if node.target != "aten.matmul.default" or node.args[1] is not value:
        return False
    count = value.type.shape[-2] if len(value.type.shape) > 2 else None
    return isinstance(count, int) and count <= _STREAMS
