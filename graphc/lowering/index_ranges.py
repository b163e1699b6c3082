"""Which inputs are used as indices, and the values they may have.

A kernel reads a valid element for an index outside its dimension, where torch raises: the check
belongs to the boundary, where it costs one pass over the input. Here is found what to check there;
indices that the graph itself computes are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from graphc.ir.graph import Graph, Node, Value

Found = Iterator[tuple[Value, int, int]]  # index, lowest and one past the highest value allowed

#: operators whose result has exactly the elements of their operand, whatever its arrangement
SAME_ELEMENTS = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default", "alias.default", "clone.default", "contiguous.default",
        "detach.default", "expand.default", "permute.default", "reshape.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "t.default", "to.dtype",
        "transpose.int", "unsqueeze.default", "_unsafe_view.default", "view.default",
    )
)  # fmt: skip
#: casts to these keep any index that is worth checking
WIDE = ("int32", "int64")


def index_ranges(graphs: Sequence[Graph]) -> list[tuple[int, int, int, str]]:
    """(input, lowest, highest + 1, what it is an index of) of each input that every graph of the
    plan uses as an index, as it is or rearranged, over a dimension of static size."""
    first, *others = map(_ranges_of, graphs)
    return [(*key, text) for key, text in first.items() if all(key in other for other in others)]


def _ranges_of(graph: Graph) -> dict[tuple[int, int, int], str]:
    position = {value: k for k, value in enumerate(graph.inputs)}
    found: dict[tuple[int, int, int], str] = {}
    for node in graph.nodes:
        rule = _RULES.get(node.target)
        for value, low, end in rule(node) if rule is not None else ():
            source = position.get(_source(value), -1)
            if source >= 0:
                name = node.target.removeprefix("aten.").split(".")[0]
                text = f"an index of {name}" + (f" at {node.location}" if node.location else "")
                found.setdefault((source, low, end), text)
    return found


def _source(value: Value) -> Value:
    """The value that `value` is a rearrangement of."""
    while value.producer is not None and value.producer.target in SAME_ELEMENTS:
        if value.type.dtype not in WIDE:
            break
        value = value.producer.argument("self")
    return value


def _static(size: object) -> bool:
    return isinstance(size, int) and size > 0


def _embedding(node: Node) -> Found:
    size = node.argument("weight").type.shape[0]
    if _static(size):
        yield node.argument("indices"), 0, size


def _along(node: Node) -> Found:
    """index_select, gather: one dimension, no negative indices."""
    shape, dim = node.argument("self").type.shape, node.argument("dim")
    if shape and isinstance(dim, int) and _static(shape[dim]):
        yield node.argument("index"), 0, shape[dim]


def _fill(node: Node) -> Found:
    """index_fill: one dimension; negative indices count from the end."""
    yield from ((value, -end, end) for value, _, end in _along(node))


def _take(node: Node) -> Found:
    """take: places in the flattened tensor; negative ones count from the end."""
    shape = node.argument("self").type.shape
    if all(isinstance(size, int) for size in shape) and _static(math.prod(shape)):
        yield node.argument("index"), -math.prod(shape), math.prod(shape)


def _index(node: Node) -> Found:
    """index, index_put: one index a dimension; negative ones count from the end."""
    shape, indices = node.argument("self").type.shape, node.argument("indices")
    given = [i for i in indices if isinstance(i, Value)]
    if any(i.type.dtype in ("bool", "uint8") for i in given):
        return  # a mask may span several dimensions
    for size, value in zip(shape, indices, strict=False):
        if isinstance(value, Value) and _static(size):
            yield value, -size, size


_RULES: dict[str, Callable[[Node], Found]] = {
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _along,
    "aten.gather.default": _along,
    "aten.scatter.src": _along,
    "aten.scatter.value": _along,
    "aten.scatter_add.default": _along,
    "aten.scatter_reduce.two": _along,
    "aten.index_add.default": _along,
    "aten.index_reduce.default": _along,
    "aten.index_copy.default": _along,
    "aten.index_fill.int_Scalar": _fill,
    "aten.index_fill.int_Tensor": _fill,
    "aten.take.default": _take,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index,
}
