"""A Loop behind a product kernel: the gc_epilogue that finishes one tile of accumulators, in
explicit vectors where the arithmetic is float or bool (see `loop_lanes`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from graphc.ir.types import Dim, itemsize
from graphc.lowering.context import View
from graphc.lowering.loop_axes import collapses
from graphc.lowering.loop_lanes import LaneWriter, lanes_of, vectorisable
from graphc.lowering.loop_writer import Arguments, loads_as
from graphc.lowering.loops import Accumulator, Load, Loop
from graphc.lowering.pointwise import FLOATS, STORAGE


def generate_epilogue(
    loop: Loop, axes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    first_pointer: int, first_immediate: int,
) -> tuple[str, str, Arguments]:  # fmt: skip
    """(name, source, arguments) of a gc_epilogue function; `axes` are the domain axes that make
    up Z, M and N, each group contiguous for every access (see `collapses`)."""
    return _Epilogue(loop, axes, first_pointer, first_immediate).generate()


class _Epilogue(LaneWriter):
    index = "j"

    def __init__(
        self, loop: Loop, axes: tuple[Sequence[int], Sequence[int], Sequence[int]],
        first_pointer: int, first_immediate: int,
    ) -> None:  # fmt: skip
        super().__init__(loop, Arguments(first_pointer, first_immediate))
        self.axes = axes
        scalars = loop.scalars()
        lanes = lanes_of(loop, scalars, axes[2])
        work = vectorisable(loop, scalars, lanes, axes[2]) or all(
            isinstance(s.scalar, Accumulator) and s.view.dtype in FLOATS for s in loop.stores
        )
        self.vectors = work and all(s.view.dtype != "float64" for s in loop.stores)
        self.lanes = lanes if self.vectors else set()
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
            self._look_ahead(view, strides, name, write)
            self.bases[key] = name
        return self.bases[key]

    def _look_ahead(self, view: View, strides: tuple[Dim, ...], name: str, write: bool) -> None:
        """Asks for the same row of the next tile, which is there once that tile's products are."""
        rows = self.axes[1]
        if not rows or self._stride(strides, 2) != "1":
            return
        if strides[rows[-1]] == 0 or not collapses(self.loop.domain, rows, strides):
            return
        row = f"(const char*)({name} + mr * {self._stride(strides, 1)})"
        for line in range(0, 32 * itemsize(view.dtype), 64):
            self.line(f"if (mr > 1) __builtin_prefetch({row} + {line}, {int(write)});")

    def _element(self, view: View, strides: tuple[Dim, ...], write: bool = False) -> str:
        step = self._stride(strides, 2)
        index = "0" if step == "0" else ("j" if step == "1" else f"j * {step}")
        return f"{self._base(view, strides, write)}[{index}]"

    def load(self, load: Load) -> str:
        return loads_as(load, self._element(load.view, load.strides))

    def place(self, view: View, strides: tuple[Dim, ...], write: bool) -> tuple[str, str]:
        return self._base(view, strides, write), self._stride(strides, 2)

    def accumulator(self) -> str:
        return "gc::vload(t + j, w)" if self.vectors else "t[j]"

    def generate(self) -> tuple[str, str, Arguments]:
        self.indent = "    "
        for load in self.loop.loads():
            self._base(load.view, load.strides, False)
        for store in self.loop.stores:
            self._base(store.view, store.strides, True)
        bases = self.lines
        self.lines = []
        if self.vectors:
            self.indent = "    "
            for scalar in self.loop.scalars():  # what does not vary along a row
                if id(scalar) not in self.lanes:
                    self.emit(scalar)
            bases += self.lines
            self.lines = []
            self.indent = "        "
            for store in self.loop.stores:
                self.lane_store(store)
            loop = (
                "      gc::sweep<1>(0, (int64_t)width, [&](int64_t j, auto w, auto) "
                "__attribute__((always_inline)) {\n" + "\n".join(self.lines) + "\n      });\n"
            )
        else:
            self.indent = "        "
            for store in self.loop.stores:
                value = self.stored(store)
                self.line(f"{self._element(store.view, store.strides, True)} = {value};")
            loop = (
                "#pragma GCC ivdep\n      for (int64_t j = 0; j < (int64_t)width; ++j) {\n"
                + "\n".join(self.lines) + "\n      }\n"
            )  # fmt: skip
        text = (
            "static void GC_NAME(const gc_args* a, const float* acc, int64_t ld, int64_t z, "
            "int64_t m0, int64_t mr, int64_t n0, int64_t nr) {\n"
            f"{self.arguments.prologue()}"
            "  for (int64_t m = 0; m < mr; ++m) {\n"
            "    const float* __restrict t = acc + m * ld;\n" + "\n".join(bases) + "\n"
            "    auto row = [&](auto width) __attribute__((always_inline)) {\n" + loop + "    };\n"
            "    if (nr == 32) row(std::integral_constant<int64_t, 32>{});\n"
            "    else row(nr);\n  }\n}\n"
        )
        name = "epi_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        source = '#include <type_traits>\n#include "vmath.h"\n' + text.replace("GC_NAME", name)
        return name, source, self.arguments
