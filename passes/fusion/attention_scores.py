"""Reads attention scores: from the softmax down to the product of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphc.ir.graph import Value
from graphc.ir.types import product, same
from graphc.rewrite import Facts, Refused
from graphc.rewrite.facts import operand, packet_of, rank, widened
from passes.fusion.forms import addends, difference, quotient, same_sizes

_MASK_WITHIN = "the scores are masked before they are capped"
PRODUCTS = frozenset(("aten.matmul", "aten.bmm", "aten.baddbmm"))
_VIEWS = frozenset(("aten.view", "aten._unsafe_view", "aten.reshape"))
_STEPS = frozenset(f"aten.{n}" for n in (
    "mul", "div", "true_divide", "add", "sub", "where", "masked_fill", "neg",
    "tanh", "clamp", "maximum", "clone", "_to_copy", "to",
)) | _VIEWS | {"prims.convert_element_type"}  # fmt: skip


@dataclass(frozen=True)
class Additive:
    """scores + factor * mask. `batch`: sizes before T and S of the scores it is added to."""

    mask: Value
    factor: float
    batch: tuple[Any, ...]


@dataclass(frozen=True)
class Selective:
    """Where `condition` is `keep`, the scores; elsewhere `fill`."""

    condition: Value
    keep: bool
    fill: float
    batch: tuple[Any, ...]


@dataclass(frozen=True)
class Scores:
    """scale * (queries @ keys) with masks, the one nearest to the product first.

    query: [*, T, D]; key: [*, D, S] (as the product reads it); batch: sizes before T and S of what
    the softmax takes, which may be those of the product split in two. soft_cap, if not 0: the
    scores are soft_cap * tanh(scores / soft_cap) before masks.
    """

    query: Value
    key: Value
    scale: float
    masks: tuple[Additive | Selective, ...]
    batch: tuple[Any, ...]
    soft_cap: float = 0.0


def read_scores(value: Value, facts: Facts) -> Iterator[Scores | Refused]:
    """What the softmax takes; nothing if no product of two tensors stands behind it."""
    batch = tuple(value.type.shape[:-2])
    yield from _walk(value, 1.0, (), batch, facts, 12)


def _walk(
    value: Value, scale: float, masks: tuple[Additive | Selective, ...], batch: tuple[Any, ...],
    facts: Facts, depth: int, cap: float = 0.0,
) -> Iterator[Scores | Refused]:  # fmt: skip
    """cap: what multiplies a hyperbolic tangent that was met on the way."""
    value = widened(value)
    name = packet_of(value)
    if name in PRODUCTS:
        for found in _product(value, scale, masks, batch, facts):
            if cap and isinstance(found, Scores):
                if len(found.masks) > len(masks):
                    yield Refused(_MASK_WITHIN)
                    continue
                found = replace(found, scale=found.scale * cap, soft_cap=abs(cap))
            yield found
        return
    if depth == 0 or not leads_to_product(value, depth):
        return

    def on(source: Value, factor: float = 1.0, *more: Additive | Selective) -> Any:
        if more and cap:
            return iter([Refused(_MASK_WITHIN)])
        if more and not same(product(value.type.shape[:-2]), product(batch)):
            return iter([Refused("masks apply to the scores in two shapes")])
        # without masks so far, the shape nearest to the product is the one that counts
        inner = batch if masks or more else tuple(source.type.shape[:-2])
        return _walk(source, scale * factor, (*more, *masks), inner, facts, depth - 1, cap)

    divided = quotient(value)
    if name in _VIEWS:
        source = operand(value)
        if same_sizes(source.type.shape[-2:], value.type.shape[-2:]):
            yield from on(source)
        else:
            yield Refused("the scores are reshaped between the product and the softmax")
    elif name == "aten.clone":
        yield from on(operand(value))
    elif name == "aten.neg":
        yield from on(operand(value), -1.0)
    elif name == "aten.tanh" and not cap and scale:
        yield from _walk(operand(value), 1.0, masks, batch, facts, depth - 1, scale)
    elif divided is not None or name == "aten.mul":
        yield from _scaled(value, facts, depth, on)
    elif name in ("aten.add", "aten.sub"):
        yield from _added(value, scale, facts, depth, on, bool(cap))
    elif name in ("aten.where", "aten.masked_fill"):
        yield from _selected(value, facts, depth, on)
    else:
        yield Refused(f"the scores pass through {name.removeprefix('aten.')}")


def _outer(scores: Value) -> tuple[Any, ...]:
    return tuple(scores.type.shape[:-2])


def leads_to_product(value: Any, depth: int) -> bool:
    """Whether a product stands behind a value, through steps that scores take."""
    name = packet_of(value)
    if name in PRODUCTS:
        return True
    if depth == 0 or name not in _STEPS:
        return False
    arguments = value.producer.args[:3]
    return any(leads_to_product(a, depth - 1) for a in arguments if isinstance(a, Value))


def _scaled(value: Value, facts: Facts, depth: int, on: Any) -> Iterator[Scores | Refused]:
    divided = quotient(value)
    if divided is not None:
        number = facts.number(divided[1])
        if number:
            yield from on(divided[0], 1 / number)
        elif isinstance(divided[0], Value) and leads_to_product(divided[0], depth - 1):
            yield Refused("the scores are divided by a tensor")
        return
    a, b = value.producer.args[:2]  # type: ignore[union-attr]
    for scores, other in ((a, b), (b, a)):
        if not isinstance(scores, Value) or not leads_to_product(scores, depth - 1):
            continue
        number = facts.number(other)
        if number is None:
            yield Refused("the scores are multiplied by a tensor: that is no mask")
        else:
            yield from on(scores, number)
        return


def _added(
    value: Value, scale: float, facts: Facts, depth: int, on: Any, capped: bool
) -> Iterator[Scores | Refused]:
    pair, sign = addends(value), 1.0
    if pair is None:
        pair, sign = difference(value), -1.0
    if pair is None:
        yield Refused("the mask is added with a factor (alpha)")
        return
    orders = [(pair[0], pair[1])] + ([(pair[1], pair[0])] if sign > 0 else [])
    for scores, mask in orders:
        if isinstance(scores, Value) and leads_to_product(scores, depth - 1):
            if not isinstance(mask, Value):
                if capped:  # a number added everywhere: the softmax does not see it, tanh does
                    yield Refused(_MASK_WITHIN)
                else:
                    yield from on(scores)
            elif rank(mask) > rank(value):
                yield Refused("the mask has more dimensions than the scores")
            else:
                yield from on(scores, 1.0, Additive(mask, sign * scale, _outer(value)))
            return


def _selected(value: Value, facts: Facts, depth: int, on: Any) -> Iterator[Scores | Refused]:
    arguments = value.producer.args  # type: ignore[union-attr]
    if packet_of(value) == "aten.masked_fill":
        scores, condition, other, keep = arguments[0], arguments[1], arguments[2], False
    elif len(arguments) < 3:
        return
    elif isinstance(arguments[1], Value) and leads_to_product(arguments[1], depth - 1):
        condition, scores, other, keep = arguments[0], arguments[1], arguments[2], True
    else:
        condition, other, scores, keep = arguments[0], arguments[1], arguments[2], False
    if not isinstance(scores, Value) or not leads_to_product(scores, depth - 1):
        return
    fill = facts.number(other)
    if fill is None:
        yield Refused("masked scores are replaced by a tensor")
    else:
        yield from on(scores, 1.0, Selective(condition, keep, fill, _outer(value)))


def _product(
    value: Value, scale: float, masks: tuple[Additive | Selective, ...], batch: tuple[Any, ...],
    facts: Facts,
) -> Iterator[Scores | Refused]:  # fmt: skip
    node = value.producer
    assert node is not None
    args = node.args
    if packet_of(value) == "aten.baddbmm":
        alpha, beta = (facts.number(node.argument(n)) for n in ("alpha", "beta"))
        if alpha is None or beta is None:
            yield Refused("the product is scaled by a tensor")
            return
        if beta:
            masks = (Additive(args[0], beta * scale, _outer(value)), *masks)
        args, scale = args[1:], scale * alpha
    query, key = args[:2]
    if rank(query) < 2 or rank(key) < 2:
        return
    for tensor in (query, key):
        if rank(tensor) < len(value.type.shape):
            yield Refused("the product is of tensors of different rank")
            return
    found = Scores(query, key, scale, masks, batch)
    yield _peeled(found, facts)


def _peeled(found: Scores, facts: Facts) -> Scores:
    """A number that scales the queries or the keys alone joins the scale."""
    for _ in range(4):
        changed = found
        source, number = _number_times(found.query, facts)
        if source is not None:
            found = replace(found, scale=found.scale * number, query=source)
        source, number = _number_times(found.key, facts)
        if source is not None:
            found = replace(found, scale=found.scale * number, key=source)
        if changed is found:
            break
    return found


def _number_times(value: Value, facts: Facts) -> tuple[Value | None, float]:
    divided = quotient(value)
    if divided is not None:
        number = facts.number(divided[1])
        if number and _like(divided[0], value):
            return divided[0], 1 / number
    if packet_of(value) == "aten.mul":
        a, b = value.producer.args[:2]  # type: ignore[union-attr]
        for x, other in ((a, b), (b, a)):
            number = facts.number(other)
            if number is not None and _like(x, value):
                return x, number
    return None, 1.0


def _like(source: Any, value: Value) -> bool:
    return (
        isinstance(source, Value)
        and source.type.dtype == value.type.dtype
        and same_sizes(source.type.shape, value.type.shape)
    )
