"""Reads the canonical text of a Graph; every node's type is inferred again and compared.

Expressions go through Python's own `ast` and a table of allowed names: nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from graphc.errors import GraphcError, UsageError
from graphc.ir.graph import Graph, Guard, Node, Value, make_node
from graphc.ir.infer import TypeContext
from graphc.ir.types import (
    UNBOUNDED,
    Dim,
    ScalarType,
    Symbol,
    TensorType,
    Type,
    as_dim,
    long_dtype,
    same,
    symbol,
    tensor_type,
    torch_dtype,
    unclamped,
)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(functions, name)
    for name in (
        "FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CleanDiv", "CeilDiv", "Max", "Min",
        "Where", "FloorToInt", "CeilToInt", "TruncToInt", "RoundToInt", "IntTrueDiv",
        "FloatTrueDiv", "ToFloat", "PowByNatural", "FloatPow", "Identity", "LShift", "RShift",
    )
} | {
    "floor": sympy.floor, "ceiling": sympy.ceiling, "Abs": sympy.Abs,
    "Eq": sympy.Eq, "Ne": sympy.Ne, "And": sympy.And, "Or": sympy.Or, "Not": sympy.Not,
}  # fmt: skip
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: functions.FloorDiv, ast.Div: lambda a, b: a / b,
    ast.Mod: functions.Mod, ast.Pow: lambda a, b: a**b,
    ast.BitAnd: sympy.And, ast.BitOr: sympy.Or,
}  # fmt: skip
_RELATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne,
}  # fmt: skip

#: how `%12` is spelled while Python's parser reads a line: a letter that no symbol begins with
_MARK = "\u00d8"
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*"|%(\d+)')
_LEAF = re.compile(r"^%(\d+): (\S+) = (input|weight|state)\((\"(?:[^\"\\]|\\.)*\")(?:, (\w+))?\)$")
_SYMBOL = re.compile(r"^symbol (\w+) in (-?\d+)\.\.(\d+|inf)( data)?$")
_UPDATE = re.compile(r"^update (state|input) %(\d+) = %(\d+)$")
_TARGET = re.compile(r"^(\w+)\.(\w+)\.(\w+)$")
_TYPE = re.compile(r"^(\w+)\[([^\]]*)\](?:@\[([^\]]*)\])?$")
_SCALAR = re.compile(r"^(int|float|bool|NoneType)(?:\((.*)\))?$")


#: name, location and module of a node
Origin = tuple[str, str, str]


def parse_graph(
    text: str, tensors: Mapping[str, torch.Tensor] | None = None,
    origins: Sequence[Origin] | None = None,
) -> Graph:  # fmt: skip
    """The graph behind a text.

    Args:
        tensors: contents of weights and states by name; what is not given is zeros.
        origins: of each node, for a text that was printed here and is known to be whole: its types
            are taken as they are written.

    Raises:
        UsageError: the text is no graph, or a written type is not the inferred one; with the
            line number, what was written and what was inferred.
    """
    parser = _Parser(tensors or {}, origins)
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            parser.line(line)
        except GraphcError as error:
            raise UsageError(f"line {number}: {error.what}", where=line) from error
        except SyntaxError as error:
            raise UsageError(f"line {number}: expected an expression", where=line) from error
    if parser.results is None:
        raise UsageError("expected a last line `return (...)`, found none")
    return parser.graph()


def parse_dim(text: str, symbols: Mapping[str, Symbol] | None = None) -> Any:
    """A dimension (or, for guards, a relation) from its text; unknown names are lengths."""
    return _Expressions({}, symbols or {}).read(text)


def parse_type(text: str, symbols: Mapping[str, Symbol] | None = None) -> Type:
    """A type from its one-word form.

    Raises:
        UsageError: no such type.
    """
    reader = _Expressions({}, symbols or {})
    scalar = _SCALAR.match(text)
    if scalar:
        return ScalarType(scalar[1], None if scalar[2] is None else reader.read(scalar[2]))
    found = _TYPE.match(text)
    if found is None:
        raise UsageError(f"expected a type such as f32[1,T,64], found {text}")
    dtype = long_dtype(found[1])
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UsageError(f"expected a dtype such as f32, found {found[1]}")
    shape = reader.read(f"({found[2]},)") if found[2] else ()
    if found[3] is None:
        return TensorType(dtype, shape)
    return tensor_type(dtype, shape, reader.read(f"({found[3]},)"))


class _Parser:
    def __init__(
        self, tensors: Mapping[str, torch.Tensor], origins: Sequence[Origin] | None
    ) -> None:
        self.tensors, self.origins = tensors, origins
        self.symbols: dict[str, Symbol] = {}
        self.values: dict[int, Value] = {}
        self.leaves: dict[str, dict[Value, torch.Tensor]] = {"weight": {}, "state": {}}
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.guards: list[Guard] = []
        self.updates: dict[str, dict[Value, Value]] = {"state": {}, "input": {}}
        self.results: tuple[Any, ...] | None = None
        self.reader = _Expressions(self.values, self.symbols)

    def graph(self) -> Graph:
        assert self.results is not None
        return Graph(
            self.symbols, tuple(self.inputs), self.leaves["weight"], self.leaves["state"],
            tuple(self.nodes), self.results, self.updates["state"], self.updates["input"],
            tuple(self.guards),
        )  # fmt: skip

    def line(self, line: str) -> None:
        if self.results is not None:
            raise UsageError("expected nothing after `return`")
        if line.startswith("return "):
            self.results = self.reader.read(line.removeprefix("return "))
        elif line.startswith("guard "):
            text = line.removeprefix("guard ")
            self.guards.append(Guard(self.reader.read(text), text))
        elif line.startswith("symbol "):
            self._symbol(line)
        elif line.startswith("update "):
            found = _UPDATE.match(line)
            if found is None:
                raise UsageError("expected `update state|input %N = %M`")
            old, new = self.reader.value(int(found[2])), self.reader.value(int(found[3]))
            self.updates[found[1]][old] = new
        elif leaf := _LEAF.match(line):
            self._leaf(leaf)
        else:
            self._node(line)

    def _symbol(self, line: str) -> None:
        found = _SYMBOL.match(line)
        if found is None:
            raise UsageError("expected `symbol NAME in MIN..MAX`")
        high = UNBOUNDED if found[3] == "inf" else int(found[3])
        self.symbols[found[1]] = Symbol(found[1], int(found[2]), high, data=bool(found[4]))

    def _leaf(self, found: re.Match[str]) -> None:
        kind, name = found[3], json.loads(found[4])
        value = Value(kind, name, parse_type(found[2], self.symbols))  # type: ignore[arg-type]
        if kind == "input":
            self.inputs.append(value)
        else:
            self.leaves[kind][value] = self._content(value)
        self._define(int(found[1]), value)

    def _content(self, value: Value) -> torch.Tensor:
        shape, strides = value.type.shape, value.type.stride()
        if any(not isinstance(d, int) for d in (*shape, *strides)):
            raise UsageError(f"expected a weight of fixed size, found {value.type}")
        given = self.tensors.get(value.name)
        if given is None:
            made = torch.empty_strided(shape, strides, dtype=torch_dtype(value.type.dtype))
            return made.zero_()
        if tuple(given.shape) != shape or given.dtype != torch_dtype(value.type.dtype):
            raise UsageError(f"expected {value.type} for weight {value.name}, found {given.shape}")
        return given

    def _define(self, number: int, value: Value) -> None:
        if number != len(self.values):
            raise UsageError(f"expected %{len(self.values)} as the next number, found %{number}")
        self.values[number] = value

    def _node(self, line: str) -> None:
        left, equals, call = line.partition(" = ") if line.startswith("%") else ("", "", line)
        head, paren, _ = call.partition("(")
        if not paren or not call.endswith(")"):
            raise UsageError("expected `%N: type = operator(arguments)`")
        op = find_operator(head)
        args, kwargs = self.reader.arguments(call[len(head) :])
        written = [self._result(part) for part in _split(left)] if equals else []
        types = [t for _, t in written]
        if self.origins is None:
            types = _checked(TypeContext.of(self.symbols, self.guards), op, args, kwargs, types)
            name = f"v{written[0][0]}" if written else f"call{len(self.nodes)}"
            node = make_node(op, args, kwargs, name, types)
        elif len(self.nodes) < len(self.origins):
            node = make_node(op, args, kwargs, self.origins[len(self.nodes)][0], types,
                             *self.origins[len(self.nodes)][1:])  # fmt: skip
        else:
            raise UsageError(f"expected {len(self.origins)} nodes, found more")
        self.nodes.append(node)
        for (number, _), value in zip(written, node.outputs, strict=True):
            self._define(number, value)

    def _result(self, part: str) -> tuple[int, Type]:
        number, colon, text = part.strip().partition(": ")
        if not colon or not number[1:].isdigit():
            raise UsageError(f"expected `%N: type`, found {part}")
        return int(number[1:]), parse_type(text, self.symbols)


def _split(left: str) -> list[str]:
    return re.split(r", (?=%\d+: )", left)


def find_operator(target: str) -> torch._ops.OpOverload:
    """The torch operator behind "aten.linear.default".

    Raises:
        UsageError: torch has no such operator.
    """
    found = _TARGET.match(target)
    if found is not None:
        packet = getattr(getattr(torch.ops, found[1]), found[2], None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and found[3] in packet.overloads():
            overload = getattr(packet, found[3])
            assert isinstance(overload, torch._ops.OpOverload)
            return overload
    raise UsageError(f"expected a torch operator, found {target}")


def _checked(
    context: TypeContext, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    written: list[Type],
) -> list[Type]:  # fmt: skip
    if torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags:
        return written  # sizes that only the data tell have no inferred form to compare
    inferred = context.infer(op, args, kwargs) if op._schema.returns else ()
    if len(inferred) != len(written):
        raise UsageError(f"written {len(written)} results, inferred {len(inferred)}")
    for one, other in zip(written, inferred, strict=True):
        if not agree(one, other, strides=looks(op)):
            raise UsageError(f"written {one}, inferred {other}")
    return written


def agree(one: Type, other: Type, *, strides: bool = True) -> bool:
    """Whether two types are the same."""
    if isinstance(one, ScalarType) or isinstance(other, ScalarType):
        return type(one) is type(other) and str(one) == str(other)
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    if not all(map(equal, one.shape, other.shape)):
        return False
    if not strides or (one.strides is None and other.strides is None):
        return True
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(d == 1 or equal(unclamped(a), unclamped(b)) for d, a, b in pairs)


#: sizes at which expressions are compared that sympy can't bring into one form
_POINTS = ((1009, 757), (64, 96), (37, 128), (8, 5))


def equal(a: Dim, b: Dim) -> bool:
    """Whether two sizes are the same: surely, or at several lengths (floor divisions and clamps
    have many forms)."""
    if same(a, b) or str(a) == str(b):
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    free = sorted(sympy.sympify(a - b).free_symbols, key=str)
    for first, step in _POINTS:
        point = {s: sympy.Integer(first + step * i) for i, s in enumerate(free)}
        try:
            if sympy.sympify(a).xreplace(point) != sympy.sympify(b).xreplace(point):
                return False
        except (ZeroDivisionError, ValueError):
            continue
    return True


def looks(op: torch._ops.OpOverload) -> bool:
    """Whether the results are views, so that their strides follow from the argument's. For what
    is computed, strides are a habit of torch's kernels that meta functions do not all share."""
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


