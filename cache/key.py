"""The key of a cache entry: a list of named, readable fields and their digest.

The digest is SHA-256 over each field's name and value, both length-prefixed, so two different
lists of fields can never run together into one digest. The text form is what is stored beside an
entry; it parses back to the same fields, so an entry can prove that it belongs to its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_HEADING = "graphc key 1"
_FIELD = re.compile(rb"\[([^\n\[\]]+) (\d+)\]\n")


@dataclass(frozen=True)
class Key:
    """Ordered (name, value) pairs. Names are single words or short phrases without brackets."""

    fields: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"expected distinct field names, found {names}")
        for name in names:
            if not name or any(c in name for c in "[]\n"):
                raise ValueError(f"expected a field name without brackets or newline: {name!r}")

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        hasher = hashlib.sha256()
        for pair in self.fields:
            for part in pair:
                data = part.encode()
                hasher.update(len(data).to_bytes(8, "little"))
                hasher.update(data)
        return hasher.hexdigest()

    def text(self) -> str:
        """Every field as `[name bytes]` on one line and the value below it."""
        return written(_HEADING, self.fields)

    @staticmethod
    def parse(text: str) -> Key:
        """The inverse of `text`.

        Raises:
            ValueError: the text is not of that form.
        """
        return Key(parsed(_HEADING, text.encode()))

    def __getitem__(self, name: str) -> str:
        for field, value in self.fields:
            if field == name:
                return value
        raise KeyError(name)


def written(heading: str, fields: Iterable[tuple[str, str]]) -> str:
    """A heading, then every field as `[name bytes]` on one line and the value below it."""
    parts = [f"[{name} {len(value.encode())}]\n{value}\n" for name, value in fields]
    return "".join([heading + "\n", *parts])


def parsed(heading: str, data: bytes) -> tuple[tuple[str, str], ...]:
    """The fields that `written` was given.

    Raises:
        ValueError: the text is not of that form.
    """
    at = len(heading) + 1
    if data[:at] != heading.encode() + b"\n":
        raise ValueError(f"expected the heading {heading!r}")
    fields: list[tuple[str, str]] = []
    while at < len(data):
        match = _FIELD.match(data, at)
        if match is None:
            raise ValueError(f"expected a field at byte {at}")
        start, size = match.end(), int(match[2])
        if data[start + size : start + size + 1] != b"\n":
            raise ValueError(f"expected field {match[1].decode()} to end at byte {start + size}")
        fields.append((match[1].decode(), data[start : start + size].decode()))
        at = start + size + 1
    return tuple(fields)
