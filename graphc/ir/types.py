"""Types of graph values: dtype, symbolic shape, and strides when they are not row-major."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import Max
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

#: a size: an integer, or a sympy expression over the graph's named symbols
Dim: TypeAlias = int | sympy.Expr

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
    "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "b1",
    "complex64": "c64", "complex128": "c128", "complex32": "c32",
    "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip
_LONG = {short: long for long, short in _SHORT.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "float32" -> torch.float32."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def short_dtype(name: str) -> str:
    """The one-word form used in graph text ("float32" -> "f32")."""
    return _SHORT.get(name, name)


def long_dtype(short: str) -> str:
    """Inverse of `short_dtype`."""
    return _LONG.get(short, short)


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return torch_dtype(dtype).itemsize


def as_dim(value: Any) -> Dim:
    """An int stays an int; a sympy integer becomes one; expressions stay expressions."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Integer):
        return int(value)
    if isinstance(value, sympy.Expr):
        return value
    raise TypeError(f"not a dimension: {value!r}")


def dim_max(a: Dim, b: Dim) -> Dim:
    """The larger of two dims."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return as_dim(Max(a, b))


def product(dims: Sequence[Dim]) -> Dim:
    """The number of elements of a shape."""
    result: Dim = 1
    for dim in dims:
        result = as_dim(result * dim)
    return result


def row_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Strides of a densely packed tensor; dimensions of size 0 or 1 count as torch counts them."""
    strides: list[Dim] = []
    step: Dim = 1
    for dim in reversed(shape):
        strides.append(step)
        step = as_dim(step * (dim if not isinstance(dim, int) else max(dim, 1)))
    return tuple(reversed(strides))


def is_row_major(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Whether strides describe a densely packed tensor (strides of size-1 dims do not matter)."""
    expected: Dim = 1
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if isinstance(dim, int) and dim == 0:
            return True
        if isinstance(dim, int) and dim == 1:
            continue
        if not same(stride, expected) and not same(unclamped(stride), expected):
            return False
        expected = as_dim(expected * dim)
    return True


def is_dense(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Whether the strides are those of a permuted row-major tensor."""
    order = [d for d in range(len(shape)) if shape[d] != 1]
    constants = [d for d in order if isinstance(strides[d], int)]
    symbolic = [d for d in order if not isinstance(strides[d], int)]
    expected: Dim = 1
    for dim in sorted(constants, key=lambda d: int(strides[d])):
        if not same(strides[dim], expected):
            return False
        expected = as_dim(expected * shape[dim])
    while symbolic:
        found = next((d for d in symbolic if same(strides[d], expected)), None)
        if found is None:
            return False
        symbolic.remove(found)
        expected = as_dim(expected * shape[found])
    return True


@lru_cache(maxsize=100_000)
def unclamped(stride: Dim) -> Dim:
    """The stride without the max(1, size) that torch writes where a size may be 0: a tensor that
    has such a size has no elements, so that its strides mean nothing. A minimum whose smaller side
    is known is that side."""
    if isinstance(stride, int):
        return stride
    from torch.utils._sympy.functions import Max, Min

    clamps: dict[sympy.Expr, sympy.Expr] = {}
    for found in stride.atoms(Max):
        if len(found.args) == 2 and sympy.Integer(1) in found.args:
            clamps[found] = max(found.args, key=lambda a: not a.is_number)
    for found in stride.atoms(Min):
        for least in found.args:
            if all((other - least).is_nonnegative for other in found.args):
                clamps[found] = least
    return as_dim(stride.xreplace(clamps))


@lru_cache(maxsize=100_000)
def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are surely equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if a == b:
        return True
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    return bool(difference == 0)


@dataclass(frozen=True)
class TensorType:
    """A tensor's type. `strides` is None for row-major."""

    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] | None = None

    def __str__(self) -> str:
        text = f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"
        if self.strides is not None:
            text += f"@[{','.join(map(str, self.strides))}]"
        return text.replace(" ", "")

    def stride(self) -> tuple[Dim, ...]:
        """The strides, spelled out."""
        return row_major(self.shape) if self.strides is None else self.strides

    def numel(self) -> Dim:
        """Number of elements."""
        return product(self.shape)


@dataclass(frozen=True)
class ScalarType:
    """The type of a result that is a Python number read from data (`.item()`)."""

    kind: str  # "int" | "float" | "bool"
    expr: sympy.Expr | None = None

    def __str__(self) -> str:
        return self.kind if self.expr is None else f"{self.kind}({self.expr})"


Type = TensorType | ScalarType


def tensor_type(dtype: str, shape: Sequence[Dim], strides: Sequence[Dim]) -> TensorType:
    """A TensorType in canonical form: no strides if row-major, stride 0 where a dim is 1 (its
    stride means nothing, and meta functions disagree about it)."""
    shape = tuple(shape)
    if is_row_major(shape, strides):
        return TensorType(dtype, shape)
    return TensorType(
        dtype, shape, tuple(0 if d == 1 else s for d, s in zip(shape, strides, strict=True))
    )


@dataclass(frozen=True)
class Symbol:
    """A named length with its proven range; `data` marks a size known only from data. `hint` is
    the length at capture: a value for which every guard of the graph holds."""

    name: str
    minimum: int
    maximum: int
    data: bool = False
    hint: int = field(default=0, compare=False)

    @property
    def expr(self) -> sympy.Symbol:
        """The sympy symbol of this name, with torch's assumptions."""
        return symbol(self.name, data=self.data, signed=self.minimum < 0)


UNBOUNDED = 2**62


def symbol(name: str, *, data: bool = False, signed: bool = False) -> sympy.Symbol:
    """The sympy symbol named `name`: positive for lengths, non-negative for sizes known only from
    data, any integer for numbers read from data."""
    if signed:
        return sympy.Symbol(name, integer=True)
    if data:
        return sympy.Symbol(name, integer=True, nonnegative=True)
    return sympy.Symbol(name, integer=True, positive=True)


def largest(dim: Dim, symbols: Mapping[str, Symbol]) -> int:
    """An upper bound of a dim by the ranges of its symbols; UNBOUNDED at most."""
    if isinstance(dim, int):
        return dim
    ranges = {s.expr: ValueRanges(s.minimum, s.maximum) for s in symbols.values()}
    upper = bound_sympy(dim, ranges).upper
    return int(upper) if upper.is_Integer and int(upper) < UNBOUNDED else UNBOUNDED
