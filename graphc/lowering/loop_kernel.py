"""What every generated kernel shares: the order of its axes, addresses, dependency levels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from graphc.ir.types import Dim
from graphc.lowering.context import View
from graphc.lowering.loop_axes import rebuild, reorder, simplify
from graphc.lowering.loop_writer import Arguments, Generated, Writer, loads_as
from graphc.lowering.loops import Load, Loop, Reduce, Store, row_level
from graphc.lowering.pointwise import STORAGE

_HEADER = '#include "prelude.h"\n#include "vmath.h"\n\n'


def prepare(loop: Loop) -> Loop:
    """The loop with its axes in the order they are run in, merged where memory allows."""
    loop = simplify(reorder(loop, _order(loop)))
    if not loop.domain:
        loop = rebuild(loop, [1], frozenset(), lambda s: (0,), lambda a: 0)
    return loop


def _order(loop: Loop) -> list[int]:
    """Kept axes first. Without reduction: the axis with most unit strides goes inside."""
    axes = list(range(len(loop.domain)))
    if loop.reduced:
        return [a for a in axes if a not in loop.reduced] + [a for a in axes if a in loop.reduced]
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


class Kernel(Writer):
    """A kernel over [begin, end) of its outer range, for a prepared loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop, Arguments())
        self.scalars = loop.scalars()
        self.rows = row_level(loop, self.scalars)
        self.kept = [a for a in range(len(loop.domain)) if a not in loop.reduced]
        self.inner_axes = [a for a in range(len(loop.domain)) if a in loop.reduced]
        self.scratch: list[tuple[int, str]] = []
        self.loop_vars: dict[int, str] = {}
        self.bases: dict[tuple[str, tuple[Dim, ...]], str] = {}
        self.vector_axis = -1

    def finish(self, body: str, range_: Dim, grain: int, scratch: Dim) -> Generated:
        """The function around `body`."""
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

    def _levels(self) -> dict[int, int]:
        """The inner loop (0, 1, ...) in which each scalar is available first."""
        levels: dict[int, int] = {}
        for scalar in self.scalars:
            if isinstance(scalar, Reduce):
                levels[id(scalar)] = levels[id(scalar.arg)] + 1
            else:
                levels[id(scalar)] = max((levels[id(o)] for o in scalar.operands()), default=0)
        return levels

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
        return loads_as(load, self._element(load.view, load.strides))

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
