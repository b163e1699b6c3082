"""The cache object that transformers' layers call, over a `Book`."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from graphc.frontends.decoder.book import Book


class PagedCache(Cache):
    """Keys and values, latents and indexer keys in pages; recurrent states in slots.

    Recurrent and convolution states are handed out whole, with the sequences' slots in the book:
    the functions that take them (`graphc.frontends.decoder.linear_attention`) know.
    """

    def __init__(self, book: Book, layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])
        self.book = book

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Appends [B, H, T, D]; gives all keys and values [B, H, S, D] of each sequence."""
        name = f"layers.{layer_idx}.rows"
        parts = [_rows(key_states), _rows(value_states)]
        heads, width = key_states.shape[1], key_states.shape[3]
        alike = (heads, width) == (value_states.shape[1], value_states.shape[3])
        # one head's keys together: attention over few queries reads them one head after the other
        self.book.append(name, parts, apart=2 * int(heads) if alike and heads > 1 else 0)
        found: list[torch.Tensor] = []
        offset = 0
        for part, states in zip(parts, (key_states, value_states), strict=True):
            width, heads = int(part.shape[-1]), states.shape[1]
            if not width:
                found.append(states.new_zeros(states.shape[0], heads, self.book.capacity, 0))
                continue
            rows = self.book.read(name, offset, width)
            found.append(rows.unflatten(-1, (heads, width // heads)).transpose(1, 2))
            offset += width
        return found[0], found[1]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Appends [B, T, D]; gives all keys [B, S, D]."""
        name = f"layers.{layer_idx}.indexer"
        self.book.append(name, [indexer_key_states], index=True)
        return self.book.read(name, 0, int(indexer_key_states.shape[-1]))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state as the layer's own functions take it (the whole of it)."""
        return self.book.slot_content(_conv(layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """The inputs as they are: the convolution that follows reads the window from the book."""
        self.book.pending = _conv(layer_idx, state_idx)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state of all slots."""
        return self.book.slot_content(_recurrent(layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keeps the new content of all slots."""
        self.book.write_slots(_recurrent(layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Sequences that begin have zeros."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is recorded for a later crop."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are told by `start`; no layer may ask."""
        raise NotImplementedError("the length of a paged sequence is data")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, int]:
        """(keys a mask has room for, position of the first one)."""
        return self.book.capacity, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Masks of graphc know positions themselves."""
        return 0


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] -> [B, T, H * D]."""
    return states.transpose(1, 2).flatten(2)


def _conv(layer: int, state: int) -> str:
    return f"layers.{layer}.conv" + (f".{state}" if state else "")


def _recurrent(layer: int, state: int) -> str:
    return f"layers.{layer}.recurrent" + (f".{state}" if state else "")
