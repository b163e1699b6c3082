"""delta_rule: norms of query and key and the sigmoid of the write strength are the operator's own:
it has these values in registers anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ops.delta_rule import NORM_EPS
from graphc.rewrite import Facts, Log, Refused, Rule, apply_until_stable
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import (
    close,
    over_root,
    reduction,
    same_number,
    shifted,
    squared,
    unrounded,
)


@dataclass(frozen=True)
class DeltaRule:
    """x / sqrt(sum(x^2) + 1e-6) of query and key; c * sigmoid(x) as beta."""

    name: ClassVar[str] = "delta_rule"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_until_stable(graph, [_Norms(), _Strength()], log)


@dataclass(frozen=True)
class _Call:
    """What the operator is called with instead."""

    arguments: dict[int, Value]
    options: dict[str, Any]


class _DeltaRule(Rule[_Call]):
    roots = frozenset(("graphc.delta_rule",))

    def rewrite(self, builder: Builder, found: _Call, node: Node) -> Sequence[Value]:
        arguments = [found.arguments.get(k, value) for k, value in enumerate(node.args)]
        return builder.call(node.op, *arguments, **{**node.kwargs, **found.options})


class _Norms(_DeltaRule):
    name = "l2_norm"

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        if node.argument("normalize"):
            return
        found = [_normalised(node.args[k], facts) for k in (1, 2)]
        if found == [None, None]:
            return
        for one in found:
            if isinstance(one, Refused):
                yield one
                return
        query, key = found
        if not isinstance(query, Value) or not isinstance(key, Value):
            yield Refused("only one of query and key is normalised")
        elif query.type.dtype != key.type.dtype or query.type.dtype != node.args[3].type.dtype:
            yield Refused("query, key and value have different dtypes without the norm's rounding")
        else:
            yield _Call({1: query, 2: key}, {"normalize": True})


def _normalised(value: Any, facts: Facts) -> Value | Refused | None:
    """x of its l2-norm over the last dimension."""
    value = unrounded(value)
    if not isinstance(value, Value) or value.producer is None:
        return None
    for x, inside, outside in over_root(value, facts):
        moved = shifted(inside, facts)
        total, eps = (inside, 0.0) if moved is None else moved
        whole = reduction(total, facts)
        square = None if whole is None or whole.kind != "sum" else squared(whole.x, facts)
        if square is None or whole is None or not whole.keep or not same_number(square, x):
            continue
        if whole.dims != (rank(x) - 1,):
            return Refused("query or key is normalised over another dimension")
        if outside or not close(eps, NORM_EPS):
            return Refused(f"eps of the norms is {eps}, not {NORM_EPS} under the root")
        plain: Value = unrounded(x)
        return plain
    return None


class _Strength(_DeltaRule):
    name = "write_strength"

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Call | Refused]:
        if node.argument("strength") is not None:
            return
        beta, factor = unrounded(node.args[5]), 1.0
        if packet_of(beta) == "aten.mul":
            for part, other in (beta.producer.args[:2], beta.producer.args[1::-1]):
                number = facts.number(other)
                if number is not None and isinstance(part, Value):
                    beta, factor = unrounded(part), number
                    break
        if packet_of(beta) != "aten.sigmoid":
            return
        if factor == 0.0 or operand(beta).type.dtype == "float64":
            yield Refused("the strength is nothing, or of doubles")
            return
        yield _Call({5: unrounded(operand(beta))}, {"strength": factor})
