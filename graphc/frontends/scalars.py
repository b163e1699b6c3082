"""Numbers computed from lengths or read from data, as 0-d tensors of the graph.

torch.export keeps `T ** 0.5` or `x.item() * 2` as Python arithmetic between the operators. A graph
knows only integer expressions over lengths, so floating-point and boolean numbers become 0-d
float64 and bool tensors, and the operators that take them as scalars become their tensor form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from graphc.errors import UnsupportedError
from graphc.ir.graph import Node, Value, make_node
from graphc.ir.infer import TypeContext
from graphc.ir.types import Symbol, TensorType, dtype_name, torch_dtype

aten = torch.ops.aten

#: Python arithmetic -> the operator on 0-d tensors
_ARITHMETIC: dict[Any, torch._ops.OpOverload] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.pow: aten.pow.Tensor_Tensor,
    operator.mod: aten.remainder.Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, operator.lt: aten.lt.Tensor, operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor, operator.ge: aten.ge.Tensor, operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor, operator.and_: aten.logical_and.default,
    operator.or_: aten.logical_or.default, torch.sym_not: aten.logical_not.default,
    torch.sym_max: aten.maximum.default, torch.sym_min: aten.minimum.default,
}  # fmt: skip
for _name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2"):
    _function = getattr(torch, f"_sym_{_name}", None)
    if _function is not None:
        _ARITHMETIC[_function] = getattr(aten, _name).default

#: operator with a scalar -> the same with a tensor; the scalar keeps its place
_WITH_TENSOR: dict[str, torch._ops.OpOverload] = {
    "aten.add.Scalar": aten.add.Tensor, "aten.sub.Scalar": aten.sub.Tensor,
    "aten.mul.Scalar": aten.mul.Tensor, "aten.div.Scalar": aten.div.Tensor,
    "aten.pow.Tensor_Scalar": aten.pow.Tensor_Tensor, "aten.pow.Scalar": aten.pow.Tensor_Tensor,
    "aten.remainder.Scalar": aten.remainder.Tensor, "aten.fmod.Scalar": aten.fmod.Tensor,
    "aten.div.Scalar_mode": aten.div.Tensor_mode,
    "aten.eq.Scalar": aten.eq.Tensor, "aten.ne.Scalar": aten.ne.Tensor,
    "aten.lt.Scalar": aten.lt.Tensor, "aten.le.Scalar": aten.le.Tensor,
    "aten.gt.Scalar": aten.gt.Tensor, "aten.ge.Scalar": aten.ge.Tensor,
    "aten.masked_fill.Scalar": aten.masked_fill.Tensor, "aten.clamp.default": aten.clamp.Tensor,
    "aten.clamp_min.default": aten.clamp_min.Tensor,
    "aten.clamp_max.default": aten.clamp_max.Tensor,
    "aten.where.Scalar": aten.where.self, "aten.where.ScalarOther": aten.where.self,
    "aten.where.ScalarSelf": aten.where.self,
}  # fmt: skip
#: operators that fill with a scalar: position of the scalar (None: keyword or computed)
_FILLS = {
    "aten.full.default": 1, "aten.full_like.default": 1, "aten.new_full.default": 2,
    "aten.fill.Scalar": 1, "aten.scalar_tensor.default": 0,
}  # fmt: skip


class Scalars:
    """Builds the 0-d tensors. `emit` appends a node; `dim` turns a SymInt into a Dim."""

    def __init__(
        self,
        symbols: Mapping[str, Symbol],
        emit: Callable[[Node], None],
        dim: Callable[[Any], Any],
        value_of: Callable[[torch.fx.Node], Value | None],
    ) -> None:
        self._symbols = symbols
        self._emit = emit
        self._dim = dim
        self._value_of = value_of
        self._made: dict[torch.fx.Node, Value] = {}
        self._counter = 0

    def call(self, op: torch._ops.OpOverload, *args: Any, location: str = "", **kwargs: Any) -> Any:
        """Appends op(*args) and answers its first result."""
        types = TypeContext.of(self._symbols).infer(op, args, kwargs)
        self._counter += 1
        name = f"number_{self._counter}"
        node = make_node(op, args, kwargs, name, types, location)
        self._emit(node)
        return node.outputs[0]

    def is_number(self, item: Any) -> bool:
        """Whether an argument is a number that only a 0-d tensor can hold."""
        if not isinstance(item, torch.fx.Node):
            return False
        return isinstance(item.meta.get("val"), (torch.SymFloat, torch.SymBool))

    def tensor(self, item: Any, where: str = "") -> Value:
        """The 0-d tensor (float64, int64 or bool) of a number or fx node."""
        if not isinstance(item, torch.fx.Node):
            return self._constant(item)
        if item in self._made:
            return self._made[item]
        value = item.meta.get("val")
        if isinstance(value, torch.SymInt):
            made = self._constant(self._dim(value))
        elif isinstance(value, (bool, int, float)):
            made = self._constant(value)
        else:
            made = self._compute(item, where)
        self._made[item] = made
        return made

    def _constant(self, number: Any) -> Value:
        kinds = {bool: torch.bool, float: torch.float64}
        if isinstance(number, sympy.Float):
            number = float(number)
        dtype = kinds.get(type(number), torch.int64)
        made: Value = self.call(aten.scalar_tensor.default, number, dtype=dtype)
        return made

    def _compute(self, item: torch.fx.Node, where: str) -> Value:
        target = item.target
        if str(target) in ("aten._local_scalar_dense.default", "aten.item.default"):
            source = item.args[0]
            assert isinstance(source, torch.fx.Node)
            held = self._value_of(source)
            if held is not None and isinstance(held.type, TensorType):
                flat = self.call(aten.reshape.default, held, ()) if held.type.shape else held
                return self._cast(flat, "bool" if held.type.dtype == "bool" else "float64")
        if target is torch.sym_float:
            return self._cast(self.tensor(item.args[0], where), "float64")
        op = _ARITHMETIC.get(target)
        if op is None or item.kwargs:
            raise UnsupportedError(
                f"expected arithmetic on a length, found {item.format_node()}",
                where=where,
                hint="keep the number as a 0-d tensor",
            )
        operands = [self.tensor(a, where) for a in item.args]
        if any(o.type.dtype == "float64" for o in operands) or target is operator.truediv:
            operands = [self._cast(o, "float64") for o in operands]
        made: Value = self.call(op, *operands, location=where)
        return made

    def _cast(self, value: Value, dtype: str) -> Value:
        if value.type.dtype == dtype:
            return value
        made: Value = self.call(aten._to_copy.default, value, dtype=torch_dtype(dtype))
        return made

    def rewrite(self, call: torch.fx.Node, argument: Callable[[Any], Any], where: str) -> Value:
        """The value of an operator call some of whose scalars are computed numbers.

        Raises:
            UnsupportedError: the operator takes no tensor in place of that scalar.
        """
        target, result = call.target, call.meta["val"]
        assert isinstance(target, torch._ops.OpOverload)
        name = str(target)
        wanted = dtype_name(result.dtype) if isinstance(result, torch.Tensor) else ""
        if name in _FILLS:
            return self._fill(call, name, wanted, argument, where)
        parameters = target._schema.arguments
        args = [argument(a) if not self.is_number(a) else a for a in call.args]
        kwargs: dict[str, Any] = {}
        for key, item in call.kwargs.items():
            kwargs[key] = self.tensor(item, where) if self.is_number(item) else argument(item)
        if name == "aten.rsub.Scalar" and len(args) == 2:
            first = self._operand(args[1], wanted, where)
            made = self.call(aten.sub.Tensor, first, args[0], location=where)
            return self._cast(made, wanted)
        if isinstance(kwargs.get("alpha"), Value) and name.startswith(("aten.add.", "aten.sub.")):
            second = self._operand(args[1], wanted, where)
            args[1] = self.call(aten.mul.Tensor, second, self._cast(kwargs.pop("alpha"), wanted))
        op = _WITH_TENSOR.get(name, target)
        for position, item in enumerate(args):
            parameter = parameters[position]
            takes_tensor = "Tensor" in str(parameter.type)
            scalar = str(parameter.type) in ("number", "Scalar", "Optional[number]")
            if self.is_number(item):
                if not takes_tensor and op is target:
                    raise self._refuse(name, parameter.name, where)
                args[position] = self._operand(item, wanted, where)
            elif op is not target and scalar and item is not None and not isinstance(item, Value):
                args[position] = self._operand(item, wanted, where)
        if any(isinstance(kwargs.get(p.name), Value) and "Tensor" not in str(p.type)
               for p in op._schema.arguments):  # fmt: skip
            raise self._refuse(name, "a keyword", where)
        made = self.call(op, *args, location=where, **kwargs)
        return self._cast(made, wanted) if wanted else made

    def _operand(self, item: Any, wanted: str, where: str) -> Any:
        """A number beside tensors: it takes part in their dtype as a Python number would."""
        if isinstance(item, Value):
            return item
        value = self.tensor(item, where)
        if value.type.dtype == "float64" and wanted in ("float32", "bfloat16", "float16"):
            return self._cast(value, "float32")
        return value

    def _fill(
        self,
        call: torch.fx.Node,
        name: str,
        wanted: str,
        argument: Callable[[Any], Any],
        where: str,
    ) -> Value:
        position = _FILLS[name]
        item = call.args[position] if position < len(call.args) else call.kwargs["fill_value"]
        value = self._cast(self.tensor(item, where), wanted)
        shape = tuple(self._dim(s) for s in call.meta["val"].shape)
        made = self.call(aten.expand.default, value, shape, location=where) if shape else value
        return made

    @staticmethod
    def _refuse(name: str, parameter: str, where: str) -> UnsupportedError:
        return UnsupportedError(
            f"expected a fixed number for {parameter!r} of {name}, found one computed from lengths "
            "or data",
            where=where,
            hint="compute it as a 0-d tensor, or make it a constant",
        )
