"""Tensors whose bytes lie in a file beside the model, read with every claim checked."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import torch
from onnx import TensorProto, helper

from graphc.errors import UsageError
from graphc.frontends.onnx.dtypes import tensor_of_array, tensor_of_proto, torch_dtype


def load_tensor(proto: TensorProto, base_dir: Path | None, where: str = "") -> torch.Tensor:
    """The value of a TensorProto, wherever its bytes are.

    Args:
        base_dir: folder of the model file; external data outside of it is never read.

    Raises:
        UsageError: the location leaves the folder, or offset, length and shape disagree.
    """
    if proto.data_location != TensorProto.EXTERNAL:
        return tensor_of_proto(proto, where)
    where = f"tensor {proto.name!r}" + (f" of {where}" if where else "")
    torch_dtype(proto.data_type, where)
    entries = {entry.key: entry.value for entry in proto.external_data}
    path = _resolve(entries.get("location", ""), base_dir, where)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(proto.data_type))
    if any(d < 0 for d in proto.dims):
        raise UsageError(f"negative size in shape {list(proto.dims)}", where=where)
    count = 1
    for dim in proto.dims:
        count *= dim
    needed = count * dtype.itemsize
    offset = _number(entries.get("offset", "0"), "offset", where)
    length = _number(entries.get("length", str(needed)), "length", where)
    size = path.stat().st_size
    if length != needed:
        raise UsageError(
            f"external data of {needed} bytes expected for {dtype.name}{list(proto.dims)}, "
            f"the model says {length}",
            where=where,
            hint="the model and its data file do not belong together; export the model again",
        )
    if offset + length > size:
        raise UsageError(
            f"bytes {offset} to {offset + length} expected in {path.name}, which has {size}",
            where=where,
            hint="the data file is truncated; copy or export it again",
        )
    if needed == 0:
        return tensor_of_array(np.zeros(tuple(proto.dims), dtype))
    with path.open("rb") as stream:
        stream.seek(offset)
        raw = stream.read(length)
    if len(raw) != length:
        raise UsageError(f"{path.name} could not be read fully", where=where)
    return tensor_of_array(np.frombuffer(raw, dtype=dtype).reshape(tuple(proto.dims)))


def _number(text: str, key: str, where: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"external data {key} must be a number, found {text!r}", where=where)
    return int(text)


def _resolve(location: str, base_dir: Path | None, where: str) -> Path:
    hint = "external data must be a file inside the model's folder"
    if not location:
        raise UsageError("external data without a location", where=where, hint=hint)
    if base_dir is None:
        raise UsageError(
            f"external data {location!r}, but the model has no folder",
            where=where,
            hint="load the model from its path, or pass base_dir",
        )
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    if posix.is_absolute() or windows.is_absolute() or windows.drive or "\\" in location:
        raise UsageError(f"external data at {location!r} refused", where=where, hint=hint)
    if ".." in posix.parts or "\0" in location:
        raise UsageError(f"external data at {location!r} refused", where=where, hint=hint)
    root = base_dir.resolve()
    path = (root / location).resolve()
    if not path.is_relative_to(root):
        raise UsageError(
            f"external data at {location!r} leads out of the model's folder", where=where, hint=hint
        )
    if not path.is_file():
        raise UsageError(
            f"external data file {location!r} not found in {root}",
            where=where,
            hint="keep the data files beside the model",
        )
    return path
