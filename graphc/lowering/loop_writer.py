"""Scalars as C++ statements, and the numbering of a kernel's pointers and immediates."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphc.errors import InternalError
from graphc.ir.types import Dim, as_dim
from graphc.lowering.context import View
from graphc.lowering.loops import (
    Accumulator,
    Compute,
    Constant,
    Load,
    Loop,
    Position,
    Scalar,
    Size,
    Store,
)
from graphc.lowering.pointwise import COMPUTE, STORAGE, cast, is_float, literal


@dataclass
class Generated:
    """Source of one kernel and what its Step must pass."""

    symbol: str
    source: str
    pointers: list[View]
    immediates: list[Dim]
    range: Dim
    grain: int
    scratch: Dim
    reads: list[View] = field(default_factory=list)
    writes: list[View] = field(default_factory=list)


class Arguments:
    """Numbers the pointers and immediates of a kernel and names them in C++."""

    def __init__(self, first_pointer: int = 0, first_immediate: int = 0) -> None:
        self.first_pointer = first_pointer
        self.first_immediate = first_immediate
        self.pointers: list[View] = []
        self.immediates: list[Dim] = []
        self._pointers: dict[tuple[int, object, str], int] = {}
        self.written: set[int] = set()

    def pointer(self, view: View, write: bool = False) -> str:
        """The C++ name of the typed base pointer of a view."""
        key = (view.buffer, view.offset, view.dtype)
        if key not in self._pointers:
            self._pointers[key] = len(self.pointers)
            self.pointers.append(view)
        number = self._pointers[key]
        if write:
            self.written.add(number)
        return f"p{number}"

    def size(self, dim: Dim) -> str:
        """C++ text of a dim: a literal, or the name of an immediate."""
        if isinstance(dim, int):
            return str(dim)
        for number, known in enumerate(self.immediates):
            if known == dim:
                return f"d{number}"
        self.immediates.append(dim)
        return f"d{len(self.immediates) - 1}"

    def prologue(self) -> str:
        """Declarations of all names."""
        lines: list[str] = []
        for number, view in enumerate(self.pointers):
            const = "" if number in self.written else "const "
            ctype = STORAGE[view.dtype]
            lines.append(
                f"  {const}{ctype}* __restrict p{number} = "
                f"({const}{ctype}*)a->ptr[{self.first_pointer + number}];"
            )
        for number in range(len(self.immediates)):
            lines.append(f"  const int64_t d{number} = a->imm[{self.first_immediate + number}];")
        return "\n".join(lines) + "\n"


class Writer:
    """Emits scalars as C++ statements, each at most once per block."""

    def __init__(self, loop: Loop, arguments: Arguments) -> None:
        self.loop = loop
        self.arguments = arguments
        self.number = {id(s): k for k, s in enumerate(loop.scalars())}
        self.lines: list[str] = []
        self.known: dict[int, str] = {}
        self.indent = "  "

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def load(self, load: Load) -> str:
        raise NotImplementedError

    def position(self, axis: int) -> str:
        raise NotImplementedError

    def accumulator(self) -> str:
        raise InternalError("an accumulator outside of an epilogue")

    def emit(self, scalar: Scalar) -> str:
        """C++ text of a scalar in the current block, of its dtype's compute type."""
        stack = [scalar]
        while stack:
            current = stack[-1]
            if id(current) in self.known:
                stack.pop()
                continue
            missing = [o for o in current.operands() if id(o) not in self.known]
            if missing:
                stack.extend(reversed(missing))
                continue
            self.known[id(current)] = self._one(current)
            stack.pop()
        return self.known[id(scalar)]

    def _one(self, scalar: Scalar) -> str:
        ctype = COMPUTE[scalar.dtype]
        if isinstance(scalar, Constant):
            return scalar.text
        if isinstance(scalar, Size):
            return f"({ctype}){self.arguments.size(scalar.dim)}"
        if isinstance(scalar, Load):
            text = self.load(scalar)
        elif isinstance(scalar, Position):
            text = self._position(scalar)
        elif isinstance(scalar, Accumulator):
            text = self.accumulator()
        elif isinstance(scalar, Compute):
            parts = [
                cast(self.known[id(arg)], arg.dtype, takes)
                for arg, takes in zip(scalar.args, scalar.takes, strict=True)
            ]
            text = scalar.template
            for position, part in enumerate(parts):
                text = text.replace(f"{{{position}}}", part)
        else:
            raise InternalError(f"{type(scalar).__name__} emitted out of place")
        name = f"v{self.number[id(scalar)]}"
        self.line(f"const {ctype} {name} = ({ctype})({text});")
        return name

    def _position(self, scalar: Position) -> str:
        wide = "double" if is_float(scalar.dtype) else "int64_t"

        def text(value: Dim | float) -> str:
            if isinstance(value, float):
                return literal(value, "float64")
            return f"({wide}){self.arguments.size(as_dim(value))}"

        if scalar.axis is None:
            return text(scalar.start)
        return f"{text(scalar.start)} + {text(scalar.step)} * ({wide}){self.position(scalar.axis)}"

    def stored(self, store: Store) -> str:
        """The value to be stored, converted to the storage type."""
        text = self.emit(store.scalar)
        text = cast(text, store.scalar.dtype, store.view.dtype)
        return f"({STORAGE[store.view.dtype]})({text})"


def loads_as(load: Load, text: str) -> str:
    return f"({text} != 0)" if load.dtype == "bool" else text
