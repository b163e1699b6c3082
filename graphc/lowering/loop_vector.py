"""Kernels whose inner loop is written in explicit vectors (see `loop_lanes`).

* plain: the last axis is the vectors' axis, all others are outer points;
* reducing rows: one row of the reduced axes at a time, read from memory once: sums and maxima stay
  in several registers, values that later levels need and that are dear to compute again stay in a
  row of scratch. While the dearest level computes, the next row is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from graphc.ir.types import Dim, as_dim, product
from graphc.lowering.context import View
from graphc.lowering.loop_kernel import Kernel
from graphc.lowering.loop_lanes import LaneWriter, lanes_of, vectorisable
from graphc.lowering.loop_reduce import lane_accumulator
from graphc.lowering.loop_writer import Generated
from graphc.lowering.loops import Compute, Load, Loop, Position, Reduce, Scalar, Store
from graphc.lowering.pointwise import COMPUTE, is_float, literal

_SHORT = 4  # an axis of fewer points is not worth vectors
_BLOCK = 1024  # elements summed in float before the sum goes to double
_HEAVY = 12  # cost of an elementary function, in additions
_AHEAD = 16384  # rows of more elements are not fetched ahead: the caches have other uses
_KEEP = 3  # values that cost this much to compute again stay in scratch

#: what the inner loop of a level reduces, stores, and saves for later levels
Work = tuple[list[Reduce], list[Store], list[Scalar]]


def vector_kernel(loop: Loop) -> Generated | None:
    """The kernel of a prepared loop, or None if it is not one for explicit vectors."""
    axis = len(loop.domain) - 1
    size = loop.domain[axis]
    if isinstance(size, int) and size < _SHORT:
        return None
    if loop.reduced and axis not in loop.reduced:
        return None
    scalars = loop.scalars()
    axes = loop.reduced or {axis}
    if not vectorisable(loop, scalars, lanes_of(loop, scalars, axes), axes):
        return None
    kernel = VectorKernel(loop)
    return kernel.reducing() if loop.reduced else kernel.plain()


class VectorKernel(Kernel, LaneWriter):
    """Plain and reducing-row kernels."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.vector_axis = len(loop.domain) - 1
        self.lanes = lanes_of(loop, self.scalars, loop.reduced or {self.vector_axis})
        self.kept_rows: dict[int, str] = {}  # scalars in scratch -> their row's name

    # -- addresses ----------------------------------------------------------------------------

    def place(self, view: View, strides: tuple[Dim, ...], write: bool) -> tuple[str, str]:
        pointer = self.arguments.pointer(view, write)
        step = self.arguments.size(strides[self.vector_axis])
        return self.bases.get((pointer, strides), pointer), step

    def lane_position(self, scalar: Position) -> str:
        assert scalar.axis is not None

        def text(value: Dim | float) -> str:
            if isinstance(value, float):
                return literal(value, "float64")
            return f"(double){self.arguments.size(as_dim(value))}"

        start, step = text(scalar.start), text(scalar.step)
        if scalar.axis != self.vector_axis:
            return f"gc::splat((float)({start} + {step} * (double){self.loop_vars[scalar.axis]}))"
        return (
            f"gc::at_lanes({self.index}, [&](int64_t k) {{ "
            f"return (float)({start} + {step} * (double)k); }})"
        )

    def _bases(
        self,
        roots: Sequence[Scalar],
        known: dict[int, str],
        stores: Sequence[Store],
        ahead: Sequence[Load] = (),
    ) -> None:
        """Row pointers for the accesses of the coming inner loop."""
        loads = {self.number[id(load)]: load for load in ahead}
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            scalar = stack.pop()
            if id(scalar) in seen or id(scalar) in known:
                continue
            seen.add(id(scalar))
            if isinstance(scalar, Load) and id(scalar) in self.lanes:
                loads[self.number[id(scalar)]] = scalar
            stack.extend(scalar.operands())
        self._hoist([loads[k] for k in sorted(loads)], stores)

    # -- without reduction --------------------------------------------------------------------

    def plain(self) -> Generated:
        """A kernel without reduced axes."""
        size = self.loop.domain[self.vector_axis]
        outer = list(range(self.vector_axis))
        if outer:
            self.line("for (int64_t row = begin; row < end; ++row) {")
            self.indent = "    "
            self._unravel("row", outer)
        for scalar in self.scalars:  # what does not vary in the inner loop
            if id(scalar) not in self.lanes and not isinstance(scalar, Reduce):
                self.emit(scalar)
        self._bases([s.scalar for s in self.loop.stores], self.known, self.loop.stores)
        unroll = 2 if self._cost() <= 8 else 1
        bounds = f"0, {self.arguments.size(size)}" if outer else "begin, end"
        self._open(unroll, bounds)
        for store in self.loop.stores:
            self.lane_store(store)
        self._close()
        grain = elements_per_grain(self._cost())
        if not outer:
            return self.finish("\n".join(self.lines) + "\n", size, grain, 0)
        self.indent = "  "
        self.line("}")
        grain = max(1, grain // size) if isinstance(size, int) else 8
        rows = product([self.loop.domain[a] for a in outer])
        return self.finish("\n".join(self.lines) + "\n", rows, grain, 0)

    def _open(self, unroll: int, bounds: str) -> None:
        self.line(
            f"gc::sweep<{unroll}>({bounds}, [&](int64_t i, auto w, auto u) "
            "__attribute__((always_inline)) {"
        )
        self.indent += "  "

    def _close(self) -> None:
        self.indent = self.indent[:-2]
        self.line("});")

    def _cost(self) -> int:
        """Additions that a point costs, roughly."""
        return sum(_weight(s) for s in self.scalars if id(s) in self.lanes)

    # -- reducing -----------------------------------------------------------------------------

    def reducing(self) -> Generated:
        """A kernel over rows of the reduced axes."""
        levels = self._levels()
        last = max(levels.values())
        self.line("for (int64_t row = begin; row < end; ++row) {")
        self.indent = "    "
        if self.kept:
            self._unravel("row", self.kept)
        keep = self._kept_between_levels(levels)
        work = [self._level(level, levels, keep) for level in range(last + 1)]
        dearest = max(range(last + 1), key=lambda k: (k > 0, self._level_cost(work[k], levels, k)))
        known: dict[int, str] = {}
        for level in range(last + 1):
            self.known = dict(known)
            for scalar in self.scalars:  # values per row that became available
                if id(scalar) not in self.lanes and levels[id(scalar)] == level:
                    if not isinstance(scalar, Reduce):
                        self.emit(scalar)
            for store in self.loop.stores:
                if levels[id(store.scalar)] == level and self._per_row(store):
                    value = self.stored(store)
                    self.line(f"{self._element(store.view, store.strides, True)} = {value};")
            known = dict(self.known)
            if any(work[level]):
                ahead = self._ahead() if level == dearest and level > 0 else []
                later = [s for w in work[level + 1 :] for s in w[1]] if ahead else []
                self._inner(work[level], known, level, levels, ahead, later)
        self.indent = "  "
        self.line("}")
        inner = product([self.loop.domain[a] for a in self.inner_axes])
        header = ""
        scratch: Dim = 0
        if self.kept_rows:
            size = self.arguments.size(as_dim(sympy.sympify(inner)))
            for slot, name in enumerate(self.kept_rows.values()):
                header += (
                    f"  float* __restrict {name} = (float*)((char*)a->scratch + "
                    f"{slot} * (({size} * 4 + 63) & -64));\n"
                )
            scratch = as_dim((inner * 4 + 64) * len(self.kept_rows))
        grain = elements_per_grain(self._cost())
        grain = max(1, grain // inner) if isinstance(inner, int) and inner > 0 else 4
        rows = product([self.loop.domain[a] for a in self.kept])
        return self.finish(header + "\n".join(self.lines) + "\n", rows, grain, scratch)

    def _per_row(self, store: Store) -> bool:
        return id(store.scalar) not in self.lanes and all(
            store.strides[a] == 0 for a in self.inner_axes
        )

    def _level(self, level: int, levels: dict[int, int], keep: Sequence[Scalar]) -> Work:
        """What the inner loop of a level reduces, stores and saves."""
        reduces = [s for s in self.scalars if isinstance(s, Reduce) and levels[id(s)] == level + 1]
        stores = [
            s for s in self.loop.stores if levels[id(s.scalar)] == level and not self._per_row(s)
        ]
        return reduces, stores, [s for s in keep if levels[id(s)] == level]

    def _ahead(self) -> list[Load]:
        """Loads that the next row moves: these are fetched while this one computes."""
        inner = self.loop.domain[self.vector_axis]
        if len(self.inner_axes) > 1 or not self.kept or not isinstance(inner, int):
            return []
        if inner > _AHEAD:
            return []
        return [
            s for s in self.scalars
            if isinstance(s, Load) and id(s) in self.lanes
            and s.strides[self.vector_axis] == 1 and s.strides[self.kept[-1]] != 0
        ]  # fmt: skip

    def _level_cost(self, work: Work, levels: dict[int, int], level: int) -> int:
        """Additions per point of a level's inner loop, roughly."""
        stack: list[Scalar] = [*(r.arg for r in work[0]), *(s.scalar for s in work[1]), *work[2]]
        total = len(work[0])
        seen: set[int] = set()
        while stack:
            scalar = stack.pop()
            if id(scalar) in seen or id(scalar) not in self.lanes:
                continue
            seen.add(id(scalar))
            total += _weight(scalar)
            if not (id(scalar) in self.kept_rows and levels[id(scalar)] < level):
                stack.extend(scalar.operands())
        return total

    def _kept_between_levels(self, levels: dict[int, int]) -> list[Scalar]:
        """Values that a later level's loop needs and that are dear: these live in scratch."""
        needed: dict[int, int] = {}
        for scalar in self.scalars:
            use = levels[id(scalar)] - (1 if isinstance(scalar, Reduce) else 0)
            for operand in scalar.operands():
                needed[id(operand)] = max(needed.get(id(operand), 0), use)
        for store in self.loop.stores:
            scalar = store.scalar
            needed[id(scalar)] = max(needed.get(id(scalar), 0), levels[id(scalar)])
        chosen: list[Scalar] = []
        price: dict[int, int] = {}
        for scalar in self.scalars:
            if id(scalar) not in self.lanes:
                price[id(scalar)] = 0
                continue
            own = _weight(scalar) + sum(price[id(o)] for o in scalar.operands())
            price[id(scalar)] = own
            if own >= _KEEP and needed.get(id(scalar), 0) > levels[id(scalar)]:
                if is_float(scalar.dtype):
                    chosen.append(scalar)
                    self.kept_rows[id(scalar)] = f"s{self.number[id(scalar)]}"
                    price[id(scalar)] = 1
        return chosen

    def _inner(
        self,
        work: Work,
        known: dict[int, str],
        level: int,
        levels: dict[int, int],
        ahead: Sequence[Load],
        later: Sequence[Store],
    ) -> None:
        """The inner loop of one level; what it reduces is added to `known`. The next row of `ahead`
        and the row of `later` are fetched."""
        reduces, stores, saves = work
        cost = self._level_cost(work, levels, level)
        unroll = (4 if cost <= 10 else 2 if cost <= 20 else 1) if reduces else 2 if cost <= 8 else 1
        accumulators = [lane_accumulator(r, self.number[id(r)], unroll) for r in reduces]
        for item in accumulators:
            for text in item.declare:
                self.line(text)
        middle = self.inner_axes[:-1]
        extent = self.loop.domain[self.vector_axis]
        size = self.arguments.size(extent)
        sums = any(item.join for item in accumulators)
        blocked = sums and not (isinstance(extent, int) and extent <= _BLOCK)
        depth = self.indent
        if middle and sums and not blocked:
            self.line(f"int64_t summed{level} = 0;")
        for axis in middle:
            self._loop(f"x{axis}", self.arguments.size(self.loop.domain[axis]))
            self.loop_vars[axis] = f"x{axis}"
        saved = {
            key: name for key, name in self.kept_rows.items() if levels[key] < level
        }  # fmt: skip
        roots = [*(r.arg for r in reduces), *(s.scalar for s in stores), *saves]
        self.bases = {}
        later = [s for s in later if s.strides[self.vector_axis] == 1]
        self._bases(roots, known | saved, [*stores, *later], ahead)
        bounds = f"0, {size}"
        if blocked:
            self.line(f"for (int64_t i0 = 0; i0 < {size}; i0 += {_BLOCK}) {{")
            self.indent += "  "
            bounds = f"i0, i0 + {_BLOCK} < {size} ? i0 + {_BLOCK} : {size}"
        self._open(unroll, bounds)
        linear = self._linear(middle, size)
        self.known = known | {
            key: f"gc::vload({name} + {linear}, w)" for key, name in saved.items()
        }
        for load in ahead:
            pointer, _ = self.place(load.view, load.strides, False)
            step = self.arguments.size(load.strides[self.kept[-1]])
            self.line(f"__builtin_prefetch({pointer} + i + {step});")
        for store in later:
            pointer, _ = self.place(store.view, store.strides, True)
            self.line(f"__builtin_prefetch({pointer} + i, 1);")
        for scalar in saves:
            text = self.emit(scalar)
            self.line(f"gc::vstore({self.kept_rows[id(scalar)]} + {linear}, {text}, w);")
        for reduce, item in zip(reduces, accumulators, strict=True):
            self.emit(reduce.arg)
            for text in item.step(self.lane_text(reduce.arg, item.dtype)):
                self.line(text)
        for store in stores:
            self.lane_store(store)
        self._close()
        joins = [text for item in accumulators for text in item.join]
        if blocked:
            for text in joins:
                self.line(text)
        elif middle and sums:
            self.line(f"if ((summed{level} += {size}) >= {_BLOCK}) {{")
            for text in [*joins, f"summed{level} = 0;"]:
                self.line("  " + text)
            self.line("}")
        while self.indent != depth:
            self.indent = self.indent[:-2]
            self.line("}")
        if not blocked:
            for text in joins:
                self.line(text)
        self.bases = {}
        for axis in middle:
            self.loop_vars.pop(axis)
        for reduce, item in zip(reduces, accumulators, strict=True):
            ctype = COMPUTE[reduce.dtype]
            text = item.result
            if reduce.kind == "mean":
                text = f"({text}) / (double){self.arguments.size(reduce.divisor)}"
            self.line(f"const {ctype} v{self.number[id(reduce)]} = ({ctype})({text});")
            known[id(reduce)] = f"v{self.number[id(reduce)]}"

    def _loop(self, name: str, size: str) -> None:
        self.line(f"for (int64_t {name} = 0; {name} < {size}; ++{name}) {{")
        self.indent += "  "

    def _linear(self, middle: Sequence[int], size: str) -> str:
        """Position of the vector in a row of scratch."""
        if not middle:
            return "i"
        parts = f"x{middle[0]}"
        for axis in middle[1:]:
            parts = f"({parts} * {self.arguments.size(self.loop.domain[axis])} + x{axis})"
        return f"{parts} * {size} + i"


def elements_per_grain(cost: int) -> int:
    """Elements worth a second thread: some microseconds of work, in whole vectors."""
    return max(1024, 131072 // (cost + 4) // 64 * 64)


def _weight(scalar: Scalar) -> int:
    """Additions that a scalar costs by itself, roughly."""
    if isinstance(scalar, Load):
        return 1 if scalar.dtype == "float32" else 2
    if isinstance(scalar, Compute):
        return _HEAVY if scalar.heavy else 1
    return 4 if isinstance(scalar, Position) else 0
