"""When float32 computes with integers exactly: as long as no partial sum reaches 2**24, sums of
integers are exact in any order."""

from __future__ import annotations

from typing import Any

from graphc.ir.graph import Value
from graphc.rewrite.facts import operand, packet_of

EXACT = 1 << 24
_BYTES = {"uint8": (0, 255), "int8": (-128, 127)}
_VIEWS = frozenset(
    f"aten.{n}" for n in ("view", "reshape", "unsqueeze", "squeeze", "permute", "slice")
)


def magnitude(value: Any) -> int | None:
    """The largest absolute value an integer can have, as its dtype, casts, views, padding with
    zeros and zero points show."""
    bounds = _bounds(value, 12)
    return None if bounds is None else max(abs(bounds[0]), abs(bounds[1]))


def _bounds(value: Any, depth: int) -> tuple[int, int] | None:
    if isinstance(value, int):
        return (value, value)
    if not isinstance(value, Value) or depth == 0:
        return None
    if value.type.dtype in _BYTES:
        return _BYTES[value.type.dtype]
    packet = packet_of(value)
    if packet == "aten._to_copy" and operand(value).type.dtype in (*_BYTES, "int32", "int64"):
        return _bounds(operand(value), depth - 1)
    if packet in _VIEWS:
        return _bounds(operand(value), depth - 1)
    if packet == "aten.constant_pad_nd":
        inner = _bounds(operand(value), depth - 1)
        return None if inner is None else (min(inner[0], 0), max(inner[1], 0))
    if packet == "aten.sub" and value.producer is not None:
        left, right = _bounds(operand(value), depth - 1), _bounds(operand(value, 1), depth - 1)
        if left is not None and right is not None and value.producer.argument("alpha") == 1:
            return (left[0] - right[1], left[1] - right[0])
    return None
