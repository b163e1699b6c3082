"""routing: scores of experts, the choice of the best ones and their weights become graphc.route.

Two values leave the form, the experts' numbers and their weights; each is rewritten to a call of
the whole, and equal calls become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import is_cast, operand, packet_of, rank
from passes.fusion.forms import addends, quotient, reduction, shifted

#: more are no experts but words: there sorting wins
_MOST = 2048, 64


@dataclass(frozen=True)
class Routing:
    """Sigmoid or softmax scores, a bias for the choice, groups, top-k, normalisation, scale.

    The operator names experts by falling score, equal ones by number. A topk that was not asked to
    sort may have given them in another order.
    """

    name: ClassVar[str] = "routing"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Experts(), _Weights()], log)


@dataclass(frozen=True)
class _Route:
    """Arguments of the operator; `end`: the weights as they leave the form."""

    logits: Value
    bias: Value | None
    count: int
    groups: int
    kept: int
    score: str
    eps: float | None
    scale: float
    end: Value

    def call(self, builder: Builder) -> Sequence[Value]:
        return builder.call(
            torch.ops.graphc.route.default, self.logits, self.bias, self.count, self.groups,
            self.kept, self.score, self.eps, self.scale,
        )  # fmt: skip


class _Experts(Rule[_Route]):
    name = "experts_of_tokens"
    roots = frozenset(("aten.topk", "aten.slice"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Route | Refused]:
        yield from _route(node.outputs[-1], facts)

    def rewrite(self, builder: Builder, found: _Route, node: Node) -> Sequence[Value]:
        index, weight = found.call(builder)
        if len(node.outputs) == 1:
            return [index]
        if found.end is not node.outputs[0]:  # plain scores, where they are read at all
            weight = replace(found, eps=None, scale=1.0).call(builder)[1]
        return [weight, index]


class _Weights(Rule[_Route]):
    name = "weights_of_experts"
    roots = frozenset(("aten.gather", "aten.div", "aten.mul"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Route | Refused]:
        index = _index_behind(node.outputs[0], facts)
        if index is not None:
            for found in _route(index, facts):
                if isinstance(found, _Route) and found.end is node.outputs[0]:
                    yield found

    def rewrite(self, builder: Builder, found: _Route, node: Node) -> Sequence[Value]:
        return [found.call(builder)[1]]


def _index_behind(value: Value, facts: Facts) -> Value | None:
    """The experts that these weights are of, if they are."""
    scaled = _scaled(value, facts)
    if scaled is not None:
        value = scaled[0]
    divided = quotient(value)
    if divided is not None and isinstance(divided[0], Value):
        value = divided[0]
    if packet_of(value) == "aten.gather":
        index: Value = operand(value, 2)
        return index
    if packet_of(value) == "aten.topk" and value.producer is not None and value.index == 0:
        return value.producer.outputs[1]
    return None


def _route(index: Value, facts: Facts) -> Iterator[_Route | Refused]:
    """Upwards from the numbers of the experts to the logits, downwards to the weights."""
    best = _best(index)
    if best is None or rank(best[0]) != 2:
        return
    choice, count = best
    grouped = _groups(choice, facts)
    if isinstance(grouped, Refused):
        yield grouped
        return
    choice, groups, kept = grouped
    for scores, bias in _biased(choice):
        named = _logits(scores)
        experts = scores.type.shape[1]
        if named is None or not isinstance(experts, int):
            continue
        if experts > _MOST[0] or count > _MOST[1]:
            return
        start = _chosen_scores(index, scores, choice, groups, facts)
        if start is None:
            return
        if _else_read(index, start, facts):
            yield Refused("something else reads what the choice sorted")
            return
        eps, scale, end = _finished(start, facts)
        yield _Route(named[0], bias, count, groups, kept, named[1], eps, scale, end)
        return


def _best(index: Any) -> tuple[Value, int] | None:
    """(x, k) of the positions of x's k largest items along its last dimension."""
    if packet_of(index) == "aten.topk" and index.index == 1:
        node: Node = index.producer
        x, count = node.args[0], node.args[1]
        falling = bool(node.argument("largest"))
        dim = node.argument("dim")
    elif packet_of(index) == "aten.slice" and packet_of(operand(index)) == "aten.sort":
        cut, node = index.producer, operand(index).producer
        if operand(index).index != 1 or cut.argument("start") not in (0, None):
            return None
        if cut.argument("step") != 1 or cut.argument("dim") not in (1, -1):
            return None
        x, count, dim = node.args[0], index.type.shape[1], node.argument("dim")
        falling = bool(node.argument("descending"))
    else:
        return None
    if not falling or dim not in (-1, rank(x) - 1) or not isinstance(count, int):
        return None
    return x, count


