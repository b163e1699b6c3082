"""A layer of DeepSeek Sparse Attention, transformers' own (deepseek_v32): 1024 wide, 8 heads of
128 + 64, latent rows of 512, an indexer of 8 heads of 128 that chooses 512 keys.

dsa_prefill         x[1, T, 1024] -> y: as shipped, all scores are made and what was not chosen is
                    masked
dsa_prefill_blocks  with care: blocks of queries attend to the latent rows they chose (absorbed)
dsa_step            one token, its latent row and indexer key written into caches of T places: as
                    shipped, keys and values of every place are expanded again
dsa_step_absorbed   with care: attention over the latent rows that were chosen
dsa_step_split      as dsa_step_absorbed, but the caches are only read: the new token is a key more
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

from benchmarks.workloads import Array, Workload, wide

WIDTH, HEADS, QUERY, LATENT, ROPE, NOPE, VALUE = 1024, 8, 512, 512, 64, 128, 128
INDEX_HEADS, INDEX_SIZE, CHOSEN = 8, 128, 512
BLOCK = 256
#: what a formulation by hand is measured with
PEERS = ("eager", "compile", "compile_freeze", "aoti", "aoti_freeze", "ort", "openvino")


def _layer() -> nn.Module:
    config = DeepseekV32Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=QUERY, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
        v_head_dim=VALUE, index_n_heads=INDEX_HEADS, index_head_dim=INDEX_SIZE,
        index_topk=CHOSEN, num_hidden_layers=1, vocab_size=128, intermediate_size=3072,
        n_routed_experts=8, max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer: nn.Module = modeling.DeepseekV32Attention(config, 0)
    return layer


def turn_of(place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, ROPE] of the positions."""
    rates = 10000.0 ** (-torch.arange(0, ROPE, 2).float() / ROPE)
    angles = wide(place[:, None].float() * rates)
    turned = torch.cat((angles, angles), -1)[None]
    return turned.cos().to(dtype), turned.sin().to(dtype)


