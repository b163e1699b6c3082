"""`--input` of `graphc run`: values by name, from files or made up, in the shape the plan wants."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphc.errors import InputRejectedError, UsageError
from graphc.plan import Plan, Program, Tensor
from graphc.runtime.expressions import evaluate

Array = NDArray[Any]

HELP = "name=@file.npy, name=@file.npz:key, random:1x128, zeros:.., ones:.., randint:LO:HI:1x16, 3"

#: of made-up values: they are the same in every run
SEED = 0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for torch's name; bfloat16 and float8 come from ml_dtypes."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        made: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return made
    return np.dtype(name)


def make_inputs(
    plan: Plan,
    given: Sequence[str],
    lengths: Sequence[str],
    shapes: Path | None,
    seed: int = SEED,
) -> tuple[list[Array], dict[str, int], list[str]]:
    """One array for every input of the plan.

    Args:
        given: "name=value" as in `HELP`. lengths: "T=128".
        shapes: shapes file with default lengths of the symbols that nothing else binds.
        seed: of the values that are made up.

    Returns:
        The arrays in the plan's order, the value of each symbol, and the names of the inputs
        that were not given and were made up (random floats; ones for integers and bools).

    Raises:
        UsageError: unknown name, malformed value, unreadable file.
        InputRejectedError: a given array contradicts another or the plan in rank or length.
    """
    names = [tensor.name for tensor in plan.inputs]
    values = _by_name(given, names, "--input", "an input")
    bound = _given_lengths(plan, lengths)
    program = plan.programs[0]
    arrays: dict[str, Array] = {}
    generator = np.random.default_rng(seed)
    for tensor, dims in zip(plan.inputs, program.input_shapes, strict=True):
        if tensor.name in values and not _needs_shape(values[tensor.name]):
            array = _value(tensor, values[tensor.name], (), generator)
            arrays[tensor.name] = array
            _bind(plan, program, tensor, dims, array.shape, bound)
    _default_lengths(plan, bound, shapes)
    order = [bound.get(symbol.name, symbol.minimum) for symbol in plan.symbols]
    made_up: list[str] = []
    for tensor, dims in zip(plan.inputs, program.input_shapes, strict=True):
        if tensor.name in arrays:
            continue
        shape = tuple(evaluate(program.expressions[dim], order) for dim in dims)
        kind = values.get(tensor.name)
        if kind is None:
            made_up.append(tensor.name)
            kind = "random" if _is_float(tensor.dtype) else "ones"
        arrays[tensor.name] = _value(tensor, kind, shape, generator)
    return [arrays[name] for name in names], bound, made_up


def make_lengths(plan: Plan, lengths: Sequence[str], shapes: Path | None) -> dict[str, int]:
    """The value of each symbol that an input binds: as given ("T=128"), else the default of the
    shapes file. Raises UsageError."""
    bound = _given_lengths(plan, lengths)
    _default_lengths(plan, bound, shapes)
    return bound


def _given_lengths(plan: Plan, lengths: Sequence[str]) -> dict[str, int]:
    names = [symbol.name for symbol in plan.symbols]
    given = _by_name(lengths, names, "--length", "a symbol")
    return {name: _integer(text, f"--length {name}={text}") for name, text in given.items()}


def _default_lengths(plan: Plan, bound: dict[str, int], shapes: Path | None) -> None:
    """Adds what is not bound yet."""
    free = [s for s in plan.symbols if s.name not in bound and s.input >= 0]
    if not free:
        return
    from graphc.shapes import Shapes

    defaults = Shapes.load(shapes)
    for symbol in free:
        largest = max(p.limits.get(symbol.name, symbol.maximum) for p in plan.programs)
        bound[symbol.name] = defaults.default_of(symbol.name, symbol.minimum, largest)


def flatten(tree: Any, result: Any) -> dict[int, Any]:
    """The leaves of a result by output index, following a tree of `Plan`."""
    if tree is None:
        return {}
    kind, content = next(iter(tree.items()))
    if kind == "leaf":
        return {content: result}
    if kind == "const":
        return {}
    parts = (
        [(item, result[key]) for key, item in content]
        if kind == "dict"
        else list(zip(content, result, strict=True))
    )
    leaves: dict[int, Any] = {}
    for item, part in parts:
        leaves.update(flatten(item, part))
    return leaves


def _by_name(given: Sequence[str], names: Sequence[str], option: str, kind: str) -> dict[str, str]:
    """ "name=value" split and checked; a bare value is the only input's."""
    values: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and len(names) == 1:
            name, value = names[0], text
        elif not equals:
            raise UsageError(f"expected {option} NAME=VALUE, found {text!r}", hint=HELP)
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(
                f"expected {kind} of the plan, found {name!r}",
                where=f"{option} {text}",
                hint=f"{hint}it has: {', '.join(names) or 'none'}",
            )
        if name in values:
            raise UsageError(f"expected {name!r} once, found it twice", where=f"{option} {text}")
        values[name] = value
    return values


