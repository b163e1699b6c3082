"""A module built by graphc and loaded, called like the module: for tests of the whole way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphc.api import Options, build_captured
from graphc.frontends.capture import capture
from graphc.lowering.classify import native_operators
from graphc.runtime.session import load

torch.set_num_threads(1)


class Built:
    """Captures, builds and loads `module`; the plan is removed by `close`."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        dynamic: Any = None,
        options: Options | None = None,
        threads: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="graphc-test-", dir=folder))
        self.plan = self.folder / "plan"
        try:
            if isinstance(module, Call) and dynamic is not None:
                dynamic = (dynamic,)  # one *args
            self.captured = capture(module, args, kwargs, dynamic, keep=native_operators())
            options = replace(options or Options(jobs=1), buckets=self._bucket())
            self.report = build_captured(self.captured, self.plan, options)
            self.session = load(self.plan, threads=threads)
        except BaseException:
            self.close()
            raise

    def _bucket(self) -> Sequence[str]:
        symbols = [s for s in self.captured.graph.symbols.values() if not s.data]
        limits = [f"{s.name}={min(s.maximum, max(s.minimum, 8 * s.hint, 64))}" for s in symbols]
        return [",".join(limits)] if limits else []

    @property
    def fallbacks(self) -> list[tuple[str, str]]:
        """(operator, reason) of each fallback."""
        return sorted({(f.target, f.reason) for f in self.report.fallbacks})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.session.run(*args, as_torch=True, **kwargs)
        leaves = pytree.tree_leaves(result)
        spec = self.captured.out_spec
        return pytree.tree_unflatten(leaves, spec) if spec.num_leaves == len(leaves) else result

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def results(function: Any, *args: Any, **options: Any) -> tuple[Any, list[tuple[str, str]]]:
    """(what graphc's build of `function` gives on `args`, its fallbacks)."""
    module = function if isinstance(function, torch.nn.Module) else Call(function)
    built = Built(module, args, **options)
    try:
        return built(*args), built.fallbacks
    finally:
        built.close()


def agree(ours: Any, theirs: Any, rtol: float, atol: float, what: str = "") -> None:
    """Equal dtypes and shapes, values within the tolerance, NaN where there is NaN."""
    a, b = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(a) == len(b), what
    for position, (x, y) in enumerate(zip(a, b, strict=True)):
        if not isinstance(y, torch.Tensor):
            assert x == y, f"{what} result {position}"
            continue
        assert (x.dtype, tuple(x.shape)) == (y.dtype, tuple(y.shape)), f"{what} result {position}"
        torch.testing.assert_close(
            x, y, rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, p=position: f"{what} result {p}: {text}",
        )  # fmt: skip
