"""What a lowering rule sees: views of buffers, and the calls that make Steps.

A rule turns one node of the fused graph into Steps:

    @rule("aten.topk.default")
    def topk(ctx: LoweringContext, node: Node) -> None:
        x = ctx.contiguous(node.args[0])
        values, indices = ctx.outputs(node)
        ctx.kernel(Unit("topk", source), "gc_topk_f32", pointers=[x, values, indices], ...)

Rules are found by the operator's name; `Refuse(reason)` from a rule makes the node an ATen
fallback Step with that reason in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import sympy

if TYPE_CHECKING:
    import torch

    from graphc.ir.graph import Node
    from graphc.lowering.tuning import Choice

#: a size: an integer, or a sympy expression over the graph's named symbols
Dim: TypeAlias = int | sympy.Expr


class Refuse(Exception):
    """A rule's answer "not with these arguments", with the reason."""


@dataclass(frozen=True)
class View:
    """A strided window on a buffer. offset and strides count elements; dtype is torch's name
    without prefix ("float32"). `shape[i]` and `strides[i]` may be symbolic."""

    buffer: int
    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0

    def with_(self, **changes: Any) -> View:
        return replace(self, **changes)


@dataclass(frozen=True)
class Unit:
    """One C++ translation unit. `name` is for people; equal source text is compiled once."""

    name: str
    source: str


@dataclass(frozen=True)
class Epilogue:
    """Elementwise work fused behind a product-like kernel, as generated C++.

    `source` defines `static void <name>(const gc_args*, const float* acc, int64_t ld, int64_t z,
    int64_t m0, int64_t mr, int64_t n0, int64_t nr)` (abi.h: gc_epilogue); it stores the results.
    Its pointers and immediates must be appended after the rule's own: the rule asks for it with
    the counts of its own pointers and immediates.

    `finish`, unless empty, is the body of `gc_conv_finish f(const gc_args* a)`: see conv.h.
    """

    name: str
    source: str
    pointers: tuple[View, ...]
    immediates: tuple[Dim, ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    finish: str = ""


class LoweringContext(Protocol):
    """Services for rules. All sizes may be symbolic; use sympy arithmetic, `ceildiv` and
    `ctx.static(dim)` to ask for a plain integer."""

    isa: str  # "avx512" | "avx2" | "portable"

    def view(self, value: Any) -> View:
        """The strided view of a graph value (node result, input, weight, state)."""
        ...

    def contiguous(self, value: Any) -> View:
        """The same, row-major from its offset; a copy Step is emitted when it is not."""
        ...

    def parts(self, value: Any, dim: int) -> list[View]:
        """The views that give the value when put one behind the other along `dim` (negative): for
        kernels that read a concatenation without its being made. One view, if it is none."""
        ...

    def outputs(self, node: Node) -> tuple[View, ...]:
        """Row-major views for the results of `node`, allocated now."""
        ...

    def workspace(self, shape: Sequence[Dim], dtype: str) -> View:
        """A temporary buffer of the planned arena, live for the current node's Steps only."""
        ...

    def weight(self, value: Any) -> torch.Tensor | None:
        """The constant tensor behind a value, or None if it is not known at build time."""
        ...

    def constant(self, name: str, data: torch.Tensor, layout: str = "", origin: str = "") -> View:
        """Puts a (packed) constant into the plan's weights (equal bytes are stored once) and
        gives a contiguous view of it."""
        ...

    def epilogue(
        self, node: Node, zmn: tuple[Dim, Dim, Dim], pointers: int, immediates: int,
        channels_last: bool = False,
    ) -> Epilogue:  # fmt: skip
        """The epilogue for `node`, whose result in row-major order is [Z, M, N] = zmn; with
        channels_last [N, C, *spatial], whose tiles have pixels as rows and channels as columns.
        Covers at least converting and storing the node's own result; may hold a fused elementwise
        chain. The rule must not call `outputs` then."""
        ...

    def kernel(
        self,
        unit: Unit,
        symbol: str,
        *,
        pointers: Sequence[View],
        immediates: Sequence[Dim] = (),
        reads: Sequence[View] = (),
        writes: Sequence[View] = (),
        range: Dim = 1,
        grain: int = 1,
        scratch: Dim = 0,
        label: str = "",
        flops: Dim | None = None,
        units: Sequence[Unit] = (),
    ) -> None:
        """Emits one Step. `units` are further units it must be linked with (micro-kernels).
        Pointers are passed with their view's offset added; reads and writes name every view the
        kernel touches (they drive lifetimes: name them all)."""

    def choose(self, choice: Choice, *facts: Dim | str) -> Any:
        """The value of a choice between candidates that are all correct: its default, or what
        `--tune` measured to be faster for these facts (sizes, dtypes)."""
        ...

    def static(self, dim: Dim) -> int | None:
        """The integer behind `dim`, or None if it is symbolic."""
        ...

    def header(self, name: str) -> str:
        """Text of graphc/kernels/<name>, for whole-file units (`Unit("gemm_f32", text)`)."""
        ...


Rule = Callable[[Any, Any], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a lowering rule under operator names such as "aten.linear.default"."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two lowering rules for {name}")
            RULES[name] = function
        return function

    return register


def ceildiv(a: Dim, b: Dim) -> Dim:
    """ceil(a / b) for positive b, symbolic if either is."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    from torch.utils._sympy.functions import FloorDiv

    result: Dim = FloorDiv(a + b - 1, b)
    return result
