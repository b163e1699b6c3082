"""LSTM, GRU and RNN: torch's fused recurrences where they mean the same, else unrolled steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.recurrent_shapes import whole_recurrences
from graphc.frontends.onnx.recurrent_steps import DEFAULT_ACTIVATIONS, unrolled
from graphc.frontends.onnx.registry import operator, prepare
from graphc.frontends.onnx.values import Raw, Static, Tensor

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# order of torch's gates in the ONNX weight: LSTM iofc -> ifco, GRU zrh -> rzh
ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}

_DEFAULTS: dict[str, Any] = {
    "activation_alpha": None, "activation_beta": None, "activations": None, "clip": 0.0,
    "direction": "forward", "input_forget": 0, "layout": 0, "linear_before_reset": 0,
}  # fmt: skip
#: of all three
_ATTRIBUTES = (
    "activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size",
    "layout", "output_sequence",
)  # fmt: skip


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
    allowed = [DEFAULT_ACTIVATIONS[kind] * directions, []]
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
    flat: list[Tensor] = []
    biased = "bih0" in packed
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
    attributes = _DEFAULTS | attributes
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
        y, last = unrolled(node, x, w, r, b, lengths, full, peepholes, attributes)
    if layout:
        return (y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last))
    return (y, *last)


def _needed_lengths(lengths: Any, x: Tensor) -> Any:
    """None if every sequence is known to have the full length."""
    if isinstance(lengths, Static) and lengths.concrete and isinstance(x.shape[0], int):
        if all(item == x.shape[0] for item in lengths.flat):
            return None
    return lengths


@operator("LSTM", attributes=(*_ATTRIBUTES, "input_forget"))
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
    **attributes: Any,
) -> tuple[Tensor, ...]:
    return _run(node, x, w, r, b, lengths, [h, c], peepholes, attributes)


@operator("GRU", attributes=(*_ATTRIBUTES, "linear_before_reset"))
@operator("RNN", attributes=_ATTRIBUTES)
def recurrent(
    node: OnnxNode,
    x: Tensor,
    w: Tensor | None,
    r: Tensor | None,
    b: Tensor | None = None,
    lengths: Raw = None,
    h: Tensor | None = None,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    return _run(node, x, w, r, b, lengths, [h], None, attributes)
