"""Lowered steps -> the Program of one bucket: expressions, arena offsets, step records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.utils._sympy import functions as tsf

from graphc.errors import InternalError, UnsupportedError
from graphc.ir.graph import Graph
from graphc.ir.types import Dim, as_dim, dtype_name, itemsize, row_major
from graphc.lowering.context import View
from graphc.lowering.steps import FallbackStep, KernelStep, Lowered
from graphc.plan import Buffer, Expression, Fallback, Kernel, Program, Step


class PlannedMemory(NamedTuple):
    """Where buffers lie: the (first, last) Step that touches each, offsets of those in the arena,
    the arena's bytes, the least it could have and what it would have without reuse."""

    spans: Mapping[int, tuple[int, int]]
    offsets: Mapping[int, int]
    arena_bytes: int
    lower_bound: int
    naive_bytes: int


#: places buffers, whose bytes by number are given, in an arena; the memory pass, handed in by the
#: caller
Planner = Callable[[Sequence[Step], Mapping[int, int]], PlannedMemory]


class Expressions:
    """The expression table of a program: postfix code, equal expressions stored once."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.slots = {name: f"s{k}" for k, name in enumerate(symbols)}
        self.table: list[Expression] = []
        self.graph: Graph | None = None  # whose sizes these are
        self._known: dict[Any, int] = {}

    def add(self, dim: Any) -> int:
        """The index of a Dim or relation."""
        key = dim if isinstance(dim, int) else sympy.sympify(dim)
        if isinstance(key, sympy.Integer):
            key = int(key)
        if key not in self._known:
            self._known[key] = len(self.table)
            self.table.append(self._code(key))
        return self._known[key]

    def _code(self, item: Any) -> Expression:
        if isinstance(item, bool) or item in (sympy.true, sympy.false):
            return [int(bool(item))]
        if isinstance(item, (int, sympy.Integer)):
            return [int(item)]
        if isinstance(item, sympy.Symbol):
            if item.name not in self.slots:
                raise InternalError(f"the size {item.name} is not bound to any input")
            return [self.slots[item.name]]
        if isinstance(item, sympy.Add):
            return self._sum(item)
        if isinstance(item, sympy.Mul):
            return self._product(item)
        if isinstance(item, (sympy.Pow, tsf.PowByNatural)) and item.args[1].is_integer:
            return [*self._code(item.args[0]), *self._code(item.args[1]), "pow"]
        operator = _BINARY.get(type(item))
        if operator is not None and len(item.args) == 2:
            first, second = (self._code(a) for a in item.args)
            if operator in (">", ">="):
                return [*second, *first, "<" if operator == ">" else "<="]
            return [*first, *second, operator]
        if isinstance(item, (tsf.Max, sympy.Max, tsf.Min, sympy.Min, sympy.And, sympy.Or)):
            word = {"Max": "max", "Min": "min", "And": "and", "Or": "or"}[type(item).__name__]
            code = self._code(item.args[0])
            for other in item.args[1:]:
                code = [*code, *self._code(other), word]
            return code
        if isinstance(item, sympy.Not):
            return [*self._code(item.args[0]), "not"]
        if isinstance(item, sympy.Abs):
            return [*self._code(item.args[0]), "abs"]
        if isinstance(item, tsf.ModularIndexing):
            base, divisor, modulus = (self._code(a) for a in item.args)
            return [*base, *divisor, "//", *modulus, "%"]
        if isinstance(item, tsf.Identity):
            return self._code(item.args[0])
        if isinstance(item, (sympy.Piecewise, tsf.Where)):
            return self._choice(item)
        if isinstance(item, sympy.floor):
            numerator, denominator = item.args[0].as_numer_denom()
            return [*self._code(numerator), *self._code(denominator), "//"]
        if isinstance(item, sympy.ceiling):
            numerator, denominator = item.args[0].as_numer_denom()
            return [*self._code(-numerator), *self._code(denominator), "//", "neg"]
        raise UnsupportedError(
            f"expected integer arithmetic on lengths, found {item} ({type(item).__name__})",
            hint="compute it on tensors, or fix the length",
        )

    def _sum(self, item: sympy.Add) -> Expression:
        code: Expression = []
        for k, term in enumerate(item.args):
            code = [*code, *self._code(term)] + (["+"] if k else [])
        return code

    def _product(self, item: sympy.Mul) -> Expression:
        numerator, denominator = item.as_numer_denom()
        if denominator != 1:
            return [*self._code(numerator), *self._code(denominator), "//"]
        code: Expression = []
        for k, factor in enumerate(item.args):
            code = [*code, *self._code(factor)] + (["*"] if k else [])
        return code

    def _choice(self, item: Any) -> Expression:
        if isinstance(item, tsf.Where):
            condition, yes, no = item.args
            return [*self._code(condition), *self._code(yes), *self._code(no), "select"]
        (yes, condition), *rest = item.args
        if not rest:
            return self._code(yes)
        other = sympy.Piecewise(*rest)
        return [*self._code(condition), *self._code(yes), *self._code(other), "select"]


_BINARY: dict[type, str] = {
    tsf.FloorDiv: "//", tsf.CleanDiv: "//", tsf.Mod: "%", tsf.PythonMod: "%", sympy.Mod: "%",
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip


def build_program(
    lowered: Lowered,
    *,
    phase: str,
    bucket: str,
    limits: Mapping[str, int],
    symbols: Sequence[str],
    sources: Mapping[str, str],
    planner: Planner,
    least: Mapping[str, int] | None = None,
) -> tuple[Program, Expressions]:
    """The Program of one bucket, and its expression table (which may still grow); buffers get
    arena offsets for sizes at `limits`. `least` gives the plan's smallest lengths: where this
    graph begins later, a guard says so."""
    graph = lowered.graph
    table = Expressions(symbols)
    table.graph = graph
    data = {s.name for s in graph.symbols.values() if s.data}
    inputs = [[table.add(d) for d in v.type.shape] for v in graph.inputs]
    outputs = [[] if t is None else [table.add(d) for d in t.shape] for t in lowered.result_types]
    guards = [(table.add(g.condition), g.text) for g in graph.guards]
    for name, low in (least or {}).items():
        known = graph.symbols[name]
        if known.minimum > low:
            condition = sympy.Ge(known.expr, known.minimum)
            guards.append((table.add(condition), f"{name} >= {known.minimum}"))
    steps = [_step(step, table, sources) for step in lowered.steps]
    sizes: dict[int, int] = {}
    kinds: list[str] = []
    for number, info in enumerate(lowered.buffers):
        kind = info.kind
        if kind == "arena":
            free = {str(s) for s in getattr(info.nbytes, "free_symbols", ())}
            if free & data:
                kind = "dynamic"
            else:
                sizes[number] = evaluate(info.nbytes, limits)
        kinds.append(kind)
    planned = planner(steps, sizes)
    buffers = [
        Buffer(
            kinds[k], info.index, planned.offsets.get(k, 0), table.add(info.nbytes),
            *planned.spans.get(k, (0, 0)), info.name,
        )
        for k, info in enumerate(lowered.buffers)
    ]  # fmt: skip
    program = Program(
        phase, bucket, dict(limits), table.table, inputs, outputs, guards, buffers, steps,
        planned.arena_bytes, planned.lower_bound, planned.naive_bytes,
    )  # fmt: skip
    return program, table


def evaluate(dim: Dim, values: Mapping[str, int]) -> int:
    """A Dim at given lengths."""
    if isinstance(dim, int):
        return dim
    known = {s: values[s.name] for s in dim.free_symbols}
    return int(dim.xreplace({s: sympy.Integer(v) for s, v in known.items()}))


def _step(step: KernelStep | FallbackStep, table: Expressions, sources: Mapping[str, str]) -> Step:
    if isinstance(step, KernelStep):
        return Step(
            kernel=Kernel(
                symbol=step.symbol,
                pointers=[
                    (v.buffer, table.add(as_dim(v.offset * itemsize(v.dtype))))
                    for v in step.pointers
                ],
                immediates=[table.add(i) for i in step.immediates],
                range=table.add(step.range),
                grain=step.grain,
                scratch=table.add(step.scratch),
                reads=step.reads,
                writes=step.writes,
                label=step.label,
                source=sources.get(step.symbol, ""),
                nodes=step.nodes,
            )
        )
    node = step.node
    dtypes: list[str] = []
    outputs: list[int] = []
    shapes: list[list[int]] = []
    strides: list[list[int]] = []
    for view, value in zip(step.outputs, node.outputs, strict=True):
        if view is None:
            outputs.append(-1)
            dtypes.append("int64")
            shapes.append([])
            strides.append([])
            continue
        outputs.append(view.buffer)
        dtypes.append(value.type.dtype)
        shapes.append([table.add(d) for d in value.type.shape])
        strides.append([table.add(d) for d in row_major(value.type.shape)])
    slots = list(table.slots)
    return Step(
        fallback=Fallback(
            target=node.target,
            arguments=[_tree(a, table) for a in step.arguments],
            keywords={k: _tree(v, table) for k, v in step.keywords.items()},
            outputs=outputs,
            output_dtypes=dtypes,
            output_shapes=shapes,
            output_strides=strides,
            binds=[(slots.index(name), output, dim) for name, output, dim in step.binds],
            label=node.target,
            nodes=[node.name],
            reason=step.reason,
            reads=list(dict.fromkeys(step.reads)),
        )
    )


def _tree(item: Any, table: Expressions) -> Any:
    if isinstance(item, View):
        return {
            "buffer": item.buffer,
            "dtype": item.dtype,
            "shape": [table.add(d) for d in item.shape],
            "strides": [table.add(d) for d in item.strides],
            "offset": table.add(item.offset),
        }
    if isinstance(item, (tuple, list)):
        return [_tree(i, table) for i in item]
    if isinstance(item, Mapping):
        return {k: _tree(v, table) for k, v in item.items()}
    if isinstance(item, sympy.Expr) and not isinstance(item, sympy.Integer):
        return {"expr": table.add(item)}
    if isinstance(item, torch.dtype):
        return {"dtype": dtype_name(item)}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, torch.memory_format):
        return {"memory_format": str(item).removeprefix("torch.")}
    if isinstance(item, torch.layout):
        return {"layout": str(item).removeprefix("torch.")}
    if isinstance(item, float) and item != item:
        return {"float": "nan"}
    if isinstance(item, float) and item in (float("inf"), float("-inf")):
        return {"float": "inf" if item > 0 else "-inf"}
    if isinstance(item, complex):
        return {"complex": [item.real, item.imag]}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, sympy.Integer):
        return int(item)
    raise InternalError(f"cannot write the argument {item!r} into a plan")
