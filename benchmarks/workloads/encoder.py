"""A BERT encoder of six layers, 384 wide, with mean pooling: the shape of all-MiniLM-L6-v2.

$MINILM names a checkpoint folder with its weights (model.safetensors); without it they are random.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Workload, wide

WIDTH, LAYERS, HEADS, INNER = 384, 6, 12, 1536
VOCABULARY, POSITIONS = 30522, 512

#: module of a layer -> name in the checkpoint
_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        )
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        inner: Tensor = self.norm2(x + self.down(functional.gelu(self.up(x))))
        return inner


class Encoder(nn.Module):
    """ids[1, T] -> embedding[1, 384] of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.segment = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, 1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        position = self.position.weight[: ids.shape[1]]
        x = self.norm(self.word(ids) + position + self.segment.weight[0])
        for layer in self.layers:
            x = layer(x)
        return functional.normalize(wide(x).mean(1), dim=-1)


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """The weights of a BERT checkpoint under this module's names."""
    from safetensors.torch import load_file

    stored = {
        name.removeprefix("bert."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    names = {
        "word.weight": "embeddings.word_embeddings.weight",
        "position.weight": "embeddings.position_embeddings.weight",
        "segment.weight": "embeddings.token_type_embeddings.weight",
        "norm.weight": "embeddings.LayerNorm.weight",
        "norm.bias": "embeddings.LayerNorm.bias",
    }
    for layer in range(LAYERS):
        for ours, theirs in _NAMES.items():
            for part in ("weight", "bias"):
                names[f"layers.{layer}.{ours}.{part}"] = f"encoder.layer.{layer}.{theirs}.{part}"
    return {ours: stored[theirs] for ours, theirs in names.items()}


def _module() -> nn.Module:
    module = Encoder()
    if folder := os.environ.get("MINILM"):
        module.load_state_dict(checkpoint(Path(folder)))
    return module


def make(length: int, random: np.random.Generator) -> Workload:
    """`length` tokens."""
    ids = random.integers(1000, 30000, (1, length))
    products = 4 * WIDTH * WIDTH + 2 * WIDTH * INNER
    flops = LAYERS * (2.0 * length * products + 4.0 * length * length * WIDTH)
    return Workload({"ids": ids}, _module, flops=flops)
