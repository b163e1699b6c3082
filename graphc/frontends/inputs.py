"""Input types and lengths as a user writes them: "ids=i64[1,T]", "T=1:2048", "ids.1=T"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphc.errors import UsageError
from graphc.ir.types import UNBOUNDED, long_dtype, torch_dtype

_TYPE = re.compile(r"^([a-z][a-z0-9_]*)\s*\[([^\]]*)\]$")
_LIST = re.compile(r"^\[(\s*-?\d+\s*(?:,\s*-?\d+\s*)*)\]$")
# inputs of ONNX files are called "serving_default_x:0" and worse
_NAME = re.compile(r"[^\s=\[\]]+")
_PLACE = re.compile(rf"^({_NAME.pattern})\.(\d+)$")
_FORM = 'write name=dtype[dims], such as "x=f32[1,T,384]" or "ids=i64[2,16]"'
_LENGTH_FORM = 'write "T=1:2048" for a range, or "ids.1=T" for the name of a dimension'


@dataclass(frozen=True)
class InputType:
    """One input as written: a tensor of `dtype` and `dims` (a str is a free length), or a fixed
    Python number or list of them (`dims` None)."""

    name: str
    dtype: torch.dtype | None
    dims: tuple[int | str, ...] | None
    value: object = None


@dataclass(frozen=True)
class Lengths:
    """What --dynamic says: ranges by length, and lengths by (input, dimension)."""

    ranges: Mapping[str, tuple[int, int]]
    places: Mapping[tuple[str, int], str]


def parse_input(text: str) -> InputType:
    """Reads "name=f32[1,T,384]", "name=i64[]", "name=0.5" or "name=[1,-1]" (a fixed list).

    Raises:
        UsageError: anything else.
    """
    name, equals, rest = (part.strip() for part in text.partition("="))
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(f"expected the type of an input, found {text!r}", hint=_FORM)
    constants: dict[str, object] = {"true": True, "false": False, "none": None}
    if rest.lower() in constants:
        return InputType(name, None, None, constants[rest.lower()])
    for number in (int, float):
        try:
            return InputType(name, None, None, number(rest))
        except ValueError:
            continue
    listed = _LIST.match(rest)
    if listed:
        return InputType(name, None, None, [int(part) for part in listed.group(1).split(",")])
    found = _TYPE.match(rest)
    if not found:
        raise UsageError(f"expected the type of an input, found {text!r}", hint=_FORM)
    dims: list[int | str] = []
    for item in filter(None, (part.strip() for part in found.group(2).split(","))):
        if item.isdecimal():
            dims.append(int(item))
        elif item.isidentifier():
            dims.append(item)
        else:
            raise UsageError(f"expected a size or a name, found {item!r} in {text!r}", hint=_FORM)
    return InputType(name, _dtype(found.group(1), text), tuple(dims))


def _dtype(word: str, text: str) -> torch.dtype:
    word = {"bool": "bool", "b1": "bool", "half": "float16", "float": "float32"}.get(
        word, long_dtype(word)
    )
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"expected a dtype, found {word!r} in {text!r}",
            hint="f32, f64, f16, bf16, i64, i32, i16, i8, u8, bool, or torch's long names",
        )
    return found


def float_dtype(name: str) -> torch.dtype:
    """The floating-point dtype of this name ("bf16", "bfloat16").

    Raises:
        UsageError: not one of float32, float64, float16, bfloat16.
    """
    known = ("float32", "float64", "float16", "bfloat16")
    long = long_dtype(name)
    if long not in known:
        raise UsageError(f"expected one of {', '.join(known)}, found {name!r}", where="dtype")
    return torch_dtype(long)


def parse_lengths(texts: Iterable[str]) -> Lengths:
    """Reads "T=1:2048", "T=:2048", "T=2048" (1 to 2048) and "ids.1=T".

    Raises:
        UsageError: anything else.
    """
    ranges: dict[str, tuple[int, int]] = {}
    places: dict[tuple[str, int], str] = {}
    for text in texts:
        left, equals, right = (part.strip() for part in text.partition("="))
        place = _PLACE.match(left)
        if equals and place and right.isidentifier():
            places[place.group(1), int(place.group(2))] = right
            continue
        span = re.match(r"^(?:(\d*):)?(\d*)$", right)
        if not equals or not left.isidentifier() or not span or not right:
            raise UsageError(f"expected a length, found {text!r}", hint=_LENGTH_FORM)
        low = int(span.group(1) or 1)
        high = int(span.group(2)) if span.group(2) else UNBOUNDED
        if high <= low:
            raise UsageError(
                f"expected a range of at least two lengths, found {text!r}",
                hint="leave a length that does not vary as a number in the input's type",
            )
        ranges[left] = (low, high)
    return Lengths(ranges, places)


def make_dim(name: str, bounds: tuple[int, int] | None) -> torch.export.Dim:
    """The torch Dim of a named length (1 to unbounded if nothing is known)."""
    low, high = bounds or (1, UNBOUNDED)
    if high >= UNBOUNDED:
        return torch.export.Dim(name, min=low)
    return torch.export.Dim(name, min=low, max=high)


def example(kind: InputType, lengths: dict[str, int], ranges: Mapping[str, tuple[int, int]]) -> Any:
    """A deterministic value of this type; `lengths` holds the sizes chosen so far."""
    if kind.dims is None or kind.dtype is None:
        return kind.value
    shape = []
    for dim in kind.dims:
        if isinstance(dim, str) and dim not in lengths:
            # sizes that differ from each other, so that no two lengths look equal by chance
            low, high = ranges.get(dim, (1, UNBOUNDED))
            lengths[dim] = max(low, min(16 + 3 * len(lengths), high))
        shape.append(lengths[dim] if isinstance(dim, str) else dim)
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(kind.dtype)
    return torch.ones(shape, dtype=kind.dtype)


def unknown_name(name: str, known: Sequence[str], what: str) -> UsageError:
    """The error for a name that is none of `known`."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}"
    )
    return UsageError(f"expected the name of {what}, found {name!r}", hint=hint)