def _biased(choice: Value) -> Iterator[tuple[Value, Value | None]]:
    """(scores, bias) that the choice may be the sum of."""
    yield choice, None
    pair = addends(choice)
    if pair is not None:
        for scores, bias in (pair, pair[::-1]):
            if not (isinstance(scores, Value) and isinstance(bias, Value)):
                continue
            if rank(scores) == 2 and rank(bias) == 1 and bias.type.dtype == "float32":
                if same(bias.type.shape[0], scores.type.shape[1]):
                    yield scores, bias


def _logits(scores: Value) -> tuple[Value, str] | None:
    """The logits of float32 scores, and how these were made."""
    name = packet_of(scores)
    if scores.type.dtype != "float32" or name not in ("aten.sigmoid", "aten.softmax"):
        return None
    logits: Value = operand(scores)
    if name == "aten.softmax" and operand(scores, 1) not in (-1, 1):
        return None
    return logits, name.removeprefix("aten.")


def _groups(choice: Value, facts: Facts) -> tuple[Value, int, int] | Refused:
    """(scores, groups, kept) of scores where all but the best groups are minus infinity."""
    masked = choice
    if packet_of(masked) == "aten.view" and packet_of(operand(masked)) == "aten.masked_fill":
        masked = operand(masked)
    if packet_of(masked) != "aten.masked_fill" or facts.number(operand(masked, 2)) != -torch.inf:
        return choice, 1, 1
    source, negated = operand(masked), operand(masked, 1)
    if rank(source) == 3 and packet_of(source) == "aten.view":
        source = operand(source)
    if not _same_shape(source, choice) or not any(_logits(s) for s, _ in _biased(source)):
        return choice, 1, 1
    marks = None
    if packet_of(negated) in ("aten.bitwise_not", "aten.logical_not"):
        marks = _by_group(operand(negated))
    picked = None if marks is None else _marked(marks, facts)
    best = None if picked is None else _best(picked)
    if marks is None or best is None:
        return Refused("what is hidden is not all but the best groups")
    box = _two_best(best[0], facts)
    if box is None:
        return Refused("a group's value is not the sum of its two best scores")
    groups = box.type.shape[1]
    if packet_of(box) != "aten.view" or operand(box) is not source:
        return Refused("groups are valued by other scores than those that choose")
    if not isinstance(groups, int) or not same(marks.type.shape[1], groups):
        return Refused("there are other groups than those valued")
    return source, groups, best[1]


def _two_best(value: Value, facts: Facts) -> Value | None:
    """[T, G, size] of the sums [T, G] of the two largest."""
    total = reduction(value, facts)
    if total is None or total.kind != "sum" or total.dims != (2,) or total.keep:
        return None
    two = total.x
    if packet_of(two) != "aten.topk" or two.index != 0 or two.producer is None:
        return None
    best = _best(two.producer.outputs[1])
    return best[0] if best is not None and best[1] == 2 else None


def _same_shape(a: Value, b: Value) -> bool:
    """Whether both have the same sizes."""
    return rank(a) == rank(b) and all(map(same, a.type.shape, b.type.shape))


