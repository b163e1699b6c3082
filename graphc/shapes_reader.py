"""YAML read with a position for every value, so that an error names line and column.

PyYAML's safe loader forgets where a value stood; `Reader` walks its node tree instead. Only plain
mappings, sequences, integers and strings exist here: no tags, so no objects are constructed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import yaml

from graphc.errors import UsageError


def read_document(path: Path) -> Reader:
    """The top mapping of a YAML file.

    Raises:
        UsageError: the file can't be read, isn't YAML, or isn't a mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"expected a readable file, found {path}: {reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _fail(path, mark, f"expected YAML, found: {error.problem or error.context}")
    except yaml.YAMLError as error:
        _fail(path, None, f"expected YAML, found: {error}")
    if node is None:
        _fail(path, None, "expected a mapping, found an empty file")
    reader = Reader(path, node)
    reader.mapping()
    return reader


class Reader:
    """One value of the file. All methods raise `UsageError` at its line and column."""

    def __init__(self, path: Path, node: yaml.Node) -> None:
        self.path = path
        self.node = node

    def error(self, expected: str) -> UsageError:
        """ "shapes.yaml:3:7: expected <expected>, found <this value>"."""
        mark = self.node.start_mark
        return UsageError(f"{_place(self.path, mark)}: expected {expected}, found {self._found()}")

    def _found(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a sequence"
        return repr(self.node.value) if self.node.value else "nothing"

    def mapping(self) -> dict[str, Reader]:
        """Entries by key; a key that stands twice is an error."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error("a mapping")
        entries: dict[str, Reader] = {}
        for key_node, value in self.node.value:
            key = Reader(self.path, key_node)
            name = key.text("a name")
            if name in entries:
                raise key.error("each name once")
            entries[name] = Reader(self.path, value)
        return entries

    def only(self, *names: str) -> None:
        """Refuses keys that are not among `names`."""
        self.mapping()
        for key_node, _ in self.node.value:
            if key_node.value not in names:
                raise Reader(self.path, key_node).error(f"one of {', '.join(names)}")

    def get(self, name: str) -> Reader | None:
        return self.mapping().get(name)

    def need(self, name: str) -> Reader:
        entry = self.get(name)
        if entry is None:
            raise self.error(f"a mapping with {name!r}")
        return entry

    def items(self, name: str = "") -> Iterator[tuple[str, Reader]]:
        """Entries of this mapping, or of the optional mapping called `name` in it."""
        entry = self.get(name) if name else self
        return iter(()) if entry is None else iter(entry.mapping().items())

    def sequence(self, name: str, required: bool = False) -> list[Reader]:
        """Items of the sequence called `name` in this mapping; empty if it isn't there."""
        entry = self.need(name) if required else self.get(name)
        if entry is None:
            return []
        if not isinstance(entry.node, yaml.SequenceNode):
            raise entry.error("a sequence")
        return [Reader(self.path, node) for node in entry.node.value]

    def alternatives(self) -> list[Reader]:
        """Items of this value where it is a sequence, else the value itself."""
        if isinstance(self.node, yaml.SequenceNode):
            return [Reader(self.path, node) for node in self.node.value]
        return [self]

    def place(self) -> str:
        """ "shapes.yaml:3:7"."""
        return _place(self.path, self.node.start_mark)

    def text(self, expected: str) -> str:
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value:
            raise self.error(expected)
        return str(self.node.value)

    def integer(self, expected: str, low: int | None = None, high: int | None = None) -> int:
        """A plain or 1_000 style decimal integer inside [low, high]."""
        value = self.node.value if isinstance(self.node, yaml.ScalarNode) else ""
        digits = str(value).replace("_", "")
        if not digits.removeprefix("-").isdecimal():
            raise self.error(expected)
        number = int(digits)
        if (low is not None and number < low) or (high is not None and number > high):
            raise self.error(expected)
        return number


def _place(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path.name}:{mark.line + 1}:{mark.column + 1}" if mark else path.name


def _fail(path: Path, mark: yaml.Mark | None, text: str) -> NoReturn:
    raise UsageError(f"{_place(path, mark)}: {text}", where=str(path))
