"""One door for all frontends: torch.export, then the Graph.

`capture` traces an nn.Module; `import_program` turns an ExportedProgram into a Graph and keeps
what torch.export knows only in its guards.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.overrides import TorchFunctionMode

import graphc.ops
from graphc.errors import CaptureError, UnsupportedError
from graphc.frontends.trees import describe_tree
from graphc.ir.graph import Graph, Guard, Node, Value, make_node, prune
from graphc.ir.infer import type_of
from graphc.ir.types import (
    UNBOUNDED,
    ScalarType,
    Symbol,
    TensorType,
    Type,
    as_dim,
    dtype_name,
    tensor_type,
)


@dataclass(frozen=True)
class Captured:
    """A Graph and how the user calls it.

    arguments/keywords/results are JSON trees as graphc.plan.Plan documents them.
    `requested`/`proven` give each symbol's asked-for and proven range.
    """

    graph: Graph
    arguments: Any
    keywords: Any
    results: Any
    positional_names: tuple[str, ...]
    state_names: tuple[str, ...]
    out_spec: Any
    notes: tuple[str, ...] = ()
    requested: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class _Opaque(TorchFunctionMode):
    """Recurrent layers become one operator instead of a loop unrolled over time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("lstm", "gru") and len(args) == 9 and isinstance(args[3], bool):
            if name == "lstm":
                return graphc.ops.lstm(*args[:5], float(args[5]), *args[6:])
            return graphc.ops.gru(*args[:5], float(args[5]), *args[6:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _tracing() -> Any:
    """Settings under which a module is traced: no fused eager fast paths, no warnings."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    keep: frozenset[str],
) -> Captured:
    """Captures `module` on example inputs.

    Args:
        dynamic_shapes: as torch.export takes them. Where the model does not hold for the whole
            range asked for, the capture is repeated with that dimension left free, and the
            conditions it relied on become guards of the plan.
        keep: operator names that must reach the passes undecomposed.

    Raises:
        CaptureError: with the user's file and line, and the remedy.
    """
    notes: list[str] = []
    with _tracing(), _Opaque():
        attempts = [dynamic_shapes]
        if dynamic_shapes is not None:
            attempts.append(_relaxed(dynamic_shapes))
        failure: Exception | None = None
        for number, shapes in enumerate(attempts):
            try:
                program = torch.export.export(
                    module, args, dict(kwargs or {}), dynamic_shapes=shapes, strict=False
                )
                break
            except Exception as error:  # torch.export raises many unrelated classes
                failure = failure or error
                if number == 0 and not _is_constraint(error):
                    raise _capture_error(error) from error
                if number == 0:
                    first = str(error).strip().splitlines()
                    notes.append("range asked for not proven: " + " ".join(first[:2])[:400])
        else:
            assert failure is not None
            raise _capture_error(failure) from failure
        names = _dim_names(dynamic_shapes)
        captured = import_program(program, keep=keep, names=names, notes=notes)
    return captured


def _is_constraint(error: Exception) -> bool:
    text = str(error)
    return "onstraint" in text or "specializ" in text.lower() or "dynamic" in text


def _relaxed(shapes: Any) -> Any:
    """The same dynamic shapes with every named Dim left free (torch proves what it can)."""

    def free(item: Any) -> Any:
        if item is None or isinstance(item, int):
            return item
        return torch.export.Dim.AUTO

    def walk(tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {k: walk(v) for k, v in tree.items()}
        if isinstance(tree, (tuple, list)):
            return type(tree)(walk(v) for v in tree)
        return free(tree)

    return walk(shapes)


def _dim_names(shapes: Any) -> list[tuple[str, int, int]]:
    """(name, min, max) of each named Dim, in the order of appearance."""
    found: dict[str, tuple[str, int, int]] = {}

    def walk(tree: Any) -> None:
        if isinstance(tree, Mapping):
            for item in tree.values():
                walk(item)
        elif isinstance(tree, (tuple, list)):
            for item in tree:
                walk(item)
        elif hasattr(tree, "__name__") and hasattr(tree, "min"):
            high = tree.max if isinstance(tree.max, int) else UNBOUNDED
            low = tree.min if isinstance(tree.min, int) else 0
            found.setdefault(tree.__name__, (tree.__name__, low, high))

    walk(shapes)
    return list(found.values())


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def location_of(stack_trace: str | None) -> str:
    """The innermost frame of the user's own code: "path/model.py:12" (empty if unknown)."""
    if not stack_trace:
        return ""
    frames = _FRAME.findall(stack_trace)
    for path, line in reversed(frames):
        if "/torch/" not in path and "/graphc/frontends/" not in path:
            parts = path.split("/")
            return f"{'/'.join(parts[-2:])}:{line}"
    return ""


_REMEDIES = (
    ("GuardOnDataDependent", "the control flow depends on tensor values; use torch.where, or make "
     "the decision outside of the model"),
    ("data-dependent", "the control flow depends on tensor values; use torch.where, or make the "
     "decision outside of the model"),
    ("onstraint", "give the dimension a smaller range, or leave it fixed"),
    ("not found", "pass every input the model's forward needs"),
)  # fmt: skip


def _capture_error(error: Exception) -> CaptureError:
    text = str(error).strip() or type(error).__name__
    kind = type(error).__name__
    where = ""
    seen: BaseException | None = error
    while seen is not None and not where:
        frames = traceback.extract_tb(seen.__traceback__)
        for frame in reversed(frames):
            if "/torch/" not in frame.filename and "graphc/frontends" not in frame.filename:
                where = f"{frame.filename}:{frame.lineno}"
                break
        seen = seen.__cause__ or seen.__context__
    user = re.search(r'File "([^"]+)", line (\d+), in forward', text)
    if user:
        where = f"{user.group(1)}:{user.group(2)}"
    if isinstance(error, CaptureError):
        return error
    hint = next(
        (remedy for word, remedy in _REMEDIES if word in text or word in kind),
        "run the module's forward on these inputs in eager torch first; what fails there cannot "
        "be captured",
    )
    if isinstance(error, NotImplementedError):
        return UnsupportedError(
            f"the model cannot be captured: {kind}: {text[:600]}", where=where, hint=hint
        )
    return CaptureError(
        f"the model cannot be captured: {kind}: {text[:600]}", where=where, hint=hint
    )


def decompositions(keep: frozenset[str]) -> dict[Any, Any]:
    """torch's decomposition table without the operators that graphc lowers itself."""
    table = torch.export.default_decompositions()
    chosen: dict[Any, Any] = {}
    for op in list(table.keys()):
        if str(op) not in keep:
            chosen[op] = table[op]
    return chosen


def import_program(
    program: torch.export.ExportedProgram,
    *,
    keep: frozenset[str],
    names: Sequence[tuple[str, int, int]] = (),
    notes: Sequence[str] = (),
) -> Captured:
    """Turns an ExportedProgram into a Graph (functional, undecomposed where `keep` says so)."""
    with _tracing():
        try:
            program = program.run_decompositions(decompositions(keep))
        except Exception as error:
            raise _capture_error(error) from error
    return _Importer(program, names, notes).run()


class _Importer:
    def __init__(
        self,
        program: torch.export.ExportedProgram,
        names: Sequence[tuple[str, int, int]],
        notes: Sequence[str],
    ) -> None:
        self.program = program
        self.wanted = {name: (low, high) for name, low, high in names}
        self.notes = list(notes)
        self.symbols: dict[str, Symbol] = {}
        self.renames: dict[sympy.Expr, sympy.Expr] = {}
        self.values: dict[torch.fx.Node, tuple[Value, ...]] = {}
        self.locations: dict[str, str] = {}

    def run(self) -> Captured:
        program = self.program
        signature = program.graph_signature
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        self._name_symbols(placeholders)
        mutated = {
            s.target
            for s in signature.output_specs
            if s.kind.name == "BUFFER_MUTATION" and s.target is not None
        }
        inputs: list[Value] = []
        weights: dict[Value, torch.Tensor] = {}
        states: dict[Value, torch.Tensor] = {}
        state_of: dict[str, Value] = {}
        shared: dict[Any, Value] = {}
        leaves: list[Any] = []
        taken: set[str] = set()
        for fx_node, spec in zip(placeholders, signature.input_specs, strict=True):
            kind = spec.kind.name
            if kind == "USER_INPUT":
                argument = spec.arg
                value = fx_node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    leaf = Value("input", self._unique(fx_node.name, taken), self._type(value))
                    inputs.append(leaf)
                    self.values[fx_node] = (leaf,)
                    leaves.append({"leaf": len(inputs) - 1})
                elif type(argument).__name__ == "ConstantArgument":
                    leaves.append({"const": argument.value})
                else:
                    raise UnsupportedError(
                        f"expected tensor inputs or fixed Python scalars, found {argument}",
                        where=f"input {fx_node.name}",
                        hint="pass the number as a 0-d tensor if it must vary",
                    )
                continue
            if kind in ("CUSTOM_OBJ", "TOKEN"):
                raise UnsupportedError(
                    f"expected tensors, found a {kind.lower()} input", where=str(spec.target)
                )
            tensor = self._tensor(str(spec.target))
            if spec.target in mutated:
                state = Value("state", str(spec.target), type_of(tensor))
                states[state] = tensor
                state_of[str(spec.target)] = state
                self.values[fx_node] = (state,)
                continue
            key = _storage_key(tensor)
            if key not in shared:
                name = self._unique(str(spec.target), taken)
                shared[key] = Value("weight", name, type_of(tensor))
                weights[shared[key]] = tensor
            self.values[fx_node] = (shared[key],)
        nodes: list[Node] = []
        for fx_node in program.graph.nodes:
            if fx_node.op == "call_function":
                self._call(fx_node, nodes)
            elif fx_node.op == "get_attr":
                self._attribute(fx_node, weights)
        output = next(n for n in program.graph.nodes if n.op == "output")
        results: list[Any] = []
        state_updates: dict[Value, Value] = {}
        input_updates: dict[Value, Value] = {}
        by_name = {n.name: self.values[n][0] for n in placeholders if n in self.values}
        for item, spec in zip(output.args[0], signature.output_specs, strict=True):
            kind = spec.kind.name
            converted = self._argument(item)
            if kind == "USER_OUTPUT":
                results.append(converted)
            elif kind == "BUFFER_MUTATION":
                state_updates[state_of[str(spec.target)]] = converted
            elif kind == "USER_INPUT_MUTATION":
                input_updates[by_name[str(spec.target)]] = converted
            else:
                raise UnsupportedError(f"cannot build a graph with a {kind.lower()} output")
        graph = prune(
            Graph(
                self.symbols, tuple(inputs), weights, states, tuple(nodes), tuple(results),
                state_updates, input_updates, self._guards(),
            )
        )  # fmt: skip
        in_spec = program.call_spec.in_spec
        out_spec = program.call_spec.out_spec
        arguments, keywords = describe_tree(in_spec, leaves)["tuple"]
        outs = [{"leaf": i} for i in range(len(results))]
        return Captured(
            graph, arguments, keywords, describe_tree(out_spec, outs), (),
            tuple(state_of), out_spec, tuple(self.notes), self.wanted,
        )  # fmt: skip

    @staticmethod
    def _unique(name: str, taken: set[str]) -> str:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        return candidate

    def _tensor(self, target: str) -> torch.Tensor:
        # non-persistent buffers and lifted constants live in constants, not in the state dict
        for table in (self.program.state_dict, self.program.constants):
            if target in table:
                found = table[target]
                if isinstance(found, torch.Tensor):
                    return found.detach()
        raise CaptureError(f"expected a tensor for weight {target}, found none in the program")

    def _attribute(self, fx_node: torch.fx.Node, weights: dict[Value, torch.Tensor]) -> None:
        found: Any = self.program.graph_module
        for part in str(fx_node.target).split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedError(
                f"expected straight-line code, found the sub-graph {fx_node.target}",
                hint="make the condition static (a constant or a shape)",
            )
        value = Value("weight", fx_node.name, type_of(found))
        weights[value] = found.detach()
        self.values[fx_node] = (value,)

    def _name_symbols(self, placeholders: Sequence[torch.fx.Node]) -> None:
        ranges = self.program.range_constraints
        unnamed = list(self.wanted)
        for fx_node in placeholders:
            value = fx_node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            for position, size in enumerate(value.shape):
                if not isinstance(size, torch.SymInt):
                    continue
                expr = size.node.expr
                if not isinstance(expr, sympy.Symbol) or expr in self.renames:
                    continue
                name = self._name_for(fx_node, position, expr, unnamed)
                low, high = _range(ranges.get(expr))
                if name in self.wanted:
                    asked = self.wanted[name]
                    low, high = max(low if low > 2 else asked[0], asked[0]), min(high, asked[1])
                self._add_symbol(expr, Symbol(name, max(low, 0), high))
        for expr, bounds in ranges.items():
            if expr not in self.renames and isinstance(expr, sympy.Symbol):
                if str(expr).startswith("u"):
                    low, high = _range(bounds)
                    self._add_symbol(expr, Symbol(str(expr), max(low, 0), high, data=True))

    def _name_for(
        self, fx_node: torch.fx.Node, position: int, expr: sympy.Symbol, unnamed: list[str]
    ) -> str:
        # torch.export replaces the user's Dim by a symbol of its own; names are given back in
        # order, which holds because dims are visited in the same order as the inputs
        if unnamed:
            return unnamed.pop(0)
        stem = re.sub(r"\W", "_", f"{fx_node.name}_{position}")
        return self._unique(stem, set(self.symbols))

    def _add_symbol(self, expr: sympy.Expr, info: Symbol) -> None:
        self.symbols[info.name] = info
        self.renames[expr] = info.expr

    def _dim(self, size: Any) -> Any:
        if isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            expr = size.node.expr
            for free in expr.free_symbols:
                if free not in self.renames:
                    if not str(free).startswith("u"):
                        raise UnsupportedError(
                            f"expected sizes over input lengths, found the symbol {free}"
                        )
                    self._add_symbol(free, Symbol(str(free), 0, UNBOUNDED, data=True))
            return as_dim(expr.xreplace(self.renames))
        return as_dim(size)

    def _type(self, value: torch.Tensor) -> TensorType:
        if value.layout != torch.strided:
            raise UnsupportedError(f"expected strided tensors, found {value.layout}")
        shape = tuple(self._dim(s) for s in value.shape)
        strides = tuple(self._dim(s) for s in value.stride())
        return tensor_type(dtype_name(value.dtype), shape, strides)

    def _result(self, value: Any) -> Type:
        if isinstance(value, torch.Tensor):
            return self._type(value)
        if isinstance(value, torch.SymInt):
            return ScalarType("int", self._dim(value))
        return ScalarType(type(value).__name__.removeprefix("Sym").lower())

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            value = item.meta.get("val")
            if isinstance(value, torch.SymInt):
                return self._dim(value)
            if isinstance(value, (int, float, bool)) and not isinstance(value, torch.Tensor):
                return value
            if isinstance(value, (torch.SymFloat, torch.SymBool)):
                raise UnsupportedError(
                    f"expected tensors and lengths, found a {type(value).__name__} computed from "
                    "data or lengths",
                    where=location_of(item.meta.get("stack_trace")),
                    hint="keep the number as a 0-d tensor",
                )
            if item not in self.values:
                raise UnsupportedError(
                    f"expected a tensor, found {value!r}",
                    where=location_of(item.meta.get("stack_trace")),
                )
            return self.values[item][0]
        if isinstance(item, (tuple, list)):
            return tuple(self._argument(i) for i in item)
        if isinstance(item, Mapping):
            return {k: self._argument(v) for k, v in item.items()}
        if isinstance(item, (torch.SymInt,)):
            return self._dim(item)
        return item

    def _call(self, fx_node: torch.fx.Node, nodes: list[Node]) -> None:
        target = fx_node.target
        name = str(target)
        value = fx_node.meta.get("val")
        if getattr(target, "__name__", "") == "getitem":
            source, index = fx_node.args
            assert isinstance(source, torch.fx.Node) and isinstance(index, int)
            if source in self.values:
                self.values[fx_node] = (self.values[source][index],)
                return
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
                return  # arithmetic on lengths lives in the types
            raise UnsupportedError(
                f"expected a torch operator, found {target}",
                where=location_of(fx_node.meta.get("stack_trace")),
            )
        if name.startswith(("aten._assert_tensor_metadata", "aten._assert_scalar",
                            "aten.sym_constrain_range")):  # fmt: skip
            return
        if name.startswith("aten.sym_"):
            return
        if value is None and not fx_node.users:
            return
        if _is_random(target, fx_node):
            raise UnsupportedError(
                f"expected a deterministic model, found the random operator {name}",
                where=location_of(fx_node.meta.get("stack_trace")),
                hint="put the model into eval mode, or pass the random numbers in as an input",
            )
        flat = value if isinstance(value, (tuple, list)) else (value,)
        args = tuple(self._argument(a) for a in fx_node.args)
        kwargs = {
            k: self._argument(v) for k, v in fx_node.kwargs.items() if k not in ("pin_memory",)
        }
        kwargs = {k: v for k, v in kwargs.items() if not (k in ("device", "layout"))}
        node = make_node(
            target,
            args,
            kwargs,
            fx_node.name,
            [self._result(v) for v in flat],
            location_of(fx_node.meta.get("stack_trace")),
        )
        nodes.append(node)
        self.values[fx_node] = node.outputs

    def _guards(self) -> tuple[Guard, ...]:
        env = None
        for fx_node in self.program.graph.nodes:
            value = fx_node.meta.get("val")
            if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
                env = value.fake_mode.shape_env
                break
        if env is None:
            return ()
        guards: list[Guard] = []
        for guard in env.guards:
            expr = guard.expr
            if any(free not in self.renames for free in expr.free_symbols):
                continue
            condition = expr.xreplace(self.renames)
            if condition not in (True, sympy.true):
                guards.append(Guard(condition, str(condition)))
        for free, checks in env.deferred_runtime_asserts.items():
            for check in checks:
                if all(
                    s in self.renames and not self.symbols[str(self.renames[s])].data
                    for s in check.expr.free_symbols
                ):
                    condition = check.expr.xreplace(self.renames)
                    guards.append(Guard(condition, str(condition)))
        return tuple(dict.fromkeys(guards))


def _is_random(op: torch._ops.OpOverload, call: torch.fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, parameter in enumerate(op._schema.arguments):
        if parameter.name in ("dropout_p", "p", "train"):
            given = call.args[position] if position < len(call.args) else parameter.default_value
            if not call.kwargs.get(parameter.name, given):
                return False
    return True


def _range(bounds: Any) -> tuple[int, int]:
    """A torch ValueRanges as two ints."""
    if bounds is None:
        return 0, UNBOUNDED
    try:
        low = int(bounds.lower)
    except (TypeError, OverflowError, AttributeError, ValueError):
        low = 0
    try:
        high = min(int(bounds.upper), UNBOUNDED)
    except (TypeError, OverflowError, AttributeError, ValueError):
        high = UNBOUNDED
    return low, high


def _storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same window on the same storage."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