def _needs_shape(value: str) -> bool:
    """Whether the value says how to fill, and leaves the shape to the plan."""
    kind, _, rest = value.partition(":")
    return kind in {"random", "zeros", "ones"} and not rest or (
        kind == "randint" and rest.count(":") == 1
    )  # fmt: skip


def _value(
    tensor: Tensor, text: str, shape: tuple[int, ...], generator: np.random.Generator
) -> Array:
    """The array that one value stands for, in the input's dtype if it's made here."""
    where = f"--input {tensor.name}={text}"
    if text.startswith("@"):
        return load_array(text[1:], where)
    dtype = numpy_dtype(tensor.dtype)
    kind, _, rest = text.partition(":")
    if kind in {"random", "zeros", "ones"}:
        dims = _dims(rest, where) if rest else shape
        if kind == "random" and not _is_float(tensor.dtype):
            if tensor.dtype != "bool":
                raise UsageError(
                    f"expected randint:LO:HI for {tensor.dtype}, found random", where=where
                )
            return generator.integers(0, 2, dims).astype(dtype)
        if kind == "random":
            return np.asarray(generator.standard_normal(dims)).astype(dtype)
        return np.full(dims, 0 if kind == "zeros" else 1).astype(dtype)
    if kind == "randint":
        low, high, *tail = rest.split(":")
        dims = _dims(tail[0], where) if tail else shape
        bounds = _integer(low, where), _integer(high, where)
        if bounds[0] >= bounds[1]:
            raise UsageError("expected randint:LO:HI with LO below HI", where=where)
        return np.asarray(generator.integers(*bounds, dims)).astype(dtype)
    return _scalar(tensor, text, where)


def _scalar(tensor: Tensor, text: str, where: str) -> Array:
    words = {"true": 1, "false": 0}
    try:
        number = words[text.lower()] if text.lower() in words else float(text)
    except ValueError:
        raise UsageError(f"expected a value for {tensor.name}", where=where, hint=HELP) from None
    if not _is_float(tensor.dtype) and number != int(number):
        raise UsageError(f"expected a {tensor.dtype}, found {text}", where=where)
    exact = int(text) if text.lstrip("-").isdecimal() else number  # int64 beyond 2**53
    return np.array(exact).astype(numpy_dtype(tensor.dtype))


def load_array(name: str, where: str) -> Array:
    """An array of a .npy file, or of a .npz as `file.npz:key`. Never unpickles.

    Raises:
        UsageError: missing, not numpy's format, or the key is not in it.
    """
    path, _, key = name.partition(".npz:")
    file = Path(f"{path}.npz" if key else name)
    try:
        loaded = np.load(file, allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "no numpy file"
        raise UsageError(f"expected a readable file, found: {reason}", where=where) from None
    except (ValueError, EOFError) as error:
        raise UsageError(f"expected a .npy or .npz file, found: {error}", where=where) from None
    if isinstance(loaded, np.ndarray):
        return loaded
    keys = list(loaded)
    key = key or (keys[0] if len(keys) == 1 else "")
    if key not in keys:
        raise UsageError(
            f"expected the name of an array, found {key!r}",
            where=where,
            hint=f"{file.name} has: {', '.join(keys)}; write @{file}:NAME",
        )
    array: Array = loaded[key]
    return array


def _bind(
    plan: Plan,
    program: Program,
    tensor: Tensor,
    dims: Sequence[int],
    shape: tuple[int, ...],
    bound: dict[str, int],
) -> None:
    """Reads symbols off the shape of a given array; what disagrees is refused here already, since
    other inputs would be made up from it."""
    if len(shape) != len(dims):
        wanted = ", ".join(tensor.text)
        raise InputRejectedError(
            f"expected {tensor.name} of {len(dims)} dimensions [{wanted}], "
            f"found {len(shape)}: {list(shape)}"
        )
    for axis, (dim, length) in enumerate(zip(dims, shape, strict=True)):
        expression = program.expressions[dim]
        if len(expression) != 1 or not isinstance(expression[0], str):
            continue
        name = plan.symbols[int(expression[0][1:])].name
        if bound.setdefault(name, length) != length:
            raise InputRejectedError(
                f"expected one length for {name}, found {bound[name]} and {length}",
                where=f"{tensor.name}, axis {axis}",
            )


def _dims(text: str, where: str) -> tuple[int, ...]:
    return tuple(_integer(part, where) for part in text.replace(",", "x").split("x"))


def _integer(text: str, where: str) -> int:
    if not text.lstrip("-").isdecimal():
        raise UsageError(f"expected an integer, found {text!r}", where=where, hint=HELP)
    return int(text)


def _is_float(dtype: str) -> bool:
    return "float" in dtype
