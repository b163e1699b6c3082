"""How passes keep a state's rows as records (`graphc.ops.records`): its pages become bytes, what
appends to them narrows, and what reads them is told the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.infer import type_of
from graphc.ops.records import record_format
from graphc.rewrite import Facts, Log
from graphc.rewrite.facts import packet_of

#: operators that read records themselves
READERS = frozenset(
    f"graphc.{name}"
    for name in ("latent_attention", "paged_attention", "paged_lightning_indexer", "pooled_indexer")
)
#: of these, those that rank
INDEXERS = ("graphc.paged_lightning_indexer", "graphc.pooled_indexer")
WRITERS = ("graphc.append_pages", "graphc.pool_keys")
PLAIN = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class Rows:
    """A state of rows in pages that a graph appends to."""

    state: Value
    node: Node  # append_pages, or pool_keys
    readers: tuple[Node, ...]

    @property
    def width(self) -> int:
        """Numbers of a row, or of a part of it where parts lie apart."""
        return int(self.state.type.shape[-1])

    @property
    def apart(self) -> bool:
        return len(self.state.type.shape) == 4

    @property
    def ranks(self) -> bool:
        """Whether an indexer reads it."""
        return any(packet_of(node.outputs[0]) in INDEXERS for node in self.readers)


@dataclass(frozen=True)
class Narrowed:
    """What rows become: `terms` records each, and what their readers are told besides."""

    format: str
    terms: int = 1
    keywords: Mapping[str, int] = field(default_factory=dict)


def appended_rows(graph: Graph, facts: Facts) -> Iterator[Rows | tuple[Node, str]]:
    """The states whose rows are numbers in pages, or a node and why its state cannot change."""
    for state, made in graph.state_updates.items():
        node = made.producer
        if node is None or packet_of(made) not in WRITERS or node.args[0] is not state:
            continue
        if state.type.dtype not in PLAIN or not isinstance(state.type.shape[-1], int):
            continue
        readers = tuple(facts.readers(made))
        others = [n for n in readers if not _reads(n, made)]
        if others or facts.readers(state) != [node]:
            name = (others or [n for n in facts.readers(state) if n is not node])[0].name
            yield node, f"its pages are also read by {name}"
        else:
            yield Rows(state, node, readers)


def _reads(node: Node, pages: Value) -> bool:
    if packet_of(node.outputs[0]) == "graphc.read_pages":
        return True
    return packet_of(node.outputs[0]) in READERS and list(node.inputs()).count(pages) == 1


def narrow(graph: Graph, rows: Mapping[Value, tuple[Rows, Narrowed]], log: Log, rule: str) -> Graph:
    """The graph with these states as records."""
    if not rows:
        return graph
    builder = Builder(graph)
    states = dict(graph.states)
    renamed: dict[Value, Value] = {}
    for state, (_, form) in rows.items():
        content = _content(states.pop(state), form)
        renamed[state] = Value("state", state.name, type_of(content))
        states[renamed[state]] = content
        builder.replace(state, renamed[state])
    appends = {found.node: form for found, form in rows.values()}
    pages_of = {found.node.outputs[0]: form for found, form in rows.values()}
    for node in graph.nodes:
        builder.location, builder.module = node.location, node.module
        if node in appends:
            made = _append(builder, node, appends[node])
            log.matched(rule, node, made)
        elif found := next((pages_of[v] for v in node.inputs() if v in pages_of), None):
            made = _read(builder, node, found)
        else:
            builder.copy(node)
            continue
        for old, new in zip(node.outputs, made, strict=True):
            builder.replace(old, new)
    after = builder.finish()
    updates = {renamed.get(s, s): v for s, v in after.state_updates.items()}
    ordered = {renamed.get(s, s): states[renamed.get(s, s)] for s in graph.states}
    return replace(after, states=ordered, state_updates=updates)


def _content(rows: torch.Tensor, form: Narrowed) -> torch.Tensor:
    """Rows [N, ..., P, W] as records; zeros as zeros, whatever the scale of nothing is."""
    records = record_format(form.format)
    if not any(rows.stride()) and not bool(rows[(0,) * rows.dim()]):  # one zero seen many times
        terms = (form.terms,) if form.terms > 1 else ()
        shape = (rows.shape[0], *terms, *rows.shape[1:-1], records.bytes)
        return torch.zeros((), dtype=torch.uint8).expand(shape)
    if form.terms > 1:
        left = rows - records.decode(records.encode(rows), rows.dtype)
        rows = torch.stack([rows, left], 1)
    if not bool(rows.any()):
        return torch.zeros(*rows.shape[:-1], records.bytes, dtype=torch.uint8)
    return records.spread(records.encode(rows))


def _append(builder: Builder, node: Node, form: Narrowed) -> Sequence[Value]:
    if packet_of(node.outputs[0]) == "graphc.pool_keys":
        return builder.call(node.op, *node.args, format=form.format)
    keywords: dict[str, Any] = {"terms": form.terms} if form.terms > 1 else {}
    op = torch.ops.graphc.append_records.default
    return builder.call(op, *node.args, format=form.format, **keywords)


def _read(builder: Builder, node: Node, form: Narrowed) -> Sequence[Value]:
    if packet_of(node.outputs[0]) == "graphc.read_pages":
        dtype = getattr(torch, node.outputs[0].type.dtype)
        op = torch.ops.graphc.read_records.default
        return builder.call(op, *node.args, format=form.format, dtype=dtype)
    keywords: dict[str, Any] = {**node.kwargs, **form.keywords}
    return builder.call(node.op, *node.args, format=form.format, **keywords)
