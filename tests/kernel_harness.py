"""Compiles kernel units with g++ and runs lowering rules for real, without the rest of graphc.

`run_rule` gives a rule a small context whose Steps are executed at once on torch tensors: the
numbers come out of the same C++ that a plan would hold, for any ISA level of this machine.

    result, = run_rule("aten.linear.default", [x, Constant(weight), Constant(bias)], isa="avx2")

Every Step runs over its range in several pieces, on scratch and workspaces filled with NaN bytes.
Each result lies between canaries that are checked afterwards, dense inputs and constants end at a
page that may not be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from graphc.lowering.context import RULES, Dim, Epilogue, Unit, View
from graphc.lowering.tuning import Choice
from tests.kernel_build import (
    KERNELS,
    Memory,
    available_isas,
    before_a_forbidden_page,
    build,
    call,
    isa_flags,
)

__all__ = ["available_isas", "build", "call", "isa_flags", "lower", "run_rule"]

C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "gc::bf16",
    torch.float16: "gc::f16",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Constant:
    """Marks an argument of `run_rule` as known at build time."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class FakeType:
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class FakeValue:
    type: FakeType
    tensor: torch.Tensor
    constant: bool = False


@dataclass(frozen=True, eq=False)
class FakeNode:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[FakeValue, ...]
    name: str = "node"

    def argument(self, name: str) -> Any:
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args) and not argument.kwarg_only:
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        raise KeyError(name)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class _Step:
    units: tuple[Unit, ...]
    symbol: str
    pointers: tuple[View, ...]
    immediates: tuple[Dim, ...]
    range: Dim
    scratch: Dim
    grain: int


