"""C++ for a Loop: one function over [begin, end) of its outer range, inner loops vectorised.

Shapes of the generated code:

* flat: every access runs through memory in one line; the range is the elements;
* rows: the range is the outer points, the last axis is the inner loop;
* reducing rows: the range is the kept points; the reduced axes are looped over once per
  dependency level (softmax: maximum, then sum of exponentials, then the quotients), dear values
  kept in a row of scratch between the levels, cheap ones computed again;
* reducing columns: neighbours in memory are kept points, so a block of them is accumulated at
  once while the reduced axes run outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy

from graphc.errors import InternalError
from graphc.ir.types import Dim, as_dim, product, same
from graphc.lowering.context import View, ceildiv
from graphc.lowering.loops import (
    Accumulator,
    Compute,
    Constant,
    Load,
    Loop,
    Position,
    Reduce,
    Scalar,
    Size,
    Store,
    row_level,
)
from graphc.lowering.pointwise import COMPUTE, STORAGE, cast, is_float, literal

COLUMNS = 64  # kept points that a column reduction accumulates at once
_HEADER = '#include "prelude.h"\n#include "vmath.h"\n\n'


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
            lines.append(
                f"  const int64_t d{number} = a->imm[{self.first_immediate + number}];"
            )
        return "\n".join(lines) + "\n"


def generate(loop: Loop) -> Generated:
    """The kernel of a loop without a product in front of it."""
    return _Kernel(loop).generate()


def generate_epilogue(
    loop: Loop, axes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    first_pointer: int, first_immediate: int,
) -> tuple[str, str, Arguments]:  # fmt: skip
    """(name, source, arguments) of a gc_epilogue function; `axes` are the domain axes that make
    up Z, M and N, each group contiguous for every access (see `collapses`)."""
    return _Epilogue(loop, axes, first_pointer, first_immediate).generate()


def collapses(loop_sizes: Sequence[Dim], axes: Sequence[int], strides: Sequence[Dim]) -> bool:
    """Whether an access runs through `axes` with a single stride."""
    for outer, inner in zip(axes, axes[1:], strict=False):
        if not same(strides[outer], as_dim(strides[inner] * loop_sizes[inner])):
            return False
    return True


def simplify(loop: Loop) -> Loop:
    """Merges neighbouring axes that every access crosses with one stride."""
    accesses: list[tuple[Dim, ...]] = [load.strides for load in loop.loads()]
    accesses += [store.strides for store in loop.stores]
    pinned = {s.axis for s in loop.scalars() if isinstance(s, Position)}
    groups: list[list[int]] = []
    for axis in range(len(loop.domain)):
        if groups:
            last = groups[-1][-1]
            mergeable = (
                (last in loop.reduced) == (axis in loop.reduced)
                and last not in pinned
                and axis not in pinned
                and all(
                    same(strides[last], as_dim(strides[axis] * loop.domain[axis]))
                    for strides in accesses
                )
                # a store must cover the reduced axes or none of them
            )
            if mergeable:
                groups[-1].append(axis)
                continue
        groups.append([axis])
    if len(groups) == len(loop.domain):
        return loop
    new_axis = {axis: number for number, group in enumerate(groups) for axis in group}

    def pick(strides: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(strides[group[-1]] for group in groups)

    return _rebuild(
        loop,
        [product([loop.domain[axis] for axis in group]) for group in groups],
        frozenset(new_axis[axis] for axis in loop.reduced),
        pick,
        lambda axis: new_axis[axis],
    )


def reorder(loop: Loop, order: Sequence[int]) -> Loop:
    """The same loop with its axes in another order."""
    if list(order) == list(range(len(order))):
        return loop
    place = {axis: number for number, axis in enumerate(order)}
    return _rebuild(
        loop,
        [loop.domain[axis] for axis in order],
        frozenset(place[axis] for axis in loop.reduced),
        lambda strides: tuple(strides[axis] for axis in order),
        lambda axis: place[axis],
    )


def _rebuild(
    loop: Loop,
    domain: list[Dim],
    reduced: frozenset[int],
    pick: Callable[[tuple[Dim, ...]], tuple[Dim, ...]],
    axis_of: Callable[[int], int],
) -> Loop:
    made: dict[int, Scalar] = {}
    for scalar in loop.scalars():
        if isinstance(scalar, Load):
            made[id(scalar)] = Load(scalar.dtype, scalar.view, pick(scalar.strides))
        elif isinstance(scalar, Position) and scalar.axis is not None:
            made[id(scalar)] = Position(
                scalar.dtype, axis_of(scalar.axis), scalar.start, scalar.step
            )
        elif isinstance(scalar, Compute):
            args = tuple(made[id(o)] for o in scalar.args)
            made[id(scalar)] = Compute(
                scalar.dtype, scalar.template, args, scalar.takes, scalar.heavy
            )
        elif isinstance(scalar, Reduce):
            made[id(scalar)] = Reduce(
                scalar.dtype, scalar.kind, made[id(scalar.arg)], scalar.divisor
            )
        else:
            made[id(scalar)] = scalar
    stores = [Store(made[id(s.scalar)], s.view, pick(s.strides)) for s in loop.stores]
    return Loop(domain, reduced, stores, loop.names)


class _Writer:
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


def _loads_as(load: Load, text: str) -> str:
    return f"({text} != 0)" if load.dtype == "bool" else text


class _Kernel(_Writer):
    """Flat, row, reducing-row and reducing-column kernels."""

    def __init__(self, loop: Loop) -> None:
        loop = reorder(loop, self._order(loop))
        loop = simplify(loop)
        if not loop.domain:
            loop = _rebuild(loop, [1], frozenset(), lambda s: (0,), lambda a: 0)
        super().__init__(loop, Arguments())
        self.scalars = loop.scalars()
        self.rows = row_level(loop, self.scalars)
        self.kept = [a for a in range(len(loop.domain)) if a not in loop.reduced]
        self.inner_axes = [a for a in range(len(loop.domain)) if a in loop.reduced]
        self.scratch: list[tuple[int, str]] = []
        self.loop_vars: dict[int, str] = {}
        self.bases: dict[tuple[str, tuple[Dim, ...]], str] = {}
        self.vector_axis = -1

    @staticmethod
    def _order(loop: Loop) -> list[int]:
        """Kept axes first. Without reduction: the axis with most unit strides goes inside."""
        axes = list(range(len(loop.domain)))
        if loop.reduced:
            return [a for a in axes if a not in loop.reduced] + [
                a for a in axes if a in loop.reduced
            ]
        if len(axes) < 2:
            return axes

        def unit(axis: int) -> tuple[int, int]:
            stores = sum(1 for s in loop.stores if s.strides[axis] == 1)
            loads = sum(1 for load in loop.loads() if load.strides[axis] == 1)
            return stores * 2 + loads, axis

        # outer axes in the order of the first store's strides: writes run through memory
        inner = max(axes, key=unit)
        rest = [a for a in axes if a != inner]
        return [*rest, inner]

    def generate(self) -> Generated:
        if self.loop.reduced:
            if self._columns_pay():
                body, range_, grain, scratch = self._column_kernel()
            else:
                body, range_, grain, scratch = self._row_kernel()
        else:
            body, range_, grain, scratch = self._plain_kernel()
        text = (
            f"GC_EXPORT void GC_NAME(const gc_args* a, int64_t begin, int64_t end) {{\n"
            f"{self.arguments.prologue()}{body}}}\n"
        )
        symbol = "k_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        source = _HEADER + text.replace("GC_NAME", symbol)
        reads = [load.view for load in self.loop.loads()]
        writes = [store.view for store in self.loop.stores]
        return Generated(
            symbol, source, self.arguments.pointers, self.arguments.immediates, range_, grain,
            scratch, reads, writes,
        )  # fmt: skip

    # -- addressing ---------------------------------------------------------------------------

    def _offset(self, strides: Sequence[Dim], axes: Sequence[int]) -> str:
        """Sum of index * stride over axes, as C++ ("0" if none matter)."""
        parts: list[str] = []
        for axis in axes:
            stride = strides[axis]
            if stride == 0 or axis not in self.loop_vars:
                continue
            size = self.arguments.size(stride)
            index = self.loop_vars[axis]
            parts.append(index if size == "1" else f"{index} * {size}")
        return " + ".join(parts) or "0"

    def _element(self, view: View, strides: tuple[Dim, ...], write: bool = False) -> str:
        pointer = self.arguments.pointer(view, write)
        key = (pointer, strides)
        base = self.bases.get(key, pointer)
        axes = [self.vector_axis] if key in self.bases else list(self.loop_vars)
        return f"{base}[{self._offset(strides, axes)}]"

    def load(self, load: Load) -> str:
        return _loads_as(load, self._element(load.view, load.strides))

    def position(self, axis: int) -> str:
        return self.loop_vars[axis]

    def _hoist(self, loads: Sequence[Load], stores: Sequence[Store]) -> None:
        """Row pointers for the accesses of the coming inner loop."""
        outer = [a for a in self.loop_vars if a != self.vector_axis]
        for view, strides, write in (
            *((x.view, x.strides, False) for x in loads),
            *((s.view, s.strides, True) for s in stores),
        ):
            pointer = self.arguments.pointer(view, write)
            key = (pointer, strides)
            if key in self.bases:
                continue
            name = f"q{len(self.bases)}_{len(self.lines)}"
            const = "" if write else "const "
            self.line(
                f"{const}{STORAGE[view.dtype]}* {name} = {pointer} + "
                f"{self._offset(strides, outer)};"
            )
            self.bases[key] = name

    def _unravel(self, index: str, axes: Sequence[int]) -> None:
        """Splits a linear index over `axes` into one variable each."""
        rest = index
        for position, axis in enumerate(reversed(axes)):
            name = f"x{axis}"
            if position == len(axes) - 1:
                self.line(f"const int64_t {name} = {rest};")
            else:
                size = self.arguments.size(self.loop.domain[axis])
                self.line(f"const int64_t {name} = {rest} % {size};")
                following = f"r{axis}"
                self.line(f"const int64_t {following} = {rest} / {size};")
                rest = following
            self.loop_vars[axis] = name

    # -- without reduction --------------------------------------------------------------------

    def _plain_kernel(self) -> tuple[str, Dim, int, Dim]:
        inner = len(self.loop.domain) - 1
        outer = list(range(inner))
        self.vector_axis = inner
        if not outer:
            self.loop_vars = {inner: "i"}
            self.line("#pragma GCC ivdep")
            self.line("for (int64_t i = begin; i < end; ++i) {")
            self._stores_block(self.loop.stores)
            self.line("}")
            return "\n".join(self.lines) + "\n", self.loop.domain[inner], 4096, 0
        self.line("for (int64_t row = begin; row < end; ++row) {")
        self.indent = "    "
        self._unravel("row", outer)
        self.loop_vars[inner] = "i"
        self._hoist(self.loop.loads(), self.loop.stores)
        self.line("#pragma GCC ivdep")
        self.line(f"for (int64_t i = 0; i < {self.arguments.size(self.loop.domain[inner])}; ++i) {{")
        self._stores_block(self.loop.stores)
        self.line("}")
        self.indent = "  "
        self.line("}")
        size = self.loop.domain[inner]
        grain = max(1, 8192 // size) if isinstance(size, int) and size > 0 else 8
        return "\n".join(self.lines) + "\n", product([self.loop.domain[a] for a in outer]), grain, 0

    def _stores_block(self, stores: Sequence[Store]) -> None:
        saved = self.indent
        self.indent += "  "
        for store in stores:
            value = self.stored(store)
            self.line(f"{self._element(store.view, store.strides, True)} = {value};")
        self.indent = saved

    # -- reducing -----------------------------------------------------------------------------

    def _columns_pay(self) -> bool:
        """Whether the last kept axis, not the last reduced one, runs through memory."""
        if not self.kept or len([s for s in self.scalars if isinstance(s, Reduce)]) == 0:
            return False
        levels = self._levels()
        if max(levels.values(), default=0) > 1 or any(
            not self.rows[id(store.scalar)] for store in self.loop.stores
        ):
            return False
        if any(isinstance(s, Reduce) and s.kind in ("argmax", "argmin") for s in self.scalars):
            return False
        if any(not isinstance(s, Reduce) and levels[id(s)] > 0 and not self.rows[id(s)]
               for s in self.scalars):  # fmt: skip
            return False
        last_kept, last_reduced = self.kept[-1], self.inner_axes[-1]
        size = self.loop.domain[last_kept]
        if isinstance(size, int) and size < 8:
            return False
        full = [x for x in self.loop.loads() if not self.rows[id(x)]]
        kept = sum(1 for x in full if x.strides[last_kept] == 1)
        reduced = sum(1 for x in full if x.strides[last_reduced] == 1)
        return kept > reduced

    def _levels(self) -> dict[int, int]:
        """The inner loop (0, 1, ...) in which each scalar is available first."""
        levels: dict[int, int] = {}
        for scalar in self.scalars:
            if isinstance(scalar, Reduce):
                levels[id(scalar)] = levels[id(scalar.arg)] + 1
            else:
                levels[id(scalar)] = max((levels[id(o)] for o in scalar.operands()), default=0)
        return levels

    def _row_kernel(self) -> tuple[str, Dim, int, Dim]:
        levels = self._levels()
        last = max(levels.values())
        self.line("for (int64_t row = begin; row < end; ++row) {")
        self.indent = "    "
        if self.kept:
            self._unravel("row", self.kept)
        inner_size = product([self.loop.domain[a] for a in self.inner_axes])
        keep = self._kept_between_levels(levels)
        row_known: dict[int, str] = {}
        for level in range(last + 1):
            self.known = dict(row_known)
            for scalar in self.scalars:  # values per row that became available
                if self.rows[id(scalar)] and levels[id(scalar)] == level:
                    if not isinstance(scalar, Reduce):
                        self.emit(scalar)
            row_known = dict(self.known)
            for store in self.loop.stores:
                if self.rows[id(store.scalar)] and levels[id(store.scalar)] == level:
                    if any(store.strides[a] != 0 for a in self.inner_axes):
                        continue
                    value = self.stored(store)
                    self.line(f"{self._element(store.view, store.strides, True)} = {value};")
            row_known = dict(self.known)
            reduces = [
                s for s in self.scalars if isinstance(s, Reduce) and levels[id(s)] == level + 1
            ]
            stores = [
                s
                for s in self.loop.stores
                if levels[id(s.scalar)] == level
                and (
                    not self.rows[id(s.scalar)] or any(s.strides[a] != 0 for a in self.inner_axes)
                )
            ]
            saves = [s for s in keep if levels[id(s)] == level]
            if reduces or stores or saves:
                self._inner_loops(reduces, stores, saves, row_known, level, levels)
        self.indent = "  "
        self.line("}")
        rows = product([self.loop.domain[a] for a in self.kept])
        grain = max(1, 8192 // inner_size) if isinstance(inner_size, int) and inner_size > 0 else 4
        scratch = as_dim(inner_size * 8 * len(self.scratch)) if self.scratch else 0
        header = ""
        if self.scratch:
            size = self.arguments.size(as_dim(sympy.sympify(inner_size)))
            for slot, (number, ctype) in enumerate(self.scratch):
                header += (
                    f"  {ctype}* __restrict s{number} = "
                    f"({ctype}*)((char*)a->scratch + {slot} * 8 * {size});\n"
                )
        return header + "\n".join(self.lines) + "\n", rows, grain, scratch

    def _kept_between_levels(self, levels: dict[int, int]) -> list[Scalar]:
        """Dear values used again in a later inner loop: these live in scratch."""
        needed: dict[int, int] = {}
        for scalar in self.scalars:
            use = levels[id(scalar)] - (1 if isinstance(scalar, Reduce) else 0)
            for operand in scalar.operands():
                needed[id(operand)] = max(needed.get(id(operand), 0), use)
        dear: dict[int, bool] = {}
        for scalar in self.scalars:
            own = isinstance(scalar, Compute) and scalar.heavy
            dear[id(scalar)] = own or (
                not isinstance(scalar, Reduce) and any(dear[id(o)] for o in scalar.operands())
            )
        chosen: list[Scalar] = []
        for scalar in self.scalars:
            if (
                dear[id(scalar)]
                and not self.rows[id(scalar)]
                and needed.get(id(scalar), 0) > levels[id(scalar)]
            ):
                chosen.append(scalar)
                self.scratch.append((self.number[id(scalar)], COMPUTE[scalar.dtype]))
        return chosen

    def _inner_loops(
        self,
        reduces: Sequence[Scalar],
        stores: Sequence[Store],
        saves: Sequence[Scalar],
        row_known: dict[int, str],
        level: int,
        levels: dict[int, int],
    ) -> None:
        accumulators = [_accumulator(s, self.number[id(s)]) for s in reduces if isinstance(s, Reduce)]
        for item in accumulators:
            for text in item.declare:
                self.line(text)
        middle = self.inner_axes[:-1]
        self.vector_axis = self.inner_axes[-1]
        depth = self.indent
        for axis in middle:
            size = self.arguments.size(self.loop.domain[axis])
            self.line(f"for (int64_t x{axis} = 0; x{axis} < {size}; ++x{axis}) {{")
            self.indent += "  "
            self.loop_vars[axis] = f"x{axis}"
        size = self.arguments.size(self.loop.domain[self.vector_axis])
        self.loop_vars.pop(self.vector_axis, None)
        saved_bases = self.bases
        self.bases = {}
        used = self._used_loads([*(s.operands()[0] for s in reduces), *(s.scalar for s in stores), *saves], row_known)  # noqa: E501
        self._hoist(used, stores)
        linear = "i"
        if middle:
            parts = f"x{middle[0]}"
            for axis in middle[1:]:
                parts = f"({parts} * {self.arguments.size(self.loop.domain[axis])} + x{axis})"
            linear = f"({parts} * {size} + i)"
        blocked = any(item.partial for item in accumulators)
        if blocked:
            self.line(f"for (int64_t i0 = 0; i0 < {size}; i0 += 1024) {{")
            self.indent += "  "
            self.line(f"const int64_t i1 = i0 + 1024 < {size} ? i0 + 1024 : {size};")
            for item in accumulators:
                for text in item.partial:
                    self.line(text)
        clauses = " ".join(item.clause for item in accumulators if item.clause)
        scalar_only = any(item.sequential for item in accumulators)
        if not scalar_only:
            self.line(f"#pragma omp simd {clauses}".rstrip())
        self.line(
            f"for (int64_t i = {'i0' if blocked else '0'}; i < {'i1' if blocked else size}; ++i) {{"
        )
        body_indent = self.indent
        self.indent += "  "
        self.loop_vars[self.vector_axis] = "i"
        self.known = dict(row_known)
        for slot in self.scratch:
            for scalar in self.scalars:
                if self.number[id(scalar)] == slot[0] and levels[id(scalar)] < level:
                    self.known[id(scalar)] = f"s{slot[0]}[{linear}]"
        for scalar in saves:
            text = self.emit(scalar)
            self.line(f"s{self.number[id(scalar)]}[{linear}] = {text};")
        for scalar, item in zip(reduces, accumulators, strict=True):
            assert isinstance(scalar, Reduce)
            value = self.emit(scalar.arg)
            for text in item.step(cast(value, scalar.arg.dtype, item.dtype), linear):
                self.line(text)
        for store in stores:
            value = self.stored(store)
            self.line(f"{self._element(store.view, store.strides, True)} = {value};")
        self.indent = body_indent
        self.line("}")
        if blocked:
            for item in accumulators:
                for text in item.join:
                    self.line(text)
            self.indent = self.indent[:-2]
            self.line("}")
        for _ in middle:
            self.indent = self.indent[:-2]
            self.line("}")
        self.indent = depth
        self.bases = saved_bases
        for axis in self.inner_axes:
            self.loop_vars.pop(axis, None)
        self.vector_axis = -1
        for scalar, item in zip(reduces, accumulators, strict=True):
            assert isinstance(scalar, Reduce)
            self._finish_reduce(scalar, item)
            row_known[id(scalar)] = f"v{self.number[id(scalar)]}"

    def _finish_reduce(self, scalar: Reduce, item: _Accumulator) -> None:
        ctype = COMPUTE[scalar.dtype]
        text = item.result
        if scalar.kind == "mean":
            text = f"({text}) / (double){self.arguments.size(scalar.divisor)}"
        self.line(f"const {ctype} v{self.number[id(scalar)]} = ({ctype})({text});")

    def _used_loads(self, roots: Sequence[Scalar], known: dict[int, str]) -> list[Load]:
        scratch = {number for number, _ in self.scratch}
        found: dict[int, Load] = {}
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            scalar = stack.pop()
            if id(scalar) in seen or id(scalar) in known:
                continue
            seen.add(id(scalar))
            if isinstance(scalar, Load) and not self.rows[id(scalar)]:
                found[id(scalar)] = scalar
            if self.number[id(scalar)] in scratch and scalar not in roots:
                stack.extend(scalar.operands())
                continue
            stack.extend(scalar.operands())
        return [found[k] for k in sorted(found, key=lambda k: self.number[k])]

    def _column_kernel(self) -> tuple[str, Dim, int, Dim]:
        last = self.kept[-1]
        outer = self.kept[:-1]
        size = self.arguments.size(self.loop.domain[last])
        self.line(f"const int64_t blocks = ({size} + {COLUMNS - 1}) / {COLUMNS};")
        self.line("for (int64_t item = begin; item < end; ++item) {")
        self.indent = "    "
        self.line(f"const int64_t c0 = (item % blocks) * {COLUMNS};")
        self.line(f"const int64_t w = {size} - c0 < {COLUMNS} ? {size} - c0 : {COLUMNS};")
        if outer:
            self.line("const int64_t rest = item / blocks;")
            self._unravel("rest", outer)
        reduces = [s for s in self.scalars if isinstance(s, Reduce)]
        accumulators = [_column_accumulator(s, self.number[id(s)]) for s in reduces]
        for item in accumulators:
            for text in item.declare:
                self.line(text)
        depth = self.indent
        for axis in self.inner_axes:
            extent = self.arguments.size(self.loop.domain[axis])
            self.line(f"for (int64_t x{axis} = 0; x{axis} < {extent}; ++x{axis}) {{")
            self.indent += "  "
            self.loop_vars[axis] = f"x{axis}"
        self.vector_axis = last
        self.line("#pragma GCC ivdep")
        self.line("for (int64_t j = 0; j < w; ++j) {")
        self.indent += "  "
        self.loop_vars[last] = "(c0 + j)"
        self.known = {}
        for scalar, item in zip(reduces, accumulators, strict=True):
            value = self.emit(scalar.arg)
            for text in item.step(cast(value, scalar.arg.dtype, item.dtype), ""):
                self.line(text)
        self.indent = self.indent[:-2]
        self.line("}")
        for _ in self.inner_axes:
            self.indent = self.indent[:-2]
            self.line("}")
        self.indent = depth
        for axis in self.inner_axes:
            self.loop_vars.pop(axis)
        self.line("for (int64_t j = 0; j < w; ++j) {")
        self.indent += "  "
        self.known = {}
        for scalar, item in zip(reduces, accumulators, strict=True):
            self._finish_reduce(scalar, item)
            self.known[id(scalar)] = f"v{self.number[id(scalar)]}"
        for store in self.loop.stores:
            value = self.stored(store)
            self.line(f"{self._element(store.view, store.strides, True)} = {value};")
        self.indent = depth
        self.line("}")
        self.indent = "  "
        self.line("}")
        blocks = ceildiv(self.loop.domain[last], COLUMNS)
        range_ = as_dim(product([self.loop.domain[a] for a in outer]) * blocks)
        return "\n".join(self.lines) + "\n", range_, 1, 0


class _Epilogue(_Writer):
    def __init__(
        self, loop: Loop, axes: tuple[Sequence[int], Sequence[int], Sequence[int]],
        first_pointer: int, first_immediate: int,
    ) -> None:  # fmt: skip
        super().__init__(loop, Arguments(first_pointer, first_immediate))
        self.axes = axes
        self.bases: dict[tuple[str, tuple[Dim, ...]], str] = {}

    def _stride(self, strides: tuple[Dim, ...], group: int) -> str:
        axes = self.axes[group]
        return self.arguments.size(strides[axes[-1]]) if axes else "0"

    def _term(self, strides: tuple[Dim, ...], group: int, index: str) -> str:
        """index-th element of a part of [Z, M, N]; a part that no single stride crosses is split
        into its axes."""
        axes = self.axes[group]
        if not axes or all(strides[a] == 0 for a in axes):
            return ""
        if collapses(self.loop.domain, axes, strides):
            return f"{index} * {self._stride(strides, group)}"
        terms: list[str] = []
        rest = index
        for position, axis in enumerate(reversed(axes)):
            size = self.arguments.size(self.loop.domain[axis])
            last = position == len(axes) - 1
            if strides[axis] != 0:
                part = rest if last else f"{rest} % {size}"
                terms.append(f"({part}) * {self.arguments.size(strides[axis])}")
            rest = f"({rest} / {size})"
        return " + ".join(terms)

    def _base(self, view: View, strides: tuple[Dim, ...], write: bool) -> str:
        pointer = self.arguments.pointer(view, write)
        key = (pointer, strides)
        if key not in self.bases:
            name = f"q{len(self.bases)}"
            const = "" if write else "const "
            terms = [self._term(strides, 0, "z"), self._term(strides, 1, "(m0 + m)")]
            step = self._stride(strides, 2)
            terms.append("" if step == "0" else f"n0 * {step}")
            offset = " + ".join(t for t in terms if t) or "0"
            self.line(f"{const}{STORAGE[view.dtype]}* {name} = {pointer} + {offset};")
            self.bases[key] = name
        return self.bases[key]

    def _element(self, view: View, strides: tuple[Dim, ...], write: bool = False) -> str:
        step = self._stride(strides, 2)
        index = "0" if step == "0" else ("j" if step == "1" else f"j * {step}")
        return f"{self._base(view, strides, write)}[{index}]"

    def load(self, load: Load) -> str:
        return _loads_as(load, self._element(load.view, load.strides))

    def accumulator(self) -> str:
        return "t[j]"

    def generate(self) -> tuple[str, str, Arguments]:
        self.indent = "    "
        for load in self.loop.loads():
            self._base(load.view, load.strides, False)
        for store in self.loop.stores:
            self._base(store.view, store.strides, True)
        bases = self.lines
        self.lines = []
        self.indent = "        "
        for store in self.loop.stores:
            value = self.stored(store)
            self.line(f"{self._element(store.view, store.strides, True)} = {value};")
        body = "\n".join(self.lines)
        text = (
            "static void GC_NAME(const gc_args* a, const float* acc, int64_t ld, int64_t z, "
            "int64_t m0, int64_t mr, int64_t n0, int64_t nr) {\n"
            f"{self.arguments.prologue()}"
            "  for (int64_t m = 0; m < mr; ++m) {\n"
            "    const float* __restrict t = acc + m * ld;\n" + "\n".join(bases) + "\n"
            "    auto row = [&](auto width) __attribute__((always_inline)) {\n"
            "#pragma GCC ivdep\n"
            "      for (int64_t j = 0; j < (int64_t)width; ++j) {\n" + body + "\n"
            "      }\n    };\n"
            "    if (nr == 32) row(std::integral_constant<int64_t, 32>{});\n"
            "    else row(nr);\n  }\n}\n"
        )
        name = "epi_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        source = '#include <type_traits>\n#include "vmath.h"\n' + text.replace("GC_NAME", name)
        return name, source, self.arguments


@dataclass
class _Accumulator:
    """The C++ pieces of one reduction."""

    declare: list[str]
    step: Callable[[str, str], list[str]]
    result: str
    dtype: str  # what the operand is converted to
    clause: str = ""
    partial: list[str] = field(default_factory=list)
    join: list[str] = field(default_factory=list)
    sequential: bool = False


def _bounds(dtype: str) -> tuple[str, str]:
    """Smallest and largest value of a compute type, as C++."""
    if is_float(dtype):
        return "-INFINITY", "INFINITY"
    if dtype == "bool":
        return "0", "1"
    ctype = COMPUTE[dtype]
    return f"std::numeric_limits<{ctype}>::min()", f"std::numeric_limits<{ctype}>::max()"


def _accumulator(scalar: Reduce, number: int) -> _Accumulator:
    """Row reductions: SIMD partials of at most 1024 elements, joined in double."""
    a, source = f"a{number}", scalar.arg.dtype
    kind = scalar.kind
    if kind in ("sum", "mean", "prod"):
        if is_float(source) or is_float(scalar.dtype):
            part = "double" if "float64" in (source, scalar.dtype) else "float"
            unit, op = ("0", "+") if kind != "prod" else ("1", "*")
            return _Accumulator(
                [f"double {a} = {unit};"], lambda v, i: [f"{a}t {op}= {v};"], a,
                "float64" if part == "double" else "float32", f"reduction({op}:{a}t)",
                [f"{part} {a}t = {unit};"], [f"{a} {op}= {a}t;"],
            )  # fmt: skip
        unit, op = ("0", "+") if kind != "prod" else ("1", "*")
        return _Accumulator(
            [f"int64_t {a} = {unit};"], lambda v, i: [f"{a} {op}= (int64_t)({v});"], a, source,
            f"reduction({op}:{a})",
        )  # fmt: skip
    if kind in ("any", "all"):
        unit, op = ("0", "|") if kind == "any" else ("1", "&")
        return _Accumulator(
            [f"int {a} = {unit};"], lambda v, i: [f"{a} {op}= (int)({v});"], a, "bool",
            f"reduction({op}:{a})",
        )  # fmt: skip
    low, high = _bounds(source)
    start = low if kind in ("max", "argmax") else high
    sign = ">" if kind in ("max", "argmax") else "<"
    ctype = COMPUTE[source]
    if kind in ("max", "min"):
        if source == "bool":
            return _Accumulator(
                [f"int {a} = {start};"],
                lambda v, i: [f"{a} {'|' if kind == 'max' else '&'}= (int){v};"], a, source,
                f"reduction({'|' if kind == 'max' else '&'}:{a})",
            )  # fmt: skip
        declare = [f"{ctype} {a} = {start};"]
        if not is_float(source):
            return _Accumulator(
                declare, lambda v, i: [f"{a} = {v} {sign} {a} ? {v} : {a};"], a, source,
                f"reduction({kind}:{a})",
            )  # fmt: skip
        return _Accumulator(
            [*declare, f"int {a}n = 0;"],
            lambda v, i: [f"{a} = {v} {sign} {a} ? {v} : {a};", f"{a}n |= ({v} != {v});"],
            f"{a}n ? ({ctype})NAN : {a}", source, f"reduction({kind}:{a}) reduction(|:{a}n)",
        )  # fmt: skip
    if kind in ("argmax", "argmin"):
        nan = f" || ({a} == {a} && {{v}} != {{v}})" if is_float(source) else ""
        return _Accumulator(
            [f"{ctype} {a} = {start}; int64_t {a}i = -1;"],
            lambda v, i: [
                f"{{ const {ctype} w = {v}; if ({a}i < 0 || w {sign} {a}"
                + nan.replace("{v}", "w")
                + f") {{ {a} = w; {a}i = {i}; }} }}"
            ],
            f"{a}i", source, sequential=True,
        )  # fmt: skip
    raise InternalError(f"unknown reduction {kind}")


def _column_accumulator(scalar: Reduce, number: int) -> _Accumulator:
    """The same over a block of neighbouring kept points."""
    a, source, kind = f"a{number}", scalar.arg.dtype, scalar.kind
    floating = is_float(source) or is_float(scalar.dtype)
    low, high = _bounds(source)
    if kind in ("sum", "mean", "prod"):
        ctype = "double" if floating else "int64_t"
        unit, op = ("0", "+") if kind != "prod" else ("1", "*")
        takes = ("float64" if "float64" in (source, scalar.dtype) else "float32") if floating else source  # noqa: E501
        step = f"{a}[j] {op}= ({ctype})({{v}});"
    elif kind in ("any", "all"):
        ctype, takes = "uint8_t", "bool"
        unit, op = ("0", "|") if kind == "any" else ("1", "&")
        step = f"{a}[j] {op}= (uint8_t)({{v}});"
    else:
        ctype, takes = COMPUTE[source], source
        unit = low if kind == "max" else high
        step = f"{a}[j] = gc::v{kind}(({ctype})({{v}}), {a}[j]);"
        if is_float(source):
            step = f"{a}[j] = {a}[j] != {a}[j] ? {a}[j] : gc::v{kind}(({ctype})({{v}}), {a}[j]);"
    return _Accumulator(
        [f"{ctype} {a}[{COLUMNS}]; for (int j = 0; j < {COLUMNS}; ++j) {a}[j] = {unit};"],
        lambda v, i: [step.replace("{v}", v)],
        f"{a}[j]",
        takes,
    )
