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

from collections.abc import Sequence
from dataclasses import replace

import sympy

from graphc.ir.types import Dim, as_dim, product
from graphc.lowering.context import ceildiv
from graphc.lowering.loop_columns import column_kernel
from graphc.lowering.loop_kernel import Kernel, prepare
from graphc.lowering.loop_reduce import COLUMNS, Accumulation, accumulator, column_accumulator
from graphc.lowering.loop_transpose import transposing_copy
from graphc.lowering.loop_vector import vector_kernel
from graphc.lowering.loop_writer import Generated
from graphc.lowering.loops import Compute, Load, Loop, Reduce, Scalar, Store, copied
from graphc.lowering.pointwise import COMPUTE, cast


def generate(loop: Loop) -> Generated:
    """The kernel of a loop without a product in front of it."""
    loop = prepare(_bits(loop))
    return (
        transposing_copy(loop)
        or column_kernel(loop)
        or vector_kernel(loop)
        or _Kernel(loop).generate()
    )


def _bits(loop: Loop) -> Loop:
    """Copies of half floats as copies of int16: through float they would quiet NaN."""
    stores: list[Store] = []
    for store in loop.stores:
        load = copied(store.scalar)
        if not isinstance(load, Load) or load.dtype != store.view.dtype:
            return loop
        if load.dtype not in ("bfloat16", "float16"):
            return loop
        source, target = (view.with_(dtype="int16") for view in (load.view, store.view))
        stores.append(Store(Load("int16", source, load.strides), target, store.strides))
    return loop if loop.reduced else replace(loop, stores=stores)


class _Kernel(Kernel):
    """Flat, row, reducing-row and reducing-column kernels."""

    def generate(self) -> Generated:
        if self.loop.reduced:
            if self._columns_pay():
                body, range_, grain, scratch = self._column_kernel()
            else:
                body, range_, grain, scratch = self._row_kernel()
        else:
            body, range_, grain, scratch = self._plain_kernel()
        return self.finish(body, range_, grain, scratch)

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
        self.line(
            f"for (int64_t i = 0; i < {self.arguments.size(self.loop.domain[inner])}; ++i) {{"
        )
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
                and (not self.rows[id(s.scalar)] or any(s.strides[a] != 0 for a in self.inner_axes))
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
        accumulators = [
            accumulator(s, self.number[id(s)]) for s in reduces if isinstance(s, Reduce)
        ]
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
        used = self._used_loads(
            [*(s.operands()[0] for s in reduces), *(s.scalar for s in stores), *saves], row_known
        )
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

    def _finish_reduce(self, scalar: Reduce, item: Accumulation) -> None:
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
        accumulators = [column_accumulator(s, self.number[id(s)]) for s in reduces]
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
