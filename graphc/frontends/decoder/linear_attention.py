"""The functions that take the place of transformers' linear attention while a model is captured.

A chunked delta rule written in torch unrolls into thousands of operators for one chunk length
(`range(length // chunk)` becomes a constant); one operator is right for every length.
"""

from __future__ import annotations

from typing import Any

import torch

from graphc.errors import InternalError, UnsupportedError
from graphc.frontends.decoder.book import current_book


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, initial_state: torch.Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Kimi Delta Attention (g [B, T, H, K]) and Gated DeltaNet (g [B, T, H]), in one piece or
    token by token: query, key [B, T, Hk, K], value [B, T, H, V], beta [B, T, H]."""
    book = current_book()
    slots = book.slots if book is not None and initial_state is not None else None
    if book is None and initial_state is not None:  # a layer by itself: states are float32
        initial_state = initial_state.to(torch.promote_types(value.dtype, torch.float32))
    out, state = torch.ops.graphc.delta_rule(
        initial_state, query, key, value, g, beta, slots, scale=float(query.shape[-1]) ** -0.5,
        normalize=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, state if output_final_state else None


def causal_conv1d(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **unused: Any,
) -> torch.Tensor:  # fmt: skip
    """The causal depthwise convolution of x [B, C, T] with weight [C, W], after the window that
    the cache holds if there is one."""
    book = current_book()
    if book is None:
        return _convolve(None, hidden_states, weight, bias, activation, None)[0]
    name, book.pending = book.pending, None
    if name is None:
        raise InternalError("a convolution that no cache was asked about")
    out, after = _convolve(
        book.slot_content(name), hidden_states, weight, bias, activation, book.slots
    )
    book.write_slots(name, after)
    return out


def causal_conv1d_update(
    hidden_states: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None, **unused: Any,
) -> torch.Tensor:  # fmt: skip
    """As `causal_conv1d` for few tokens; the layer hands over the state that the book gave it. In a
    layer by itself that is a tensor [B, C, at least W - 1], written in place."""
    book = current_book()
    if book is None:
        kept, width = conv_state.shape[-1], weight.shape[-1]
        before = conv_state[..., kept - (width - 1) :].transpose(1, 2)
        seen = torch.cat([conv_state, hidden_states], -1)
        out, _ = _convolve(before, hidden_states, weight, bias, activation, None)
        conv_state.copy_(seen[..., -kept:])
        return out
    if book.contents is None:
        raise InternalError("a window without a book")
    name = next(n for n, content in book.contents.items() if content is conv_state)
    out, after = _convolve(conv_state, hidden_states, weight, bias, activation, book.slots)
    book.write_slots(name, after)
    return out


def _convolve(
    state: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if activation not in (None, "silu", "swish"):
        raise UnsupportedError(f"a short convolution with the activation {activation}")
    out, after = torch.ops.graphc.short_convolution(
        state, x.transpose(1, 2), weight, bias, None if state is None else slots,
        silu=activation is not None,
    )  # fmt: skip
    return out.transpose(1, 2), after
