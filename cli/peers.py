"""What `graphc bench` compares with: eager torch, torch.compile, ONNX Runtime."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cli.options import BuildOptions
from graphc.errors import GraphcError

Call = Callable[[], object]


class Unavailable(Exception):
    """This peer can't run here, and why."""


def _tensors(value: Any) -> Any:
    """numpy arrays in a tree of arguments as torch tensors."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind == "V":  # ml_dtypes: by way of float32, which holds each value exactly
            return torch.from_numpy(value.astype(np.float32)).to(getattr(torch, value.dtype.name))
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tensors(item) for item in value)
    return value


def _module(model: str, build: BuildOptions, threads: int) -> Any:
    """The model as an eager torch module."""
    import torch

    from graphc import api

    torch.set_num_threads(threads)
    try:
        return api.reference(model, dtype=build.dtype)
    except GraphcError as error:
        raise Unavailable(error.what) from None


def eager(model: str, build: BuildOptions, args: Any, kwargs: Any, threads: int) -> Call:
    """The model in plain torch."""
    import torch

    module = _module(model, build, threads)
    tensors, named = _tensors(args), _tensors(kwargs)

    def call() -> object:
        with torch.inference_mode():
            return module(*tensors, **named)

    return call


def compiled(model: str, build: BuildOptions, args: Any, kwargs: Any, threads: int) -> Call:
    """The model through torch.compile, compiled for these very shapes."""
    import torch

    compiler: Any = torch.compile  # untyped
    module = compiler(_module(model, build, threads), dynamic=False)
    tensors, named = _tensors(args), _tensors(kwargs)

    def call() -> object:
        with torch.inference_mode():
            return module(*tensors, **named)

    try:
        call()
    except Exception as error:
        raise Unavailable(f"torch.compile: {str(error).splitlines()[0]}") from None
    return call


def onnxruntime(model: str, build: BuildOptions, args: Any, kwargs: Any, threads: int) -> Call:
    """An .onnx file as it is; another model as torch.onnx exports it."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise Unavailable("onnxruntime is not installed (the extra `bench` has it)")
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = model if Path(model).suffix == ".onnx" else _exported(model, build, args, kwargs)
    try:
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise Unavailable(f"onnxruntime: {str(error).splitlines()[0]}") from None
    names = [item.name for item in session.get_inputs()]
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray)]
    if len(names) != len(values):
        raise Unavailable(f"its graph has {len(names)} inputs, the plan {len(values)}")
    feeds = dict(zip(names, values, strict=True))
    return lambda: session.run(None, feeds)


def _exported(model: str, build: BuildOptions, args: Any, kwargs: Any) -> bytes:
    if importlib.util.find_spec("onnxscript") is None:
        raise Unavailable("onnxscript is not installed (the extra `bench` has it)")
    import torch

    module = _module(model, build, torch.get_num_threads())
    # what the exporter has to say is about itself (torchvision is missing, a deprecation), and
    # what fails is said below
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module, _tensors(args), kwargs=_tensors(kwargs), dynamo=True, verbose=False
            )
    except Exception as error:
        raise Unavailable(f"torch.onnx: {str(error).splitlines()[0]}") from None
    if program is None:
        raise Unavailable("torch.onnx gave no program")
    return bytes(program.model_proto.SerializeToString())


PEERS: dict[str, Callable[[str, BuildOptions, Any, Any, int], Call]] = {
    "eager": eager,
    "compile": compiled,
    "ort": onnxruntime,
}
