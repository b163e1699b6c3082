"""graphc as the callable that conformance suites take.

Every callable builds for real (capture, passes, kernels, plan on disk), loads the plan and runs
it; nothing is compared or special-cased here. `UnsupportedError` is a NotImplementedError, which
the suites count apart from wrong answers.

    onnx_case(model, inputs) -> outputs            one ONNX model, in memory
    torch_op(module, args, kwargs) -> outputs      one module, static shapes
    zoo(module, args, kwargs, dynamic_shapes)      -> callable for every length
    real_model(path, feeds) -> outputs             an .onnx file; real_model.torch for modules
    bug_case(module, args, kwargs, dynamic_shapes) -> callable with .state_dict() and .plan
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils import _pytree as pytree

from graphc.api import Options, build_captured
from graphc.errors import InputRejectedError
from graphc.frontends.capture import capture
from graphc.frontends.variants import further_captures
from graphc.lowering.classify import native_operators
from graphc.runtime.session import load

torch.set_num_threads(1)
VERBOSE = bool(os.environ.get("GRAPHC_CONFORMANCE_VERBOSE"))


class Compiled:
    """A module built by graphc, called like the module."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any = None,
    ) -> None:
        self.module = module
        self.folder = Path(tempfile.mkdtemp(prefix="graphc-conformance-"))
        try:
            self.captured = capture(module, args, kwargs, dynamic_shapes, keep=native_operators())
            options = Options(jobs=1, buckets=self._bucket())
            more = further_captures(
                module, args, kwargs, dynamic_shapes, self.captured, keep=native_operators()
            )
            self.report = build_captured(
                self.captured, self.folder / "plan", options, variants=more
            )
            self.session = load(self.folder / "plan", threads=1)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.plan = self.folder / "plan"
        if VERBOSE:
            for item in self.report.fallbacks:
                print(f"  fallback {item.target}: {item.reason}", file=sys.stderr)

    def _bucket(self) -> list[str]:
        """One bucket: every free length up to eight times its example, or to 2048 if there is
        but one."""
        symbols = [s for s in self.captured.graph.symbols.values() if not s.data]
        asked = self.captured.requested
        symbols = [
            replace(s, maximum=max(s.maximum, asked.get(s.name, (0, 0))[1])) for s in symbols
        ]
        least = 2048 if len(symbols) == 1 else 64
        limits = [f"{s.name}={min(s.maximum, max(s.minimum, 8 * s.hint, least))}" for s in symbols]
        return [",".join(limits)] if limits else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.session.run(*args, as_torch=True, **kwargs)
        leaves = list(pytree.tree_leaves(result))
        spec = self.captured.out_spec
        if spec.num_leaves == len(leaves):
            return pytree.tree_unflatten(leaves, spec)
        return result

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's own state dict, with the states of the session in it."""
        states = {k: torch.from_numpy(v.copy()) for k, v in self.session.states.items()}
        return {**self.module.state_dict(), **states}

    def close(self) -> None:
        """Removes the plan."""
        shutil.rmtree(self.folder, ignore_errors=True)


def torch_op(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One operator with fixed shapes."""
    compiled = Compiled(module, args, kwargs)
    try:
        return compiled(*args, **kwargs)
    finally:
        compiled.close()


class PerLength:
    """A model over a symbolic length; where its plan rejects a length that the capture does not
    hold for, a plan of that very length is built."""

    def __init__(self, module: torch.nn.Module, first: Compiled) -> None:
        self.module = module
        self.plans = [first]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for plan in self.plans:
            try:
                return plan(*args, **kwargs)
            except InputRejectedError:
                continue
        self.plans.append(Compiled(self.module, args, kwargs))
        return self.plans[-1](*args, **kwargs)


def zoo(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> Callable[..., Any]:
    """A model over a symbolic length."""
    return PerLength(module, Compiled(module, args, kwargs, dynamic_shapes))


bug_case = Compiled


def onnx_case(model: Any, inputs: list[Any]) -> list[Any]:
    """One ONNX model in memory: fixed shapes, those of the inputs; inputs that decide shapes or
    axes are fixed to the value given, as a user of such a model must."""
    from graphc.frontends.onnx_model import load_onnx

    names = [i.name for i in model.graph.input]
    initializers = {i.name for i in model.graph.initializer}
    feeds = dict(zip([n for n in names if n not in initializers], inputs, strict=False))
    module = load_onnx(model)
    fixed = {n: feeds[n] for n in module.structural_inputs if feeds.get(n) is not None}
    return _run_onnx(load_onnx(model, fixed=fixed) if fixed else module, feeds, dynamic=False)


def _run_onnx(module: Any, feeds: Mapping[str, Any], *, dynamic: bool) -> list[Any]:
    import numpy as np

    args = tuple(_tensor(feeds[name]) for name in module.input_names)
    compiled = Compiled(module, args, {}, module.dynamic_shapes() if dynamic else None)
    try:
        result = compiled(*args)
    finally:
        compiled.close()
    leaves = list(pytree.tree_leaves(result))
    return [_array(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in leaves]


def _tensor(value: Any) -> Any:
    import numpy as np

    if value is None or isinstance(value, list):
        raise NotImplementedError("sequences and optionals at the boundary")
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    if array.dtype.kind in "OUS":
        raise NotImplementedError("strings")
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


_MODELS: dict[tuple[Any, ...], Any] = {}


def real_model(path: str, feeds: Mapping[str, Any]) -> list[Any]:
    """An .onnx file, built once with its free dimensions free; inputs that decide shapes or
    branches, and 0-d inputs (a sample rate), are fixed to the value fed."""
    from graphc.frontends.onnx_model import load_onnx

    key = (path,)
    if key not in _MODELS:
        probe = load_onnx(path)
        scalars = [s.name for s in probe.input_specs if not s.dims and s.name in feeds]
        fixed = {n: feeds[n] for n in {*probe.structural_inputs, *scalars}}
        module = load_onnx(path, fixed=fixed) if fixed else probe
        args = tuple(_wide(_tensor(feeds[s.name]), s.dims) for s in module.input_specs)
        _MODELS[key] = (module, Compiled(module, args, {}, module.dynamic_shapes()))
        _announce(path, _MODELS[key][1])
    module, compiled = _MODELS[key]
    args = tuple(_tensor(feeds[name]) for name in module.input_names)
    return [_array(x) for x in pytree.tree_leaves(compiled(*args))]


def _wide(tensor: torch.Tensor, dims: Any) -> torch.Tensor:
    """An example without size-1 free dimensions: torch.export would take them for fixed."""
    for dim, size in enumerate(dims or ()):
        if not isinstance(size, int) and tensor.shape[dim] == 1:
            tensor = torch.cat([tensor, tensor], dim)
    return tensor


def _announce(name: str, compiled: Compiled) -> None:
    listed = sorted({f.target for f in compiled.report.fallbacks})
    ratios = [m.arena_bytes / max(m.lower_bound, 1) for m in compiled.report.memory]
    print(
        f"    {Path(name).name}: {compiled.report.buckets[0].steps} steps, fallbacks "
        f"{', '.join(listed) or 'none'}, arena/bound {max(ratios):.3f}",
        flush=True,
    )


def _real_torch(module: torch.nn.Module, args: tuple[Any, ...]) -> list[Any]:
    key = (id(module), tuple(tuple(a.shape) for a in args))
    if key not in _MODELS:
        _MODELS[key] = (module, Compiled(module, args, {}))
        _announce(type(module).__name__, _MODELS[key][1])
    result = _MODELS[key][1](*args)
    return [_array(x) for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


real_model.torch = _real_torch  # type: ignore[attr-defined]
