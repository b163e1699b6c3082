"""A decoder as a module whose past are its buffers: what is captured for prefill and decode.

forward(input_ids int64 [B, T], start int32 [B], table int32 [B, M], slots int32 [B], kept int64
[K]) gives the float32 logits [B, K, V] behind the tokens input_ids[:, kept] and changes the states.
Sequence b has start[b] tokens before this call, in the pages table[b] and the slot slots[b]; all
of its state is zero when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphc.frontends.decoder.book import Book, StateSpec, opened

#: rows of a page. FlashMLA's and DeepGEMM's page, and a whole number of key panels
PAGE = 64

#: what a decoder computes: (input_ids, position_ids, book, kept) -> logits
Forward = Callable[[torch.Tensor, torch.Tensor, Book, torch.Tensor], torch.Tensor]


class StatefulDecoder(torch.nn.Module):
    """See the module's text.

    Args:
        model: the module that holds the weights.
        forward: runs it on a book.
        pages, slots: how many the states have room for; one page is never handed out.
        stop, begin: tokens that end a text, and that stand in front of one.
        bytes_are_tokens: token i is the byte i.
    """

    def __init__(
        self, model: torch.nn.Module, forward: Forward, *, pages: int, slots: int,
        page: int = PAGE, stop: Sequence[int] = (),
        begin: Sequence[int] = (), bytes_are_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.page = page
        self.stop, self.begin = tuple(stop), tuple(begin)
        self.bytes_are_tokens = bytes_are_tokens
        self._forward = forward
        self.specs: tuple[StateSpec, ...] = tuple(self._found().values())
        for spec in self.specs:
            shape = spec.content(pages=pages, page=page, slots=slots)
            content = torch.zeros(shape, dtype=spec.dtype)
            self.register_buffer(spec.buffer, content)

    def _found(self) -> dict[str, StateSpec]:
        """The states that the layers ask for, by running three tokens."""
        one = torch.zeros(1, dtype=torch.int32)
        table = torch.ones(1, 1, dtype=torch.int32)
        book = Book(one, table, one, self.page, None)
        ids, positions = torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)
        with torch.no_grad(), opened(book):
            self._forward(ids, positions[None], book, positions[2:])
        return book.specs

    def forward(
        self, input_ids: torch.Tensor, start: torch.Tensor, table: torch.Tensor,
        slots: torch.Tensor, kept: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """{"logits": ...}."""
        contents = {spec.name: self.get_buffer(spec.buffer) for spec in self.specs}
        positions = start.long()[:, None] + torch.arange(input_ids.shape[1])
        book = Book(start, table, slots, self.page, contents)
        with opened(book):
            logits = self._forward(input_ids, positions, book, kept).float()
        for name, content in book.after.items():
            contents[name].copy_(content)
        return {"logits": logits}

    def example(self, batch: int = 2, length: int = 5, columns: int = 3) -> dict[str, Any]:
        """Inputs to capture with: sequences of different lengths, in one page each."""
        table = torch.full((batch, columns), -1, dtype=torch.int32)
        table[:, 0] = torch.arange(1, batch + 1)
        return {
            "input_ids": torch.arange(batch * length).reshape(batch, length) % 3,
            "start": torch.arange(batch, dtype=torch.int32),
            "table": table,
            "slots": torch.arange(batch, dtype=torch.int32),
            "kept": torch.zeros(2, dtype=torch.int64),
        }


def transformers_decoder(model: Any, **options: Any) -> StatefulDecoder:
    """A causal language model of transformers as a StatefulDecoder; `substituted(model)` must be
    open while it is made and traced."""
    from graphc.frontends.decoder.cache import PagedCache
    from graphc.frontends.decoder.hooks import install

    install(model)
    layers = int(model.config.get_text_config().num_hidden_layers)

    def run(
        ids: torch.Tensor, positions: torch.Tensor, book: Book, kept: torch.Tensor
    ) -> torch.Tensor:
        answer = model(
            input_ids=ids, position_ids=positions, use_cache=True,
            cache=PagedCache(book, layers), logits_to_keep=kept,
        )  # fmt: skip
        logits: torch.Tensor = answer.logits
        return logits

    stop = getattr(model.generation_config, "eos_token_id", None)
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    return StatefulDecoder(model, run, stop=stop, **options)
