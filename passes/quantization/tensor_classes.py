"""The formats that the tensors of a plan are in, class by class: what `graphc inspect PLAN
precision` shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphc.ir.graph import Graph, Node, Value, leaves
from graphc.ir.types import TensorType, itemsize, short_dtype
from graphc.ops.records import RecordFormat, record_format
from graphc.precision import ROLES, Precision
from graphc.report import PrecisionReport, RoleRecord, TensorClassRecord
from graphc.rewrite.rules import packet
from passes.quantization.guard import narrowed_uses
from passes.quantization.narrowing import ATTENTION, PRODUCTS, has_argument
from passes.quantization.roles import Roles

PROJECTION, EXPERT, ROUTER = "projection weights", "expert weights", "router weights"
EMBEDDING, HEAD, SMALL = "embedding", "output head", "norms and small weights"
TIED = "embedding and output head"
CACHE, INDEX = "KV cache pages", "index key pages"
RECURRENT, WINDOWS, STATES = "recurrent states", "convolution states", "other states"
STREAM, ACTIVATIONS = "residual stream", "activations between steps"
ATTENDING, ROUTING = "attention accumulation", "router"
ORDER = (
    PROJECTION, EXPERT, ROUTER, SMALL, EMBEDDING, TIED, HEAD, CACHE, INDEX, RECURRENT, WINDOWS,
    STATES, STREAM, ACTIVATIONS, ATTENDING, ROUTING,
)  # fmt: skip
_EXPERTS = frozenset(
    ("graphc.experts", "aten._grouped_mm", "transformers.grouped_mm_fallback",
     "graphc.quantized_grouped_mm")
)  # fmt: skip
#: the class that a narrowed operand of a role is counted in, if it is no weight or state
_ACTIVE = {
    "index": INDEX, "cache": CACHE, "projections": ACTIVATIONS, "attention": ATTENDING,
    "residual": STREAM, "router": ROUTING, "state": RECURRENT,
}  # fmt: skip


class StoredWeight(NamedTuple):
    """A weight of the plan: what it is of (a weight, or a node with a suffix), dtype, place and
    size."""

    origin: str
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Arena:
    """The arena of a program at its limits: dtypes and bytes of its buffers."""

    phase: str
    bucket: str
    limits: Mapping[str, int]
    nbytes: int
    buffers: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Sequences:
    """How states are shared by sequences: tokens of a page, of the longest sequence, slots. All
    zero where a plan has one state of each kind."""

    page: int = 0
    context: int = 0
    slots: int = 0


@dataclass
class _Class:
    tensors: int = 0
    nbytes: int = 0
    token_nbytes: float = 0.0
    bucket_nbytes: int = 0
    plain_token_nbytes: float = 0.0
    formats: dict[str, str] = field(default_factory=dict)  # judged, with their roles


_Key = tuple[str, str, str, str, str]  # kind, path, place, phase, bucket


def precision_report(
    graphs: Sequence[tuple[str, Graph]],
    weights: Iterable[StoredWeight],
    arenas: Sequence[Arena],
    sequences: Sequences,
    *,
    policy: Precision,
) -> PrecisionReport:
    """The paths of everything in a plan. `graphs` are those behind the passes, by phase."""
    made = _Classes([graph for _, graph in graphs], sequences)
    made.weights(weights)
    made.states()
    made.stream([phase for phase, _ in graphs], arenas)
    made.activations(arenas)
    made.registers()
    made.narrowings()
    return PrecisionReport(
        [RoleRecord(r, list(policy[r].formats), policy[r].origin) for r in ROLES],
        [_record(key, one, policy) for key, one in made.ordered()],
    )


def _record(key: _Key, one: _Class, policy: Precision) -> TensorClassRecord:
    rules = {
        f"{role}={policy[role]} ({policy[role].origin})"
        if policy[role].takes(format_) else "the model's own"
        for format_, role in one.formats.items()
    }  # fmt: skip
    kind, path, place, phase, bucket = key
    return TensorClassRecord(
        kind, path, place, one.tensors, one.nbytes, one.token_nbytes, one.bucket_nbytes, phase,
        bucket, list(one.formats), ", ".join(sorted(rules)), one.plain_token_nbytes,
    )  # fmt: skip


class _Classes:
    """Filled class by class. Values of several graphs that have one name are one tensor."""

    def __init__(self, graphs: Sequence[Graph], sequences: Sequences) -> None:
        self.graphs = graphs
        self.roles = [Roles(graph) for graph in graphs]
        self.sequences = sequences
        self.found: dict[_Key, _Class] = {}
        self._by_name: dict[str, tuple[str, str]] = {}
        for roles in self.roles:
            for name, where in weight_classes(roles):
                self._by_name[name] = _joined(self._by_name.get(name), where)

    def ordered(self) -> list[tuple[_Key, _Class]]:
        """In the order of ORDER."""
        return sorted(self.found.items(), key=lambda item: ORDER.index(item[0][0]))

    def _add(
        self, kind: str, path: str, place: str, tensors: int, nbytes: int, phase: str = "",
        bucket: str = "",
    ) -> _Class:  # fmt: skip
        one = self.found.setdefault((kind, path, place, phase, bucket), _Class())
        one.tensors += tensors
        one.nbytes += nbytes
        return one

    def weights(self, stored: Iterable[StoredWeight]) -> None:
        """Each piece of memory once, whoever reads it."""
        seen: set[int] = set()
        for item in stored:
            if item.offset in seen:
                continue
            seen.add(item.offset)
            kind, path = self._class_of(item)
            self._add(kind, path, "weights", 1, item.nbytes)

    def _class_of(self, item: StoredWeight) -> tuple[str, str]:
        """By its name, or by the node or weight that it was packed for."""
        name = item.origin
        while name and name not in self._by_name:
            name = name.rpartition("_g" if name[-1:].isdigit() and "_g" in name else ".")[0]
        return self._by_name.get(name, (SMALL, short_dtype(item.dtype)))

    def states(self) -> None:
        seen: dict[str, tuple[str, str, Value, float]] = {}
        for roles in self.roles:
            for state in roles.graph.states:
                kind, path = state_class(roles, state)
                if state.name not in seen or seen[state.name][0] == STATES:
                    wider = _wider(roles.graph.state_updates.get(state))
                    seen[state.name] = (kind, path, state, wider)
        for kind, path, state, wider in seen.values():
            nbytes = _nbytes(state, {})
            one = self._add(kind, path, "states", 1, nbytes)
            per_token, whole = self._shares(kind, state, nbytes)
            one.token_nbytes += per_token
            one.plain_token_nbytes += per_token * wider
            one.bucket_nbytes += whole

    def _shares(self, kind: str, state: Value, nbytes: int) -> tuple[float, int]:
        """Bytes of a state for one token, and for the longest sequence."""
        if not self.sequences.page:
            return 0.0, nbytes
        if kind in (CACHE, INDEX) and state.type.shape[0] != self.sequences.slots:
            page = nbytes // int(state.type.shape[0])
            pages = -(-self.sequences.context // self.sequences.page)
            return page / self.sequences.page, page * pages
        return 0.0, nbytes // max(1, self.sequences.slots)

    def stream(self, phases: Sequence[str], arenas: Sequence[Arena]) -> None:
        """Sums of the phase with the largest arena, and the largest of them there."""
        largest = max(arenas, key=lambda a: a.nbytes)
        for roles in (r for p, r in zip(phases, self.roles, strict=True) if p == largest.phase):
            for node in filter(roles.is_residual, roles.graph.nodes):
                result = node.outputs[0]
                added = sorted({short_dtype(v.type.dtype) for v in leaves(node.args[:2])})
                path = f"{' + '.join(added)} -> {short_dtype(result.type.dtype)} sums"
                one = self._add(STREAM, path, "arena", 1, 0, largest.phase, largest.bucket)
                one.nbytes = max(one.nbytes, _nbytes(result, largest.limits))

    def activations(self, arenas: Sequence[Arena]) -> None:
        """The largest arena of each phase."""
        by_phase: dict[str, Arena] = {}
        for arena in arenas:
            if arena.phase not in by_phase or arena.nbytes > by_phase[arena.phase].nbytes:
                by_phase[arena.phase] = arena
        for phase, arena in by_phase.items():
            sums: dict[str, int] = {}
            for dtype, nbytes in arena.buffers:
                sums[short_dtype(dtype)] = sums.get(short_dtype(dtype), 0) + nbytes
            whole = max(1, sum(sums.values()))
            shares = sorted(sums.items(), key=lambda item: -item[1])
            path = ", ".join(f"{d} {100 * n / whole:.0f}%" for d, n in shares if 200 * n >= whole)
            count = len(arena.buffers)
            self._add(ACTIVATIONS, path, "arena", count, arena.nbytes, phase, arena.bucket)

    def registers(self) -> None:
        """What never lies in memory: sums and weights of attention, scores of experts."""
        for roles in self.roles:
            for node in roles.graph.nodes:
                name = packet(node)
                result = short_dtype(node.outputs[0].type.dtype) if node.outputs else ""
                if name in ATTENTION:
                    given = short_dtype(node.argument("query").type.dtype)
                    path = (
                        f"{given} operands -> {_sums(given)} scores, weights and sums -> {result}"
                    )
                    self._add(ATTENDING, path, "registers", 1, 0)
                elif roles.is_weighting(node):
                    given = short_dtype(node.args[0].type.dtype)
                    path = f"{given} scores -> {_sums(given)} softmax -> {result} weights"
                    self._add(ATTENDING, path, "arena", 1, 0)
                elif name == "graphc.route":
                    given = short_dtype(node.argument("logits").type.dtype)
                    path = f"{given} logits -> {_sums(given)} scores and weights"
                    self._add(ROUTING, path, "registers", 1, 0)
                elif any(use.role == "router" for use in roles.of(node)) and name not in PRODUCTS:
                    path = f"{short_dtype(node.args[0].type.dtype)} scores, the best of them"
                    self._add(ROUTING, path, "arena", 1, 0)

    def narrowings(self) -> None:
        """Which of these a policy judges: those whose path says so, else the whole class."""
        for roles in self.roles:
            for use, by, role in narrowed_uses(roles.graph):
                kind = _ACTIVE[role]
                if use.value in roles.graph.weights:
                    kind = self._by_name.get(use.value.name, (kind, ""))[0]
                elif use.value.kind == "state" or use.state:
                    state = use.state or use.value.name
                    kind = next(
                        (state_class(roles, s)[0] for s in roles.graph.states if s.name == state),
                        kind,
                    )  # fmt: skip
                self._judged(kind, by.format, role)

    def _judged(self, kind: str, format_: str, role: str) -> None:
        own = [key for key in self.found if key[0] == kind]
        named = [key for key in own if format_ in key[1]]
        if not own:
            self._add(kind, format_, "arena", 1, 0)
            named = [(kind, format_, "arena", "", "")]
        for key in named or own:
            self.found[key].formats[format_] = role


def _joined(old: tuple[str, str] | None, new: tuple[str, str]) -> tuple[str, str]:
    """The class of a weight that is read in two places."""
    if old is None or old[0] == SMALL:
        return new
    if {old[0], new[0]} == {EMBEDDING, HEAD}:
        return TIED, old[1] if old[0] == HEAD else new[1]
    return old


def weight_classes(roles: Roles) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name of a weight, or of the node whose packed weight it is; its class and path)."""
    for node in roles.graph.nodes:
        name = packet(node)
        if name == "aten.embedding":
            stored = short_dtype(node.args[0].type.dtype)
            path = f"{stored} -> {short_dtype(node.outputs[0].type.dtype)}"
            yield from ((v.name, (EMBEDDING, path)) for v in _weights(node.args[0], roles))
        elif name in PRODUCTS:
            kind, path = _product_kind(node, roles), ""
            for value in (v for operand in node.inputs() for v in _weights(operand, roles)):
                if len(value.type.shape) > 1 or has_argument(node, "form"):
                    path = _product_path(node, value)
                    yield value.name, (kind, path)
            if path:
                yield node.name, (kind, path)
    for value in roles.graph.weights:
        yield value.name, (SMALL, short_dtype(value.type.dtype))


