"""The built-in model of `graphc demo`: a small transformer encoder in plain torch.

Weights are random from a fixed seed, so nothing is downloaded and every machine has the same
model. It is an ordinary user's module: nothing in graphc knows it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 1024
MAX_LENGTH = 2048
WIDTH = 128
HEADS = 4
LAYERS = 4


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm. [1, T, WIDTH] -> [1, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_output = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.attention_output(mixed)
        hidden = F.gelu(self.up(self.mlp_norm(x)))
        result: Tensor = x + self.down(hidden)
        return result


class Encoder(nn.Module):
    """Token numbers int64 [1, T], 1 <= T <= MAX_LENGTH -> one unit vector float32 [1, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.norm(x).mean(dim=1), dim=-1)


def encoder() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, object], dict[str, object]]:
    """A factory: module, example arguments, keywords, and the axes whose length is free."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Encoder().eval()
    ids = torch.arange(16).unsqueeze(0)
    length = torch.export.Dim("T", min=1, max=MAX_LENGTH)
    return module, (ids,), {}, {"ids": {1: length}}
