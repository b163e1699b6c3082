"""Scalars as explicit vectors: which loops can be written so, and the C++ of each expression.

A scalar that varies from lane to lane is a `gc::vf` (float32, bfloat16 and float16 are computed in
float) or, for bool, a mask `gc::vi`; all others stay plain C++ scalars in front of the loop. The
operators' expressions are the same text as in scalar code, with functions replaced by their
vector forms; one that has none runs lane by lane (`gc::each`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from graphc.ir.types import Dim
from graphc.lowering.context import View
from graphc.lowering.loop_writer import Arguments, Writer
from graphc.lowering.loops import (
    Accumulator,
    Compute,
    Load,
    Loop,
    Position,
    Reduce,
    Scalar,
    Store,
    copied,
)
from graphc.lowering.pointwise import COMPUTE, cast

_FLOATS = ("float32", "bfloat16", "float16")
_SMALL_INTS = ("int8", "uint8", "int16", "int32")  # read as floats
#: functions of float expressions that have a vector form of another name
_NAMES = {
    "sqrt": "gc::vsqrt", "sqrtf": "gc::vsqrt", "fabsf": "gc::vabs", "floorf": "gc::vfloor",
    "ceilf": "gc::vceil", "truncf": "gc::vtrunc", "nearbyintf": "gc::vnearest",
}  # fmt: skip
_VECTOR = frozenset(_NAMES.values()) | frozenset(
    f"gc::{name}"
    for name in (
        "vexp", "vexpm1", "vlog", "vlog1p", "vsigmoid", "vtanh", "verf", "vsin", "vcos", "vgelu",
        "vgelu_tanh", "vsilu", "vsoftplus", "vmax", "vmin", "rounded<gc::bf16>",
        "rounded<gc::f16>",
    )
)  # fmt: skip
_NUMBER = re.compile(r"\(float\)-?(?:[0-9.]+(?:e[-+]?[0-9]+)?|NAN|INFINITY)|\b[0-9][0-9.]*"
                     r"(?:e[-+]?[0-9]+)?f?\b|\bINFINITY\b|\{[0-9]+\}")  # fmt: skip
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(?:::[A-Za-z_0-9]+)*(?:<[A-Za-z_0-9:]+>)?")


def vector_template(template: str) -> str | None:
    """An operator's expression over vectors, or None if some part of it has no vector form."""
    text = _WORD.sub(lambda m: _NAMES.get(m.group(), m.group()), template)
    rest = _NUMBER.sub(" ", text)
    if any(word not in _VECTOR for word in _WORD.findall(rest)):
        return None
    text = text.replace("&&", "&").replace("||", "|")
    return re.sub(r"!(?!=)", "~", text)


def lanes_of(loop: Loop, scalars: Sequence[Scalar], axes: Collection[int]) -> set[int]:
    """Ids of the scalars that vary along `axes`; a reduction does not."""
    found: set[int] = set()
    for scalar in scalars:
        if isinstance(scalar, Load):
            varies = any(scalar.strides[a] != 0 for a in axes)
        elif isinstance(scalar, Position):
            varies = scalar.axis is not None and scalar.axis in axes
        elif isinstance(scalar, Accumulator):
            varies = True
        else:
            varies = not isinstance(scalar, Reduce) and any(
                id(o) in found for o in scalar.operands()
            )
        if varies:
            found.add(id(scalar))
    return found


def vectorisable(
    loop: Loop, scalars: Sequence[Scalar], lanes: Collection[int], axes: Collection[int]
) -> bool:
    """Whether everything that varies from lane to lane (along `axes`) is float or bool
    arithmetic."""
    floats = {id(s) for s in scalars if isinstance(s, Load) and s.dtype in _SMALL_INTS}
    work = False
    for scalar in scalars:
        if isinstance(scalar, Reduce):
            work = True
            wanted = ("bool",) if scalar.kind in ("any", "all") else _FLOATS
            if scalar.kind in ("argmax", "argmin") or scalar.arg.dtype not in wanted:
                return False
            if scalar.kind not in ("any", "all") and scalar.dtype not in _FLOATS:
                return False
            continue
        if id(scalar) not in lanes:
            continue
        if isinstance(scalar, Load):
            if scalar.dtype not in (*_FLOATS, "bool", *_SMALL_INTS):
                return False
        elif isinstance(scalar, Compute):
            work = work or copied(scalar) is scalar
            if scalar.dtype not in (*_FLOATS, "bool"):
                return False
            if any(takes not in (*_FLOATS, "bool") for takes in scalar.takes):
                return False
        elif scalar.dtype not in _FLOATS:
            return False
    for store in loop.stores:
        varies = id(store.scalar) in lanes or any(store.strides[a] != 0 for a in axes)
        if not varies and loop.reduced:
            continue  # one value a row, written by scalar code
        if id(store.scalar) in floats or store.view.dtype not in (*_FLOATS, "bool"):
            return False
        if store.scalar.dtype not in (*_FLOATS, "bool"):
            return False
    return work