@dataclass
class FakeContext:
    """A LoweringContext over real tensors. `epilogue_expression` is C++ over `x` (the fp32
    accumulator), stored after conversion: "x" or for example "x > 0 ? x : 0"."""

    isa: str
    bindings: dict[sympy.Symbol, int] = field(default_factory=dict)
    epilogue_expression: str = "x"
    eager_layout: bool = False
    cuts: tuple[int, ...] = ()  # where operands that may be concatenations are cut
    trial: dict[str, Any] = field(default_factory=dict)  # values of choices other than the default
    buffers: list[tuple[int, object]] = field(default_factory=list)  # address, owner
    results: tuple[torch.Tensor, ...] = ()
    steps: list[_Step] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def number(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        return int(sympy.sympify(dim).subs(self.bindings))

    def _tensor_view(self, tensor: torch.Tensor, shape: tuple[Dim, ...]) -> View:
        if tensor.is_contiguous() and tensor.storage_offset() == 0:
            self.buffers.append(before_a_forbidden_page(tensor))
        else:
            self.buffers.append((tensor.untyped_storage().data_ptr(), tensor))
        strides: list[Dim] = list(tensor.stride())
        if tensor.is_contiguous():
            running: Dim = 1
            for i in reversed(range(len(shape))):
                strides[i] = running
                running = running * shape[i]
        return View(len(self.buffers) - 1, dtype_name(tensor.dtype), shape, tuple(strides),
                    tensor.storage_offset())  # fmt: skip

    def view(self, value: Any) -> View:
        return self._tensor_view(value.tensor, value.type.shape)

    def contiguous(self, value: Any) -> View:
        return self._tensor_view(value.tensor.contiguous(), value.type.shape)

    def parts(self, value: Any, dim: int) -> list[View]:
        length = value.tensor.shape[dim]
        cuts = [c for c in self.cuts if c < length] if length == value.type.shape[dim] else []
        bounds = list(zip([0, *cuts], [*cuts, length], strict=True))
        if len(bounds) == 1:
            return [self.view(value)]
        pieces = [value.tensor.narrow(dim, a, b - a) for a, b in bounds]
        pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
        return [self._tensor_view(piece, tuple(piece.shape)) for piece in pieces]

    def _allocate(self, shape: Sequence[Dim], dtype: torch.dtype) -> tuple[View, torch.Tensor]:
        sizes = [self.number(d) for d in shape]
        count = 1
        for size in sizes:
            count *= size
        memory = Memory(count * dtype.itemsize)
        self.memories.append(memory)
        tensor = memory.tensor(dtype, sizes)
        self.buffers.append((memory.address, memory))
        strides: list[Dim] = []
        running: Dim = 1
        for size in reversed(tuple(shape)):
            strides.insert(0, running)
            running = running * size
        view = View(len(self.buffers) - 1, dtype_name(dtype), tuple(shape), tuple(strides))
        return view, tensor

    def outputs(self, node: Any) -> tuple[View, ...]:
        made = [self._allocate(v.type.shape, v.tensor.dtype) for v in node.outputs]
        self.results = tuple(t for _, t in made)
        views = tuple(v for v, _ in made)
        if self.eager_layout:  # a dense layout of torch's choice instead of row-major
            strides = [v.tensor.stride() for v in node.outputs]
            views = tuple(v.with_(strides=s) for v, s in zip(views, strides, strict=True))
            self.results = tuple(
                t.as_strided(t.shape, s) for t, s in zip(self.results, strides, strict=True)
            )
        return views

    def workspace(self, shape: Sequence[Dim], dtype: str) -> View:
        return self._allocate(shape, getattr(torch, dtype))[0]

    def weight(self, value: Any) -> torch.Tensor | None:
        return value.tensor if value.constant else None

    def constant(self, name: str, data: torch.Tensor, layout: str = "", origin: str = "") -> View:
        return self._tensor_view(data.contiguous(), tuple(data.shape))

    def epilogue(
        self, node: Any, zmn: tuple[Dim, Dim, Dim], pointers: int, immediates: int,
        channels_last: bool = False,
    ) -> Epilogue:  # fmt: skip
        (out,) = self.outputs(node)
        logical = [self.number(d) for d in zmn]
        count = logical[0] * logical[1] * logical[2]
        if count != self.results[0].numel():
            raise AssertionError(f"[Z, M, N] = {logical} is not {tuple(self.results[0].shape)}")
        kind = C_TYPES[self.results[0].dtype]
        first, step = "(z * M + m0 + r) * N + n0", "i"
        if channels_last:  # stored row-major all the same
            first, step = "(z * N + n0) * M + m0 + r", "i * M"
        source = f"""#include "num.h"
static void store_tile(const gc_args* a, const float* acc, int64_t ld, int64_t z, int64_t m0,
                       int64_t mr, int64_t n0, int64_t nr) {{
  const int64_t M = a->imm[{immediates}], N = a->imm[{immediates + 1}];
  for (int64_t r = 0; r < mr; r++) {{
    {kind}* out = ({kind}*)a->ptr[{pointers}] + {first};
    for (int64_t i = 0; i < nr; i++) {{
      const float x = acc[r * ld + i];
      out[{step}] = ({kind})({self.epilogue_expression});
    }}
  }}
}}
"""
        return Epilogue("store_tile", source, (out,), (zmn[1], zmn[2]), (), (out,))

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
        named = {view.buffer for view in (*reads, *writes)}
        missing = [view for view in pointers if view.buffer not in named]
        if missing:
            raise AssertionError(f"{symbol}: neither read nor written: {missing}")
        self.steps.append(
            _Step((unit, *units), symbol, tuple(pointers), tuple(immediates), range, scratch, grain)
        )

    def choose(self, choice: Choice, *facts: Dim | str) -> Any:
        return self.trial.get(choice.name, choice.default)

    def static(self, dim: Dim) -> int | None:
        if isinstance(dim, int):
            return dim
        return int(dim) if sympy.sympify(dim).is_Integer else None

    def header(self, name: str) -> str:
        return (KERNELS / name).read_text()

    def address(self, view: View) -> int:
        itemsize = getattr(torch, view.dtype).itemsize
        return self.buffers[view.buffer][0] + self.number(view.offset) * int(itemsize)

    def execute(self, parts: int) -> None:
        """Runs the Steps in order, each range in `parts` pieces, last piece first."""
        for step in self.steps:
            library = build(step.units, self.isa)
            total = self.number(step.range)
            cuts = sorted({total * i // parts for i in range(parts + 1)})
            pieces = list(zip(cuts[:-1], cuts[1:], strict=True))[::-1]
            call(
                library,
                step.symbol,
                [self.address(p) for p in step.pointers],
                [self.number(d) for d in step.immediates],
                pieces,
                self.number(step.scratch),
            )
        for memory in self.memories:
            memory.check("buffer")


def lookup(name: str) -> Any:
    """The torch overload behind "aten.linear.default"."""
    space, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload)


def lower(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    isa: str,
    symbols: Mapping[tuple[int, int], str] | None = None,
    epilogue: str = "x",
    eager_layout: bool = False,
    cuts: tuple[int, ...] = (),
) -> FakeContext:
    """Applies the rule of operator `name`; tensors in args become graph values.

    symbols maps (argument position, dimension) to the name of a symbolic length; eager_layout
    asks for results with the strides that eager torch gives.
    """
    operator = lookup(name)
    context = FakeContext(isa, epilogue_expression=epilogue, eager_layout=eager_layout, cuts=cuts)

    def wrap(argument: Any, position: int) -> Any:
        if isinstance(argument, list | tuple):
            return [wrap(item, -1) for item in argument]
        constant = isinstance(argument, Constant)
        tensor = argument.tensor if constant else argument
        if not isinstance(tensor, torch.Tensor):
            return tensor
        shape: list[Dim] = list(tensor.shape)
        for (place, dim), symbol_name in (symbols or {}).items():
            if place == position:
                symbol = sympy.Symbol(symbol_name, integer=True, positive=True)
                context.bindings[symbol] = tensor.shape[dim]
                shape[dim] = symbol
        return FakeValue(FakeType(dtype_name(tensor.dtype), tuple(shape)), tensor, constant)

    def strip(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [strip(item) for item in argument]
        return argument.tensor if isinstance(argument, Constant) else argument

    keywords = dict(kwargs or {})
    eager = operator(*[strip(a) for a in args], **{k: strip(v) for k, v in keywords.items()})
    results = eager if isinstance(eager, tuple | list) else (eager,)
    outputs = tuple(
        FakeValue(FakeType(dtype_name(t.dtype), tuple(t.shape)), t)
        for t in results
        if isinstance(t, torch.Tensor)
    )
    node = FakeNode(
        operator,
        tuple(wrap(a, i) for i, a in enumerate(args)),
        {k: wrap(v, -1) for k, v in keywords.items()},
        outputs,
    )
    RULES[name](context, node)
    return context


def run_rule(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    isa: str,
    symbols: Mapping[tuple[int, int], str] | None = None,
    epilogue: str = "x",
    parts: int = 3,
    eager_layout: bool = False,
    cuts: tuple[int, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Lowers one operator call and executes its Steps; gives the results (copies).

    Raises graphc.lowering.context.Refuse if the rule refuses.
    """
    context = lower(
        name, args, kwargs, isa=isa, symbols=symbols, epilogue=epilogue, eager_layout=eager_layout,
        cuts=cuts,
    )  # fmt: skip
    context.execute(parts)
    return tuple(t.clone() for t in context.results)
