"""What a hybrid model remembers of a sequence, and how its layers ask for it.

A layer knows nothing of where its past lives. `States` is all that it calls; what `append` returns
goes straight into the functions of `graphc.models.functional` that read rows, so whoever keeps
rows elsewhere (in pages) gives handles of his own and replaces those functions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class States(Protocol):
    """The past of B sequences, as the layers of a model see it."""

    @property
    def start(self) -> Tensor | None:
        """int32 [B], the tokens that each sequence had before this call; None: no past."""
        ...

    def append(self, layer: int, kind: str, *rows: Tensor) -> Any:
        """A handle on all rows of `layer`, the new ones at the end, for `lightning_indexer`
        (kind "index") or `latent_attention` (kind "latent").

        rows: [B, T, Wi] each, the parts of a row side by side.
        """

    def read(self, layer: int, kind: str) -> tuple[Tensor | None, Tensor | None]:
        """(state, slots) as `delta_rule` (kind "recurrent") and `short_convolution` (kind
        "convolution") take them; a state of None is zeros."""
        ...

    def write(self, layer: int, kind: str, state: Tensor) -> None:
        """The state after this call's tokens."""

    def advance(self, tokens: int) -> None:
        """Called once at the end of a model's forward: each sequence has so many tokens more."""


class NoStates:
    """Sequences that begin with this call and are not continued."""

    start = None

    def append(self, layer: int, kind: str, *rows: Tensor) -> Tensor:
        return torch.cat(rows, -1)

    def read(self, layer: int, kind: str) -> tuple[None, None]:
        return None, None

    def write(self, layer: int, kind: str, state: Tensor) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


class TensorStates:
    """States as growing tensors: sequences of equal length, in plain torch.

    rows: (layer, kind) -> [B, S, W]. held: (layer, kind) -> the state of a sequence a row.
    """

    def __init__(self, batch: int = 1) -> None:
        self.start = torch.zeros(batch, dtype=torch.int32)
        self.rows: dict[tuple[int, str], Tensor] = {}
        self.held: dict[tuple[int, str], Tensor] = {}

    def append(self, layer: int, kind: str, *rows: Tensor) -> Tensor:
        new = torch.cat(rows, -1)
        old = self.rows.get((layer, kind))
        whole = new if old is None else torch.cat([old, new], 1)
        self.rows[layer, kind] = whole
        return whole

    def read(self, layer: int, kind: str) -> tuple[Tensor | None, None]:
        return self.held.get((layer, kind)), None

    def write(self, layer: int, kind: str, state: Tensor) -> None:
        self.held[layer, kind] = state

    def advance(self, tokens: int) -> None:
        self.start = self.start + tokens
