"""attention_residuals: the softmax-weighted sum of what earlier layers made (arXiv:2603.15031) is
one operator: candidates are read once; no stack, no norm of it and no scores are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import is_cast, operand, packet_of, rank
from passes.fusion.forms import FLOATS, addends, same_sizes, unrounded
from passes.fusion.norm import cast
from passes.fusion.residual_scores import (
    Candidate,
    Scores,
    along,
    candidates_of,
    labels,
    scores_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionResiduals:
    """Candidates stacked (einsum, matmul, product and sum) or one by one."""

    name: ClassVar[str] = "attention_residuals"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Stacked(), _OneByOne()], log)


@dataclass(frozen=True)
class _Mix:
    candidates: tuple[Candidate, ...]
    axis: int  # where those that share a tensor lie side by side in it
    scores: Scores


class _MixRule(Rule[_Mix]):
    def rewrite(self, builder: Builder, found: _Mix, node: Node) -> Sequence[Value]:
        query = _flat_query(builder, found.scores)
        dtype = node.outputs[0].type.dtype
        candidates = tuple(
            cast(builder, value if k is None else _cut(builder, value, found.axis, k), dtype)
            for value, k in found.candidates
        )
        return builder.call(
            torch.ops.graphc.residual_mix.default, candidates, query, found.scores.eps
        )


def _cut(builder: Builder, value: Value, axis: int, position: int) -> Value:
    made: Value = builder.call1(aten.select.int, value, axis, position)
    return made


def _flat_query(builder: Builder, scores: Scores) -> Value:
    """query * gain, float32 [D]; folded where both are constants."""
    tensors = [builder.graph.weights.get(v) for v in (scores.query, *scores.gains)]
    if all(t is not None for t in tensors):
        made = torch.ones(1, dtype=torch.float64)
        for tensor in tensors:
            assert tensor is not None
            made = made * tensor.reshape(-1).double()
        return builder.weight("query", made.float())
    query = scores.query
    if rank(query) > 1:
        query = builder.call1(aten.view.default, query, query.type.shape[-1:])
    made_value = cast(builder, query, "float32")
    for gain in scores.gains:
        made_value = builder.call1(aten.mul.Tensor, made_value, cast(builder, gain, "float32"))
    return made_value


class _Stacked(_MixRule):
    name = "stacked_candidates"
    roots = frozenset(("aten.einsum", "aten.sum", "aten.squeeze", "aten.view"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Mix | Refused]:
        parts = _weighted_sum(node) if node.outputs[0].type.dtype in FLOATS else None
        if parts is None:
            return
        weights, stack = parts
        axis = along(unrounded(stack))
        softmax = unrounded(weights)
        if axis is None or packet_of(softmax) != "aten.softmax":
            return
        found = list(candidates_of(unrounded(stack), axis))
        scores = scores_of(operand(softmax), stack, facts)
        if isinstance(scores, Refused):
            yield scores
        elif operand(softmax, 1) % rank(softmax) != axis:
            yield Refused("the softmax is not over the candidates")
        elif None in found or len(found) < 2:
            yield Refused("the number of candidates is not known")
        else:
            yield _Mix(tuple(c for c in found if c is not None), axis, scores)


def _weighted_sum(node: Node) -> tuple[Value, Value] | None:
    """(weights [.., n, ..], stack [.., n, .., D]) of their product, summed over n."""
    out = node.outputs[0]
    name = packet_of(out)
    if name == "aten.einsum":
        return _einsum_sum(node)
    if node.target == "aten.sum.dim_IntList":
        dims, product = node.argument("dim"), operand(out)
        if packet_of(product) != "aten.mul" or not dims or len(dims) != 1:
            return None
        if node.argument("keepdim"):
            return None
        for weights, stack in (product.producer.args, product.producer.args[::-1]):
            column = unrounded(weights)
            if packet_of(column) == "aten.unsqueeze" and isinstance(stack, Value):
                last = operand(column, 1) % rank(column) == rank(stack) - 1
                axis = along(unrounded(stack))
                if last and axis is not None and int(dims[0]) % rank(stack) == axis:
                    return operand(column), stack
        return None
    if name == "aten.sum":
        return None
    product = unrounded(operand(out))
    if packet_of(product) not in ("aten.matmul", "aten.bmm") or rank(product) != rank(out) + 1:
        return None
    if rank(product) < 2:
        return None
    row, stack = operand(product), operand(product, 1)
    if packet_of(row) != "aten.unsqueeze" or not same(product.type.shape[-2], 1):
        return None
    if operand(row, 1) % rank(row) != rank(row) - 2 or rank(row) != rank(stack):
        return None
    if not same_sizes((*out.type.shape[:-1], 1, out.type.shape[-1]), product.type.shape):
        return None
    weights = operand(row)
    return (weights, stack) if along(unrounded(stack)) == rank(stack) - 2 else None


def _einsum_sum(node: Node) -> tuple[Value, Value] | None:
    """Of an equation such as "nbt,nbtd->btd"."""
    terms = labels(node)
    if terms is None or len(terms) != 3:
        return None
    for weights, stack in ((0, 1), (1, 0)):
        value = node.args[1][stack]
        axis = along(unrounded(value))
        every = terms[stack]
        if axis is not None and terms[weights] == every[:-1] and len(set(every)) == len(every):
            if terms[2] == every[:axis] + every[axis + 1 :]:
                return node.args[1][weights], value
    return None


class _OneByOne(_MixRule):
    name = "single_candidates"
    roots = frozenset(("aten.add", "aten._to_copy"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Mix | Refused]:
        out = node.outputs[0]
        if out.type.dtype not in FLOATS:
            return
        total = operand(out) if is_cast(out) else out
        terms = list(_terms(total))
        found = [_term(term) for term in terms]
        if len(found) < 2 or any(t is None for t in found):
            return
        softmax = found[0][0] if found[0] else None
        parts = {t[1]: t[2] for t in found if t is not None and t[0] is softmax}
        if softmax is None or sorted(parts) != list(range(len(found))):
            return
        scores = operand(softmax)
        axis = operand(softmax, 1) % rank(softmax)
        if packet_of(scores) != "aten.stack" or len(operand(scores)) != len(found):
            return
        if scores.producer.argument("dim") % rank(scores) != axis:
            return
        singles = [scores_of(s, parts[k], facts) for k, s in enumerate(operand(scores))]
        for one in singles:
            if isinstance(one, Refused):
                yield one
                return
        first = singles[0]
        if any(one != first for one in singles):
            yield Refused("candidates are scored in different ways")
            return
        plain = tuple(unrounded(parts[k]) for k in range(len(found)))
        if any(value.type.dtype != out.type.dtype for value in plain):
            # in float32, and rounded behind it: the rule takes the rounding too
            if any(is_cast(r.outputs[0]) for r in facts.readers(out)) or is_cast(out):
                return
            plain = tuple(parts[k] for k in range(len(found)))
        assert isinstance(first, Scores)
        yield _Mix(tuple((value, None) for value in plain), 0, first)


def _terms(total: Any) -> Iterator[Value]:
    """The addends of a chain, in order."""
    pair = addends(total)
    if pair is None or not all(isinstance(v, Value) for v in pair):
        yield total
        return
    yield from _terms(pair[0])
    yield pair[1]


def _term(value: Any) -> tuple[Value, int, Value] | None:
    """(softmax, j, x) of softmax[..., j, None] * x."""
    if packet_of(value) != "aten.mul":
        return None
    for column, x in (value.producer.args, value.producer.args[::-1]):
        if packet_of(column) != "aten.unsqueeze" or not isinstance(x, Value):
            continue
        cut, last = operand(column), operand(column, 1) % rank(column) == rank(column) - 1
        if packet_of(cut) != "aten.select" or rank(column) != rank(x) or not last:
            continue
        softmax, dim, position = cut.producer.args
        if packet_of(softmax) == "aten.softmax" and isinstance(position, int):
            axis = operand(softmax, 1) % rank(softmax)
            if dim % rank(softmax) == axis and isinstance(softmax.type.shape[axis], int):
                return softmax, position % softmax.type.shape[axis], x
    return None
