"""A mixture of experts after routing: every token through its experts, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from graphc.ops.library import define
from graphc.ops.weight_forms import PANEL, decode, encode

_Map = Callable[[torch.Tensor], torch.Tensor]

#: act(g) = g s(g), and s: what a cap on the gate leaves alone
ACTIVATIONS: dict[str, tuple[_Map, _Map]] = {
    "silu": (F.silu, torch.sigmoid),
    "gelu": (F.gelu, lambda g: 0.5 * torch.erfc(-g * 0.5**0.5)),
    "gelu_tanh": (
        lambda g: F.gelu(g, approximate="tanh"),
        lambda g: torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)),
    ),
}


def _meta(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, activation: str = "silu", gate_cap: float | None = None,
    up_cap: float | None = None, limit: float | None = None, form: str = "", hidden: int = 0,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@define(
    "experts(Tensor x, Tensor index, Tensor weight, Tensor gate_up, Tensor down, "
    'str activation="silu", float? gate_cap=None, float? up_cap=None, float? limit=None, '
    'str form="", int hidden=0) -> Tensor',
    _meta,
)
def experts(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, activation: str = "silu", gate_cap: float | None = None,
    up_cap: float | None = None, limit: float | None = None, form: str = "", hidden: int = 0,
) -> torch.Tensor:  # fmt: skip
    """y[t] = sum_j weight[t, j] * down[e] @ (act(gate[e] @ x[t]) * up[e] @ x[t]), e = index[t, j].

    Args:
        x: [T, D].
        index: int64 or int32 [T, K]; an index of E or more (or below 0) is no expert.
        weight: [T, K].
        gate_up: [E, 2 I, D], the gate's rows first.
        down: [E, D, I].
        activation: act(g) = g s(g): silu, gelu or gelu_tanh.
        gate_cap: c in act(g) = c tanh(g / c) s(g); with silu and `up_cap` this is SiTU.
        up_cap: c in c tanh(u / c), which then stands for u = up[e] @ x[t].
        limit: the gate is at most this, u between it and its negative, before all else.
        form: of the weights, as `encode_experts` makes them: uint8 [E, bytes]. Then
        hidden: I, and products are those of float32 numbers.

    The sum runs over j in order, in float32; hidden values have x's dtype.

    Raises:
        KeyError: an unknown activation or form.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    if form:
        plain = decode_experts(gate_up, down, form, hidden, x.shape[1])
        gate_up, down = (weight.to(kind) for weight in plain)
    out = x.new_zeros(x.shape, dtype=kind)
    parts = x.new_zeros([*index.shape, x.shape[1]], dtype=kind)
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(index == expert)
        if token.numel():
            rows = x[token].to(gate_up.dtype)
            gate, up = F.linear(rows, gate_up[expert]).to(kind).chunk(2, -1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (_activated(gate, activation, gate_cap) * _capped(up, up_cap)).to(x.dtype)
            made = F.linear(inner.to(down.dtype), down[expert]).to(x.dtype)
            parts[token, slot] = made.to(kind) * weight[token, slot, None].to(kind)
    for j in range(index.shape[1]):
        out += parts[:, j]
    return out.to(x.dtype)


def _activated(gate: torch.Tensor, activation: str, cap: float | None) -> torch.Tensor:
    plain, share = ACTIVATIONS[activation]
    return plain(gate) if cap is None else _capped(gate, cap) * share(gate)


def _capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 I, K] with half a panel of the gate's rows and the same of up's in turns, zero-padded."""
    half, depth = PANEL // 2, gate_up.shape[1]
    parts = [F.pad(part, (0, 0, 0, -len(part) % half)) for part in gate_up.chunk(2)]
    return torch.stack([p.view(-1, half, depth) for p in parts], 1).view(-1, depth)


def encode_experts(
    gate_up: torch.Tensor, down: torch.Tensor, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2 I, D] and down [E, D, I] in a form of graphc.ops.weight_forms, uint8
    [E, bytes] each, the rows of gate_up interleaved."""
    return (
        torch.stack([encode(interleaved(matrix), form) for matrix in gate_up]),
        torch.stack([encode(matrix, form) for matrix in down]),
    )


def decode_experts(
    gate_up: torch.Tensor, down: torch.Tensor, form: str, hidden: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse: float32 [E, 2 hidden, width] and [E, width, hidden]."""
    half = PANEL // 2
    padded = hidden + -hidden % half
    both = [
        decode(one, form, 2 * padded, width).view(-1, 2, half, width).transpose(0, 1)
        .reshape(2, padded, width)[:, :hidden].reshape(-1, width)
        for one in gate_up
    ]  # fmt: skip
    return torch.stack(both), torch.stack([decode(one, form, width, hidden) for one in down])
