"""Reducing kernels whose neighbours in memory are kept points: columns side by side.

A block of columns is swept row after row, as memory lies; each column's sums and extrema stand in
arrays that fit the first cache. With several dependency levels (softmax over a dim that is not the
last) the rows are read again for each, and what depends on a column alone is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphc.ir.types import as_dim, product
from graphc.lowering.context import ceildiv
from graphc.lowering.loop_lanes import lanes_of, vectorisable
from graphc.lowering.loop_reduce import ColumnSums, column_sums
from graphc.lowering.loop_vector import VectorKernel, elements_per_grain
from graphc.lowering.loop_writer import Generated
from graphc.lowering.loops import Compute, Constant, Loop, Reduce, Scalar, Size, Store

_BLOCK = 512  # columns in a block
_STEPS = 128  # rows summed in float before the sums go to double
_NARROW = 8  # fewer columns are not worth vectors


def column_kernel(loop: Loop) -> Generated | None:
    """The kernel of a prepared loop, or None if its columns do not lie side by side."""
    kept = [a for a in range(len(loop.domain)) if a not in loop.reduced]
    if not loop.reduced or not kept:
        return None
    last, size = kept[-1], loop.domain[kept[-1]]
    if isinstance(size, int) and size < _NARROW:
        return None
    inner = max(loop.reduced)
    full = [x for x in loop.loads() if any(x.strides[a] != 0 for a in loop.reduced)]
    if not sum(x.strides[last] == 1 for x in full) > sum(x.strides[inner] == 1 for x in full):
        return None
    scalars = loop.scalars()
    lanes = _lanes(loop, scalars, last)
    if not vectorisable(loop, scalars, lanes, (last, *loop.reduced)):
        return None
    if any(s.view.dtype not in ("float32", "bfloat16", "float16", "bool") for s in loop.stores):
        return None
    return ColumnKernel(loop, last, lanes).columns()


def _lanes(loop: Loop, scalars: Sequence[Scalar], axis: int) -> set[int]:
    """What differs from column to column, or from row to row; reductions always do."""
    lanes = lanes_of(loop, scalars, (axis, *loop.reduced))
    for scalar in scalars:
        follows = isinstance(scalar, Compute) and any(id(o) in lanes for o in scalar.operands())
        if follows or isinstance(scalar, Reduce):
            lanes.add(id(scalar))
    return lanes


class ColumnKernel(VectorKernel):
    """Blocks of columns, all reduced axes run through once per level."""

    def __init__(self, loop: Loop, axis: int, lanes: set[int]) -> None:
        super().__init__(loop)
        self.vector_axis = axis
        self.lanes = lanes
        self.full = {
            id(s) for s in self.scalars
            if not self.rows[id(s)] and not isinstance(s, (Constant, Size))
        }  # fmt: skip
        self.arrays: dict[int, str] = {}  # scalars of a column -> their vector in an array
        self.pending: list[tuple[Reduce, ColumnSums]] = []  # of the level just run

    def columns(self) -> Generated:
        """The kernel."""
        levels = self._levels()
        outer = self.kept[:-1]
        size = self.arguments.size(self.loop.domain[self.vector_axis])
        self.line(f"const int64_t blocks = ({size} + {_BLOCK - 1}) / {_BLOCK};")
        self.line("for (int64_t item = begin; item < end; ++item) {")
        self.indent = "    "
        self.line(f"const int64_t c0 = (item % blocks) * {_BLOCK};")
        self.line(f"const int64_t c1 = c0 + {_BLOCK} < {size} ? c0 + {_BLOCK} : {size};")
        if outer:
            self.line("const int64_t rest = item / blocks;")
            self._unravel("rest", outer)
        for scalar in self.scalars:
            if id(scalar) not in self.lanes:
                self.emit(scalar)
        alone = dict(self.known)
        for level in range(max(levels.values()) + 1):
            if level > 0:
                self._finish_level(level, levels, alone)
            reduces = [
                s for s in self.scalars if isinstance(s, Reduce) and levels[id(s)] == level + 1
            ]
            stores = [
                s for s in self.loop.stores
                if levels[id(s.scalar)] == level and self._over_rows(s)
            ]  # fmt: skip
            if reduces or stores:
                self._rows(reduces, stores, level, alone)
            if level == 0:
                self._column_stores(0, levels, alone)
        self.indent = "  "
        self.line("}")
        blocks = ceildiv(self.loop.domain[self.vector_axis], _BLOCK)
        range_ = as_dim(product([self.loop.domain[a] for a in outer]) * blocks)
        inner = product([self.loop.domain[a] for a in self.inner_axes])
        grain = 1
        width = self.loop.domain[self.vector_axis]
        if isinstance(inner, int) and isinstance(width, int) and inner > 0:
            grain = max(1, elements_per_grain(self._cost()) // (inner * min(width, _BLOCK)))
        return self.finish("\n".join(self.lines) + "\n", range_, grain, 0)

    def _over_rows(self, store: Store) -> bool:
        return id(store.scalar) in self.full or any(store.strides[a] != 0 for a in self.inner_axes)

    def _rows(
        self, reduces: Sequence[Reduce], stores: Sequence[Store], level: int, alone: dict[int, str]
    ) -> None:
        """All rows of the block: one level's reductions and stores."""
        sums = [column_sums(r, self.number[id(r)], _BLOCK) for r in reduces]
        for item in sums:
            for text in item.declare:
                self.line(text)
        flushed = [text for item in sums for text in item.flush]
        if flushed:
            self.line(f"int64_t steps{level} = 0;")
        depth = self.indent
        for axis in self.inner_axes:
            self._loop(f"x{axis}", self.arguments.size(self.loop.domain[axis]))
            self.loop_vars[axis] = f"x{axis}"
        self.bases = {}
        self.known = alone | self.arrays
        self._bases([*(r.arg for r in reduces), *(s.scalar for s in stores)], self.known, stores)
        self._open(2 if len(self.scalars) <= 8 else 1, "c0, c1")
        self.line("const int64_t k = i - c0;")
        for reduce, item in zip(reduces, sums, strict=True):
            self.emit(reduce.arg)
            for text in item.step(self.lane_text(reduce.arg, item.dtype)):
                self.line(text)
        for store in stores:
            self.lane_store(store)
        self._close()
        if flushed:
            self._flush(flushed, f"if (++steps{level} == {_STEPS}) {{", f"steps{level} = 0;")
        while self.indent != depth:
            self.indent = self.indent[:-2]
            self.line("}")
        for axis in self.inner_axes:
            self.loop_vars.pop(axis)
        if flushed:
            self._flush(flushed, "{", "")
        self.pending = list(zip(reduces, sums, strict=True))

    def _flush(self, texts: Sequence[str], head: str, tail: str) -> None:
        self.line(head)
        self.line("  for (int64_t k = 0; k < c1 - c0; ++k) {")
        for text in texts:
            self.line("    " + text)
        self.line("  }")
        if tail:
            self.line("  " + tail)
        self.line("}")

    def _finish_level(self, level: int, levels: dict[int, int], alone: dict[int, str]) -> None:
        """Turns the sums of the level before into values, and computes what columns need of
        them."""
        reduces = {id(r): (r, item) for r, item in self.pending}
        made = [
            s for s in self.scalars
            if id(s) in self.lanes and id(s) not in self.full and levels[id(s)] == level
            and (id(s) in reduces or isinstance(s, Compute))
        ]  # fmt: skip
        for scalar in made:
            name = f"r{self.number[id(scalar)]}"
            kind = "int32_t" if scalar.dtype == "bool" else "float"
            self.line(f"alignas(64) {kind} {name}[{_BLOCK}];")
        self.bases = {}
        self.known = alone | self.arrays
        stores = self._stores_of_columns(level, levels)
        self._bases([*made, *(s.scalar for s in stores)], self.known, stores)
        self._open(1, "c0, c1")
        self.line("const int64_t k = i - c0;")
        for scalar in made:
            number = self.number[id(scalar)]
            if id(scalar) in reduces:
                assert isinstance(scalar, Reduce)
                divisor = self.arguments.size(scalar.divisor) if scalar.kind == "mean" else ""
                text = reduces[id(scalar)][1].value(divisor)
                kind = "vi" if scalar.dtype == "bool" else "vf"
                self.line(f"const gc::{kind} v{number} = {text};")
                self.known[id(scalar)] = f"v{number}"
            else:
                self.emit(scalar)
            self.line(f"gc::store(r{number} + k, v{number});")
        for store in stores:
            self.lane_store(store)
        self._close()
        for scalar in made:
            kind = "vi" if scalar.dtype == "bool" else "vf"
            self.arrays[id(scalar)] = f"gc::load<gc::{kind}>(r{self.number[id(scalar)]} + k)"

    def _stores_of_columns(self, level: int, levels: dict[int, int]) -> list[Store]:
        return [
            s for s in self.loop.stores
            if levels[id(s.scalar)] == level and not self._over_rows(s)
        ]  # fmt: skip

    def _column_stores(self, level: int, levels: dict[int, int], alone: dict[int, str]) -> None:
        """Values of columns that no reduction takes part in."""
        stores = self._stores_of_columns(level, levels)
        if not stores:
            return
        self.bases = {}
        self.known = dict(alone)
        self._bases([s.scalar for s in stores], self.known, stores)
        self._open(1, "c0, c1")
        for store in stores:
            self.lane_store(store)
        self._close()