def _product_kind(node: Node, roles: Roles) -> str:
    if packet(node) in _EXPERTS:
        return EXPERT
    if roles.is_router(node):
        return ROUTER
    return HEAD if roles.is_head(node) else PROJECTION


def _product_path(node: Node, weight: Value) -> str:
    """bf16 -> bf16 operands, f32 sums -> bf16."""
    result = short_dtype(node.outputs[0].type.dtype)
    given = short_dtype(next(node.inputs()).type.dtype)
    stored = short_dtype(weight.type.dtype)
    if has_argument(node, "form") and node.argument("form"):
        return f"{node.argument('form')} -> f32 operands and sums -> {result}"
    if packet(node) == "graphc.coded_linear":
        stored = "bf16 in 12 bits"
    return f"{stored} -> {given} operands, {_sums(given)} sums -> {result}"


def _weights(operand: Value, roles: Roles) -> Iterator[Value]:
    """The weights that an operand is a view of, or is made of."""
    if operand in roles.graph.weights:
        yield operand
    elif operand.producer is not None and roles.is_constant(operand):
        for value in operand.producer.inputs():
            yield from _weights(value, roles)


def state_class(roles: Roles, state: Value) -> tuple[str, str]:
    """The class of a state by who reads it, and its path."""
    held = short_dtype(state.type.dtype)
    readers = roles.readers_of(state)
    for node, role in readers:
        if role == "state":
            kind = WINDOWS if packet(node) == "graphc.short_convolution" else RECURRENT
            return kind, f"{held} -> {_sums(held)} sums -> {held}"
    written = roles.graph.state_updates.get(state)
    rows, form = _appended(written)
    inside = f"{_terms(written)}{form}" if form is not None else held
    for node, role in readers:
        if role in ("index", "cache"):
            by = node.argument("query") if has_argument(node, "query") else next(node.inputs())
            query = short_dtype(by.type.dtype)
            kind = INDEX if role == "index" else CACHE
            steps = dict.fromkeys((rows or held, inside, f"{query} operands, {_sums(query)} sums"))
            return kind, " -> ".join(steps)
    return STATES, f"{rows} -> {inside}" if rows and rows != inside else inside


