"""Finds contents that are already there, without hashing them whole: what looks alike at a few
places is compared."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_SAMPLE = 512  # bytes at each of the places
_PIECE = 1 << 20


class Distinct(Generic[T]):
    """Contents, each with what was noted for it. The contents are kept alive, not copied."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[memoryview, T]]] = {}

    def find(self, data: memoryview, kind: Hashable = None) -> T | None:
        """What was noted for the same bytes of the same kind."""
        for other, noted in self._known.get(_key(data, kind), ()):
            if equal_bytes(data, other):
                return noted
        return None

    def note(self, data: memoryview, what: T, kind: Hashable = None) -> None:
        """For later; `data` must stay as it is."""
        self._known.setdefault(_key(data, kind), []).append((data, what))


def _key(data: memoryview, kind: Hashable) -> Hashable:
    size = data.nbytes
    starts = (0, size // 2, max(0, size - _SAMPLE))
    return kind, size, *(bytes(data[start : start + _SAMPLE]) for start in starts)


def equal_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two contents of the same size are the same."""
    # as bytes: views are compared item by item
    return all(
        bytes(a[i : i + _PIECE]) == bytes(b[i : i + _PIECE]) for i in range(0, a.nbytes, _PIECE)
    )
