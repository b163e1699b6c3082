"""Where a graph narrows values, and which values are narrow therefore.

A narrowing lasts: what is only viewed, put together, scaled, added to, normalised or activated
afterwards is as narrow as before, and so is what is kept in a state and read again. It ends in an
operator that computes something new with wide sums: a product, attention, an indexer, a recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphc.ir.graph import Graph, Node, Value, leaves, target_name
from graphc.ir.types import TensorType, itemsize
from graphc.ops.records import PLAIN, record_format
from graphc.precision import E4M3, E8M0
from graphc.rewrite.driver import is_view
from graphc.rewrite.facts import operand, packet_of
from graphc.rewrite.rules import packet

WIDE = ("bfloat16", "float16", "float32", "float64")
#: dtypes that are narrow by themselves, in the words of a policy
_CASTS = {
    "float8_e4m3fn": E4M3, "float8_e4m3fnuz": E4M3, "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2", "float8_e8m0fnu": E8M0, "float4_e2m1fn_x2": "mxfp4",
    "int8": "int8", "uint8": "int8",
}  # fmt: skip
_HALVES = {"bfloat16": "bf16", "float16": "f16"}
SIXTEEN_BITS = frozenset(_HALVES.values())

PRODUCTS = frozenset(
    f"aten.{name}"
    for name in ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "mv", "dot", "addmv",
                 "einsum", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
                 "conv_transpose2d", "conv_transpose3d", "_grouped_mm", "_scaled_mm")
) | {"graphc.coded_linear", "graphc.integer_linear", "graphc.quantized_linear",
     "graphc.quantized_grouped_mm", "graphc.experts",
     "transformers.grouped_mm_fallback"}  # fmt: skip
ATTENTION = frozenset(
    ("aten.scaled_dot_product_attention", "graphc.attention", "graphc.cached_attention",
     "graphc.paged_attention", "graphc.sparse_attention", "graphc.latent_attention")
)  # fmt: skip
INDEXERS = frozenset(
    ("graphc.lightning_indexer", "graphc.paged_lightning_indexer", "graphc.pooled_indexer")
)
_RECURRENT = frozenset(("aten.lstm", "aten.gru", "graphc.lstm", "graphc.gru"))
#: rows that come into a state, or out of it
KEPT = frozenset(
    ("graphc.append_pages", "graphc.append_records", "graphc.append_ring", "graphc.pool_keys",
     "graphc.read_pages", "graphc.read_records")
)  # fmt: skip
#: what puts values into others, or lets them be
_MOVES = frozenset(
    f"aten.{name}"
    for name in ("cat", "slice_scatter", "select_scatter", "index_copy", "index_put", "scatter",
                 "copy", "clone", "_to_copy", "where", "roll", "constant_pad_nd")
)  # fmt: skip
_ROUNDINGS = frozenset(("aten.round", "aten.floor", "aten.trunc"))
_CLAMPS = {"aten.clamp": ("min", "max"), "aten.hardtanh": ("min_val", "max_val")}
_WRITERS = frozenset(("graphc.append_records", "graphc.pool_keys"))
#: operands that are looked at as numbers, where others only say which or how many
_DATA: dict[str, tuple[int, ...]] = {
    "aten.gather": (0,), "aten.index": (0,), "aten.index_select": (0,), "aten.embedding": (0,),
    "aten.take_along_dim": (0,), "aten.masked_fill": (0, 2), "aten.where": (1, 2),
    "aten.scatter": (0, 3), "aten.scatter_add": (0, 3), "aten.scatter_reduce": (0, 3),
    "aten.index_put": (0, 2), "aten.index_copy": (0, 3), "aten.index_add": (0, 3),
    "aten.copy": (1,), "graphc.append_pages": (0, 1), "graphc.append_records": (0, 1),
    "graphc.read_pages": (0,), "graphc.read_records": (0,), "graphc.append_ring": (0, 1),
    "graphc.pool_keys": (0, 1, 2, 3, 4),
}  # fmt: skip
_CREATIONS = (
    "_like", ".new_zeros", ".new_ones", ".new_full", ".new_empty", ".zeros", ".ones", ".full",
    ".empty", ".arange", ".scalar_tensor",
)  # fmt: skip


def has_argument(node: Node, name: str) -> bool:
    """Whether its operator takes an argument of this name."""
    return any(parameter.name == name for parameter in node.op._schema.arguments)


def is_recurrence(node: Node) -> bool:
    """Whether it has a state and tokens: delta rules, short convolutions, LSTM, operators that are
    defined by their mathematics (`graphc.dsl`)."""
    return _is_recurrence(node.op)


def is_creation(node: Node) -> bool:
    """Whether no operand is seen in its result."""
    return packet(node).endswith(_CREATIONS)


def is_new(node: Node) -> bool:
    """Whether it computes something new, in which no operand is seen any more."""
    return _is_new(node.op)


@cache
def _is_recurrence(op: torch._ops.OpOverload) -> bool:
    name, first = target_name(op), op._schema.arguments[:1]
    if name.rpartition(".")[0] in _RECURRENT:
        return True
    return name.startswith("graphc.") and bool(first) and first[0].name == "state"


@cache
def _is_new(op: torch._ops.OpOverload) -> bool:
    name = target_name(op).rpartition(".")[0]
    if name in PRODUCTS or name in ATTENTION or name in INDEXERS or name == "graphc.route":
        return True
    return _is_recurrence(op) or name.endswith(_CREATIONS)


def is_move(node: Node) -> bool:
    """Whether its result consists of values that it is given."""
    return is_view(node) or packet(node) in _MOVES or packet(node) in KEPT


def sources(node: Node) -> list[Value]:
    """The operands that a result is made of, element by element or row by row."""
    if all(getattr(v.type, "dtype", "") == "bool" for v in node.outputs):
        return []
    positions = _DATA.get(packet(node))
    given: Any = node.args if positions is None else [node.args[p] for p in positions
                                                     if p < len(node.args)]  # fmt: skip
    found = [*leaves(given), *(leaves(node.kwargs) if positions is None else ())]
    return [v for v in dict.fromkeys(found) if isinstance(v.type, TensorType)]


@dataclass(frozen=True)
class Narrowing:
    """A node that makes a value narrower, and the format it gets."""

    node: Node
    format: str


#: (format, whether it has been in a state) -> the first node that made the value so narrow
Narrow = Mapping[tuple[str, bool], Narrowing]
_NONE: Narrow = {}


class Narrowings:
    """The narrowings of a graph by the values that are narrow because of them."""

    def __init__(self, graph: Graph) -> None:
        self._of: dict[Value, Narrow] = {}
        self._nodes = [(node, sources(node)) for node in graph.nodes if not is_new(node)]
        #: what states hold, and rows among it
        self._held = set(graph.states)
        for node, given in self._nodes:
            if is_move(node) and any(v in self._held for v in given):
                self._held.update(node.outputs)
        self._walk()
        kept = {s: _in_states(self.of(v)) for s, v in graph.state_updates.items()}
        if any(kept.values()):  # what one call writes, the next one reads
            self._of = {s: narrow for s, narrow in kept.items() if narrow}
            self._walk()

    def of(self, value: Value) -> Narrow:
        """Its narrowings."""
        return self._of.get(value, _NONE)

    def _walk(self) -> None:
        for node, given in self._nodes:
            narrow = _merged([self.of(v) for v in given])
            name = packet(node)
            if name == "graphc.read_records":
                narrow = self._read(node, narrow)
            else:
                own = {(f, False): Narrowing(node, f) for f in narrows(node, given)}
                narrow = {**own, **narrow} if own else narrow
            if name in KEPT or node.outputs[:1] and node.outputs[0] in self._held:
                narrow = _in_states(narrow)
            if narrow:
                self._of.update((v, narrow) for v in node.outputs)

    def _read(self, node: Node, narrow: Narrow) -> Narrow:
        """What columns of records are: other columns may have another format."""
        formats = _columns(node)
        made = {
            key: by for key, by in narrow.items()
            if packet(by.node) not in _WRITERS or by.format in formats
        }  # fmt: skip
        known = {by.format for by in made.values()}
        own = {(f, True): Narrowing(node, f) for f in formats if f not in known}
        return {**made, **own}


def _merged(parts: Iterable[Narrow]) -> Narrow:
    made = _NONE
    for part in parts:
        if part and part is not made:
            made = {**part, **made} if made else part
    return made


def _in_states(narrow: Narrow) -> Narrow:
    if all(kept for _, kept in narrow):
        return narrow
    return {(f, True): by for (f, _), by in narrow.items()}


def narrows(node: Node, sources: Sequence[Value]) -> Iterator[str]:
    """The formats in which it leaves what it is given wider."""
    if packet(node) in _WRITERS:
        yield from record_kinds(node)
        return
    result = node.outputs[0].type if node.outputs else None
    if not isinstance(result, TensorType) or node.target == "aten.view.dtype":
        return
    given = [v.type for v in sources if v.type.dtype in WIDE]
    if node.target.startswith("aten.fake_quantize"):
        yield _integers(node.argument("quant_min"), node.argument("quant_max")) or "int8"
    elif result.dtype in _CASTS:
        if given:
            yield _CASTS[result.dtype]
    elif result.dtype in _HALVES:
        # a number in a wider format changes no dtype
        widest = max((itemsize(t.dtype) for t in given if t.shape or not result.shape), default=0)
        if widest > itemsize(result.dtype):
            yield _HALVES[result.dtype]
    elif bounds := _bounds(node):
        if _is_rounded(node.args[0]):
            yield from filter(None, [_integers(*bounds)])
    elif packet(node) in _ROUNDINGS and packet_of(node.args[0]) in _CLAMPS:
        if _is_scaled(operand(node.args[0])):
            yield from filter(None, [_integers(*_bounds(node.args[0].producer))])


def _bounds(node: Node) -> tuple[Any, ...]:
    """The least and the greatest number that a clamp leaves."""
    names = _CLAMPS.get(packet(node))
    return () if names is None else tuple(node.argument(name) for name in names)


def record_kinds(node: Node) -> list[str]:
    """The narrow ones among the formats of the records that it reads or writes, if it does."""
    if not (text := has_argument(node, "format") and node.argument("format")):
        return []
    kinds = (part.kind for part in record_format(text).segments)
    return [kind for kind in dict.fromkeys(kinds) if kind not in PLAIN]


def _columns(node: Node) -> list[str]:
    """The narrow formats among the columns that a node reads of records."""
    form = record_format(node.argument("format"))
    first, width = int(node.argument("offset")), int(node.argument("width"))
    if first // form.width != (first + width - 1) // form.width:
        return record_kinds(node)
    first %= form.width
    found: list[str] = []
    at = 0
    for part in form.segments:
        if at < first + width and first < at + part.width and part.kind not in PLAIN:
            found.append(part.kind)
        at += part.width
    return list(dict.fromkeys(found))


def _integers(low: Any, high: Any) -> str:
    """The format of whole numbers from `low` to `high`, if they are few."""
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return ""
    span = high - low
    return "int4" if 0 < span < 16 else "int8" if 0 < span < 256 else ""


def _is_rounded(item: Any, steps: int = 4) -> bool:
    """Whether it is a scaled value, rounded, plus a zero point."""
    while isinstance(item, Value) and item.producer is not None and steps:
        name = packet_of(item)
        if name in _ROUNDINGS:
            return _is_scaled(operand(item))
        if name not in ("aten.add", "aten.sub", "aten._to_copy", "aten.clamp"):
            return False
        item, steps = operand(item), steps - 1
    return False


def _is_scaled(item: Any) -> bool:
    while packet_of(item) in ("aten.add", "aten.sub", "aten._to_copy"):
        item = operand(item)
    return packet_of(item) in ("aten.mul", "aten.div")
