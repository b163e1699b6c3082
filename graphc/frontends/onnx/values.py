"""Values that flow through an ONNX graph while it runs as torch operations.

A value is a `torch.Tensor`, a `Static` (a small value known at capture, whose elements may be
symbolic lengths), a list (an ONNX sequence) or None (an absent input or empty optional).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from graphc.errors import UnsupportedError

STATIC_LIMIT = 1024  # elements; larger constants are ordinary tensors

Tensor = torch.Tensor
Value = Any
# Kinds of handler parameters; the interpreter converts before the call.
Raw = Annotated[Any, "raw"]  # a Value as it is
Known = Annotated[Any, "known"]  # a Value as it is, whose content the handler needs at capture
Ints = Annotated[list[int], "ints"]  # a 1-D (or 0-D) integer input as ints, symbols allowed
Int = Annotated[int, "int"]  # a one-element integer input
Floats = Annotated[list[float], "floats"]  # a concrete float input
Bool = Annotated[bool, "bool"]  # a concrete one-element bool input


@dataclass(frozen=True)
class Ratio:
    """The exact quotient of a symbolic length and an integer, before a Floor, Ceil or Cast.

    float32 quotients of integers below 2**23 round to the same integers, so floor and ceil of
    this exact value are those of the float computation the graph spells.
    """

    numerator: Any
    denominator: int

    def floor(self) -> Any:
        return self.numerator // self.denominator

    def ceil(self) -> Any:
        return -((-self.numerator) // self.denominator)

    def truncate(self) -> Any:
        return self.floor()  # lengths are not negative


def is_symbolic(item: Any) -> bool:
    return isinstance(item, (torch.SymInt, torch.SymBool, torch.SymFloat, Ratio))


@dataclass(eq=False)
class Static:
    """A value known while the graph is captured: shapes, axes, small constants.

    Args:
        items: object array of int, SymInt, bool, SymBool, float or Ratio, in the ONNX shape.
        dtype: the element type the ONNX graph sees.
        buffer: name of the module buffer that holds the same value, if there is one.
    """

    items: np.ndarray
    dtype: torch.dtype
    buffer: str | None = None
    _tensor: torch.Tensor | None = field(default=None, repr=False)

    @staticmethod
    def of(items: Any, dtype: torch.dtype = torch.int64) -> Static:
        """A Static of one item (rank 0) or of a list of items (rank 1)."""
        if isinstance(items, (list, tuple)):
            array = np.empty(len(items), dtype=object)
            for i, item in enumerate(items):
                array[i] = item
            return Static(array, dtype)
        array = np.empty((), dtype=object)
        array[()] = items
        return Static(array, dtype)

    @staticmethod
    def of_tensor(tensor: torch.Tensor, buffer: str | None = None) -> Static:
        """The Static of a small real tensor."""
        flat = np.empty(tensor.numel(), dtype=object)
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            values = tensor.float().reshape(-1).tolist()
        else:
            values = tensor.reshape(-1).tolist()
        for i, item in enumerate(values):
            flat[i] = item
        return Static(flat.reshape(tuple(tensor.shape)), tensor.dtype, buffer)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.items.shape

    @property
    def flat(self) -> list[Any]:
        return list(self.items.reshape(-1))

    @property
    def concrete(self) -> bool:
        return not any(is_symbolic(item) for item in self.items.reshape(-1))

    def real(self) -> torch.Tensor:
        """A real tensor of a concrete value, outside any capture."""
        flat = torch.tensor(self.flat, dtype=_literal_dtype(self.dtype)).to(self.dtype)
        return flat.reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        """This value as a tensor operation, part of the capture when one is running."""
        if self._tensor is not None:
            return self._tensor
        made = self._materialize()
        if type(made) is torch.Tensor:  # one made while tracing belongs to that trace only
            self._tensor = made
        return made

    def _materialize(self) -> torch.Tensor:
        flat = [_plain(item) for item in self.flat]
        if flat and self.concrete and all(same(item, flat[0]) for item in flat):
            return torch.full(self.shape, flat[0], dtype=self.dtype)
        if not flat:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.concrete:
            return (
                torch.tensor(flat, dtype=_literal_dtype(self.dtype))
                .to(self.dtype)
                .reshape(self.shape)
            )
        parts = [torch.scalar_tensor(item, dtype=self.dtype) for item in flat]
        return torch.stack(parts).reshape(self.shape) if self.shape else parts[0]


def same(a: Any, b: Any) -> bool:
    """Equality of two concrete scalars that tells 0.0 from -0.0 and equals NaN to itself."""
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


def _literal_dtype(dtype: torch.dtype) -> torch.dtype:
    """float8 has no literals of its own; its values are exact in float32."""
    return torch.float32 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype


def _plain(item: Any) -> Any:
    if isinstance(item, Ratio):
        return item.numerator / item.denominator
    return item


class outside_capture:
    """Runs torch on real tensors although a torch.export capture is in progress."""

    def __enter__(self) -> None:
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._dispatch = _disable_current_modes()
        self._dispatch.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._dispatch.__exit__(*error)
        self._function.__exit__(*error)


def statically_true(condition: Any) -> bool:
    """True if `condition` (bool or SymBool) holds for every length the capture allows."""
    if isinstance(condition, bool):
        return condition
    return bool(statically_known_true(condition))


def decided(condition: Any) -> bool | None:
    """The truth of a SymBool if it is the same for every allowed length, else None."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_true(condition):
        return True
    return False if statically_true(torch.sym_not(condition)) else None


def choose(condition: Any, a: Any, b: Any) -> Any:
    """`a` if `condition` (bool or SymBool) holds, else `b`; numbers alone make it a guard."""
    known = decided(condition)
    if known is None and isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return torch.sym_ite(condition, a, b)
    return a if (bool(condition) if known is None else known) else b


def int_items(value: Value, where: str, what: str) -> list[Any]:
    """The elements of an integer value as ints and SymInts; a data-dependent tensor is read.

    Reading a tensor gives plain numbers in eager mode and unbacked symbols under torch.export.
    """
    if isinstance(value, Static):
        return [_whole(item, where, what) for item in value.flat]
    if isinstance(value, torch.Tensor):
        value = value.to(torch.int64)
        if value.ndim == 0:
            return [value.item()]
        if value.ndim == 1 and isinstance(value.shape[0], int):
            return [value[i].item() for i in range(value.shape[0])]
    raise UnsupportedError(f"{what} must be known when the model is captured", where=where)


def _whole(item: Any, where: str, what: str) -> Any:
    if isinstance(item, Ratio):
        raise UnsupportedError(f"{what} is a fraction of a symbolic length", where=where)
    if isinstance(item, torch.SymBool):
        return choose(item, 1, 0)
    return int(item) if isinstance(item, (bool, float)) else item


def float_items(value: Value, where: str, what: str) -> list[Any]:
    """The elements of a value as floats (Ratio allowed)."""
    if isinstance(value, Static):
        return value.flat
    if isinstance(value, torch.Tensor) and not torch.compiler.is_exporting():
        return list(value.reshape(-1).tolist())
    raise UnsupportedError(
        f"{what} must be known when the model is captured",
        where=where,
        hint="bind the input it comes from with `fixed`",
    )


def product(sizes: Sequence[Any]) -> Any:
    """The product of ints and SymInts."""
    out: Any = 1
    for size in sizes:
        out = out * size
    return out
