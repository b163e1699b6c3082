"""Copies whose reads and writes run along different axes, in tiles (`kernels/transpose.h`)."""

from __future__ import annotations

from graphc.ir.types import as_dim, itemsize, product
from graphc.lowering.context import ceildiv
from graphc.lowering.loop_kernel import Kernel
from graphc.lowering.loop_writer import Generated
from graphc.lowering.loops import Load, Loop, copied

_ROWS = 64  # rows of the result written by one item of the range
_SMALL = 8  # shorter axes are not worth tiles


def transposing_copy(loop: Loop) -> Generated | None:
    """The kernel of a prepared loop that only copies, if one axis is next in the source and another
    in the target; else None."""
    if loop.reduced or len(loop.stores) != 1 or len(loop.domain) < 2:
        return None
    store = loop.stores[0]
    load = copied(store.scalar)
    if not isinstance(load, Load) or load.dtype != store.view.dtype:
        return None
    across = len(loop.domain) - 1
    along = [a for a in range(across) if load.strides[a] == 1]
    if store.strides[across] != 1 or load.strides[across] in (0, 1) or not along:
        return None
    sizes = (loop.domain[across], loop.domain[along[-1]])
    if any(isinstance(size, int) and size < _SMALL for size in sizes):
        return None
    return _Transpose(loop, along[-1], load).generate()


class _Transpose(Kernel):
    """`along` runs through the source, the last axis through the target."""

    def __init__(self, loop: Loop, along: int, source: Load) -> None:
        super().__init__(loop)
        self.along = along
        self.source = source

    def generate(self) -> Generated:
        """The kernel: the range is the other axes times blocks of rows of the result."""
        loop, store, across = self.loop, self.loop.stores[0], len(self.loop.domain) - 1
        outer = [a for a in range(across) if a != self.along]
        size, bits = self.arguments.size, 8 * itemsize(store.view.dtype)
        rows, columns = size(loop.domain[self.along]), size(loop.domain[across])
        target = self.arguments.pointer(store.view, True)
        source = self.arguments.pointer(self.source.view)
        self.line(f"const int64_t blocks = ({rows} + {_ROWS - 1}) / {_ROWS};")
        self.line("for (int64_t item = begin; item < end; ++item) {")
        self.indent = "    "
        self.line(f"const int64_t b0 = item % blocks * {_ROWS};")
        self.line(f"const int64_t nb = {rows} - b0 < {_ROWS} ? {rows} - b0 : {_ROWS};")
        if outer:
            self.line("const int64_t rest = item / blocks;")
            self._unravel("rest", outer)
        to = f"{target} + ({self._offset(store.strides, outer)})"
        of = f"{source} + ({self._offset(self.source.strides, outer)})"
        step, row = size(self.source.strides[across]), size(store.strides[self.along])
        self.line(
            f"gc::turn((uint{bits}_t*)({to} + b0 * {row}), {row}, "
            f"(const uint{bits}_t*)({of} + b0), {step}, nb, {columns});"
        )
        self.indent = "  "
        self.line("}")
        range_ = as_dim(
            product([loop.domain[a] for a in outer]) * ceildiv(loop.domain[self.along], _ROWS)
        )
        width = loop.domain[across]
        grain = max(1, 16384 // (_ROWS * width)) if isinstance(width, int) else 1
        made = self.finish("\n".join(self.lines) + "\n", range_, grain, 0)
        made.source = made.source.replace('"vmath.h"', '"transpose.h"')
        return made
