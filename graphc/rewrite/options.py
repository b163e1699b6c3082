"""Which passes run and with which options: names and `name{k=v,...}` from the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from graphc.errors import UsageError
from graphc.rewrite.rules import Pass

_FORM = re.compile(r"^\s*([\w-]+)\s*(?:\{(.*)\})?\s*$")


def configure(
    passes: Sequence[Pass], *, disable: Iterable[str] = (), options: Iterable[str] = ()
) -> tuple[Pass, ...]:
    """The passes without the disabled ones, with options set.

    Raises:
        UsageError: an unknown pass or option, or a value of the wrong type.
    """
    names = [p.name for p in passes]
    off = {_known(name, names) for name in disable}
    given = [parse_option(text, names) for text in options]
    result: list[Pass] = []
    for one in passes:
        if one.name in off:
            continue
        for name, values in given:
            if name == one.name:
                one = _with(one, values)
        result.append(one)
    return tuple(result)


def parse_option(text: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """("quantize", {"group": "32"}) of "quantize{group=32}".

    Raises:
        UsageError: not of this form, or no such pass.
    """
    found = _FORM.match(text)
    if found is None:
        raise UsageError(f"expected NAME{{key=value,...}}, found {text!r}")
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in (found[2] or "").split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"expected key=value in {text!r}, found {part!r}")
        values[key.strip()] = value.strip()
    return _known(found[1], names), values


def describe(one: Pass) -> dict[str, object]:
    """The options of a pass, by name."""
    return {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}  # type: ignore[arg-type]


def _known(name: str, names: Sequence[str]) -> str:
    plain = name.replace("-", "_")
    if plain in names:
        return plain
    known = list(dict.fromkeys(names))  # a pass may stand in the pipeline more than once
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    hint = f"passes: {', '.join(known)}"
    if close:
        hint = f"did you mean {', '.join(close)}?"
    raise UsageError(f"expected a pass, found {name!r}", hint=hint)


def _with(one: Pass, values: dict[str, str]) -> Pass:
    fields = describe(one)
    changed: dict[str, Any] = {}
    for key, text in values.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UsageError(
                f"expected an option of {one.name}, found {key!r}", hint=f"has: {known}"
            )
        changed[key] = _typed(text, fields[key], f"{one.name}{{{key}}}")
    return dataclasses.replace(one, **changed)  # type: ignore[type-var]


def _typed(text: str, default: object, where: str) -> object:
    if isinstance(default, bool):
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise UsageError(f"expected true or false for {where}, found {text!r}")
    if isinstance(default, (int, float)):
        try:
            return type(default)(text)
        except ValueError:
            kind = type(default).__name__
            raise UsageError(f"expected a {kind} for {where}, found {text!r}") from None
    return text
