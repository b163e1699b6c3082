"""Four decoder layers in the shape of Qwen3-0.6B: 1024 wide, 16 query and 8 key heads of 128 with
normalised queries and keys, rotary positions, a gated product of 3072.

prefill     x[1, T, 1024] -> y, and keys and values of each layer
step        one token, its keys and values written into a cache of T places; attention as people
            write it
step_cat    the same without writing: the oldest place is dropped, the new one concatenated
step_split  with care: the cache is only read, the new token joins at the scores (T + 1 keys)
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Array, Workload, wide

WIDTH, HEADS, KEYS, SIZE, INNER, LAYERS = 1024, 16, 8, 128, 3072, 4
KINDS = ("prefill", "step", "step_cat", "step_split")


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [1, heads, T, 128], halves paired."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.key = nn.Linear(WIDTH, KEYS * SIZE, bias=False)
        self.value = nn.Linear(WIDTH, KEYS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.query_norm, self.key_norm = RMSNorm(SIZE), RMSNorm(SIZE)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        length = x.shape[1]
        q = self.query_norm(self.query(x).view(1, length, HEADS, SIZE)).transpose(1, 2)
        k = self.key_norm(self.key(x).view(1, length, KEYS, SIZE)).transpose(1, 2)
        v = self.value(x).view(1, length, KEYS, SIZE).transpose(1, 2)
        q, k = rotate(q, *turn), rotate(k, *turn)
        new: tuple[Tensor, ...] = (k, v)
        attend = functional.scaled_dot_product_attention
        if self.kind == "prefill":
            y = attend(q, k, v, is_causal=True, enable_gqa=True)
        elif self.kind == "step":
            keys, values = cache
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            y = attend(q, keys, values, enable_gqa=True)
            new = ()
        elif self.kind == "step_cat":
            keys = torch.cat((cache[0][:, :, 1:], k), 2)
            values = torch.cat((cache[1][:, :, 1:], v), 2)
            y = attend(q, keys, values, enable_gqa=True)
        else:
            y = self._split(q, k, v, cache)
        return self.out(y.transpose(1, 2).reshape(1, length, HEADS * SIZE)), new

    @staticmethod
    def _split(q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
        grouped = q.view(KEYS, HEADS // KEYS, SIZE)
        old = grouped @ cache[0][0].transpose(1, 2)
        scores = torch.cat((old, grouped @ k[0].transpose(1, 2)), -1) * SIZE**-0.5
        share = wide(scores).softmax(-1).to(q.dtype)
        y = share[..., :-1] @ cache[1][0] + share[..., -1:] * v[0]
        return y.view(1, HEADS, 1, SIZE)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention = Attention(kind)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        attended, new = self.attention(self.norm1(x), turn, cache, place)
        x = x + attended
        inner = self.norm2(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner)), new


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, place: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        frequency = 1e6 ** -(torch.arange(0, SIZE, 2) / SIZE)
        angle = torch.cat((place[:, None] * frequency,) * 2, -1)
        turn = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        kept: tuple[Tensor, ...] = ()
        for i, layer in enumerate(self.layers):
            x, new = layer(x, turn, cache[2 * i : 2 * i + 2], place)
            kept += new
        return self.norm(x), *kept


def make(kind: str, length: int, random: np.random.Generator) -> Workload:
    """`length`: tokens of prefill, places of the cache of a step."""
    products = HEADS * SIZE * WIDTH * 2 + 2 * KEYS * SIZE * WIDTH + 3 * WIDTH * INNER

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    if kind == "prefill":
        inputs = {"x": normal(1, length, WIDTH), "place": np.arange(length)}
        pairs = length * length / 2  # causal
        flops = LAYERS * (2.0 * length * products + 4.0 * pairs * HEADS * SIZE)
        return Workload(inputs, partial(Decoder, kind), flops=flops)
    inputs = {"x": normal(1, 1, WIDTH), "place": np.array([length - 1])}
    for layer in range(LAYERS):
        inputs |= {f"{part}{layer}": normal(1, KEYS, length, SIZE) for part in ("key", "value")}
    flops = LAYERS * (2.0 * products + 4.0 * length * HEADS * SIZE)
    return Workload(inputs, partial(Decoder, kind), flops=flops)
