"""Scores of Attention Residuals: how a query meets the normalised candidates, in its spellings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphc.ir.graph import Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Refused
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import (
    inverse_root,
    reduction,
    same_sizes,
    shifted,
    squared,
    unrounded,
)


@dataclass(frozen=True)
class Scores:
    """query . (z / sqrt(mean(z^2) + eps) * gains), over the last dimension."""

    query: Value
    gains: tuple[Value, ...]
    eps: float


def scores_of(value: Any, z: Value, facts: Facts) -> Scores | Refused:
    """The scores of the candidates z, or why these are not any."""
    value = unrounded(value)
    dot = _dot(value)
    if dot is not None:
        return _of_keys(*dot, z)
    if packet_of(value) == "aten.mul":
        for product, factor in (value.producer.args[:2], value.producer.args[1::-1]):
            dot, eps = _dot(unrounded(product)), _root_of_mean(unrounded(factor), z, facts)
            if dot is not None and eps is not None:
                if unrounded(dot[0]) is not unrounded(z):
                    return Refused("scores are of other tensors than are summed")
                return Scores(dot[1], (), eps)
    return Refused("the scores are not products of a query and normalised candidates")


def _of_keys(keys: Any, query: Value, z: Value) -> Scores | Refused:
    gains: list[Value] = []
    keys = unrounded(keys)
    while packet_of(keys) == "aten.mul":
        for gain, rest in (keys.producer.args[:2], keys.producer.args[1::-1]):
            if isinstance(gain, Value) and rank(gain) == 1 and isinstance(rest, Value):
                gains.append(gain)
                keys = unrounded(rest)
                break
        else:
            break
    if packet_of(keys) != "aten.rms_norm":
        return Refused("the candidates are scored without being normalised")
    node = keys.producer
    if len(node.args[1]) != 1:
        return Refused("candidates are normalised over several dimensions")
    if unrounded(node.args[0]) is not unrounded(z):
        return Refused("scores are of other tensors than are summed")
    weight, eps = node.argument("weight"), node.argument("eps")
    if weight is not None:
        gains.append(weight)
    if eps is None:
        eps = torch.finfo(getattr(torch, keys.type.dtype)).eps
    return Scores(query, tuple(gains), float(eps))


def _dot(value: Any) -> tuple[Value, Value] | None:
    """(keys [.., D], query [D] or [1, D]) of their products, summed over the last dimension."""
    name = packet_of(value)
    if name == "aten.einsum":
        terms = labels(value.producer)
        if terms is None or len(terms) != 3:
            return None
        for keys, query in ((0, 1), (1, 0)):
            every = terms[keys]
            if len(terms[query]) == 1 and every == terms[2] + terms[query]:
                return value.producer.args[1][keys], value.producer.args[1][query]
    elif name in ("aten.matmul", "aten.mv"):
        keys, query = operand(value), operand(value, 1)
        if rank(query) == 1 and rank(keys) > 1:
            return keys, query
    elif name in ("aten.squeeze", "aten.view", "aten.select"):
        product = unrounded(operand(value))
        if packet_of(product) == "aten.linear" and rank(product) == rank(value) + 1:
            keys, query = operand(product), operand(product, 1)
            column = same_sizes((*value.type.shape, 1), product.type.shape)
            single = same(query.type.shape[0], 1)
            if product.producer.argument("bias") is None and column and single:
                return keys, query
    elif name == "aten.sum" and value.producer.target == "aten.sum.dim_IntList":
        return _summed(value)
    return None


def _summed(value: Value) -> tuple[Value, Value] | None:
    product = operand(value)
    dims = value.producer.argument("dim") if value.producer else None
    if packet_of(product) != "aten.mul" or not dims or len(dims) != 1 or rank(value) == 0:
        return None
    if int(dims[0]) % rank(product) != rank(product) - 1 or rank(value) == rank(product):
        return None
    for keys, query in (product.producer.args[:2], product.producer.args[1::-1]):
        if isinstance(query, Value) and isinstance(keys, Value) and rank(query) == 1:
            return keys, query
    return None


def _root_of_mean(value: Any, z: Value, facts: Facts) -> float | None:
    """eps of 1 / sqrt(mean(z^2) + eps) over the last dimension."""
    moved = shifted(inverse_root(value, facts), facts)
    if moved is None:
        return None
    mean = reduction(moved[0], facts)
    if mean is None or mean.kind != "mean" or mean.keep or mean.dims != (rank(mean.x) - 1,):
        return None
    square = squared(mean.x, facts)
    return moved[1] if square is not None and unrounded(square) is unrounded(z) else None


def labels(node: Node) -> list[str] | None:
    """The labels of an einsum's operands and result; None with an ellipsis."""
    text = str(node.args[0]).replace(" ", "")
    if "." in text or "->" not in text:
        return None
    inputs, _, result = text.partition("->")
    return [*inputs.split(","), result]


def along(stack: Any) -> int | None:
    """The dimension, not the last, along which tensors were put side by side."""
    if packet_of(stack) not in ("aten.stack", "aten.cat"):
        return None
    axis = int(stack.producer.argument("dim")) % rank(stack)
    return axis if axis != rank(stack) - 1 else None


#: a candidate: a tensor, or one of those that lie side by side in it
Candidate = tuple[Value, int | None]


def candidates_of(value: Value, axis: int) -> Iterator[Candidate | None]:
    """What was put side by side; None for a part of unknown size."""
    if packet_of(value) == "aten.stack" and along(value) == axis:
        yield from ((part, None) for part in operand(value))
    elif packet_of(value) == "aten.cat" and along(value) == axis:
        for part in operand(value):
            yield from candidates_of(part, axis)
    elif packet_of(value) == "aten.unsqueeze" and operand(value, 1) % rank(value) == axis:
        yield operand(value), None
    elif isinstance(value.type.shape[axis], int):
        yield from ((value, k) for k in range(value.type.shape[axis]))
    else:
        yield None
