"""An ExportedProgram as a Graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from graphc.errors import CaptureError, UnsupportedError
from graphc.frontends import guards
from graphc.frontends.aliases import overlapping, shared_state, window
from graphc.frontends.lengths import simplify_rounding
from graphc.frontends.locations import module_of, traced_at
from graphc.frontends.naming import Asked, Place, int_range
from graphc.frontends.scalars import Scalars
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
    symbol,
    tensor_type,
)

#: checks that types, ranges and guards already hold
_CHECKS = (
    "aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range",
    "aten._assert_async", "aten.sym_",
)  # fmt: skip
#: arguments that say where a tensor lives
_PLACEMENT = ("pin_memory", "device", "layout")


class Importer:
    """Turns a functional ExportedProgram into a Graph.

    Args:
        saved: the program comes from a file, and its ranges and guards with it.
        names: names of flat inputs that forward's parameters do not name (what *args takes).

    Attributes (after `run`):
        leaves: per flat input {"leaf": i} or {"const": scalar}.
        notes: what the user should know (fixed lengths, narrowed ranges).
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        asked: Mapping[Place, Asked],
        *,
        saved: bool = False,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.program = program
        self.saved = saved
        self.names = dict(names or {})
        self.asked = asked
        self.notes: list[str] = []
        self.symbols: dict[str, Symbol] = {}
        self.leaves: list[dict[str, Any]] = []
        self.state_names: tuple[str, ...] = ()
        self._renames: dict[sympy.Expr, sympy.Expr] = {}
        self._values: dict[torch.fx.Node, tuple[Value, ...]] = {}
        self._inputs: list[Value] = []
        self._weights: dict[Value, torch.Tensor] = {}
        self._states: dict[Value, torch.Tensor] = {}
        self._nodes: list[Node] = []
        self._taken: set[str] = set()
        self._more_guards: list[Guard] = []
        self._scalars = Scalars(self.symbols, self._nodes.append, self._dim, self._value_of)

    def run(self) -> Graph:
        """The Graph.

        Raises:
            UnsupportedError: the program holds something that cannot be a Graph.
        """
        program, signature = self.program, self.program.graph_signature
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        self._name_symbols(placeholders)
        self._taken |= {n.name for n in program.graph.nodes if n.op == "call_function"}
        mutated = {
            s.target
            for s in signature.output_specs
            if s.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION")
        }
        shared: dict[Any, Value] = {}
        for fx_node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind.name == "USER_INPUT":
                self._input(fx_node, spec.arg)
            elif spec.kind.name in ("CUSTOM_OBJ", "TOKEN"):
                kind = spec.kind.name.lower()
                raise UnsupportedError(f"expected tensors, found a {kind} input at {spec.target}")
            elif spec.target in mutated:
                tensor = self._tensor(str(spec.target))
                state = Value("state", self._unique(str(spec.target)), type_of(tensor))
                self._states[state] = tensor
                self._values[fx_node] = (state,)
            else:
                tensor = self._tensor(str(spec.target))
                key = window(tensor)
                if key not in shared:
                    name = self._unique(str(spec.target))
                    shared[key] = Value("weight", name, type_of(tensor))
                    self._weights[shared[key]] = tensor
                self._values[fx_node] = (shared[key],)
        self._check_state_aliases()
        for fx_node in program.graph.nodes:
            if fx_node.op == "call_function":
                self._call(fx_node)
            elif fx_node.op == "get_attr":
                self._attribute(fx_node)
        return self._finish(placeholders)

    def _finish(self, placeholders: Sequence[torch.fx.Node]) -> Graph:
        signature = self.program.graph_signature
        output = next(n for n in self.program.graph.nodes if n.op == "output")
        results: list[Any] = []
        state_updates: dict[Value, Value] = {}
        input_updates: dict[Value, Value] = {}
        inputs = {n.name: self._values[n][0] for n in placeholders if n in self._values}
        states = {
            str(spec.target): self._values[n][0]
            for n, spec in zip(placeholders, signature.input_specs, strict=True)
            if spec.target is not None
        }
        for item, spec in zip(output.args[0], signature.output_specs, strict=True):
            kind = spec.kind.name
            if self._scalars.is_number(item):
                raise UnsupportedError(
                    "expected tensors or lengths as results, found a number computed from them",
                    where=traced_at(item.meta),
                    hint="return it as a 0-d tensor",
                )
            converted = self._argument(item)
            if kind == "USER_OUTPUT":
                results.append(converted)
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
                state_updates[states[str(spec.target)]] = converted
            elif kind == "USER_INPUT_MUTATION":
                input_updates[inputs[str(spec.target)]] = converted
            else:
                raise UnsupportedError(f"cannot build a graph with a {kind.lower()} output")
        self.state_names = tuple(value.name for value in self._states)
        return prune(
            Graph(
                self.symbols, tuple(self._inputs), self._weights, self._states,
                tuple(self._nodes), tuple(results), state_updates, input_updates,
                (*guards.collect(self.program, self._rename, saved=self.saved),
                 *self._more_guards),
            )
        )  # fmt: skip

    # -- inputs, weights, states -------------------------------------------------------------

    def _input(self, fx_node: torch.fx.Node, argument: Any) -> None:
        value = fx_node.meta.get("val")
        if isinstance(value, torch.Tensor):
            name = self.names.get(len(self.leaves), fx_node.name)
            leaf = Value("input", self._unique(name), self._type(value))
            self._inputs.append(leaf)
            self._values[fx_node] = (leaf,)
            self.leaves.append({"leaf": len(self._inputs) - 1})
        elif type(argument).__name__ == "ConstantArgument":
            self.leaves.append({"const": argument.value})
        else:
            raise UnsupportedError(
                f"expected tensor inputs or fixed Python scalars, found {argument}",
                where=f"input {fx_node.name}",
                hint="pass the number as a 0-d tensor if it must vary",
            )

    def _unique(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self._taken:
            number += 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate

    def _tensor(self, target: str) -> torch.Tensor:
        # non-persistent buffers and lifted constants live in constants, not in the state dict
        for table in (self.program.state_dict, self.program.constants):
            found = table.get(target)
            if isinstance(found, torch.Tensor):
                if found.device.type != "cpu":
                    raise UnsupportedError(
                        f"expected weights in memory of the CPU, found {target} on {found.device}",
                        hint="move the model to the CPU, or load its weights, before the build",
                    )
                return found.detach()
        raise CaptureError(f"expected a tensor for weight {target}, found none in the program")

    def _check_state_aliases(self) -> None:
        tensors = {v.name: t for v, t in (*self._states.items(), *self._weights.items())}
        written = {value.name for value in self._states}
        for names in overlapping(tensors):
            if written & set(names):
                raise shared_state(names)

    def _attribute(self, fx_node: torch.fx.Node) -> None:
        found: Any = self.program.graph_module
        for part in str(fx_node.target).split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedError(
                f"expected straight-line code, found the sub-graph {fx_node.target}",
                where=traced_at(next(iter(fx_node.users)).meta),
                hint="make the condition static (a constant or a shape)",
            )
        value = Value("weight", self._unique(fx_node.name), type_of(found))
        self._weights[value] = found.detach()
        self._values[fx_node] = (value,)

    # -- symbols -----------------------------------------------------------------------------

    def _name_symbols(self, placeholders: Sequence[torch.fx.Node]) -> None:
        ranges = self.program.range_constraints
        specs = self.program.graph_signature.input_specs
        users = [
            n for n, spec in zip(placeholders, specs, strict=True) if spec.kind.name == "USER_INPUT"
        ]
        dims = [
            (leaf, fx_node, position, size)
            for leaf, fx_node in enumerate(users)
            if isinstance(fx_node.meta.get("val"), torch.Tensor)
            for position, size in enumerate(fx_node.meta["val"].shape)
        ]
        fixed: dict[str, str] = {}
        # dims the user named first, then the others, so that a name lands where it was asked for
        for leaf, fx_node, position, size in dims:
            asked = self.asked.get((leaf, position))
            if asked is None:
                continue
            free = list(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else []
            if not free:
                fixed[asked.name] = (
                    f"{asked.name} is fixed at {int(size)}: the model holds for no other length "
                    f"(dimension {position} of {fx_node.name})"
                )
            elif len(free) == 1 and asked.derived != (size.node.expr == free[0]):
                low, high = int_range(ranges.get(free[0]))
                self._name(free[0], asked.name, low, high, asked)
        for leaf, fx_node, position, size in dims:
            if isinstance(size, torch.SymInt):
                for free in sorted(size.node.expr.free_symbols, key=str):
                    if free not in self._renames:
                        given = self.names.get(leaf, fx_node.name)
                        stem = re.sub(r"\W", "_", f"{given}_{position}")
                        name, number = stem, 1
                        while name in self.symbols:
                            number += 1
                            name = f"{stem}_{number}"
                        low, high = int_range(ranges.get(free))
                        self._name(free, name, low, high, None)
        for expr, bounds in ranges.items():
            if expr not in self._renames and isinstance(expr, sympy.Symbol):
                low, high = int_range(bounds)
                self._data_symbol(expr, low, high)
        self.notes += [text for name, text in fixed.items() if name not in self.symbols]

    def _name(self, expr: sympy.Expr, name: str, low: int, high: int, asked: Asked | None) -> None:
        if expr in self._renames:
            return
        if asked is not None:
            # torch assumes a length of at least 2 while it traces; whether 0 and 1 hold is for
            # `capture` to find out
            traced = low <= 2 and not self.saved
            low = asked.minimum if traced else max(low, asked.minimum)
            high = min(high, asked.maximum)
        if name in self.symbols:  # two lengths that the user called by one name
            low = max(low, self.symbols[name].minimum)
            high = min(high, self.symbols[name].maximum)
        env = guards.shape_env(self.program)
        hint = env.backed_var_to_val.get(expr, 0) if env is not None else 0
        self.symbols[name] = Symbol(name, max(low, 0), high, hint=int(hint))
        self._renames[expr] = symbol(name)

    def _data_symbol(self, expr: sympy.Expr, low: int, high: int) -> None:
        # a number read from data may be negative; a size may not
        info = Symbol(
            str(expr), low if expr.is_nonnegative is None else max(low, 0), high, data=True
        )
        self.symbols[info.name] = info
        self._renames[expr] = info.expr

    def _rename(self, expr: sympy.Expr) -> sympy.Expr | None:
        if not isinstance(expr, sympy.Basic):
            return sympy.sympify(expr)
        if any(free not in self._renames for free in expr.free_symbols):
            return None
        return simplify_rounding(expr).xreplace(self._renames)

    def _dim(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return as_dim(size)
        expr = size.node.expr
        for free in expr.free_symbols:
            if free not in self._renames:
                if not str(free).startswith("u"):
                    raise UnsupportedError(
                        f"expected sizes over input lengths, found the symbol {free}"
                    )
                self._data_symbol(free, 0, UNBOUNDED)
        return as_dim(simplify_rounding(expr).xreplace(self._renames))

    def _kept_dims(self, node: Node) -> None:
        """torch traces a squeeze of a size known only from data as if it were not 1: the run has
        to make sure of it."""
        for size in node.outputs[0].type.shape:
            free: set[sympy.Symbol] = getattr(size, "free_symbols", set())
            if any(self.symbols[str(s)].data for s in free):
                condition = sympy.Ne(size, 1)
                if condition is not sympy.true:
                    self._more_guards.append(Guard(condition, f"{size} != 1 (squeezed)"))

    # -- types and calls ---------------------------------------------------------------------

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

    def _value_of(self, item: torch.fx.Node) -> Value | None:
        return self._values[item][0] if item in self._values else None

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            value = item.meta.get("val")
            if isinstance(value, torch.SymInt):
                return self._dim(value)
            if (
                isinstance(value, (int, float, bool, str))
                or value is None
                and (item.op == "placeholder")
            ):
                return value
            if item not in self._values:
                raise UnsupportedError(
                    f"expected a tensor, found {value!r}",
                    where=traced_at(item.meta),
                )
            return self._values[item][0]
        if isinstance(item, (tuple, list)):
            return tuple(self._argument(i) for i in item)
        if isinstance(item, Mapping):
            return {k: self._argument(v) for k, v in item.items()}
        return self._dim(item) if isinstance(item, torch.SymInt) else item

    def _call(self, fx_node: torch.fx.Node) -> None:
        target, value = fx_node.target, fx_node.meta.get("val")
        where = traced_at(fx_node.meta)
        if getattr(target, "__name__", "") == "getitem":
            source, index = fx_node.args
            if isinstance(source, torch.fx.Node) and source in self._values:
                assert isinstance(index, int)
                self._values[fx_node] = (self._values[source][index],)
                return
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
                return  # arithmetic on lengths: expressions of the types, or graphc.scalars
            raise UnsupportedError(f"expected a torch operator, found {target}", where=where)
        name = str(target)
        if name.startswith(_CHECKS) or (value is None and not fx_node.users):
            return
        if _is_random(target, fx_node):
            raise UnsupportedError(
                f"expected a deterministic model, found the random operator {name}",
                where=where,
                hint="put the model into eval mode, or pass the random numbers in as an input",
            )
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return  # a number read from data: becomes a 0-d tensor where it is used
        if any(self._scalars.is_number(a) for a in fx_node.all_input_nodes):
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"expected a tensor of {name}, found {value!r}", where=where)
            self._values[fx_node] = (self._scalars.rewrite(fx_node, self._argument, where),)
            return
        flat = value if isinstance(value, (tuple, list)) else (value,)
        kwargs = {k: self._argument(v) for k, v in fx_node.kwargs.items() if k not in _PLACEMENT}
        args = tuple(self._argument(a) for a in fx_node.args)
        types = [self._result(v) for v in flat]
        node = make_node(target, args, kwargs, fx_node.name, types, where, module_of(fx_node.meta))
        self._nodes.append(node)
        if name.startswith("aten.squeeze."):
            self._kept_dims(node)
        self._values[fx_node] = node.outputs


def _is_random(op: torch._ops.OpOverload, call: torch.fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, parameter in enumerate(op._schema.arguments):
        if parameter.name in ("dropout_p", "p", "train"):
            given = call.args[position] if position < len(call.args) else parameter.default_value
            if not call.kwargs.get(parameter.name, given):
                return False
    return True
