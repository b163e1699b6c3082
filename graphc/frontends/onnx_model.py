"""ONNX files as torch modules that torch.export captures as one static graph."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    EncodeError,
)

import graphc.frontends.onnx.operators  # noqa: F401  (fills the operator table)
from graphc.errors import UnsupportedError, UsageError
from graphc.frontends.onnx.dtypes import tensor_of_array, torch_dtype
from graphc.frontends.onnx.folding import fold, pack, register
from graphc.frontends.onnx.graph import Constant, OnnxGraph, normal_domain, parse_graph
from graphc.frontends.onnx.interpreter import Interpreter

OLDEST_OPSET = 1
Fixed = Mapping[str, Any]


@dataclass(frozen=True)
class InputSpec:
    """A graph input: its name, dtype and declared sizes.

    Args:
        dims: an int for a fixed size, a str for a named one, None for an unnamed one; None in
            place of the list if the model declares no rank.
        kind: "tensor", "sequence" or "optional".
    """

    name: str
    dtype: torch.dtype
    dims: list[int | str | None] | None
    kind: str = "tensor"


class OnnxModule(torch.nn.Module):
    """Executes an ONNX graph with torch operators; built by `load_onnx`.

    Attributes:
        input_names, output_names: of the graph, in order; initializers and fixed inputs are not
            inputs.
        input_specs: dtype and sizes of each input.
    """

    def __init__(self, model: onnx.ModelProto, base_dir: Path | None, fixed: Fixed) -> None:
        super().__init__()
        self._opsets = _opset_versions(model)
        graph = parse_graph(model.graph, self._opsets, base_dir, set())
        declared = {i.name: i for i in model.graph.input}
        for name, value in fixed.items():
            if name not in declared:
                raise UsageError(
                    f"no input {name!r} to fix", hint=f"the inputs are {', '.join(declared)}"
                )
            graph.constants[name] = _fixed_constant(_input_spec(declared[name]), value)
        graph.inputs = [name for name in graph.inputs if name not in graph.constants]
        self.input_specs = [_input_spec(declared[name]) for name in graph.inputs]
        self.input_names = list(graph.inputs)
        self.output_names = list(graph.outputs)
        self._interpreter = Interpreter(lambda name: getattr(self, name))
        fold(graph, self._interpreter)
        pack(graph)
        register(graph, self)
        self._graph: OnnxGraph = graph

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs of the graph for its inputs in order."""
        if len(inputs) != len(self.input_names):
            raise UsageError(
                f"{len(self.input_names)} inputs expected, found {len(inputs)}",
                hint=f"the inputs are {', '.join(self.input_names)}",
            )
        for spec, value in zip(self.input_specs, inputs, strict=True):
            _check_input(spec, value)
        results = self._interpreter.run(self._graph, inputs, None)
        return tuple(_output(self._interpreter, r) for r in results)

    def example_inputs(self, sizes: Mapping[str, int] | None = None) -> tuple[torch.Tensor, ...]:
        """Deterministic example inputs for a capture.

        Args:
            sizes: size by dimension name, or by "input[axis]" for a dimension without a name.

        Raises:
            UsageError: a size for a dimension that no input has, or an input of unknown rank.
        """
        sizes = dict(sizes or {})
        generator = torch.Generator().manual_seed(0)
        chosen: dict[str, int] = {}
        result = []
        for spec in self.input_specs:
            if spec.dims is None or spec.kind != "tensor":
                raise UsageError(
                    f"no example can be made for input {spec.name!r}", hint="pass your own inputs"
                )
            shape = []
            for axis, dim in enumerate(spec.dims):
                key = dim if isinstance(dim, str) else f"{spec.name}[{axis}]"
                if isinstance(dim, int) and key not in sizes:
                    shape.append(dim)
                    continue
                if key not in chosen:
                    chosen[key] = sizes.get(key, _likely_size(spec, axis, key, len(chosen)))
                shape.append(chosen[key])
            result.append(_example(spec.dtype, shape, generator))
        unknown = set(sizes) - set(chosen)
        if unknown:
            raise UsageError(
                f"no dimension named {', '.join(sorted(unknown))}",
                hint=f"the dimensions are {', '.join(chosen) or 'all fixed'}",
            )
        return tuple(result)

    @property
    def structural_inputs(self) -> list[str]:
        """Inputs that decide shapes, axes or branches, and so are best bound with `fixed`."""
        kinds = {"ints", "int", "floats", "bool", "known"}
        found = set()
        for graph in self._graph.walk():
            for node in graph.nodes:
                entry = node.operator
                if entry is None:
                    continue
                for index, name in enumerate(node.inputs):
                    kind = entry.inputs[index] if index < len(entry.inputs) else entry.variadic
                    if kind in kinds:
                        found.add(name)
        return [name for name in self.input_names if name in found]

    def dynamic_shapes(self, auto: bool = False) -> tuple[tuple[dict[int, Any] | None, ...]]:
        """Per input the dimensions that stay symbolic, as torch.export takes `dynamic_shapes`.

        Dimensions of one name share one `Dim`, for which the capture fails if the graph does not
        hold for every size from 0 up. Unnamed ones are `Dim.AUTO`, whose range and relations the
        capture finds.

        Args:
            auto: `Dim.AUTO` for named dimensions too.
        """
        named: dict[str, Any] = {}
        result: list[dict[int, Any] | None] = []
        for spec in self.input_specs:
            axes: dict[int, Any] = {}
            for axis, dim in enumerate(spec.dims or ()):
                if isinstance(dim, str) and not auto:
                    if dim not in named:
                        named[dim] = torch.export.Dim(_identifier(dim, set(named)))
                    axes[axis] = named[dim]
                elif not isinstance(dim, int):
                    axes[axis] = torch.export.Dim.AUTO
            result.append(axes or None)
        return (tuple(result),)  # the one entry is forward's *inputs


