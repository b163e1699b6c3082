"""What `graphc bench` compares with: eager torch, torch.compile, AOTInductor, ONNX Runtime and
OpenVINO, each as it is best driven on a CPU. Everything here runs in a worker process of its own
(cli.worker), so nothing is shared between two peers, thread pools least of all.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cli.jobs import Array, Inputs, Job, Unavailable, flat, load_inputs, mapped, single, tensor

#: seconds that the float64 results of further draws may take
_REFERENCE_S = 20.0


@dataclass(frozen=True)
class Loaded:
    """A model that is ready: `call` gives the results for what the arguments hold now."""

    call: Callable[[], object]
    arguments: list[Any]  # arrays or tensors, flat and in order

    def write(self, inputs: Inputs) -> None:
        """Other contents for the arguments, where they are."""
        arrays: list[Array] = []
        mapped((inputs.args, inputs.kwargs), arrays.append)
        for held, array in zip(self.arguments, arrays, strict=True):
            if isinstance(held, np.ndarray):
                np.copyto(held, array.astype(held.dtype))
            else:
                held.copy_(tensor(array))


def _module(job: Job, dtype: str | None) -> Any:
    import torch

    torch.set_num_threads(job.threads)
    module, _, function = job.loader.partition(":")
    loaded = getattr(importlib.import_module(module), function)(job.model, dtype)
    return loaded.eval().requires_grad_(False)


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """The arguments of a call of a torch module, and the tensors in them."""
    inputs = load_inputs(job)
    held: list[Any] = []

    def made(array: Array) -> Any:
        held.append(tensor(array))
        return held[-1]

    return mapped(inputs.args, made), mapped(inputs.kwargs, made), held


def _first_line(name: str, error: BaseException) -> Unavailable:
    lines = str(error).strip().splitlines()
    return Unavailable(
        f"{name}: {type(error).__name__}: {lines[0][:200] if lines else ''}",
        lasting=not isinstance(error, ImportError | OSError | MemoryError),
    )


def _needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            extra = "peers" if package == "openvino" else "bench"
            raise Unavailable(f"{package} is not installed (the extra `{extra}` has it)")


# ------------------------------------------------------------------------------ graphc itself


def _graphc(job: Job) -> Loaded:
    from graphc.runtime import session as runtime

    session = runtime.load(Path(job.folder) / "plan", threads=job.threads)
    inputs = load_inputs(job)
    held: list[Array] = []
    mapped((inputs.args, inputs.kwargs), held.append)
    return Loaded(lambda: session.run(*inputs.args, **inputs.kwargs), held)


def _build_graphc(job: Job) -> None:
    plan = Path(job.folder) / "plan"
    if job.onnx:
        from graphc import api

        inputs = load_inputs(job)
        arrays: list[Array] = []
        mapped((inputs.args, inputs.kwargs), arrays.append)
        types = [
            f"{name}={array.dtype.name}[{','.join(map(str, array.shape))}]"
            for name, array in zip(inputs.names, arrays, strict=True)
        ]
        api.build(job.onnx, plan, inputs=types)
        return
    module = _module(job, job.dtype)
    args, kwargs, _ = _arguments(job)
    # what loading the module took is no peer's build either
    clock = _Clock(job)
    from graphc import api

    api.build_module(module, args, kwargs, output=plan)
    clock.stop()


# ------------------------------------------------------------------------------ torch


class _Clock:
    """Notes the CPU seconds, children included, of the part of a build that counts."""

    def __init__(self, job: Job) -> None:
        from cli.measure import cpu_seconds

        self.folder, self.now = Path(job.folder), cpu_seconds
        self.start = cpu_seconds()

    def stop(self) -> None:
        (self.folder / "build-cpu").write_text(repr(self.now() - self.start))


def _eager(job: Job) -> Loaded:
    import torch

    module = _module(job, job.dtype)
    args, kwargs, held = _arguments(job)
    torch.inference_mode().__enter__()  # until the process ends
    return Loaded(lambda: module(*args, **kwargs), held)


def _compile(freezing: bool) -> Callable[[Job], Loaded]:
    def load(job: Job) -> Loaded:
        import torch
        import torch._inductor.config as config

        config.freezing = freezing
        module = _module(job, job.dtype)
        args, kwargs, held = _arguments(job)
        torch.inference_mode().__enter__()
        compiler: Any = torch.compile  # untyped
        compiled = compiler(module, dynamic=False)
        clock = _Clock(job) if not (Path(job.folder) / "build-cpu").exists() else None
        try:
            compiled(*args, **kwargs)
        except Exception as error:
            raise _first_line("torch.compile", error) from None
        if clock is not None:
            clock.stop()
        return Loaded(lambda: compiled(*args, **kwargs), held)

    return load


def _build_aoti(freezing: bool) -> Callable[[Job], None]:
    def build(job: Job) -> None:
        import torch
        import torch._inductor

        module = _module(job, job.dtype)
        args, kwargs, _ = _arguments(job)
        clock = _Clock(job)
        try:
            with torch.no_grad():
                program = torch.export.export(module, args, kwargs, strict=False)
                torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(Path(job.folder) / "model.pt2"),
                    inductor_configs={"freezing": freezing},
                )
        except Exception as error:
            raise _first_line("AOTInductor", error) from None
        clock.stop()

    return build


def _aoti(job: Job) -> Loaded:
    import torch
    import torch._inductor

    torch.set_num_threads(job.threads)
    args, kwargs, held = _arguments(job)
    try:
        package = torch._inductor.aoti_load_package(str(Path(job.folder) / "model.pt2"))
    except Exception as error:
        raise _first_line("AOTInductor", error) from None
    torch.inference_mode().__enter__()
    return Loaded(lambda: package(*args, **kwargs), held)


# ------------------------------------------------------------------------------ ONNX


def _onnx_file(job: Job) -> str:
    """The model as an ONNX file with float32 weights; exported once for all peers and dtypes."""
    if job.onnx:
        return job.onnx
    path = Path(job.shared) / "onnx" / "model.onnx"
    record = path.with_suffix(".json")
    if record.exists():
        return str(path)
    _needs("onnxscript")
    import torch

    module, inputs = _module(job, None).float(), load_inputs(job)
    arrays: list[Array] = []
    kwargs = mapped(inputs.kwargs, lambda a: tensor(single(a)))
    args = mapped(inputs.args, lambda a: tensor(single(a)))
    mapped((inputs.args, inputs.kwargs), arrays.append)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    kept = [arg.clone() for arg in args if isinstance(arg, torch.Tensor)]
    with torch.no_grad():
        module(*args, **kwargs)
    written = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if any(not torch.equal(a, b) for a, b in zip(kept, written, strict=True)):
        raise Unavailable(
            "the model writes into its inputs, which an ONNX file cannot say", lasting=True
        )
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module, args, kwargs=kwargs, dynamo=True, verbose=False, input_names=inputs.names
            )
    except Exception as error:
        raise _first_line("torch.onnx", error) from None
    if program is None:
        raise Unavailable("torch.onnx gave no program")
    if hasattr(module, "finish_onnx"):
        module.finish_onnx(program)
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=True)
    record.write_text(json.dumps({"export_cpu_s": time.process_time() - start}))
    return str(path)


def _build_onnx(*packages: str) -> Callable[[Job], None]:
    def build(job: Job) -> None:
        _needs(*packages)
        if job.dtype == "bfloat16" and "onnxruntime" in packages:
            raise Unavailable("onnxruntime has no bfloat16 kernels for CPUs", lasting=True)
        _onnx_file(job)
        record = Path(job.shared) / "onnx" / "model.json"
        if record.exists():
            cost = json.loads(record.read_text())["export_cpu_s"]
            (Path(job.folder) / "build-cpu").write_text(repr(cost))

    return build


def _feeds(job: Job) -> dict[str, Array]:
    inputs = load_inputs(job)
    arrays: list[Array] = []
    mapped((inputs.args, inputs.kwargs), arrays.append)
    pairs = zip(inputs.names, arrays, strict=True)
    return {name: np.ascontiguousarray(single(array)) for name, array in pairs}


def _onnxruntime(job: Job) -> Loaded:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(_onnx_file(job), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _first_line("onnxruntime", error) from None
    taken = {item.name for item in session.get_inputs()}
    held = _feeds(job)
    feeds = {name: array for name, array in held.items() if name in taken}
    if len(feeds) != len(taken):
        raise Unavailable(f"its graph has other inputs: {', '.join(sorted(taken - set(feeds)))}")
    return Loaded(lambda: session.run(None, feeds), list(held.values()))


def _openvino(job: Job) -> Loaded:
    import openvino as ov

    feeds = _feeds(job)
    core = ov.Core()
    try:
        model = core.read_model(_onnx_file(job))
        names = [next((n for n in port.get_names() if n in feeds), "") for port in model.inputs]
        if "" in names:
            raise Unavailable("its graph has other inputs")
        # fixed shapes are what it is fastest with
        model.reshape(
            {port: list(feeds[name].shape) for port, name in zip(model.inputs, names, strict=True)}
        )
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16" if job.dtype == "bfloat16" else "f32",
                "INFERENCE_NUM_THREADS": job.threads,
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
    except Unavailable:
        raise
    except Exception as error:
        raise _first_line("openvino", error) from None
    request = compiled.create_infer_request()
    for port, name in zip(compiled.inputs, names, strict=True):
        request.set_tensor(port, ov.Tensor(feeds[name], shared_memory=True))
    count = len(compiled.outputs)

    def call() -> object:
        assert feeds  # the request reads them where they are: they must live as long
        request.infer()
        return [request.get_output_tensor(i).data for i in range(count)]

    return Loaded(call, list(feeds.values()))


# ------------------------------------------------------------------------------ float64


def _build_reference(job: Job) -> None:
    """The results in float64 of the module as it is at the job's dtype: weights and inputs are
    rounded first, so what is measured is the error of the computation. Of as many draws as
    `_REFERENCE_S` allows, at least one; array "1.0" is the first result of the second draw."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    module = _module(job, job.dtype).double()
    if job.onnx:  # reads its types off the file
        module.input_specs = [
            replace(spec, dtype=torch.float64) if spec.dtype.is_floating_point else spec
            for spec in module.input_specs
        ]

    def double(array: Array) -> Any:
        made = tensor(array)
        return made.double() if made.is_floating_point() else made

    class Double(TorchFunctionMode):
        """Conversions to float32 inside of the model become conversions to float64."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            def wide(leaf: Any) -> Any:
                return torch.float64 if leaf is torch.float32 else leaf

            args, kwargs = tree_map(wide, (args, kwargs or {}))
            return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)

    results: dict[str, Array] = {}
    begin = time.perf_counter()
    for draw in range(len(job.inputs)):
        if draw and (time.perf_counter() - begin) * (draw + 1) / draw > _REFERENCE_S:
            break
        inputs = load_inputs(job, draw)
        try:
            with torch.inference_mode(), Double():
                result = module(*mapped(inputs.args, double), **mapped(inputs.kwargs, double))
        except Exception as error:
            raise _first_line("float64", error) from None
        results |= {f"{draw}.{i}": array for i, array in enumerate(flat(result))}
    with Path(job.reference).open("wb") as file:
        np.savez(file, **results)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Peer:
    """How a peer is prepared (once; what it leaves in the job's folder is kept) and loaded."""

    load: Callable[[Job], Loaded]
    build: Callable[[Job], object] | None = None
    packages: tuple[str, ...] = ()  # whose versions an artefact depends on


GRAPHC = "graphc"
REFERENCE = "float64"
OURS = {
    GRAPHC: Peer(_graphc, _build_graphc),
    REFERENCE: Peer(_eager, _build_reference, ("torch",)),
}
PEERS = {
    "eager": Peer(_eager, None, ("torch",)),
    "compile": Peer(_compile(False), _compile(False), ("torch",)),
    "compile_freeze": Peer(_compile(True), _compile(True), ("torch",)),
    "aoti": Peer(_aoti, _build_aoti(False), ("torch",)),
    "aoti_freeze": Peer(_aoti, _build_aoti(True), ("torch",)),
    "ort": Peer(_onnxruntime, _build_onnx("onnxruntime"), ("torch", "onnxruntime")),
    "openvino": Peer(_openvino, _build_onnx("openvino"), ("torch", "openvino")),
}
