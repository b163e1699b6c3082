"""Recurrent layers as single operators: torch's own export unrolls them over time.

Same arguments and results as aten.lstm.input and aten.gru.input; gates in torch's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define

_SCHEMA = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)


def _lstm_meta(
    input: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    hidden, cell = hx
    size = hidden.shape[2] * (2 if bidirectional else 1)
    out = input.new_empty([input.shape[0], input.shape[1], size])
    return out, torch.empty_like(hidden), torch.empty_like(cell)


def _gru_meta(
    input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size = hx.shape[2] * (2 if bidirectional else 1)
    return input.new_empty([input.shape[0], input.shape[1], size]), torch.empty_like(hx)


@define(f"lstm(Tensor input, Tensor[] hx, {_SCHEMA}) -> (Tensor, Tensor, Tensor)", _lstm_meta)
def lstm(
    input: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """input [T, B, I] ([B, T, I] if batch_first), hx = (h, c) [layers * directions, B, H]."""
    out, h, c = torch.ops.aten.lstm.input(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return out.contiguous(), h.clone(), c.clone()


@define(f"gru(Tensor input, Tensor hx, {_SCHEMA}) -> (Tensor, Tensor)", _gru_meta)
def gru(
    input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """input [T, B, I] ([B, T, I] if batch_first), hx [layers * directions, B, H]."""
    out, h = torch.ops.aten.gru.input(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return out.contiguous(), h.clone()
