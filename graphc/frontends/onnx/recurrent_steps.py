"""Recurrences step by step, for the options that torch's fused ones lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.values import Tensor

F = torch.nn.functional
UNROLL_LIMIT = 1000
DEFAULT_ACTIVATIONS = {
    "LSTM": ["sigmoid", "tanh", "tanh"],
    "GRU": ["sigmoid", "tanh"],
    "RNN": ["tanh"],
}

Activation = Callable[[Tensor], Tensor]


def _activation(
    node: OnnxNode, name: str, alphas: Iterator[float], betas: Iterator[float]
) -> Activation:
    """The named activation; those with parameters take the next of `alphas` and `betas`."""
    key = name.lower()
    plain: dict[str, Activation] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softsign": F.softsign,
        "softplus": F.softplus,
    }
    if key in plain:
        return plain[key]
    defaults: dict[str, tuple[float, float | None]] = {
        "affine": (1.0, 0.0),
        "leakyrelu": (0.01, None),
        "thresholdedrelu": (1.0, None),
        "scaledtanh": (1.0, 1.0),
        "hardsigmoid": (0.2, 0.5),
        "elu": (1.0, None),
    }
    if key not in defaults:
        raise node.refuse(f"the activation {name} is not supported")
    usual_alpha, usual_beta = defaults[key]
    alpha = next(alphas, usual_alpha)
    beta = 0.0 if usual_beta is None else next(betas, usual_beta)
    functions: dict[str, Activation] = {
        "affine": lambda t: alpha * t + beta,
        "leakyrelu": lambda t: F.leaky_relu(t, alpha),
        "thresholdedrelu": lambda t: torch.where(t > alpha, t, 0),
        "scaledtanh": lambda t: alpha * torch.tanh(beta * t),
        "hardsigmoid": lambda t: torch.clamp(alpha * t + beta, 0.0, 1.0),
        "elu": lambda t: F.elu(t, alpha),
    }
    return functions[key]


def unrolled(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Any,
    states: list[Tensor],
    peepholes: Tensor | None,
    attributes: dict[str, Any],
) -> tuple[Tensor, list[Tensor]]:
    """Step by step, for options that the fused recurrences lack; needs a known length."""
    steps = x.shape[0]
    if not isinstance(steps, int) or steps > UNROLL_LIMIT:
        raise node.refuse(
            f"{node.op_type} with these options over a symbolic or very long sequence",
            "export the model with a fixed sequence length",
        )
    direction = attributes["direction"]
    names = attributes["activations"] or DEFAULT_ACTIVATIONS[node.op_type] * w.shape[0]
    alphas, betas = (
        iter(attributes["activation_alpha"] or ()),
        iter(attributes["activation_beta"] or ()),
    )
    functions = [_activation(node, name, alphas, betas) for name in names]
    each = len(functions) // w.shape[0]
    limits = None if lengths is None else node.tensor(lengths).to(torch.int64)
    outputs, lasts = [], []
    for d in range(w.shape[0]):
        step = _step(
            node,
            r[d],
            None if b is None else b[d],
            None if peepholes is None else peepholes[d],
            functions[d * each : (d + 1) * each],
            attributes,
        )
        backward = direction == "reverse" or d == 1
        source = _reversed(x, limits) if backward else x
        projected = torch.matmul(source, w[d].t())
        if b is not None:
            projected = projected + b[d][: b.shape[1] // 2]
        y, last = _scan(projected, step, [s[d] for s in states], limits)
        outputs.append(_reversed(y, limits) if backward else y)
        lasts.append(last)
    y = torch.stack(outputs, 1)
    return y, [torch.stack([last[i] for last in lasts]) for i in range(len(states))]


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence of [T, B, ...] backwards within its own length."""
    if lengths is None:
        return torch.flip(x, [0])
    steps = torch.arange(x.shape[0]).unsqueeze(1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return torch.gather(x, 0, source.unsqueeze(-1).expand(x.shape))


def _scan(
    projected: Tensor,
    step: Callable[..., list[Tensor]],
    states: list[Tensor],
    lengths: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    outputs = []
    for t in range(int(projected.shape[0])):
        new = step(projected[t], *states)
        if lengths is None:
            outputs.append(new[0])
        else:
            active = (lengths > t).unsqueeze(-1)
            outputs.append(torch.where(active, new[0], 0))
            new = [torch.where(active, n, s) for n, s in zip(new, states, strict=True)]
        states = new
    return torch.stack(outputs), states


def _step(
    node: OnnxNode,
    r: Tensor,
    b: Tensor | None,
    p: Tensor | None,
    functions: list[Activation],
    attributes: dict[str, Any],
) -> Callable[..., list[Tensor]]:
    """One step: (input projection with its bias [B, gates * H], states) -> states."""
    clip = attributes["clip"]
    half = None if b is None else b[b.shape[0] // 2 :]

    def limited(t: Tensor) -> Tensor:
        return torch.clamp(t, -clip, clip) if clip else t

    def rnn_step(x: Tensor, h: Tensor) -> list[Tensor]:
        return [functions[0](limited(x + F.linear(h, r, half)))]

    def gru_step(x: Tensor, h: Tensor) -> list[Tensor]:
        xz, xr, xh = torch.chunk(x, 3, -1)
        rz, rr, rh = torch.chunk(r, 3, 0)
        bz, br, bh = (None, None, None) if half is None else torch.chunk(half, 3, 0)
        z = functions[0](limited(xz + F.linear(h, rz, bz)))
        reset = functions[0](limited(xr + F.linear(h, rr, br)))
        if attributes["linear_before_reset"]:
            new = functions[1](limited(xh + reset * F.linear(h, rh, bh)))
        else:
            new = functions[1](limited(xh + F.linear(reset * h, rh, bh)))
        return [(1 - z) * new + z * h]

    def lstm_step(x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        xi, xo, xf, xc = torch.chunk(x + F.linear(h, r, half), 4, -1)
        pi, po, pf = torch.chunk(p, 3, 0) if p is not None else (None, None, None)
        if pi is not None and pf is not None:
            xi, xf = xi + pi * c, xf + pf * c
        i = functions[0](limited(xi))
        f = 1 - i if attributes["input_forget"] else functions[0](limited(xf))
        new = f * c + i * functions[1](limited(xc))
        if po is not None:
            xo = xo + po * new
        return [functions[0](limited(xo)) * functions[2](new), new]

    steps: dict[str, Callable[..., list[Tensor]]] = {
        "RNN": rnn_step,
        "GRU": gru_step,
        "LSTM": lstm_step,
    }
    return steps[node.op_type]