def load_onnx(
    source: str | Path | bytes | onnx.ModelProto,
    *,
    base_dir: Path | None = None,
    fixed: Fixed | None = None,
) -> OnnxModule:
    """Loads an ONNX model as a torch module.

    Args:
        source: path of the file, its bytes, or the parsed model.
        base_dir: folder of external data; the file's own folder by default.
        fixed: inputs bound to a constant, by name (a sample rate, a flag).

    Raises:
        UsageError: the file is missing, damaged or breaks the ONNX standard.
        UnsupportedError: it holds something that cannot be built.
    """
    model = _read(source)
    if base_dir is None and isinstance(source, (str, Path)):
        base_dir = Path(source).resolve().parent
    if not model.HasField("graph"):
        where = str(source) if isinstance(source, (str, Path)) else ""
        raise UsageError(
            "expected an ONNX model, found no graph in it", where=where, hint="the file is damaged"
        )
    if model.functions:
        model = _inline_functions(model)
    return OnnxModule(model, base_dir, dict(fixed or {})).eval()


def _read(source: str | Path | bytes | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    where = "" if isinstance(source, bytes) else str(source)
    if isinstance(source, bytes):
        raw = source
    else:
        try:
            raw = Path(source).read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot read the model: {error.strerror}", where=where, hint="check the path"
            ) from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise UsageError(
            f"not an ONNX model, or damaged: {error}",
            where=where,
            hint="export or download the file again",
        ) from error
    return model


def _inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnx.inliner import inline_local_functions

    try:
        return inline_local_functions(model)
    except (EncodeError, ValueError, RuntimeError) as error:
        raise UsageError(f"the model's functions cannot be inlined: {error}") from error


def _opset_versions(model: onnx.ModelProto) -> dict[str, int]:
    opsets = {normal_domain(o.domain): o.version for o in model.opset_import}
    newest = onnx.defs.onnx_opset_version()
    version = opsets.get("", 1)
    opsets.setdefault("", 1)
    if version > newest:
        raise UnsupportedError(
            f"opset {version} is newer than {newest}, the newest that is known here",
            hint="install a newer onnx package, or export the model for an older opset",
        )
    return opsets


def _input_spec(info: onnx.ValueInfoProto) -> InputSpec:
    kind = info.type.WhichOneof("value") or "none"
    inner = info.type
    while inner.WhichOneof("value") in ("sequence_type", "optional_type"):
        outer = inner.WhichOneof("value")
        inner = (
            inner.sequence_type.elem_type
            if outer == "sequence_type"
            else (inner.optional_type.elem_type)
        )
    if inner.WhichOneof("value") != "tensor_type":
        raise UnsupportedError(f"inputs of type {kind} are not supported", where=info.name)
    tensor = inner.tensor_type
    dtype = torch_dtype(tensor.elem_type, f"input {info.name!r}")
    dims: list[int | str | None] | None = None
    if tensor.HasField("shape"):
        dims = []
        for dim in tensor.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value > 0:
                dims.append(int(dim.dim_value))
            elif dim.HasField("dim_param") and dim.dim_param not in ("", "?", "-1"):
                dims.append(dim.dim_param)
            else:
                dims.append(None)
    return InputSpec(info.name, dtype, dims, kind.removesuffix("_type"))


def _fixed_constant(spec: InputSpec, value: Any) -> Constant:
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    tensor = tensor_of_array(array).to(spec.dtype)
    if spec.dims is not None:
        if not spec.dims and tensor.numel() == 1:
            tensor = tensor.reshape(())
        sizes = zip(spec.dims, tensor.shape, strict=False)
        if tensor.ndim != len(spec.dims) or any(isinstance(d, int) and d != n for d, n in sizes):
            raise UsageError(
                f"input {spec.name!r} has the shape {spec.dims}, the fixed value "
                f"{list(tensor.shape)}"
            )
    return Constant.of(tensor)


def _check_input(spec: InputSpec, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.dtype != spec.dtype:
        raise UsageError(f"input {spec.name!r} must be {spec.dtype}, found {value.dtype}")
    if spec.kind == "tensor" and not isinstance(value, torch.Tensor):
        raise UsageError(f"input {spec.name!r} must be a tensor, found {type(value).__name__}")


def _output(interpreter: Interpreter, value: Any) -> Any:
    if isinstance(value, list):
        return [_output(interpreter, v) for v in value]
    return None if value is None else interpreter.tensor(value)


def _identifier(name: str, taken: set[str]) -> str:
    base = re.sub(r"\W+", "_", name).strip("_") or "dim"
    if base[0].isdigit() or keyword.iskeyword(base):
        base = f"dim_{base}"
    used = {re.sub(r"\W+", "_", t).strip("_") for t in taken}
    return base if base not in used else f"{base}_{len(taken)}"


def _likely_size(spec: InputSpec, axis: int, key: str, count: int) -> int:
    """A size that typical models of such an input accept; never 0 or 1, which would be fixed."""
    rank = len(spec.dims or ())
    if "batch" in key.lower() or (axis == 0 and rank > 1):
        return 2
    if rank == 4 and axis >= 2:
        return 64 if axis == 2 else 96  # an image whose sides differ, multiples of 32
    return 16 + count


def _example(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.ones(shape, dtype=dtype)
