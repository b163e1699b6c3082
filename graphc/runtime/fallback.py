"""ATen fallback Steps: one torch operator call over the Session's memory. Imports torch."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from graphc.errors import InputRejectedError, InternalError, PlanMismatchError
from graphc.plan import Fallback
from graphc.runtime.native import NativeProgram
from graphc.runtime.tensors import ITEMSIZE

torch: Any = importlib.import_module("torch")


class FallbackStep:
    """A callable Fallback. `call` gives the tensors for its external buffers and the values of
    the symbols it binds."""

    def __init__(self, fallback: Fallback, native: NativeProgram) -> None:
        self.fallback = fallback
        self._native = native
        self._operator = _resolve(fallback.target)

    def call(self, address: Callable[[int], int]) -> dict[int, Any]:
        """Runs the operator; `address` gives the memory of a buffer. Gives the result tensor of
        each external buffer; each owns its memory and has the strides the graph expects. Symbols
        in `binds` are set in the native program, which is evaluated again."""
        fallback = self.fallback
        storages: set[int] = set()
        with torch.no_grad():
            arguments = [self._decode(item, address, storages) for item in fallback.arguments]
            keywords = {
                key: self._decode(item, address, storages)
                for key, item in fallback.keywords.items()
            }
            results = _flatten(self._run(arguments, keywords))
            if fallback.binds:
                for symbol, output, dim in fallback.binds:
                    self._native.symbols[symbol] = _size(results[output], dim)
                self._native.evaluate()
            owned: dict[int, Any] = {}
            for i, buffer in enumerate(fallback.outputs):
                if buffer >= 0:
                    owned[buffer] = self._own(i, results[i], storages)
        return owned

    def _run(self, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        try:
            return self._operator(*arguments, **keywords)
        except NotImplementedError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            # shapes and dtypes were checked when the graph was made: torch rejects the values
            raise InputRejectedError(
                f"{self.fallback.target} cannot be computed for these inputs: {error}",
                where=", ".join(self.fallback.nodes),
                hint="eager torch raises the same for them",
            ) from error

    def _decode(self, tree: Any, address: Callable[[int], int], storages: set[int]) -> Any:
        if isinstance(tree, list):
            return [self._decode(item, address, storages) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "buffer" in tree:
            value = self._native.value
            tensor = tensor_at(
                address(tree["buffer"]),
                tree["dtype"],
                [value(e) for e in tree["shape"]],
                [value(e) for e in tree["strides"]],
                value(tree["offset"]),
            )
            storages.add(tensor.untyped_storage().data_ptr())
            return tensor
        ((kind, content),) = tree.items()
        if kind == "expr":
            return self._native.value(content)
        if kind in ("dtype", "memory_format", "layout"):
            return getattr(torch, content)
        if kind == "device":
            return torch.device(content)
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*content)
        raise InternalError(f"unknown argument {tree!r}", where=self.fallback.target)

    def _own(self, i: int, result: Any, storages: set[int]) -> Any:
        fallback, native = self.fallback, self._native
        dtype = getattr(torch, fallback.output_dtypes[i])
        if not isinstance(result, torch.Tensor):
            result = torch.tensor(result, dtype=dtype)
        shape = native.shape(fallback.output_shapes[i])
        strides = native.shape(fallback.output_strides[i])
        if shape is None or strides is None:
            raise InternalError(f"result {i} has an undefined shape", where=fallback.target)
        if tuple(result.shape) != shape or result.dtype != dtype or result.device.type != "cpu":
            raise InternalError(
                f"expected result {i} as {fallback.output_dtypes[i]}{list(shape)}, "
                f"found {str(result.dtype)[6:]}{list(result.shape)} on {result.device}",
                where=fallback.target,
            )
        result = result.detach().resolve_conj().resolve_neg()
        aliases = result.untyped_storage().data_ptr() in storages and result.numel() > 0
        differs = result.numel() > 0 and any(
            size > 1 and found != wanted
            for size, found, wanted in zip(shape, result.stride(), strides, strict=True)
        )
        if aliases or differs:
            # planned memory is reused: a result must not be a window on it
            copy = torch.empty_strided(shape, strides, dtype=dtype)
            result = copy.copy_(result)
        return result


def _resolve(target: str) -> Any:
    namespace, _, name = target.partition(".")
    name, _, overload = name.partition(".")
    if namespace == "graphc":  # our operators register themselves; only their meaning is needed
        importlib.import_module("graphc.ops")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError) as error:
        raise PlanMismatchError(
            f"torch {torch.__version__} here has no operator {target}",
            hint=f"import the package that registers the operators of {namespace!r} before loading",
        ) from error


def _flatten(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in _flatten(item)]
    return [result]


def _size(result: Any, dim: int) -> int:
    if dim >= 0:
        return int(result.shape[dim])
    return int(result.item()) if isinstance(result, torch.Tensor) else int(result)


def tensor_at(
    address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Any:
    """A tensor over memory it does not own; offset and strides (not negative) in elements."""
    element = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=element)
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (extent * ITEMSIZE[dtype])).from_address(address)
    flat = torch.frombuffer(memory, dtype=element)
    return torch.as_strided(flat, tuple(shape), tuple(strides), offset)