class _Expressions:
    """Reads arguments and dimensions out of Python's syntax tree."""

    def __init__(self, values: Mapping[int, Value], symbols: Mapping[str, Symbol]) -> None:
        self.values = values
        self.symbols = symbols

    def read(self, text: str) -> Any:
        return self._expression(_tree(text))

    def arguments(self, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of "(%1, 2, dim=3)"."""
        call = _tree(f"f{text}")
        if not isinstance(call, ast.Call):
            raise UsageError("expected arguments in parentheses")
        args = tuple(self._expression(a) for a in call.args)
        kwargs = {str(k.arg): self._expression(k.value) for k in call.keywords}
        return args, kwargs

    def value(self, number: int) -> Value:
        if number not in self.values:
            raise UsageError(f"expected a value defined above, found %{number}")
        return self.values[number]

    def _expression(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value) if value is not Ellipsis:
                return value
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return tuple(self._expression(e) for e in elts)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                return _torch_constant(attribute)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _exact(-self._expression(operand))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                apply = _OPERATORS[type(operator)]
                return _exact(apply(_symbolic(self._expression(left)), self._expression(right)))
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                apply = _RELATIONS[type(operator)]
                return apply(self._expression(left), self._expression(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._call(name, [self._expression(a) for a in args])
            case _:
                raise UsageError(f"expected an argument, found {ast.unparse(node)}")

    def _name(self, name: str) -> Any:
        if name.startswith(_MARK):
            return self.value(int(name[1:]))
        if name in ("inf", "nan"):
            return float(name)
        info = self.symbols.get(name)
        return info.expr if info is not None else symbol(name)

    def _call(self, name: str, args: list[Any]) -> Any:
        if name == "device" and len(args) == 1:
            return torch.device(args[0])
        if name == "complex" and len(args) == 2:
            return complex(*args)
        if name not in _FUNCTIONS:
            raise UsageError(f"expected one of {', '.join(sorted(_FUNCTIONS))}, found {name}")
        return _exact(_FUNCTIONS[name](*map(_symbolic, args)))


def _tree(text: str) -> ast.expr:
    def mark(found: re.Match[str]) -> str:
        return found[0] if found[1] is None else _MARK + found[1]

    return ast.parse(_REFERENCE.sub(mark, text), mode="eval").body


def _symbolic(item: Any) -> Any:
    return sympy.Integer(item) if isinstance(item, int) and not isinstance(item, bool) else item


def _exact(item: Any) -> Any:
    """Integers as int, expressions as they are."""
    return as_dim(item) if isinstance(item, sympy.Expr) else item


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name, None)
    if isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        return found
    raise UsageError(f"expected a dtype, layout or memory format, found torch.{name}")
