"""Passes and rules: a pass rewrites a graph; a rule is one rewrite in three small parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.report import Match, Refusal
from graphc.rewrite.facts import Facts


class Pass(Protocol):
    """A frozen dataclass: its fields are its options, its name is the file's."""

    name: ClassVar[str]

    def run(self, graph: Graph, log: Log) -> Graph:
        """The rewritten graph; `graph` itself if there is nothing to do."""
        ...


@dataclass(frozen=True)
class Refused:
    """A rule's answer "this looks like mine, but is not": the reason is shown to the user."""

    reason: str


class Log:
    """What a pass did and what it refused to do, with the user's source lines."""

    def __init__(self) -> None:
        self.matches: list[Match] = []
        self.refusals: list[Refusal] = []
        #: (value before, value after), for `bisect`
        self.replaced: list[tuple[Value, Value]] = []
        self._made: dict[Match, tuple[Value, ...]] = {}

    def matched(self, rule: str, node: Node, made: Sequence[Value] = (), detail: str = "") -> None:
        """The rule replaced `node`'s results by `made`."""
        match = Match(rule, node.name, node.location, detail=detail)
        self.matches.append(match)
        self._made[match] = tuple(made)
        self.replaced += zip(node.outputs, made, strict=False)

    def refused(self, rule: str, node: Node, reason: str) -> None:
        """The rule looked at `node` and said no."""
        refusal = Refusal(rule, node.name, reason, node.location)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def settle(self, before: Graph, after: Graph) -> None:
        """Forgets what concerned only nodes that a larger rewrite has made dead."""
        live = {n.name for n in after.nodes}
        values = {v for n in after.nodes for v in n.outputs} | {*after.inputs, *after.weights}
        own = {n.name for n in before.nodes}
        self.matches = [
            m
            for m in self.matches
            if m.node not in own or not self._made[m] or any(v in values for v in self._made[m])
        ]
        self.refusals = [r for r in self.refusals if r.node in live or r.node not in own]


F = TypeVar("F")


class Rule(ABC, Generic[F]):
    """A rewrite of the value of one node (the root).

    `pattern` is ordinary code that looks upwards from the root and yields what it found, or a
    Refused where the form is close; `check` decides on what was found; `rewrite` makes the new
    values, one per result of the root. Values with other readers simply stay.
    """

    name: ClassVar[str]
    #: operators that may be the root, by packet: "aten.mul"
    roots: ClassVar[frozenset[str]]

    @abstractmethod
    def pattern(self, node: Node, facts: Facts) -> Iterator[F | Refused]:
        """Candidates, in the order of preference."""

    def check(self, found: F, facts: Facts) -> Refused | None:
        """Why not, or None."""
        return None

    @abstractmethod
    def rewrite(self, builder: Builder, found: F, node: Node) -> Sequence[Value]:
        """The new values."""

    def detail(self, found: F) -> str:
        """What is reported with the match."""
        return ""


def packet(node: Node) -> str:
    """ "aten.mul" of aten.mul.Tensor."""
    return node.target.rpartition(".")[0]


def apply_rules(graph: Graph, rules: Iterable[Rule[Any]], log: Log) -> Graph:
    """One walk over the graph: at each node the first rule that takes it."""
    table: dict[str, list[Rule[Any]]] = {}
    for rule in rules:
        for root in rule.roots:
            table.setdefault(root, []).append(rule)
    facts = Facts(graph)
    builder = Builder(graph)
    changed = False
    for node in graph.nodes:
        builder.location, builder.module = node.location, node.module
        for rule in table.get(packet(node), ()):
            made = _attempt(rule, node, facts, builder, log)
            if made is not None:
                changed = True
                break
        else:
            builder.copy(node)
    if not changed:
        return graph
    after = builder.finish()
    log.settle(graph, after)
    return after


def apply_until_stable(graph: Graph, rules: Sequence[Rule[Any]], log: Log, limit: int = 8) -> Graph:
    """Repeats `apply_rules` until nothing matches, at most `limit` times."""
    for _ in range(limit):
        after = apply_rules(graph, rules, log)
        if after is graph:
            break
        graph = after
    return graph


def _attempt(
    rule: Rule[F], node: Node, facts: Facts, builder: Builder, log: Log
) -> Sequence[Value] | None:
    reason = ""
    for found in rule.pattern(node, facts):
        answer = found if isinstance(found, Refused) else rule.check(found, facts)
        if isinstance(answer, Refused):
            reason = reason or answer.reason
            continue
        assert not isinstance(found, Refused)
        made = [builder.of(v) for v in rule.rewrite(builder, found, node)]
        if not all(map(_same_type, node.outputs, made)):
            reason = reason or "a number in it has a shape of its own"
            continue  # what was built is dead
        for old, new in zip(node.outputs, made, strict=True):
            builder.replace(old, new)
        log.matched(rule.name, node, made, rule.detail(found))
        return made
    if reason:
        log.refused(rule.name, node, reason)
    return None


def _same_type(old: Value, new: Value) -> bool:
    """The same dtype and sizes; strides may differ."""
    one, other = old.type, new.type
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    return all(same(a, b) for a, b in zip(one.shape, other.shape, strict=True))
