"""LSTM, GRU and RNN: torch's fused recurrences where they mean the same, else unrolled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.recurrent_shapes import whole_recurrences
from graphc.frontends.onnx.registry import operator, prepare
from graphc.frontends.onnx.values import Raw, Static, Tensor

F = torch.nn.functional
UNROLL_LIMIT = 1000
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# order of torch's gates in the ONNX weight: LSTM iofc -> ifco, GRU zrh -> rzh
ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
DEFAULT = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}

Activation = Callable[[Tensor], Tensor]


def torch_weights(kind: str, w: Tensor, r: Tensor, b: Tensor | None) -> dict[str, Tensor]:
    """ONNX weights of every direction in torch's gate order: "ih0", "hh0", "bih0", "bhh0", ..."""
    result: dict[str, Tensor] = {}
    for direction in range(w.shape[0]):
        result[f"ih{direction}"] = _reordered(kind, w[direction])
        result[f"hh{direction}"] = _reordered(kind, r[direction])
        if b is not None:
            half = b.shape[1] // 2
            result[f"bih{direction}"] = _reordered(kind, b[direction][:half])
            result[f"bhh{direction}"] = _reordered(kind, b[direction][half:])
    return result


def _reordered(kind: str, t: Tensor) -> Tensor:
    parts = torch.chunk(t, GATES[kind], 0)
    return torch.cat([parts[i] for i in ORDER[kind]], 0) if len(parts) > 1 else t


def is_native(node: OnnxNode, lengths: bool, peepholes: bool) -> bool:
    """True if torch's recurrence has these semantics."""
    attributes = node.attributes
    kind = node.op_type.removeprefix("DynamicQuantize")
    names = [a.lower() for a in attributes.get("activations", [])]
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    allowed = [DEFAULT[kind] * directions, []]
    if kind == "RNN":
        allowed.append(["relu"] * directions)
    if kind == "GRU" and not attributes.get("linear_before_reset", 0):
        return False
    return (
        names in allowed
        and not lengths
        and not peepholes
        and not attributes.get("clip", 0)
        and not attributes.get("input_forget", 0)
    )


@prepare("LSTM", "GRU", "RNN")
def pack_recurrent(node: OnnxNode, constants: list[Tensor | None]) -> dict[str, Tensor]:
    w, r = constants[1], constants[2]
    has = [i < len(node.inputs) and bool(node.inputs[i]) for i in range(8)]
    b = constants[3] if has[3] else None
    if w is None or r is None or (has[3] and b is None):
        return {}
    if not is_native(node, has[4], has[7]):
        return {}
    node.consumed = {1, 2, 3} if has[3] else {1, 2}
    return torch_weights(node.op_type, w, r, b)


def packed_weights(node: OnnxNode) -> dict[str, Tensor]:
    """What `torch_weights` made at load, or nothing."""
    keys = [f"{key}{d}" for key in ("ih", "hh", "bih", "bhh") for d in range(2)]
    return {key: t for key in keys if (t := node.packed(key)) is not None}


def recurrence(
    kind: str,
    x: Tensor,
    packed: dict[str, Tensor],
    states: list[Tensor],
    direction: str,
    relu: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """A fused recurrence over `x` [T, B, I] with `states` [D, B, H].

    Returns:
        y [T, D, B, H] and the last states [D, B, H].
    """
    count = 2 if direction == "bidirectional" else 1
    x = torch.flip(x, [0]) if direction == "reverse" else x
    flat, biased = [], "bih0" in packed
    for d in range(count):
        keys = ["ih", "hh", "bih", "bhh"] if biased else ["ih", "hh"]
        flat.extend(packed[f"{key}{d}"] for key in keys)
    options = (biased, 1, 0.0, False, count == 2, False)
    with whole_recurrences() if torch.compiler.is_exporting() else nullcontext():
        y, *last = _fused(kind, x, states, flat, options, relu)
    y = torch.flip(y, [0]) if direction == "reverse" else y
    hidden = packed["hh0"].shape[1]
    y = y.reshape(y.shape[0], y.shape[1], count, hidden).permute(0, 2, 1, 3)
    return y, last


def _fused(
    kind: str, x: Tensor, states: list[Tensor], flat: list[Tensor], options: Any, relu: bool
) -> Any:
    functions: Any = torch._VF
    if kind == "LSTM":
        return functions.lstm(x, tuple(states), flat, *options)
    if kind == "GRU":
        return functions.gru(x, states[0], flat, *options)
    return (functions.rnn_relu if relu else functions.rnn_tanh)(x, states[0], flat, *options)


def _run(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None,
    lengths: Raw,
    states: list[Tensor | None],
    peepholes: Tensor | None,
    attributes: dict[str, Any],
) -> tuple[Tensor, ...]:
    kind, layout = node.op_type, attributes["layout"]
    direction = attributes["direction"]
    if direction not in ("forward", "reverse", "bidirectional"):
        raise node.invalid(f"unknown direction {direction!r}")
    count = 2 if direction == "bidirectional" else 1
    if layout:
        x = x.transpose(0, 1)
        states = [None if s is None else s.transpose(0, 1) for s in states]
    lengths = _needed_lengths(lengths, x)
    packed = packed_weights(node)
    if not packed and is_native(node, lengths is not None, peepholes is not None):
        assert w is not None and r is not None
        packed = torch_weights(kind, w, r, b)
    hidden = packed["hh0"].shape[1] if packed else r.shape[2]  # type: ignore[union-attr]
    full = [
        torch.zeros([count, x.shape[1], hidden], dtype=x.dtype) if s is None else s for s in states
    ]
    if packed:
        names = node.attributes.get("activations", [])
        relu = bool(names) and names[0].lower() == "relu"
        y, last = recurrence(kind, x, packed, full, direction, relu)
    else:
        assert w is not None and r is not None
        y, last = _unrolled(node, x, w, r, b, lengths, full, peepholes, attributes)
    if layout:
        return (y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last))
    return (y, *last)


