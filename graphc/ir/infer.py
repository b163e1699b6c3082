"""Type inference: an operator's own meta function, run on fake tensors with symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from graphc.errors import InternalError
from graphc.ir.graph import Guard, Value, map_tree
from graphc.ir.types import (
    Dim,
    ScalarType,
    Symbol,
    TensorType,
    Type,
    as_dim,
    dtype_name,
    tensor_type,
    torch_dtype,
)

#: sizes the meta functions see behind the symbols: unlike each other and unlike real sizes, so
#: that an accidental equality with a constant cannot specialise a graph
_HINTS = (1009, 1291, 1553, 1867, 2129, 2411, 2729, 3067, 3371, 3673)


def _hints(symbols: Mapping[str, Symbol], guards: Sequence[Guard]) -> dict[sympy.Symbol, int]:
    """A size for each length: the one at capture, else one inside its range under which every
    guard holds (if one is found; a graph read from text does not say what was captured)."""
    lengths = [info for info in symbols.values() if not info.data]
    first: dict[sympy.Symbol, int] | None = None
    for multiple in (1, 2, 3, 4, 8, 16, 64, 128, 256, 512, 1024):
        for divisor in (1, 4, 16, 32, 64, 128, 256):
            hints: dict[sympy.Symbol, int] = {}
            for position, info in enumerate(lengths):
                hint = _HINTS[position % len(_HINTS)] + 8 * (position // len(_HINTS))
                hint = max(multiple, hint // divisor // multiple * multiple)
                hints[info.expr] = info.hint or max(info.minimum, min(hint, info.maximum))
            first = hints if first is None else first
            if all(_holds(guard, hints) for guard in guards):
                return hints
    return first or {}


def _holds(guard: Guard, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """False only if the guard is surely broken."""
    try:
        answer = guard.condition.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    except (ValueError, ZeroDivisionError):
        return False  # the guard itself has no meaning at these sizes
    return answer not in (False, sympy.false)


class TypeContext:
    """Infers result types over a set of named symbols. Fake tensors of Values are kept."""

    _cache: dict[Any, TypeContext] = {}

    def __init__(self, symbols: Mapping[str, Symbol], guards: Sequence[Guard] = ()) -> None:
        self._hints = _hints(symbols, guards)
        self.env = ShapeEnv(specialize_zero_one=True, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self._ints: dict[sympy.Expr, Any] = {}
        self._to_env: dict[sympy.Expr, sympy.Expr] = {}
        self._from_env: dict[sympy.Expr, sympy.Expr] = {}
        self._fakes: dict[Value, torch.Tensor] = {}
        for info in symbols.values():
            if info.data:
                made = self.env.create_unbacked_symint()
            else:
                made = self._backed(info)
            self._to_env[info.expr] = made.node.expr
            self._from_env[made.node.expr] = info.expr
            self._ints[info.expr] = made

    @classmethod
    def of(cls, symbols: Mapping[str, Symbol], guards: Sequence[Guard] = ()) -> TypeContext:
        """The shared context for these symbols under these guards."""
        known = tuple((s, s.hint) for s in symbols.values())
        key = (known, tuple(sorted(guard.text for guard in guards)))
        if key not in cls._cache:
            if len(cls._cache) > 8:
                cls._cache.clear()
            cls._cache[key] = cls(symbols, guards)
        return cls._cache[key]

    def _backed(self, info: Symbol) -> Any:
        hint = self._hints[info.expr]
        source = ConstantSource(info.name)
        expr = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        if isinstance(expr, sympy.Integer):  # a hint of 0 or 1 would be specialised
            expr = self.env.create_symbol(
                max(2, hint),
                source,
                dynamic_dim=DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
            )
        return self.env.create_symintnode(expr, hint=hint, source=source)

    def symint(self, dim: Dim) -> Any:
        """The SymInt (or int) for a Dim of ours."""
        if isinstance(dim, int):
            return dim
        if dim not in self._ints:
            expr = dim.xreplace(self._to_env)
            try:
                hint = int(expr.xreplace(dict(self.env.backed_var_to_val)))
            except (TypeError, AttributeError):
                hint = None
            self._ints[dim] = self.env.create_symintnode(expr, hint=hint)
        return self._ints[dim]

    def dim(self, size: Any) -> Dim:
        """Our Dim for an int or SymInt of this context."""
        if isinstance(size, torch.SymInt):
            expr = self.env.simplify(size.node.expr)
            return as_dim(expr.xreplace(self._from_env))
        return as_dim(size)

    def fake(self, value: Value) -> Any:
        """The fake tensor that stands for a Value."""
        if value not in self._fakes:
            if isinstance(value.type, ScalarType):
                raise InternalError(f"number {value} used as a tensor")
            shape = [self.symint(d) for d in value.type.shape]
            strides = [self.symint(d) for d in value.type.stride()]
            with self.mode, self._quiet():
                made = torch.empty_strided(shape, strides, dtype=torch_dtype(value.type.dtype))
            self._fakes[value] = made
        return self._fakes[value]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        with torch.no_grad(), enable_python_dispatcher():
            yield

    def infer(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Type, ...]:
        """Result types of op(*args, **kwargs), lists of tensors flattened.

        Raises InternalError if the operator refuses these types.
        """

        def leaf(item: Any) -> Any:
            if isinstance(item, Value):
                return self.fake(item)
            if isinstance(item, sympy.Expr) and not isinstance(item, sympy.Integer):
                return self.symint(item)
            return item

        def listed(item: Any) -> Any:
            return [listed(i) for i in item] if isinstance(item, tuple) else item

        fake_args = tuple(listed(a) for a in map_tree(leaf, args))
        fake_kwargs = {k: listed(v) for k, v in map_tree(leaf, kwargs).items()}
        with self.mode, self._quiet():
            try:
                result = op(*fake_args, **fake_kwargs)
            except Exception as error:
                raise InternalError(
                    f"{op} refuses its arguments: {type(error).__name__}: {error}"
                ) from error
        flat = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(self.type_of(r) for r in flat)

    def type_of(self, result: Any) -> Type:
        """Our type of a fake result."""
        if isinstance(result, torch.Tensor):
            shape = tuple(self.dim(s) for s in result.shape)
            strides = tuple(self.dim(s) for s in result.stride())
            return tensor_type(dtype_name(result.dtype), shape, strides)
        if isinstance(result, torch.SymInt):
            return ScalarType("int", result.node.expr.xreplace(self._from_env))
        if isinstance(result, (int, float, bool)) or result is None:
            return ScalarType(type(result).__name__)
        if isinstance(result, (torch.SymFloat, torch.SymBool)):
            return ScalarType("float" if isinstance(result, torch.SymFloat) else "bool")
        raise InternalError(f"unknown result {type(result).__name__}")


def type_of(tensor: torch.Tensor) -> TensorType:
    """The type of a real tensor."""
    shape = tuple(int(s) for s in tensor.shape)
    strides = tuple(int(s) for s in tensor.stride())
    return tensor_type(dtype_name(tensor.dtype), shape, strides)