class Caches:
    """The part of transformers' cache that a layer asks for, over tensors of fixed size."""

    def __init__(self, place: Tensor, latent: Tensor, rope: Tensor, index: Tensor) -> None:
        self.place, self.latent, self.rope, self.index = place, latent, rope, index

    def update(self, latent: Tensor, rope: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.latent.index_copy_(2, self.place, latent)
        self.rope.index_copy_(2, self.place, rope)
        return self.latent, self.rope

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        self.index.index_copy_(1, self.place, key)
        return self.index


class AsShipped(nn.Module):
    """The layer itself, over a causal mask or over caches that are full."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _layer()

    def forward(self, x: Tensor, place: Tensor, *caches: Tensor) -> Tensor:
        length, low = x.shape[1], torch.finfo(x.dtype).min
        if caches:
            held = Caches(place, *caches)
            mask = torch.zeros(1, 1, length, caches[0].shape[2], dtype=x.dtype)
        else:
            held = None
            mask = torch.full((length, length), low, dtype=x.dtype).triu(1)[None, None]
        made: Tensor = self.layer(x, turn_of(place, x.dtype), mask, cache=held)[0]
        return made


class Careful(nn.Module):
    """The same by hand: no expanded keys and values, and only chosen rows are read."""

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        self.layer = _layer()
        self.split = split

    def forward(
        self, x: Tensor, place: Tensor, *caches: Tensor
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        turn = turn_of(place, x.dtype)
        rows = self._rows(x, turn)
        if self.split:
            return self._attend(x, turn, *caches, new=rows), *rows
        if caches:
            held = Caches(place, *caches)
            return self._attend(x, turn, *held.update(*rows[:2]), held.update_indexer(rows[2], 0))
        made = []
        for begin in range(0, x.shape[1], BLOCK):
            end = min(begin + BLOCK, x.shape[1])
            part = tuple(t[:, begin:end] for t in turn)
            latent, rope, index = rows[0][:, :, :end], rows[1][:, :, :end], rows[2][:, :end]
            made.append(self._attend(x[:, begin:end], part, latent, rope, index))
        return torch.cat(made, 1)

    def _rows(self, x: Tensor, turn: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Latent [1, 1, T, LATENT], rope [1, 1, T, ROPE] and indexer keys [1, T, INDEX_SIZE]."""
        layer = self.layer
        latent, rope = layer.kv_a_proj_with_mqa(x)[:, None].split((LATENT, ROPE), -1)
        rope, _ = modeling.apply_rotary_pos_emb_interleave(rope, rope, *turn)
        key = layer.indexer.k_norm(layer.indexer.wk(x))[:, None]
        turned, plain = key.split((ROPE, INDEX_SIZE - ROPE), -1)
        turned, _ = modeling.apply_rotary_pos_emb(turned, turned, *turn)
        return layer.kv_a_layernorm(latent), rope, torch.cat((turned, plain), -1)[:, 0]

    def _attend(
        self, x: Tensor, turn: tuple[Tensor, ...], latent: Tensor, rope: Tensor, index: Tensor,
        new: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        """The last x.shape[1] of the rows are those of x, or the `new` one behind all."""
        layer, length = self.layer, x.shape[1]
        low = layer.q_a_layernorm(layer.q_a_proj(x))
        chosen, seen = self._choose(x, low, turn, index[0], *(t[0] for t in new[2:]))
        query = layer.q_b_proj(low).view(length, HEADS, NOPE + ROPE)
        plain, turned = query.split((NOPE, ROPE), -1)
        turned, _ = modeling.apply_rotary_pos_emb_interleave(
            turned, turned, *(t[0] for t in turn)
        )  # fmt: skip
        weight = layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT)
        absorbed = torch.einsum("thn,hnl->thl", plain, weight[:, :NOPE])
        if length == 1:
            last = latent.shape[2] - 1
            old = chosen.clamp(max=last) if new else chosen
            rows = torch.cat((latent[0, 0][old], rope[0, 0][old]), -1)
            if new:
                row = torch.cat(new[:2], -1)[0]
                rows = torch.where((chosen > last)[..., None], row, rows)
        else:
            rows = torch.cat((latent, rope), -1)[0, 0][chosen]  # [T, CHOSEN, LATENT + ROPE]
        scores = torch.cat((absorbed, turned), -1) @ rows.transpose(1, 2)
        scores = wide(scores) * layer.scaling
        if length > 1:
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
        read = scores.softmax(-1).to(x.dtype) @ rows[..., :LATENT]
        made = torch.einsum("thl,hvl->thv", read, weight[:, NOPE:])
        result: Tensor = layer.o_proj(made.reshape(1, length, HEADS * VALUE))
        return result

    def _choose(
        self, x: Tensor, low: Tensor, turn: tuple[Tensor, ...], *index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions [T, CHOSEN] of the best keys, and which of them a query may see."""
        indexer, length = self.layer.indexer, x.shape[1]
        query = indexer.wq_b(low).view(1, length, INDEX_HEADS, INDEX_SIZE)
        turned, plain = query.split((ROPE, INDEX_SIZE - ROPE), -1)
        turned, _ = modeling.apply_rotary_pos_emb(turned, turned, *turn, unsqueeze_dim=2)
        query = torch.cat((turned, plain), -1).view(length * INDEX_HEADS, INDEX_SIZE)
        scores = wide(torch.cat([query @ keys.T for keys in index], -1))
        scores = scores.view(length, INDEX_HEADS, -1)
        count = scores.shape[2]
        weights = wide(indexer.weights_proj(x)[0]) * INDEX_HEADS**-0.5
        total = (weights[:, None] @ functional.relu(scores * INDEX_SIZE**-0.5))[:, 0]
        if length > 1:
            later = torch.arange(count) > torch.arange(count - length, count)[:, None]
            total = total.masked_fill(later, -torch.inf)
        best, chosen = total.topk(min(CHOSEN, count), -1)
        return chosen, best > -torch.inf


def make(kind: str, length: int, random: np.random.Generator) -> Workload:
    careful = partial(Careful, kind == "dsa_step_split")
    shipped = kind in ("dsa_prefill", "dsa_step")

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    products = WIDTH * (QUERY + LATENT + ROPE + HEADS * VALUE + INDEX_SIZE + INDEX_HEADS)
    products += QUERY * (HEADS * (NOPE + ROPE) + INDEX_HEADS * INDEX_SIZE)
    products += LATENT * HEADS * (NOPE + VALUE)
    chosen = min(CHOSEN, length)
    if kind.startswith("dsa_prefill"):
        inputs = {"x": normal(1, length, WIDTH), "place": np.arange(length)}
        scores = length * length / 2 * INDEX_HEADS * INDEX_SIZE  # causal
        heads = length * chosen * HEADS * (NOPE + ROPE + VALUE)
        flops = 2.0 * (length * products + scores + heads)
        runtimes, left_out = _prefill_runtimes(kind, length)
    else:
        inputs = {
            "x": normal(1, 1, WIDTH), "place": np.array([length - 1]),
            "latent": normal(1, 1, length, LATENT), "rope": normal(1, 1, length, ROPE),
            "index": normal(1, length, INDEX_SIZE),
        }  # fmt: skip
        heads = chosen * HEADS * (2 * LATENT + ROPE)
        flops = 2.0 * (products + length * INDEX_HEADS * INDEX_SIZE + heads)
        runtimes, left_out = ((), "") if shipped else (PEERS, "a formulation for peers")
    return Workload(
        inputs, AsShipped if shipped else careful, flops=flops, reference=careful, by_row=True,
        alike=("latent", "rope", "index"), runtimes=runtimes, left_out=left_out,
    )  # fmt: skip


def _prefill_runtimes(kind: str, length: int) -> tuple[tuple[str, ...], str]:
    """Who is measured, and why others are not."""
    if kind == "dsa_prefill_blocks":
        if length > BLOCK * 8:
            return ("eager",), f"{length // BLOCK} blocks, unrolled"
        return PEERS, "a formulation for peers"
    if length > BLOCK * 8:  # float32 scores of all heads are 2 GB, the logits another 2
        return ("graphc", "eager"), "the scores of all heads take several GB"
    return (), ""
