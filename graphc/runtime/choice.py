"""From the shapes of a call to its program: symbols bound, ranges checked, the smallest bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from graphc.errors import InputRejectedError, InternalError
from graphc.plan import Plan, Program
from graphc.runtime.native import UNBOUND, NativeProgram

Shapes = tuple[tuple[int, ...], ...]


class Assignment(msgspec.Struct):
    """One choice: a program, the symbols' values, and the result shapes (None: not yet known)."""

    program: int
    native: NativeProgram
    symbols: list[int]
    outputs: list[tuple[int, ...] | None]
    scratch: int  # bytes per thread
    unchecked: list[tuple[int, str]] = []  # guards on data-dependent symbols
    placed: bool = False  # the arena knows its large buffers


class _Source(msgspec.Struct, frozen=True):
    """The symbol's input dimension is factor * symbol + constant."""

    symbol: int
    input: int
    dim: int
    factor: int
    constant: int


class Chooser:
    """Chooses programs; `native(i)` gives program i inside the executor."""

    def __init__(self, plan: Plan, natives: Sequence[NativeProgram]) -> None:
        self._plan = plan
        self._natives = natives
        self._sources = [
            self._source(k) for k, symbol in enumerate(plan.symbols) if symbol.input >= 0
        ]
        self._order = sorted(
            range(len(plan.programs)),
            key=lambda i: math.prod(self._limits(plan.programs[i])),
        )

    def _limits(self, program: Program) -> list[int]:
        return [program.limits.get(s.name, s.maximum) for s in self._plan.symbols if s.input >= 0]

    def _source(self, k: int) -> _Source:
        symbol = self._plan.symbols[k]
        expression = self._plan.inputs[symbol.input].shape[symbol.dim]
        if self._plan.programs[0].expressions[expression] == [f"s{k}"]:
            return _Source(k, symbol.input, symbol.dim, 1, 0)
        native = self._natives[0]
        points = []
        for value in range(3):
            native.symbols[:] = UNBOUND
            native.symbols[k] = value
            native.evaluate()
            points.append(native.value(expression))
        factor = points[1] - points[0]
        if factor == 0 or points[2] - points[1] != factor:
            raise InternalError(f"no input dimension tells the symbol {symbol.name}")
        return _Source(k, symbol.input, symbol.dim, factor, points[0])

    def choose(self, shapes: Shapes) -> Assignment:
        """The smallest bucket for inputs of these shapes. Raises InputRejectedError."""
        symbols = self._bind(shapes)
        reason: InputRejectedError | None = None
        for i in self._order:
            if self._holds(self._plan.programs[i], symbols):
                found = self._try(i, symbols, shapes)
                if isinstance(found, Assignment):
                    return found
                reason = reason or found
        raise reason or self._too_large(symbols)

    def _bind(self, shapes: Shapes) -> list[int]:
        symbols = [UNBOUND] * len(self._plan.symbols)
        for source in self._sources:
            symbol = self._plan.symbols[source.symbol]
            size = shapes[source.input][source.dim]
            value, rest = divmod(size - source.constant, source.factor)
            place = f"dimension {source.dim} of input {self._plan.inputs[source.input].name!r}"
            if rest or value < symbol.minimum:
                form = self._plan.inputs[source.input].text[source.dim]
                raise InputRejectedError(
                    f"expected {form} with {symbol.name} from {symbol.minimum} to "
                    f"{symbol.maximum}, found {size}",
                    where=place,
                )
            symbols[source.symbol] = value
        return symbols

    def _holds(self, program: Program, symbols: Sequence[int]) -> bool:
        return all(
            value <= min(symbol.maximum, program.limits.get(symbol.name, symbol.maximum))
            for symbol, value in zip(self._plan.symbols, symbols, strict=True)
        )

    def _too_large(self, symbols: Sequence[int]) -> InputRejectedError:
        found = ", ".join(
            f"{symbol.name} = {value}"
            for symbol, value in zip(self._plan.symbols, symbols, strict=True)
            if value != UNBOUND
        )
        buckets = "; ".join(
            f"{self._plan.programs[i].bucket or 'default'} ("
            + ", ".join(f"{k} <= {v}" for k, v in self._plan.programs[i].limits.items())
            + ")"
            for i in self._order
        )
        beyond = [
            f"{symbol.name}={value}"
            for symbol, value in zip(self._plan.symbols, symbols, strict=True)
            if value != UNBOUND
            and all(
                value > min(symbol.maximum, program.limits.get(symbol.name, symbol.maximum))
                for program in self._plan.programs
            )
        ]
        return InputRejectedError(
            f"expected lengths within a bucket, found {found}; built buckets: {buckets}",
            hint=f"rebuild with a larger bucket: graphc build {self._plan.model} "
            + " ".join(f"--bucket {text}" for text in beyond or [found.replace(" ", "")]),
        )

    def _try(self, i: int, symbols: list[int], shapes: Shapes) -> Assignment | InputRejectedError:
        program, native = self._plan.programs[i], self._natives[i]
        native.symbols[: len(symbols)] = symbols
        scratch = native.evaluate()
        lengths = ", ".join(
            f"{symbol.name} = {value}"
            for symbol, value in zip(self._plan.symbols, symbols, strict=True)
            if value != UNBOUND
        )
        for tensor, expressions, shape in zip(
            self._plan.inputs, program.input_shapes, shapes, strict=True
        ):
            if native.shape(expressions) != shape:
                wanted = f"[{', '.join(tensor.text)}]" + (f" with {lengths}" if lengths else "")
                return InputRejectedError(
                    f"expected shape {wanted}, found {list(shape)}", where=f"input {tensor.name!r}"
                )
        assignment = Assignment(i, native, symbols, self.output_shapes(i), scratch)
        for expression, text in program.guards:
            holds = native.holds(expression)
            if holds is None:
                assignment.unchecked.append((expression, text))
            elif not holds:
                return guard_failed(text, lengths)
        return assignment

    def output_shapes(self, i: int) -> list[tuple[int, ...] | None]:
        """Result shapes under the current assignment of program i."""
        return [self._natives[i].shape(e) for e in self._plan.programs[i].output_shapes]


def guard_failed(text: str, lengths: str = "") -> InputRejectedError:
    return InputRejectedError(
        f"the model was captured under the condition {text}"
        + (f", which does not hold for {lengths}" if lengths else ", which does not hold here"),
        hint="use lengths for which it holds, or capture the model again for these",
    )
