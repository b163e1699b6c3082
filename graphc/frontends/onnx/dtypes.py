"""ONNX element types and their torch dtypes."""

from __future__ import annotations

import numpy as np
import torch
from onnx import TensorProto, numpy_helper

from graphc.errors import UnsupportedError, UsageError

TORCH_OF_ONNX: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
}
ONNX_OF_TORCH: dict[torch.dtype, int] = {v: k for k, v in TORCH_OF_ONNX.items()}

WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def torch_dtype(element_type: int, where: str = "") -> torch.dtype:
    """The torch dtype of an ONNX element type.

    Raises:
        UnsupportedError: strings, complex numbers, 4- and 2-bit types and the float8 variants
            that torch cannot represent exactly as ONNX defines them.
    """
    found = TORCH_OF_ONNX.get(element_type)
    if found is None:
        try:
            name = TensorProto.DataType.Name(element_type)
        except ValueError:
            raise UsageError(f"unknown ONNX element type {element_type}", where=where) from None
        raise UnsupportedError(
            f"tensors of element type {name} are not supported",
            where=where,
            hint="convert the model to a float, integer or bool type",
        )
    return found


def is_unsigned(dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 or dtype in WIDE_UNSIGNED


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype."""
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def tensor_of_array(array: np.ndarray) -> torch.Tensor:
    """A torch tensor that owns a copy of `array`, for every dtype torch knows (ml_dtypes too)."""
    name = array.dtype.name
    bits = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    bits["float8_e5m2"] = torch.float8_e5m2
    if name in bits:
        raw = np.int16 if array.dtype.itemsize == 2 else np.int8
        flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(raw).copy())
        return flat.view(bits[name]).reshape(array.shape)
    if array.dtype.kind not in "fiub":
        raise UnsupportedError(f"arrays of type {name} are not supported")
    return torch.from_numpy(np.array(array, order="C", copy=True))


def tensor_of_proto(proto: TensorProto, where: str = "") -> torch.Tensor:
    """The value of a TensorProto whose data lies inside it."""
    torch_dtype(proto.data_type, where or proto.name)
    try:
        array = numpy_helper.to_array(proto)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"the data of tensor {proto.name!r} does not fit its shape and type: {error}",
            where=where or proto.name,
            hint="the file is damaged; export it again",
        ) from error
    return tensor_of_array(array)
