"""The states of a decoder while it runs or is traced: what layers remember between calls.

Two kinds. Rows grow with a sequence and lie in pages (`graphc.ops.pages`): keys and values, latent
rows, indexer keys. Slots have one fixed shape per sequence: recurrent states, windows of
convolutions. Whoever adapts a model to graphc (a cache object of transformers, the states of
`graphc.models`) is a thin layer over this book.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from graphc.errors import InternalError, UnsupportedError


@dataclass(frozen=True)
class StateSpec:
    """kind "rows": rows of `shape`, which lie apart by part in a page where the shape has two
    dimensions (parts, width), one for each `tokens` tokens; "slots": one entry of `shape` for each
    sequence. `index`: the rows are keys that only rank."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 1
    index: bool = False

    def content(self, *, pages: int, page: int, slots: int) -> tuple[int, ...]:
        """The shape of the whole state."""
        if self.kind == "slots":
            return (slots, *self.shape)
        return (pages, *self.shape[:-1], page // self.tokens, self.shape[-1])

    @property
    def buffer(self) -> str:
        """The name of the buffer that holds it while it is traced, and of the plan's state."""
        return "state_" + self.name.replace(".", "_")


class Book:
    """The states of one call.

    Args:
        start: int32 [B], rows each sequence had before.
        table: int32 [B, M], its pages.
        slots: int32 [B], its place in every state of the kind "slots".
        page: rows of a page.
        contents: the states before the call by name; None while they are being found out, when
            every sequence begins here.

    `after` holds the new content of every state that was written.
    """

    def __init__(
        self,
        start: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        page: int,
        contents: dict[str, torch.Tensor] | None,
    ) -> None:
        self.start, self.table, self.slots, self.page = start, table, slots, page
        self.contents = contents
        self.specs: dict[str, StateSpec] = {}
        self.after: dict[str, torch.Tensor] = {}
        #: the window that the next convolution continues, where the model asks for it beforehand
        self.pending: str | None = None

    @property
    def capacity(self) -> torch.types.IntLikeType:
        """Rows that the tables have room for."""
        return self.table.shape[1] * self.page

    def append(
        self, name: str, parts: Sequence[torch.Tensor], apart: int = 0, *, index: bool = False
    ) -> torch.Tensor:
        """The pages with new rows [B, T, Wi], side by side, behind those of each sequence.

        apart: so many equal parts of a row (heads) lie apart in a page. index: they are keys of
        an indexer.
        """
        given = [part for part in parts if part.shape[-1]]
        width = sum(int(part.shape[-1]) for part in given)
        shape = (apart, width // apart) if apart else (width,)
        before = self._before(StateSpec(name, "rows", shape, given[0].dtype, index=index))
        made: torch.Tensor = torch.ops.graphc.append_pages(before, given, self.table, self.start)
        self.after[name] = made
        return made

    def append_pooled(
        self, name: str, key: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """The pages of pooled keys (`graphc.ops.pooled_indexer`) with those that the new tokens'
        keys and gates [B, T, D] complete; bias [P, D].

        Raises UnsupportedError: pools of P tokens do not fill a page.
        """
        pool, width = map(int, bias.shape)
        if self.page % pool:
            raise UnsupportedError(
                f"an indexer over pools of {pool} tokens: a page has {self.page}"
            )
        ring, pooled = f"{name}.ring", f"{name}.pooled"
        pages = self._before(StateSpec(pooled, "rows", (width,), key.dtype, pool, True))
        last = self._before(StateSpec(ring, "slots", (pool, 2 * width), key.dtype))
        made: torch.Tensor = torch.ops.graphc.pool_keys(
            pages, last, key, gate, bias, self.table, self.start, self.slots
        )
        self.after[pooled] = made
        self.after[ring] = torch.ops.graphc.append_ring(last, [key, gate], self.start, self.slots)
        return made

    def read(self, name: str, offset: int, width: int) -> torch.Tensor:
        """Columns of all rows of each sequence, those just written included: [B, S, width]."""
        found: torch.Tensor = torch.ops.graphc.read_pages(
            self.after[name], self.table, offset, width
        )
        return found

    def slot_content(self, name: str) -> torch.Tensor | None:
        """The whole state [N, ...] of the kind "slots"; None while states are being found out."""
        return None if self.contents is None else self.contents[name]

    def write_slots(self, name: str, content: torch.Tensor) -> None:
        """The new content of a state of the kind "slots": all of it, or while states are being
        found out, that of the call's sequences."""
        self._declare(StateSpec(name, "slots", tuple(map(int, content.shape[1:])), content.dtype))
        self.after[name] = content

    def _before(self, spec: StateSpec) -> torch.Tensor:
        """The whole content of a state that is about to be written."""
        self._declare(spec)
        if self.contents is not None:
            return self.contents[spec.name]
        pages, slots = int(self.table.max()) + 1, int(self.slots.max()) + 1
        shape = spec.content(pages=pages, page=self.page, slots=slots)
        return torch.zeros(shape, dtype=spec.dtype)

    def _declare(self, spec: StateSpec) -> None:
        if spec.name in self.specs:
            raise InternalError(f"the state {spec.name} is written twice in one call")
        self.specs[spec.name] = spec


_CURRENT: ContextVar[Book | None] = ContextVar("graphc_book", default=None)


def current_book() -> Book | None:
    """The book of the call being traced or run, for functions that a model calls by name."""
    return _CURRENT.get()


@contextmanager
def opened(book: Book) -> Iterator[Book]:
    """`current_book` answers with `book` inside."""
    token = _CURRENT.set(book)
    try:
        yield book
    finally:
        _CURRENT.reset(token)
