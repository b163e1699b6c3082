"""Tensors at the boundary: numpy arrays and torch tensors as addresses, and back.

torch is never imported here: a caller who passes torch tensors has imported it already.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphc.errors import InputRejectedError, UnsupportedError
from graphc.plan import Tensor
from graphc.runtime.pool import Region, address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes of an element, by torch's dtype name
ITEMSIZE = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
#: dtypes that numpy only has through the package ml_dtypes
EXTENDED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})

_VIEWS = {name: np.dtype(f"uint{8 * ITEMSIZE[name]}") for name in EXTENDED}
_numpy_dtypes: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ITEMSIZE if name not in EXTENDED
}
_nothing = Region(64)  # where empty tensors point to: a kernel may form, never follow, the pointer


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for a torch dtype name; UnsupportedError if that needs ml_dtypes."""
    known = _numpy_dtypes.get(name)
    if known is not None:
        return known
    try:
        extended: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        _numpy_dtypes[name] = extended
        return extended
    except ImportError as error:
        raise UnsupportedError(
            f"numpy has no {name} of its own",
            hint="install ml_dtypes, or ask for torch tensors with run(..., as_torch=True)",
        ) from error


class Bound(NamedTuple):
    """An input, ready for kernels."""

    shape: tuple[int, ...]
    address: int
    given: Any  # the caller's object
    used: Any  # what `address` points into: the same object or a contiguous copy
    torch: bool


class Input:
    """The boundary of one input leaf: checks dtype and rank, makes strided data contiguous."""

    def __init__(self, tensor: Tensor, mutated: bool) -> None:
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.text = tensor.text
        self.rank = len(tensor.shape)
        self.mutated = mutated
        self._numpy = None if tensor.dtype in EXTENDED else np.dtype(tensor.dtype)
        self._view = _VIEWS.get(tensor.dtype)

    def expected(self) -> str:
        return f"{self.dtype}[{', '.join(self.text)}]"

    def reject(self, found: str, hint: str = "") -> InputRejectedError:
        return InputRejectedError(
            f"expected {self.expected()}, found {found}", where=f"input {self.name!r}", hint=hint
        )

    def bind(self, value: Any) -> Bound:
        """Raises InputRejectedError unless `value` is a tensor of this dtype and rank."""
        if isinstance(value, np.ndarray):
            return self._bind_numpy(value)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._bind_torch(torch, value)
        if isinstance(value, np.generic) and not self.mutated:
            return self._bind_numpy(np.asarray(value))
        raise self.reject(type(value).__name__, "pass a numpy array or a torch tensor")

    def _bind_numpy(self, value: NDArray[Any]) -> Bound:
        dtype = value.dtype
        if (
            dtype is self._numpy
            and type(value) is np.ndarray
            and value.ndim == self.rank
            and value.size
            and value.flags.carray  # contiguous, aligned and writeable: the usual case
        ):
            # dtypes of ml_dtypes have no buffer interface
            memory = value if self._view is None else value.view(self._view)
            return Bound(value.shape, address_of(memory), value, value, False)
        if dtype is not self._numpy and dtype != self._numpy:
            if self._numpy is not None or dtype.name != self.dtype:
                order = "" if dtype.isnative else " in foreign byte order"
                raise self.reject(f"{dtype.name}{order}{list(value.shape)}")
            self._numpy = dtype  # the one of ml_dtypes, which is never imported for this
        if value.ndim != self.rank:
            raise self.reject(f"rank {value.ndim}, shape {list(value.shape)}")
        if isinstance(value, np.ma.MaskedArray):
            raise self.reject("a masked array", "fill it first")
        used = value
        flags = value.flags
        if not (flags.c_contiguous and flags.aligned):
            used = np.array(value, order="C", subok=False)
        if self.mutated and not flags.writeable:
            raise self.reject("a read-only array", "the model writes to this input")
        address = used.__array_interface__["data"][0] if used.size else _nothing.address
        return Bound(value.shape, address, value, used, False)

    def _bind_torch(self, torch: Any, value: Any) -> Bound:
        if value.dtype is not getattr(torch, self.dtype):
            raise self.reject(f"{str(value.dtype)[6:]}{list(value.shape)}")
        if value.layout is not torch.strided or not value.is_cpu:
            raise self.reject(
                f"a {value.layout} tensor on {value.device}", "pass a dense tensor in CPU memory"
            )
        shape = tuple(value.shape)
        if len(shape) != self.rank:
            raise self.reject(f"rank {len(shape)}, shape {list(shape)}")
        used = value
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            used = value.detach().resolve_conj().resolve_neg().contiguous()
        try:
            address = used.data_ptr() or _nothing.address
        except RuntimeError as error:
            raise self.reject(f"a {type(value).__name__} without memory") from error
        return Bound(shape, address, value, used, True)

    def private(self, bound: Bound) -> Bound:
        """A copy of an input that shares memory with another."""
        if bound.torch:
            used = bound.used.detach().clone()
            return bound._replace(used=used, address=used.data_ptr() or _nothing.address)
        used = np.array(bound.used)
        return bound._replace(used=used, address=int(used.__array_interface__["data"][0]))

    def write_back(self, bound: Bound) -> None:
        """Copies a mutated copy into the caller's tensor, through its strides."""
        if bound.used is bound.given:
            return
        if bound.torch:
            bound.given.detach().copy_(bound.used)
        else:
            np.copyto(bound.given, bound.used)


def new_tensor(dtype: str, shape: Sequence[int], as_torch: bool) -> tuple[Any, int]:
    """A fresh row-major tensor for the caller, uninitialised, and its address."""
    if as_torch:
        torch: Any = importlib.import_module("torch")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        return tensor, tensor.data_ptr() or _nothing.address
    element = numpy_dtype(dtype)
    nbytes = math.prod(shape) * element.itemsize
    if nbytes < 1024:
        array: NDArray[Any] = np.empty(shape, _VIEWS.get(dtype, element))
        address = address_of(array) if nbytes else _nothing.address
        return (array.view(element) if dtype in _VIEWS else array), address
    # numpy aligns to 16 bytes: a 64-byte vector would straddle cache lines everywhere
    raw = np.empty(nbytes + 64, np.uint8)
    base = address_of(raw)
    start = -base % 64
    return np.ndarray(shape, element, raw, start), base + start


def as_numpy(tensor: Any, dtype: str) -> NDArray[Any]:
    """A CPU torch tensor as a numpy array over the same memory."""
    if dtype not in EXTENDED:
        array: NDArray[Any] = tensor.detach().numpy()
        return array
    torch: Any = sys.modules["torch"]
    plain = torch.int16 if ITEMSIZE[dtype] == 2 else torch.uint8
    array = tensor.detach().view(plain).numpy().view(numpy_dtype(dtype))
    return array
