"""The mixed-precision guard: does a graph narrow only what its policy allows?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphc.errors import PrecisionError
from graphc.ir.graph import Graph, Node
from graphc.ir.types import itemsize, short_dtype
from graphc.precision import DEFAULT, E4M3, E8M0, Allowed, Precision
from passes.quantization.narrowing import (
    SIXTEEN_BITS,
    Narrowing,
    Narrowings,
    has_argument,
    record_kinds,
)
from passes.quantization.roles import Roles, Use

_READERS = frozenset(
    ("graphc.paged_attention.default", "graphc.latent_attention.default",
     "graphc.paged_lightning_indexer.default", "graphc.pooled_indexer.default")
)  # fmt: skip
#: roles from the most telling one: what narrows a stream narrows the products behind it, too
_TELLING = ("state", "router", "residual", "attention", "index", "cache", "projections")


@dataclass(frozen=True)
class Violation:
    """A narrowed value that reaches an operand with a role: the node that narrows, what it makes of
    it, and who reads it."""

    by: Narrowing
    role: str
    reader: Use


def check_precision(graph: Graph, policy: Precision = DEFAULT, *, authored: bool = False) -> None:
    """Holds a graph against a policy.

    Args:
        authored: what the graph narrows in operators of torch is the model as its author wrote it;
            only what graphc's own operators narrow is judged.

    Raises:
        PrecisionError: a narrowed value reaches a role that is kept; names the first such node.
    """
    found = list(violations(graph, policy, authored=authored))
    if found:
        order = {node: position for position, node in enumerate(graph.nodes)}
        found.sort(key=lambda v: (order[v.by.node], _TELLING.index(v.role)))
        raise _error(found, policy)


def violations(graph: Graph, policy: Precision, *, authored: bool = False) -> Iterator[Violation]:
    """Everything in a graph that its policy does not allow, each narrowing once for a role."""
    seen: set[tuple[Node, str, str]] = set()
    for use, by, role in narrowed_uses(graph):
        own = by.node.target.startswith("graphc.")
        key = (by.node, by.format, role)
        if key in seen or (authored and not own) or policy[role].takes(by.format):
            continue
        seen.add(key)
        yield Violation(by, role, use)


def narrowed_uses(graph: Graph) -> Iterator[tuple[Use, Narrowing, str]]:
    """Each operand that is narrower than its role asks for, why, and its role."""
    narrowed, roles = Narrowings(graph), Roles(graph)
    for use in roles.uses():
        for (format_, kept), by in narrowed.of(use.value).items():
            if format_ not in SIXTEEN_BITS or _below(format_, use.floor):
                yield use, by, _role(use, kept)
        yield from _own(use, narrowed, roles)


def _own(use: Use, narrowed: Narrowings, roles: Roles) -> Iterator[tuple[Use, Narrowing, str]]:
    """What the reader itself says of an operand: records, weights in a form, a narrow state."""
    node, value = use.node, use.value
    if node.target in _READERS and value is node.argument("pages"):
        known = {format_ for format_, _ in narrowed.of(value)}
        for kind in record_kinds(node):
            if kind not in known:
                yield use, Narrowing(node, kind), _role(use, True)
    if value in roles.graph.weights and has_argument(node, "form") and node.argument("form"):
        yield use, Narrowing(node, node.argument("form")), _role(use, False)
    if use.role == "state" and value.kind == "state" and use.floor:
        held = short_dtype(value.type.dtype)
        if held in SIXTEEN_BITS and _below(held, use.floor):
            yield use, Narrowing(node, held), "state"


def _role(use: Use, kept: bool) -> str:
    """Keys, values, and what they are expanded from, are cache as soon as they have been kept."""
    role, _, other = use.role.partition(" or ")
    return other if kept and other else role


def _below(format_: str, floor: str) -> bool:
    return bool(floor) and itemsize(floor) > 2 and format_ in SIXTEEN_BITS


def _error(found: list[Violation], policy: Precision) -> PrecisionError:
    first = found[0]
    node, role = first.by.node, first.role
    allowed = policy[role]
    wanted = f"in {allowed} or wider" if allowed.formats else "kept as it is"
    place = ", ".join(filter(None, (node.location, node.module)))
    more = f"; {len(found) - 1} more like this" if len(found) > 1 else ""
    return PrecisionError(
        f"expected {role} {wanted} ({allowed.origin}), found {first.by.format}: "
        f"{node!r} narrows what {_ends(first)}{more}",
        where=f"{node.name}" + (f" ({place})" if place else ""),
        hint=f"leave it as wide as it was, or --precision {role}={_opened(first, allowed)}"
        " (`precision:` in shapes.yaml)",
        node=node.name,
        role=role,
        found=first.by.format,
    )


def _ends(found: Violation) -> str:
    use = found.reader
    return f"is left in the state {use.state}" if use.state else f"{use.node!r} reads"


def _opened(found: Violation, allowed: Allowed) -> str:
    """The formats of a policy that would take it."""
    names = {E4M3: "fp8", E8M0: "mxfp8"}
    wanted = names.get(found.by.format, found.by.format)
    return "+".join(dict.fromkeys((*allowed.formats, wanted)))
