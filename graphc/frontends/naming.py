"""Which dimension of which input the user named: `dynamic_shapes` laid over the flat inputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphc.errors import UsageError
from graphc.ir.types import UNBOUNDED

#: (flat input, dimension)
Place = tuple[int, int]


@dataclass(frozen=True)
class Asked:
    """A named length as the user asked for it, both ends included; `derived` if the dimension is
    not the length itself but computed from it (2 * T)."""

    name: str
    minimum: int
    maximum: int
    derived: bool = False


@dataclass(frozen=True)
class _Leaf:
    index: int


def combined(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the name of forward's parameter, as torch.export combines them.

    Raises:
        UsageError: forward does not take these arguments.
    """
    try:
        bound = inspect.signature(module.forward).bind(*args, **dict(kwargs))
    except TypeError as error:
        raise UsageError(
            f"expected the inputs of forward, found others: {error}",
            where=where_defined(module.forward),
            hint=f"forward{inspect.signature(module.forward)}",
        ) from error
    return dict(bound.arguments)


def where_defined(function: Callable[..., Any]) -> str:
    """ "file.py:12" of a function, empty if unknown."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def positional_names(module: torch.nn.Module, count: int) -> tuple[str, ...]:
    """forward's parameter names of the first `count` positional arguments; what *args takes is
    named args_0, args_1, ..."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            given = getattr(module, "input_names", None)
            rest = count - len(names)
            if isinstance(given, (list, tuple)) and len(given) == rest:
                names.extend(str(name) for name in given)
            else:
                names.extend(f"{parameter.name}_{i}" for i in range(rest))
    return tuple(names[:count])


def spread_names(module: torch.nn.Module, args: Sequence[Any]) -> dict[int, str]:
    """Names of the tensors that forward takes by *args, by flat input, as identifiers."""
    found: dict[int, str] = {}
    kinds = {p.name for p in inspect.signature(module.forward).parameters.values()}
    leaf = 0
    for name, value in zip(positional_names(module, len(args)), args, strict=False):
        if name not in kinds and isinstance(value, torch.Tensor):
            found[leaf] = re.sub(r"\W", "_", name)
        leaf += len(pytree.tree_leaves(value))
    return found


def asked_dims(
    module: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any
) -> dict[Place, Asked]:
    """The named Dims of `dynamic_shapes` by flat input and dimension."""
    found: dict[Place, Asked] = {}
    if dynamic_shapes is None:
        return found
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    marked_args, marked_kwargs = pytree.tree_unflatten([_Leaf(i) for i in range(len(leaves))], spec)
    tree = combined(module, marked_args, marked_kwargs)
    shapes = dynamic_shapes
    if isinstance(shapes, Mapping):
        for name, value in tree.items():
            _walk(value, shapes.get(name), found)
    else:
        for value, item in zip(tree.values(), shapes, strict=False):
            _walk(value, item, found)
    return found


def _walk(value: Any, shapes: Any, found: dict[Place, Asked]) -> None:
    if shapes is None:
        return
    if isinstance(value, _Leaf):
        items = shapes.items() if isinstance(shapes, Mapping) else enumerate(_sequence(shapes))
        for dim, asked in list(items):
            made = as_asked(asked)
            if made is not None:
                found[value.index, int(dim)] = made
        return
    if isinstance(value, Mapping):
        for key, child in value.items():
            _walk(child, shapes.get(key) if isinstance(shapes, Mapping) else None, found)
        return
    children: list[Any]
    if isinstance(value, (tuple, list)):
        children = list(value)
    elif type(value) in pytree.SUPPORTED_NODES:
        children = list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    else:
        return
    specs = list(shapes.values()) if isinstance(shapes, Mapping) else list(_sequence(shapes))
    for child, item in zip(children, specs, strict=False):
        _walk(child, item, found)


def _sequence(shapes: Any) -> Any:
    return shapes if isinstance(shapes, (tuple, list)) else ()


def as_asked(dim: Any) -> Asked | None:
    """A torch Dim as `Asked`; None for hints and fixed dims."""
    if isinstance(dim, type) or not isinstance(dim, torch.export.Dim):
        return None
    source = getattr(dim, "root", dim)
    low = source.min if isinstance(source.min, int) else 0
    high = source.max if isinstance(source.max, int) else UNBOUNDED
    return Asked(str(source.__name__), low, min(high, UNBOUNDED), source is not dim)


def bound(shapes: Any, names: frozenset[str]) -> Any:
    """The same dynamic shapes; a dimension computed from a length that no dimension is itself
    (2 * T without T) is left free, since a call could not tell the length."""
    if isinstance(shapes, Mapping):
        return {key: bound(item, names) for key, item in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(bound(item, names) for item in shapes)
    asked = as_asked(shapes)
    if asked is None or not asked.derived or asked.name in names:
        return shapes
    return torch.export.Dim.AUTO


def relaxed(shapes: Any) -> Any:
    """The same dynamic shapes with each named Dim left free within its range, so that torch keeps
    what it cannot prove as guards."""
    if isinstance(shapes, Mapping):
        return {key: relaxed(item) for key, item in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(relaxed(item) for item in shapes)
    asked = as_asked(shapes)
    if asked is None or asked.derived:
        return shapes if shapes is None or isinstance(shapes, int) else torch.export.Dim.AUTO
    high = {} if asked.maximum >= UNBOUNDED else {"max": asked.maximum}
    return torch.export.Dim.AUTO(min=asked.minimum, **high)


def int_range(bounds: Any) -> tuple[int, int]:
    """A torch ValueRanges as two ints."""

    def end(value: Any, otherwise: int) -> int:
        try:
            return max(min(int(value), UNBOUNDED), -UNBOUNDED)
        except (TypeError, OverflowError, AttributeError, ValueError):
            return otherwise

    if bounds is None:
        return 0, UNBOUNDED
    return end(bounds.lower, 0), end(bounds.upper, UNBOUNDED)
