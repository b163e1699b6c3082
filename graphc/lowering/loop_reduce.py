"""The C++ pieces of a reduction: declaration, step, join, result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphc.errors import InternalError
from graphc.lowering.loops import Reduce
from graphc.lowering.pointwise import COMPUTE, is_float

COLUMNS = 64  # kept points that a column reduction accumulates at once


@dataclass
class Accumulation:
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
    bits = dtype.removeprefix("u").removeprefix("int")
    if dtype.startswith("u"):
        return "0", f"UINT{bits}_MAX"
    return f"INT{bits}_MIN", f"INT{bits}_MAX"


def accumulator(scalar: Reduce, number: int) -> Accumulation:
    """Row reductions: SIMD partials of at most 1024 elements, joined in double."""
    a, source = f"a{number}", scalar.arg.dtype
    kind = scalar.kind
    if kind in ("sum", "mean", "prod"):
        if is_float(source) or is_float(scalar.dtype):
            part = "double" if "float64" in (source, scalar.dtype) else "float"
            unit, op = ("0", "+") if kind != "prod" else ("1", "*")
            return Accumulation(
                [f"double {a} = {unit};"], lambda v, i: [f"{a}t {op}= {v};"], a,
                "float64" if part == "double" else "float32", f"reduction({op}:{a}t)",
                [f"{part} {a}t = {unit};"], [f"{a} {op}= {a}t;"],
            )  # fmt: skip
        unit, op = ("0", "+") if kind != "prod" else ("1", "*")
        return Accumulation(
            [f"int64_t {a} = {unit};"], lambda v, i: [f"{a} {op}= (int64_t)({v});"], a, source,
            f"reduction({op}:{a})",
        )  # fmt: skip
    if kind in ("any", "all"):
        unit, op = ("0", "|") if kind == "any" else ("1", "&")
        return Accumulation(
            [f"int {a} = {unit};"], lambda v, i: [f"{a} {op}= (int)({v});"], a, "bool",
            f"reduction({op}:{a})",
        )  # fmt: skip
    low, high = _bounds(source)
    start = low if kind in ("max", "argmax") else high
    sign = ">" if kind in ("max", "argmax") else "<"
    ctype = COMPUTE[source]
    if kind in ("max", "min"):
        if source == "bool":
            return Accumulation(
                [f"int {a} = {start};"],
                lambda v, i: [f"{a} {'|' if kind == 'max' else '&'}= (int){v};"], a, source,
                f"reduction({'|' if kind == 'max' else '&'}:{a})",
            )  # fmt: skip
        declare = [f"{ctype} {a} = {start};"]
        if not is_float(source):
            return Accumulation(
                declare, lambda v, i: [f"{a} = {v} {sign} {a} ? {v} : {a};"], a, source,
                f"reduction({kind}:{a})",
            )  # fmt: skip
        return Accumulation(
            [*declare, f"int {a}n = 0;"],
            lambda v, i: [f"{a} = {v} {sign} {a} ? {v} : {a};", f"{a}n |= ({v} != {v});"],
            f"{a}n ? ({ctype})NAN : {a}", source, f"reduction({kind}:{a}) reduction(|:{a}n)",
        )  # fmt: skip
    if kind in ("argmax", "argmin"):
        nan = f" || ({a} == {a} && {{v}} != {{v}})" if is_float(source) else ""
        return Accumulation(
            [f"{ctype} {a} = {start}; int64_t {a}i = -1;"],
            lambda v, i: [
                f"{{ const {ctype} w = {v}; if ({a}i < 0 || w {sign} {a}"
                + nan.replace("{v}", "w")
                + f") {{ {a} = w; {a}i = {i}; }} }}"
            ],
            f"{a}i", source, sequential=True,
        )  # fmt: skip
    raise InternalError(f"unknown reduction {kind}")


def column_accumulator(scalar: Reduce, number: int) -> Accumulation:
    """The same over a block of neighbouring kept points."""
    a, source, kind = f"a{number}", scalar.arg.dtype, scalar.kind
    floating = is_float(source) or is_float(scalar.dtype)
    low, high = _bounds(source)
    if kind in ("sum", "mean", "prod"):
        ctype = "double" if floating else "int64_t"
        unit, op = ("0", "+") if kind != "prod" else ("1", "*")
        takes = (
            ("float64" if "float64" in (source, scalar.dtype) else "float32")
            if floating
            else source
        )
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
    return Accumulation(
        [f"{ctype} {a}[{COLUMNS}]; for (int j = 0; j < {COLUMNS}; ++j) {a}[j] = {unit};"],
        lambda v, i: [step.replace("{v}", v)],
        f"{a}[j]",
        takes,
    )


@dataclass
class LaneAccumulation:
    """The C++ pieces of one reduction in registers: `step` adds a vector, `join` moves the
    registers into the sum so far and empties them."""

    declare: list[str]
    step: Callable[[str], list[str]]
    result: str
    dtype: str
    join: list[str] = field(default_factory=list)


def lane_accumulator(scalar: Reduce, number: int, unroll: int) -> LaneAccumulation:
    """A reduction of float or bool vectors into `unroll` registers (kinds as in `Reduce`, without
    positions). Sums are joined in double."""
    a, kind = f"a{number}", scalar.kind
    registers = f"gc::vf {a}v[{unroll}]"
    if kind in ("sum", "mean", "prod"):
        unit, op, word = ("1", "*", "prod") if kind == "prod" else ("0", "+", "sum")
        fill = f"for (auto& t : {a}v) t = gc::splat({unit}.0f);"
        return LaneAccumulation(
            [f"double {a} = {unit};", f"{registers};", fill],
            lambda v: [f"{a}v[u] {op}= gc::only({v}, {unit}.0f, w);"], a, "float32",
            [f"{a} {op}= gc::h{word}(gc::{word}_of({a}v));", fill],
        )  # fmt: skip
    if kind in ("any", "all"):
        unit, op, word = ("0", "|", "any") if kind == "any" else ("-1", "&", "all")
        return LaneAccumulation(
            [f"gc::vi {a}v[{unroll}];", f"for (auto& t : {a}v) t = {unit} - gc::vi{{}};"],
            lambda v: [f"{a}v[u] {op}= gc::only({v}, {unit}, w);"],
            f"gc::h{word}(gc::{word}_of({a}v))", "bool",
        )  # fmt: skip
    if kind in ("max", "min"):
        unit, op = ("-INFINITY", ">") if kind == "max" else ("INFINITY", "<")
        return LaneAccumulation(
            [f"{registers}; gc::vi {a}n[{unroll}] = {{}};",
             f"for (auto& t : {a}v) t = gc::splat({unit});"],
            lambda v: [
                f"{{ const gc::vf t = gc::only({v}, {unit}, w); {a}n[u] |= t != t; "
                f"{a}v[u] = t {op} {a}v[u] ? t : {a}v[u]; }}"
            ],
            f"gc::hany(gc::any_of({a}n)) ? NAN : gc::h{kind}(gc::{kind}_of({a}v))", "float32",
        )  # fmt: skip
    raise InternalError(f"no reduction {kind} in registers")


@dataclass
class ColumnSums:
    """A reduction of each column of a block in an array: `step` adds the vector of a row at column
    k, `flush` moves the sums so far of column k to double, `value(divisor)` is the result at k."""

    declare: list[str]
    step: Callable[[str], list[str]]
    value: Callable[[str], str]
    dtype: str
    flush: list[str] = field(default_factory=list)


def column_sums(scalar: Reduce, number: int, block: int) -> ColumnSums:
    """The arrays of a float or bool reduction over a block of columns."""
    a, kind = f"a{number}", scalar.kind
    at = f"gc::load<gc::vf>({a} + k)"
    if kind in ("sum", "mean", "prod"):
        unit, op = ("1", "*") if kind == "prod" else ("0", "+")
        return ColumnSums(
            [f"alignas(64) float {a}[{block}]; double {a}d[{block}];",
             f"for (int64_t k = 0; k < {block}; ++k) {a}[k] = {unit}, {a}d[k] = {unit};"],
            lambda v: [f"gc::store({a} + k, {at} {op} {v});"],
            lambda divisor: f"gc::narrowed({a}d + k, {divisor or '1'})", "float32",
            [f"{a}d[k] {op}= {a}[k]; {a}[k] = {unit};"],
        )  # fmt: skip
    if kind in ("any", "all"):
        unit, op = ("0", "|") if kind == "any" else ("-1", "&")
        at = f"gc::load<gc::vi>({a} + k)"
        return ColumnSums(
            [f"alignas(64) int32_t {a}[{block}];",
             f"for (int64_t k = 0; k < {block}; ++k) {a}[k] = {unit};"],
            lambda v: [f"gc::store({a} + k, {at} {op} {v});"], lambda divisor: at, "bool",
        )  # fmt: skip
    unit = "-INFINITY" if kind == "max" else "INFINITY"
    return ColumnSums(
        [f"alignas(64) float {a}[{block}];",
         f"for (int64_t k = 0; k < {block}; ++k) {a}[k] = {unit};"],
        lambda v: [f"gc::store({a} + k, gc::v{kind}({v}, {at}));"], lambda divisor: at, "float32",
    )  # fmt: skip
