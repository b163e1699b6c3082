"""What a worker process is told to do, and the arguments and results it works on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: input sets that results are compared on at most, and their bytes in all
_DRAWS, _DRAWS_BYTES = 64, 1 << 28


class Unavailable(Exception):
    """This peer can't run here, or can't take this model; says why. `lasting`: it can't as long as
    the model and the peer's version are the same."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One peer on one model, as a worker process is told.

    folder: this peer's artefacts. shared: those of all peers and dtypes of the model. loader:
    "package.module:function", which called with (model, dtype) gives the torch module. dtype: torch
    name that floating-point weights and inputs are converted to, None to leave them as they are.
    inputs: files of `save_draws`; the first is timed. reference: where the float64 results are.
    onnx: the model itself, if it is an ONNX file. path: added to sys.path. kept: inputs that stay
    as they are whatever the dtype. by_row: errors are medians over the rows of a result (a model
    that chooses may choose otherwise for a few).
    """

    peer: str
    folder: str
    shared: str
    loader: str
    model: str
    dtype: str | None
    threads: int
    cpus: list[int]
    inputs: list[str]
    reference: str = ""
    onnx: str = ""
    path: list[str] = []
    kept: list[str] = []
    by_row: bool = False


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call. `names` are those of the flat arrays, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]


def save_draws(path: Path, draw: Callable[[int], Inputs]) -> list[str]:
    """Writes the arguments of several calls, which `draw` makes by number: at most `_DRAWS`, and
    no more than `_DRAWS_BYTES` hold; one if all are alike. Arrays that are those of the first draw
    are written once. For workers of this machine only: pickles. Returns the names of the files."""
    names: list[str] = []
    last, size = b"", 0
    first: list[Array] = []
    while len(names) < _DRAWS:
        inputs = draw(len(names))
        arrays = _leaves(inputs.args, inputs.kwargs)
        alike = [i for i, array in enumerate(arrays) if names and array is first[i]]
        first = first or arrays
        order = iter(range(len(arrays)))

        def written(array: Array, order: Iterator[int] = order, alike: list[int] = alike) -> Array:
            return array[:0] if next(order) in alike else array

        content = pickle.dumps(
            (mapped(inputs.args, written), mapped(inputs.kwargs, written), inputs.names, alike)
        )
        size += len(content)
        same = content == last or len(alike) == len(arrays)
        if names and (same or size > _DRAWS_BYTES):
            break
        names.append(f"{path}-{len(names)}")
        Path(names[-1]).write_bytes(content)
        last = content
    return names


def load_inputs(job: Job, draw: int = 0) -> Inputs:
    """Numpy arrays, converted to the job's dtype."""
    args, kwargs, names, alike = pickle.loads(Path(job.inputs[draw]).read_bytes())
    first = _first(job.inputs[0]) if alike else []
    order = iter(enumerate([*names, *[""] * len(_leaves(args, kwargs))]))

    def leaf(array: Array) -> Array:
        number, name = next(order)
        if number in alike:
            array = first[number]
        if job.dtype is None or not floating(array) or name in job.kept:
            return array
        return array.astype(_numpy_dtype(job.dtype))

    return Inputs(mapped(args, leaf), mapped(kwargs, leaf), names)


@lru_cache(maxsize=1)
def _first(path: str) -> list[Array]:
    """The arrays of the first draw."""
    args, kwargs, *_ = pickle.loads(Path(path).read_bytes())
    return _leaves(args, kwargs)


def _leaves(args: Any, kwargs: Any) -> list[Array]:
    found: list[Array] = []
    mapped((args, kwargs), found.append)
    return found


def mapped(value: Any, leaf: Callable[[Array], Any]) -> Any:
    """`leaf` of every numpy array in a tree of arguments."""
    if isinstance(value, np.ndarray):
        return leaf(value)
    if isinstance(value, dict):
        return {key: mapped(item, leaf) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, leaf) for item in value)
    return value


def flat(value: Any) -> list[Array]:
    """The tensors of a result in order, as numpy arrays; low precision as float32."""
    if value is None or isinstance(value, bool | int | float | str):
        return []
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flat(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    if not isinstance(value, np.ndarray):
        value = value.detach()
        if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
            value = value.float()
        return [value.numpy()]
    return [value.astype(np.float32) if value.dtype.kind == "V" else value]


def floating(array: Array) -> bool:
    return array.dtype.kind == "f" or "float" in array.dtype.name


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name.startswith("bfloat"):
        import ml_dtypes

        made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return made
    return np.dtype(name)


def single(array: Array) -> Array:
    """float32 for floating-point arrays: what ONNX models take."""
    return array.astype(np.float32) if floating(array) else array


def tensor(array: Array) -> Any:
    """The array as a torch tensor that owns its memory."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.kind == "V":  # ml_dtypes: by way of float32, which holds each value exactly
        return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, array.dtype.name))
    return torch.from_numpy(array).clone()
