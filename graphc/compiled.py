"""`graphc.compile(module)`: a callable that builds a plan when it is first called.

A plan belongs to the signature of a call (dtypes and shapes of tensors, values of everything else)
and is kept in the cache folder by the content of its graph and weights: another process that
captures the same model loads it without building.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import graphc
from graphc.errors import GraphcError, UnsupportedError, UsageError
from graphc.garbage import rarely_collected
from graphc.plan import ABI_VERSION, FORMAT_VERSION
from graphc.runtime.session import Session, load

if TYPE_CHECKING:
    from graphc.api import Options
    from graphc.frontends.capture import Captured


class Compiled:
    """Made by `graphc.compile`. Calls take and give what the module does, for inference."""

    def __init__(
        self,
        module: torch.nn.Module,
        dynamic_shapes: Any,
        options: Options,
        threads: int | None,
    ) -> None:
        self.module = module
        self.dynamic_shapes = dynamic_shapes
        self.options = options
        self.threads = threads
        #: the plan of each signature
        self.sessions: dict[Hashable, Session] = {}
        self._weights: tuple[tuple[int, int], ...] = ()
        self._held: list[torch.Tensor] = []  # keeps the ids in `_weights` taken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan of this signature; the first time, or after weights changed, builds it.

        Raises:
            UnsupportedError: the module is in training mode, or an argument requires gradients.
            GraphcError: it cannot be built, or the plan rejects the arguments.
        """
        self._check(args, kwargs)
        weights = tuple((id(t), _version(t)) for t in self._tensors())
        if weights != self._weights:
            self.sessions.clear()
            self._weights, self._held = weights, list(self._tensors())
        signature = _signature(args, kwargs, self.dynamic_shapes is not None)
        session = self.sessions.get(signature)
        if session is None:
            session = self._session(args, kwargs)
            if self.sessions and (
                session.plan.states or next(iter(self.sessions.values())).plan.states
            ):
                raise UnsupportedError(
                    "the module changes buffers of its own, which two plans would each keep",
                    hint="give dynamic_shapes, so that one plan takes all lengths",
                )
            self.sessions[signature] = session
        return session.run(*args, **kwargs)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.module.training:
            raise UnsupportedError(
                "graphc.compile is for inference, and the module is in training mode",
                hint="call module.eval() first",
            )
        for leaf in pytree.tree_leaves((args, dict(kwargs))):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    "graphc has no gradients, and an argument requires them",
                    hint="call it under torch.inference_mode(), or detach the argument",
                )

    @rarely_collected()
    def _session(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Session:
        from graphc.api import build_captured, kept_plans
        from graphc.frontends.capture import capture
        from graphc.frontends.variants import further_captures
        from graphc.lowering.classify import native_operators

        def example(leaf: Any) -> Any:
            return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf

        args, kwargs = pytree.tree_map(example, (args, dict(kwargs)))
        keep = native_operators()
        captured = capture(self.module, args, kwargs, self.dynamic_shapes, keep=keep)
        more = further_captures(self.module, args, kwargs, self.dynamic_shapes, captured, keep=keep)
        place = kept_plans() / self._digest([captured, *more])
        try:
            return load(place, threads=self.threads)
        except GraphcError:  # none there, or not for this machine, or damaged
            shutil.rmtree(place, ignore_errors=True)
        build_captured(
            captured, place, self.options, model=type(self.module).__name__, variants=more
        )
        return load(place, threads=self.threads)

    def _digest(self, captures: list[Captured]) -> str:
        """Of all that decides what the plan is: graph, weights, options, machine, compiler."""
        from graphc.ir.text import print_graph
        from graphc.toolchain.compiler import Compiler, NoCompilerError
        from graphc.toolchain.isa import Isa
        from graphc.warm.identity import PLAN_ROOMS, sources

        try:
            compiler = Compiler.discover().identity
        except NoCompilerError:  # the build then takes what the cache holds
            compiler = "none"
        digest = hashlib.sha256()
        for part in (
            f"{graphc.__version__} {FORMAT_VERSION} {ABI_VERSION} {sources(PLAN_ROOMS)}",
            repr(Isa.detect()),
            compiler,
            repr(self.options),
            *(print_graph(c.graph) for c in captures),
            *(repr((c.arguments, c.keywords, c.results, c.result_names)) for c in captures),
        ):
            digest.update(part.encode())
            digest.update(b"\0")
        return digest.hexdigest()[:32]


def _version(tensor: torch.Tensor) -> int:
    """Counts changes in place; torch does not count those of inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def _signature(args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool) -> Hashable:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | np.ndarray):
            shape = len(leaf.shape) if dynamic else tuple(leaf.shape)
            parts.append((str(leaf.dtype).removeprefix("torch."), shape))
        elif isinstance(leaf, Hashable):
            parts.append((type(leaf), leaf))
        else:
            raise UsageError(
                f"expected tensors and plain values as arguments, found {type(leaf).__name__}"
            )
    return tuple(parts), str(spec)
