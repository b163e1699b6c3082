"""Which values of a decoder's graph tell what narrowing does to it: what each part of a layer
gives, and what the indexers and the attention that reads their choice are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from graphc.ir.graph import Graph, Node, Value

#: a part of a numbered layer, as "model.layers.3.self_attn"
_PART = re.compile(r"(?:.*\.)?(\w+\.\d+\.\w+)$")
_PRODUCTS = (
    "aten.linear.",
    "aten.addmm.",
    "aten.mm.",
    "graphc.experts.",
    "graphc.quantized_linear.",
)
_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Indexer:
    """Sparse attention and the indexer whose choice it reads.

    layer: the attention's name. query, weights, attention: results of the plan, [B, T, Hi, Di],
    [B, T, Hi] and, of the attention's queries, [B, T, H, W]. keys, rows: states of the plan.
    """

    layer: str
    query: str
    weights: str
    attention: str
    keys: str
    rows: str
    count: int
    scale: float


class Probes:
    """Called with a graph, the passes behind it: gives what a plan is to tell, by name.

    `parts` are the names of layers' parts, in order; `indexers` what is known of sparse attention,
    `refused` why some of it cannot be judged.
    """

    def __init__(self) -> None:
        self.parts: tuple[str, ...] = ()
        self.indexers: tuple[Indexer, ...] = ()
        self.refused: tuple[str, ...] = ()

    def __call__(self, graph: Graph) -> dict[str, Value]:
        parts = dict(_parts(graph))
        found: list[tuple[Indexer, dict[str, Value]]] = []
        refused: list[str] = []
        for made in _indexers(graph):
            if isinstance(made, str):
                refused.append(made)
            else:
                found.append(made)
        self.parts, self.refused = tuple(parts), tuple(dict.fromkeys(refused))
        self.indexers = tuple(indexer for indexer, _ in found)
        values = dict(parts)
        for _, asked in found:
            values |= asked
        return values


def _parts(graph: Graph) -> Iterator[tuple[str, Value]]:
    """What leaves each part of a numbered layer that multiplies by weights: [B, T, D]."""
    where: dict[Node, str] = {}
    multiply: set[str] = set()
    for node in graph.nodes:
        if (match := _PART.match(node.module.split(" ")[0])) is not None:
            where[node] = match[1]
            if node.target.startswith(_PRODUCTS):
                multiply.add(match[1])
    leading = tuple(graph.inputs[0].type.shape)
    last: dict[str, Value] = {}
    readers = graph.uses()
    for node, part in where.items():
        for value in node.outputs:
            shape = tuple(getattr(value.type, "shape", ()))
            read = any(where.get(reader) != part for reader in readers.get(value, []))
            if part in multiply and read and len(shape) == 3 and shape[:2] == leading:
                if value.type.dtype in _FLOATS:
                    last[part] = value
    yield from last.items()


def _indexers(graph: Graph) -> Iterator[tuple[Indexer, dict[str, Value]] | str]:
    """Each sparse attention with its indexer, or why it is left out."""
    states = {after: before.name for before, after in graph.state_updates.items()}
    for node in graph.nodes:
        name = node.target.rpartition(".")[0]
        if name not in ("graphc.latent_attention", "graphc.sparse_attention"):
            continue
        indices: Value | None = node.argument("indices")
        if indices is None:
            continue
        match = _PART.match(node.module.split(" ")[0])
        layer = match[1] if match else node.name
        chooser = indices.producer
        kind = chooser.target.rpartition(".")[0] if chooser is not None else ""
        if kind not in ("graphc.lightning_indexer", "graphc.paged_lightning_indexer"):
            yield f"{layer}: its keys are not one Lightning Indexer's choice at all lengths"
            continue
        assert chooser is not None
        keys, rows = states.get(_pages(chooser)), states.get(node.args[1])
        if keys is None or rows is None or node.argument("rope") is not None:
            yield f"{layer}: it does not read latent rows and keys in pages"
            continue
        names = [f"{layer}.{kind}" for kind in ("index_query", "index_weights", "query")]
        count, scale = int(chooser.argument("count")), float(node.argument("scale"))
        asked = (chooser.args[0], chooser.args[1], node.args[0])
        yield (
            Indexer(layer, names[0], names[1], names[2], keys, rows, count, scale),
            dict(zip(names, asked, strict=True)),
        )


def _pages(chooser: Node) -> Value:
    """The pages that an indexer's keys are in."""
    source: Value = chooser.args[2]
    read = source.producer
    if read is not None and read.target.startswith(("graphc.read_pages.", "graphc.read_records.")):
        pages: Value = read.args[0]
        return pages
    return source
