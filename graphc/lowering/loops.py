"""The loop IR: what one generated kernel computes at each point of its domain.

A `Loop` has a domain (a list of axes with sizes), some of which may be reduced. Scalars are
immutable expression nodes: loads, constants, positions, computations and reductions. `Store`s say
which of them go to memory. `graphc.lowering.loop_codegen` turns a Loop into C++.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphc.ir.types import Dim
from graphc.lowering.context import View


@dataclass(frozen=True, eq=False)
class Scalar:
    """Base of expression nodes; `dtype` is torch's name."""

    dtype: str

    def operands(self) -> tuple[Scalar, ...]:
        """Scalars this one is computed from."""
        return ()


@dataclass(frozen=True, eq=False)
class Load(Scalar):
    """An element of `view` at the current point; strides has one entry per domain axis (0 where
    the view does not vary)."""

    view: View
    strides: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Constant(Scalar):
    """C++ text of a constant of dtype's compute type."""

    text: str


@dataclass(frozen=True, eq=False)
class Size(Scalar):
    """A length-dependent integer, converted to dtype."""

    dim: Dim


@dataclass(frozen=True, eq=False)
class Position(Scalar):
    """start + step * (position along `axis`), as dtype. Without an axis: the start alone."""

    axis: int | None
    start: Dim | float
    step: Dim | float


@dataclass(frozen=True, eq=False)
class Accumulator(Scalar):
    """The fp32 result of the product kernel this loop is the epilogue of."""


@dataclass(frozen=True, eq=False)
class Compute(Scalar):
    """`template` is C++ with {0}, {1}, ... for the operands (already converted to `takes`)."""

    template: str
    args: tuple[Scalar, ...]
    takes: tuple[str, ...]
    heavy: bool = False

    def operands(self) -> tuple[Scalar, ...]:
        return self.args


@dataclass(frozen=True, eq=False)
class Reduce(Scalar):
    """A reduction of `arg` over all reduced axes. kind: sum, mean, prod, max, min, any, all,
    argmax, argmin. `divisor` (mean) divides the sum."""

    kind: str
    arg: Scalar
    divisor: Dim = 1

    def operands(self) -> tuple[Scalar, ...]:
        return (self.arg,)


@dataclass(frozen=True, eq=False)
class Store:
    """Writes `scalar` to `view` (converted to the view's dtype)."""

    scalar: Scalar
    view: View
    strides: tuple[Dim, ...]


@dataclass
class Loop:
    """A kernel to generate."""

    domain: list[Dim]
    reduced: frozenset[int] = frozenset()
    stores: list[Store] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def scalars(self) -> list[Scalar]:
        """Every scalar the stores need, operands first."""
        seen: dict[int, Scalar] = {}

        def visit(root: Scalar) -> None:
            stack: list[tuple[Scalar, Iterator[Scalar]]] = [(root, iter(root.operands()))]
            while stack:
                scalar, rest = stack[-1]
                if id(scalar) in seen:
                    stack.pop()
                    continue
                operand = next(rest, None)
                if operand is None:
                    seen[id(scalar)] = scalar
                    stack.pop()
                elif id(operand) not in seen:
                    stack.append((operand, iter(operand.operands())))

        for store in self.stores:
            visit(store.scalar)
        return list(seen.values())

    def loads(self) -> list[Load]:
        """The loads among the scalars."""
        return [s for s in self.scalars() if isinstance(s, Load)]


def copied(scalar: Scalar) -> Scalar:
    """What a scalar is a copy of, without arithmetic or conversion; itself if it computes."""
    while isinstance(scalar, Compute) and scalar.template == "{0}":
        if not scalar.dtype == scalar.takes[0] == scalar.args[0].dtype:
            break
        scalar = scalar.args[0]
    return scalar


def row_level(loop: Loop, scalars: Sequence[Scalar]) -> dict[int, bool]:
    """For each scalar (by id) whether it is constant along the reduced axes."""
    table: dict[int, bool] = {}
    for scalar in scalars:
        if isinstance(scalar, (Reduce, Constant, Size)):
            table[id(scalar)] = True
        elif isinstance(scalar, Load):
            table[id(scalar)] = all(
                stride == 0 for axis, stride in enumerate(scalar.strides) if axis in loop.reduced
            )
        elif isinstance(scalar, Position):
            table[id(scalar)] = scalar.axis is None or scalar.axis not in loop.reduced
        else:
            table[id(scalar)] = all(table[id(o)] for o in scalar.operands())
    return table
