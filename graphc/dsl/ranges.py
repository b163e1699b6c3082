"""Summaries of ranges of tokens, as devices that each hold a range exchange them.

Every device summarises its range without knowing what came before it; from the summaries of the
ranges before its own it knows the state in which its own begins. In torch; exchange in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphc.dsl.interpret import evaluate
from graphc.dsl.operator import STATE, Affine, Definition, SequenceOperator, given, trace
from graphc.dsl.registry import CHUNK, cut, flags_of, spread, wide_rows
from graphc.dsl.tiles import K, V

Summary = tuple[torch.Tensor, torch.Tensor]


def summarize(operator: SequenceOperator, arguments: dict[str, Any], chunk: int = CHUNK) -> Summary:
    """(factor [B, H, K or 1, K or 1], offset [B, H, K, V]) of all tokens of a call's operands, by
    name, of which there must be one at least."""
    value = arguments[wide_rows(operator, V)]
    kind = torch.promote_types(value.dtype, getattr(torch, operator.summary_dtype))
    definition = trace(operator, flags_of(operator, arguments))
    channels = arguments[wide_rows(operator, K)].shape[3]
    operands = spread(operator, arguments, kind)
    batch, tokens, heads, _ = value.shape
    found: Summary | None = None
    for t0 in range(0, tokens, chunk):
        next_ = _evaluate(definition.summary, cut(operands, t0, t0 + chunk), channels)
        found = next_ if found is None else compose(definition, found, next_)
    if found is None:
        raise ValueError("a summary of no tokens")
    factor, offset = found
    return factor.expand(batch, heads, *factor.shape[-2:]), offset


def compose(definition: Definition, first: Summary, second: Summary) -> Summary:
    """The summary of two ranges, `first` before `second`."""
    values = {
        "first.factor": first[0], "first.offset": first[1],
        "second.factor": second[0], "second.offset": second[1],
    }  # fmt: skip
    return _evaluate(definition.composed, values, first[1].shape[-2])


def starts(
    definition: Definition, summaries: Sequence[Summary], state: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The states in which ranges begin, that of the first being `state`, and the last's end. Only
    products of a matrix with a state: what composing would cost is not paid."""
    root = given("first", definition.summary.factor).act(STATE)
    for factor, offset in summaries:
        yield state
        values = {"first.factor": factor, "first.offset": offset, "state": state}
        (state,) = evaluate((root,), values, state.shape[-2])
    yield state


def _evaluate(summary: Affine, values: dict[str, torch.Tensor], channels: int) -> Summary:
    factor, offset = evaluate((summary.factor, summary.offset), values, channels)
    return factor, offset