def _appended(value: Value | None) -> tuple[str, RecordFormat | None]:
    """The dtype of the rows that are appended to a state, and the records they become."""
    if value is None or value.producer is None:
        return "", None
    node = value.producer
    form = record_format(node.argument("format")) if has_argument(node, "format") and (
        node.argument("format")) else None  # fmt: skip
    if not has_argument(node, "rows"):
        return "", form
    return short_dtype(node.argument("rows")[0].type.dtype), form


def _wider(value: Value | None) -> float:
    """How many times more bytes rows would take as the numbers that are appended."""
    _, form = _appended(value)
    if form is None or value is None or value.producer is None:
        return 1.0
    node = value.producer
    rows = node.argument("rows")[0] if has_argument(node, "rows") else node.argument("key")
    terms = node.argument("terms") if has_argument(node, "terms") else 1
    return float(form.width * itemsize(rows.type.dtype) / (form.bytes * terms))


def _terms(value: Value | None) -> str:
    node = None if value is None else value.producer
    if node is None or not has_argument(node, "terms") or node.argument("terms") == 1:
        return ""
    return f"{node.argument('terms')} x "


def _sums(dtype: str) -> str:
    """The dtype in which kernels sum."""
    return {"f64": "f64", "i8": "i32", "u8": "i32", "i32": "i32"}.get(dtype, "f32")


def _nbytes(value: Value, limits: Mapping[str, int]) -> int:
    """Bytes at these lengths; 0 where a length is known from data only."""
    if not isinstance(value.type, TensorType):
        return 0
    total = itemsize(value.type.dtype)
    for dim in value.type.shape:
        if not isinstance(dim, int):
            known = {s: limits.get(str(s)) for s in dim.free_symbols}
            if None in known.values():
                return 0
            dim = int(dim.subs(known))
        total *= dim
    return total
