"""What a capture relied on: conditions on lengths that torch.export knows only in its guards.

A range says how far the example's dimension was allowed to vary; the guards say for which lengths
the traced code is the right code. Both are kept; a graph without its guards answers silently wrong.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy import functions as torch_sympy

from graphc.errors import UnsupportedError
from graphc.ir.graph import Guard


def shape_env(program: torch.export.ExportedProgram) -> Any:
    """The ShapeEnv behind a program's fake tensors, None if it has no symbols."""
    for fx_node in program.graph.nodes:
        value = fx_node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, FakeTensor):
                return item.fake_mode.shape_env
            if isinstance(item, torch.SymInt):
                return item.node.shape_env
    return None


def collect(
    program: torch.export.ExportedProgram,
    rename: Callable[[sympy.Expr], sympy.Expr | None],
    *,
    saved: bool,
) -> tuple[Guard, ...]:
    """All conditions of a program over the graph's symbols; `rename` answers None for an
    expression with symbols the graph does not have. Of a `saved` program only their text is left.
    """
    conditions: list[Any] = []
    env = shape_env(program)
    if env is not None:
        conditions += [rename(guard.expr) for guard in env.guards]
        for checks in env.deferred_runtime_asserts.values():
            conditions += [rename(check.expr) for check in checks]
    if saved:
        conditions += [rename(expr) for expr in written(program)]
    found: dict[Any, Guard] = {}
    for condition in conditions:
        if condition is None or condition in (True, sympy.true):
            continue
        found.setdefault(condition, Guard(condition, str(condition)))
    return tuple(found.values())


def written(program: torch.export.ExportedProgram) -> list[sympy.Expr]:
    """The guards that a program carries as text (all that is left of them in a saved file).

    Raises:
        UnsupportedError: a guard on sizes that cannot be read.
    """
    sizes = _input_sizes(program)
    found: list[sympy.Expr] = []
    for text in getattr(program, "_guards_code", None) or ():
        if ".size()" not in text and ".stride()" not in text:
            continue  # values of Python scalars; those are constants of the call
        try:
            found.append(_read(ast.parse(text, mode="eval").body, sizes))
        except (KeyError, TypeError, ValueError, SyntaxError) as error:
            raise UnsupportedError(
                f"expected a guard over input sizes, found {text}", where="guards of the program"
            ) from error
    return found


def _input_sizes(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Example inputs by the spelling the guards use: L['x'], L['state']['k'][0]."""
    from torch.utils import _pytree as pytree

    signature = program.graph_signature
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    leaves = [
        node.meta.get("val")
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
        if spec.kind.name == "USER_INPUT"
    ]
    assert program.call_spec.in_spec is not None  # torch.export always gives one
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    top = program.module_call_graph[0].signature
    names = list(getattr(top, "forward_arg_names", None) or ())
    table: dict[str, torch.Tensor] = {}

    def add(root: str, value: Any) -> None:
        flat, _ = pytree.tree_flatten_with_path(value)
        table.update({root + pytree.keystr(path): leaf for path, leaf in flat})

    for position, value in enumerate(args):
        name = names[position] if position < len(names) else f"args_{position}"
        add(f"L['{name}']", value)
        stem, _, number = name.rpartition("_")
        if stem and number.isdecimal():  # what *args takes is spelled L['args'][0]
            add(f"L['{stem}'][{number}]", value)
    for name, value in kwargs.items():
        add(f"L['{name}']", value)
    return table


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: torch_sympy.FloorDiv,
    ast.Mod: torch_sympy.PythonMod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "max": torch_sympy.Max,
    "min": torch_sympy.Min,
    "abs": sympy.Abs,
    "math.ceil": torch_sympy.CeilToInt,
    "math.floor": torch_sympy.FloorToInt,
    "math.trunc": torch_sympy.TruncToInt,
    "float": torch_sympy.ToFloat,
    "torch.sym_float": torch_sympy.ToFloat,
}


def _read(tree: ast.expr, sizes: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float)):
        return sympy.sympify(tree.value)
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Div):
        return torch_sympy.IntTrueDiv(_read(tree.left, sizes), _read(tree.right, sizes))
    if isinstance(tree, ast.BinOp):
        return _BINARY[type(tree.op)](_read(tree.left, sizes), _read(tree.right, sizes))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_read(tree.operand, sizes)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        return sympy.Not(_read(tree.operand, sizes))
    if isinstance(tree, ast.BoolOp):
        join = sympy.And if isinstance(tree.op, ast.And) else sympy.Or
        return join(*(_read(item, sizes) for item in tree.values))
    if isinstance(tree, ast.Compare):
        items: Sequence[ast.expr] = [tree.left, *tree.comparators]
        return sympy.And(
            *(
                _COMPARE[type(op)](_read(a, sizes), _read(b, sizes))
                for op, a, b in zip(tree.ops, items, items[1:], strict=False)
            )
        )
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Call):
        called = tree.value.func
        if isinstance(called, ast.Attribute) and called.attr in ("size", "stride"):
            tensor = sizes[ast.unparse(called.value)]
            index = ast.literal_eval(tree.slice)
            size: Any = getattr(tensor, called.attr)()[index]
            return size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
    if isinstance(tree, ast.Call) and not tree.keywords:
        return _CALLS[ast.unparse(tree.func)](*(_read(item, sizes) for item in tree.args))
    raise ValueError(ast.dump(tree))


def truth(condition: Any, values: Mapping[sympy.Expr, sympy.Expr]) -> Any:
    """A guard's condition at given lengths; a length at which it divides by zero fails it."""
    try:
        return condition.xreplace(dict(values))
    except ZeroDivisionError:
        return sympy.false