def _needed_lengths(lengths: Any, x: Tensor) -> Any:
    """None if every sequence is known to have the full length."""
    if isinstance(lengths, Static) and lengths.concrete and isinstance(x.shape[0], int):
        if all(item == x.shape[0] for item in lengths.flat):
            return None
    return lengths


@operator("LSTM")
def lstm(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None = None,
    lengths: Raw = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 1,
) -> tuple[Tensor, ...]:
    return _run(
        node,
        x,
        w,
        r,
        b,
        lengths,
        [h, c],
        peepholes,
        {
            "alpha": activation_alpha,
            "beta": activation_beta,
            "activations": activations,
            "clip": clip,
            "direction": direction,
            "input_forget": input_forget,
            "layout": layout,
        },
    )


@operator("GRU")
def gru(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None = None,
    lengths: Raw = None,
    h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 1,
) -> tuple[Tensor, ...]:
    return _run(
        node,
        x,
        w,
        r,
        b,
        lengths,
        [h],
        None,
        {
            "alpha": activation_alpha,
            "beta": activation_beta,
            "activations": activations,
            "clip": clip,
            "direction": direction,
            "layout": layout,
            "linear_before_reset": linear_before_reset,
        },
    )


@operator("RNN")
def rnn(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None = None,
    lengths: Raw = None,
    h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    output_sequence: int = 1,
) -> tuple[Tensor, ...]:
    return _run(
        node,
        x,
        w,
        r,
        b,
        lengths,
        [h],
        None,
        {
            "alpha": activation_alpha,
            "beta": activation_beta,
            "activations": activations,
            "clip": clip,
            "direction": direction,
            "layout": layout,
        },
    )


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
    defaults = {
        "affine": (1.0, 0.0),
        "leakyrelu": (0.01, None),
        "thresholdedrelu": (1.0, None),
        "scaledtanh": (1.0, 1.0),
        "hardsigmoid": (0.2, 0.5),
        "elu": (1.0, None),
    }
    if key not in defaults:
        raise node.refuse(f"the activation {name} is not supported")
    alpha = next(alphas, defaults[key][0])
    beta = 0.0 if defaults[key][1] is None else next(betas, defaults[key][1])
    functions: dict[str, Activation] = {
        "affine": lambda t: alpha * t + beta,
        "leakyrelu": lambda t: F.leaky_relu(t, alpha),
        "thresholdedrelu": lambda t: torch.where(t > alpha, t, 0),
        "scaledtanh": lambda t: alpha * torch.tanh(beta * t),
        "hardsigmoid": lambda t: torch.clamp(alpha * t + beta, 0.0, 1.0),
        "elu": lambda t: F.elu(t, alpha),
    }
    return functions[key]


def _unrolled(
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
    names = attributes["activations"] or DEFAULT[node.op_type] * w.shape[0]
    alphas, betas = iter(attributes["alpha"] or ()), iter(attributes["beta"] or ())
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
        if p is not None:
            pi, po, pf = torch.chunk(p, 3, 0)
            xi, xf = xi + pi * c, xf + pf * c
        i = functions[0](limited(xi))
        f = 1 - i if attributes["input_forget"] else functions[0](limited(xf))
        new = f * c + i * functions[1](limited(xc))
        if p is not None:
            xo = xo + po * new
        return [functions[0](limited(xo)) * functions[2](new), new]

    return {"RNN": rnn_step, "GRU": gru_step, "LSTM": lstm_step}[node.op_type]