def _by_group(mask: Value) -> Value | None:
    """[T, G] of a mask over experts that is the same for a group's: [T, G, 1] or [T, G * size]."""
    while is_cast(mask) or packet_of(mask) in _SPREAD or _flat(mask):
        mask = operand(mask)
    if rank(mask) != 3 or packet_of(mask) not in ("aten.unsqueeze", "aten.view"):
        return None
    inner: Value = operand(mask)
    while is_cast(inner):
        inner = operand(inner)
    column = same(mask.type.shape[2], 1) and rank(inner) == 2
    return inner if column and same(mask.type.shape[1], inner.type.shape[1]) else None


_SPREAD = ("aten.expand", "aten.clone")


def _flat(mask: Value) -> bool:
    """Whether it is [T, G * size] of an expanded [T, G, size]."""
    return (
        packet_of(mask) == "aten.view" and rank(mask) == 2 and packet_of(operand(mask)) in _SPREAD
    )


def _marked(marks: Value, facts: Facts) -> Value | None:
    """The positions along the rows that were set to one among zeros."""
    if marks.producer is None or marks.producer.target != "aten.scatter.value":
        return None
    zeros, dim, index, value = marks.producer.args[:4]
    if facts.number(zeros) != 0 or facts.number(value) != 1 or dim not in (1, -1):
        return None
    found: Value = index
    return found


def _chosen_scores(
    index: Value, scores: Value, choice: Value, groups: int, facts: Facts
) -> Value | None:
    """The scores of the chosen experts: gathered, or those that topk gave with them."""
    for reader in facts.readers(index):
        if reader.target == "aten.gather.default" and reader.args[0] is scores:
            if reader.args[1] in (1, -1) and reader.args[2] is index:
                return reader.outputs[0]
    if scores is choice and groups == 1 and packet_of(index) == "aten.topk":
        assert index.producer is not None
        return index.producer.outputs[0]
    return None


def _else_read(index: Value, start: Value, facts: Facts) -> bool:
    """Whether torch's choice would have to stay: it may differ where scores are nearly equal."""
    assert index.producer is not None
    choice = index.producer
    if packet_of(index) == "aten.slice":
        choice = operand(index).producer
        if not facts.only_reader(choice.outputs[1]):
            return True
    values = choice.outputs[0]
    return values is not start and bool(facts.readers(values) or values in facts.kept)


def _finished(start: Value, facts: Facts) -> tuple[float | None, float, Value]:
    """(eps, scale, weights) of the chosen scores: divided by their sum + eps, then scaled."""
    eps, end = None, start
    for reader in facts.readers(start):
        divided = quotient(reader.outputs[0])
        found = None if divided is None else _sum_of(divided[1], start, facts)
        if divided is not None and divided[0] is start and found is not None:
            eps, end = found, reader.outputs[0]
            break
    for reader in facts.readers(end):
        scaled = _scaled(reader.outputs[0], facts)
        if scaled is not None and scaled[0] is end:
            return eps, scaled[1], reader.outputs[0]
    return eps, 1.0, end


def _sum_of(total: Any, start: Value, facts: Facts) -> float | None:
    """eps, if this is the sum of the chosen scores + eps."""
    moved = shifted(total, facts)
    total, eps = (total, 0.0) if moved is None else moved
    whole = reduction(total, facts)
    if whole is None or whole.kind != "sum" or whole.x is not start:
        return None
    return eps if whole.dims == (1,) and whole.keep else None


def _scaled(value: Value, facts: Facts) -> tuple[Value, float] | None:
    """(x, c) of x * c."""
    if packet_of(value) == "aten.mul":
        for x, other in ((operand(value), operand(value, 1)), (operand(value, 1), operand(value))):
            number = facts.number(other)
            if number is not None and isinstance(x, Value) and x.type == value.type:
                return x, number
    return None