class LaneWriter(Writer):
    """Writes the scalars of `lanes` as vectors of width `w` at `index`."""

    index = "i"

    def __init__(self, loop: Loop, arguments: Arguments) -> None:
        super().__init__(loop, arguments)
        self.lanes: set[int] = set()

    # where an access along the lanes begins, and its step
    def place(self, view: View, strides: tuple[Dim, ...], write: bool) -> tuple[str, str]:
        raise NotImplementedError

    def lane_position(self, scalar: Position) -> str:
        raise NotImplementedError

    def _one(self, scalar: Scalar) -> str:
        if id(scalar) not in self.lanes:
            return super()._one(scalar)
        mask = scalar.dtype == "bool"
        if isinstance(scalar, Load):
            text = self._lane_load(scalar)
        elif isinstance(scalar, Position):
            text = self.lane_position(scalar)
        elif isinstance(scalar, Accumulator):
            text = self.accumulator()
        else:
            assert isinstance(scalar, Compute)
            text = self._lane_compute(scalar)
        name = f"v{self.number[id(scalar)]}"
        self.line(f"const gc::{'vi' if mask else 'vf'} {name} = {text};")
        return name

    def _lane_load(self, load: Load) -> str:
        pointer, step = self.place(load.view, load.strides, False)
        function = "vtest" if load.dtype == "bool" else "vload"
        if step == "0":
            return (
                f"gc::vmask({pointer}[0] != 0)"
                if load.dtype == "bool"
                else (f"gc::splat((float){pointer}[0])")
            )
        if step == "1":
            return f"gc::{function}({pointer} + {self.index}, w)"
        return f"gc::{function}({pointer} + {self.index} * {step}, {step}, w)"

    def lane_text(self, scalar: Scalar, takes: str) -> str:
        """A known scalar as a vector that an operand of dtype `takes` is read from."""
        text = self.known[id(scalar)]
        if id(scalar) not in self.lanes:
            text = cast(text, scalar.dtype, takes)
            return f"gc::vmask({text})" if takes == "bool" else f"gc::splat((float)({text}))"
        if scalar.dtype == "bool" and takes != "bool":
            return f"gc::one({text})"
        if scalar.dtype != "bool" and takes == "bool":
            return f"({text} != 0.0f)"
        return text

    def _lane_compute(self, scalar: Compute) -> str:
        parts = [self.lane_text(a, t) for a, t in zip(scalar.args, scalar.takes, strict=True)]
        template = vector_template(scalar.template)
        if "bool" in scalar.takes and re.search(r"[<>]", scalar.template):
            template = None  # a mask's true is -1: it has another order
        if template is not None and not any(f"{{{k}}}" in template for k in range(len(parts))):
            return f"gc::{'vmask' if scalar.dtype == 'bool' else 'splat'}({scalar.template})"
        if template is not None:
            for position, part in enumerate(parts):
                template = template.replace(f"{{{position}}}", part)
            return template
        body = scalar.template
        for position in range(len(parts)):
            body = body.replace(f"{{{position}}}", f"x{position}")
        names = ", ".join(f"{COMPUTE[t]} x{k}" for k, t in enumerate(scalar.takes))
        result = "gc::vi" if scalar.dtype == "bool" else "gc::vf"
        ctype = COMPUTE[scalar.dtype]
        return (
            f"gc::each<{result}>([&]({names}) -> {ctype} {{ return ({ctype})({body}); }}"
            + "".join(f", {part}" for part in parts)
            + ")"
        )

    def lane_store(self, store: Store) -> None:
        """Emits a store of vectors."""
        self.emit(store.scalar)
        value = self.lane_text(store.scalar, store.view.dtype)
        pointer, step = self.place(store.view, store.strides, True)
        if step == "1":
            self.line(f"gc::vstore({pointer} + {self.index}, {value}, w);")
        else:
            self.line(f"gc::vstore({pointer} + {self.index} * {step}, {step}, {value}, w);")
