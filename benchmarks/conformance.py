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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from graphc.api import build_module  # noqa: E402
from graphc.runtime.session import load  # noqa: E402

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
        self.folder = Path(tempfile.mkdtemp(prefix="graphc-conformance-"))
        try:
            self.report, self.captured = build_module(
                module, args, kwargs, dynamic_shapes, output=self.folder / "plan", jobs=1
            )
            self.session = load(self.folder / "plan", threads=1)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.plan = self.folder / "plan"
        if VERBOSE:
            for item in self.report.fallbacks:
                print(f"  fallback {item.target}: {item.reason}", file=sys.stderr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.session.run(*args, as_torch=True, **kwargs)
        leaves = [x for x in pytree.tree_leaves(result)]
        spec = self.captured.out_spec
        if spec.num_leaves == len(leaves):
            return pytree.tree_unflatten(leaves, spec)
        return result

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The states as torch tensors, by buffer name."""
        return {k: torch.from_numpy(v.copy()) for k, v in self.session.states.items()}

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


def zoo(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> Callable[..., Any]:
    """A model over a symbolic length."""
    return Compiled(module, args, kwargs, dynamic_shapes)


bug_case = zoo
