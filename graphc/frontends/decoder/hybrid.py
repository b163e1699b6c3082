"""The reference hybrid (`graphc.models.hybrid`) with its states in a `Book`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import graphc.ops
from graphc.frontends.decoder.book import Book
from graphc.frontends.decoder.stateful import StatefulDecoder
from graphc.models import functional
from graphc.models.hybrid import Hybrid


@dataclass(frozen=True)
class Rows:
    """What `append` hands to the functions that read rows: pages, and how to find them."""

    pages: torch.Tensor
    table: torch.Tensor


class BookStates:
    """`graphc.models.states.States` over a book."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.start = book.start

    def append(self, layer: int, kind: str, *rows: torch.Tensor) -> Rows:
        pages = self._book.append(f"layers.{layer}.{kind}", rows, index=kind == "index")
        return Rows(pages, self._book.table)

    def read(self, layer: int, kind: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        content = self._book.slot_content(f"layers.{layer}.{kind}")
        return content, None if content is None else self._book.slots

    def write(self, layer: int, kind: str, state: torch.Tensor) -> None:
        self._book.write_slots(f"layers.{layer}.{kind}", state)

    def advance(self, tokens: int) -> None:
        """The caller counts tokens."""


def _indexer(
    query: torch.Tensor, weights: torch.Tensor, key: Rows, start: torch.Tensor, *, count: int
) -> torch.Tensor:
    rows = torch.ops.graphc.read_pages(key.pages, key.table, 0, key.pages.shape[2])
    made: torch.Tensor = graphc.ops.lightning_indexer(query, weights, rows, start, count=count)
    return made


def _latent_attention(
    query: torch.Tensor, rows: Rows, start: torch.Tensor, indices: torch.Tensor | None = None, *,
    latent: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    made: torch.Tensor = graphc.ops.latent_attention(
        query, rows.pages, rows.table, start, indices, latent=latent, scale=scale
    )
    return made


#: names of `graphc.models.functional` that cannot be traced for all lengths as they are written
_REPLACED: dict[str, Callable[..., Any]] = {
    "delta_rule": graphc.ops.delta_rule,
    "short_convolution": graphc.ops.short_convolution,
    "lightning_indexer": _indexer,
    "latent_attention": _latent_attention,
    "experts": graphc.ops.experts,
}


@contextmanager
def substituted() -> Iterator[None]:
    """Functions of the reference hybrid are operators of graphc, while inside."""
    saved = {name: getattr(functional, name) for name in _REPLACED}
    try:
        for name, replacement in _REPLACED.items():
            setattr(functional, name, replacement)
        yield
    finally:
        for name, function in saved.items():
            setattr(functional, name, function)


def hybrid_decoder(model: Hybrid, **options: Any) -> StatefulDecoder:
    """The model as a StatefulDecoder; `substituted()` must be open while it is made and traced."""

    def run(
        ids: torch.Tensor, positions: torch.Tensor, book: Book, kept: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = model(ids, BookStates(book), kept)
        return logits

    return StatefulDecoder(model, run, **options)
