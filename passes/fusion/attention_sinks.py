"""Reads attention sinks: one more score for each head, joined to the scores of the keys before the
softmax, its weight left out behind it (arXiv:2309.17453)."""

from __future__ import annotations

from graphc.ir.graph import Value
from graphc.ir.types import as_dim, same
from graphc.rewrite import Refused
from graphc.rewrite.facts import axes, operand, packet_of, rank, widened
from passes.fusion.forms import difference, same_number


def drops_last(value: Value) -> bool:
    """Whether a slice is its operand without the last column."""
    node, source = value.producer, operand(value)
    assert node is not None
    if int(node.argument("dim")) % rank(source) != rank(source) - 1:
        return False
    first = node.argument("start") in (None, 0) and node.argument("step") == 1
    return first and same(value.type.shape[-1], as_dim(source.type.shape[-1] - 1))


def read_sinks(logits: Value) -> tuple[Value, Value] | Refused | None:
    """(scores, sinks) of what the softmax takes; sinks are [*, 1, 1]. None: no sinks here."""
    logits = _unshifted(widened(logits))
    if packet_of(logits) != "aten.cat":
        return None
    node = logits.producer
    assert node is not None
    parts, dim = node.args[0], int(node.argument("dim"))
    if len(parts) != 2 or dim % rank(logits) != rank(logits) - 1:
        return None
    scores, sinks = parts
    if sinks.type.shape[-1] != 1:
        return None
    while packet_of(sinks) == "aten.expand" and sinks.type.shape[-2] != 1:
        sinks = operand(sinks)
    if rank(sinks) < 2 or sinks.type.shape[-2] != 1:
        return Refused("the sinks differ from query to query")
    return scores, sinks


def _unshifted(logits: Value) -> Value:
    """x of x - max(x, -1, keepdim), which the softmax does not see."""
    pair = difference(logits)
    if pair is None or not isinstance(pair[1], Value):
        return logits
    source: Value = pair[0]
    if packet_of(pair[1]) not in ("aten.max", "aten.amax") or rank(pair[1]) != rank(source):
        return logits
    node = pair[1].producer
    assert node is not None
    dims = axes(node.args[1] if len(node.args) > 1 else None, rank(source))
    if not same_number(node.args[0], source) or dims != (rank(source) - 1,):
        return logits
    return source
