"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form, over all keys
or over those a Lightning Indexer chooses (DeepSeek-V3.2).

Rows [latent | rotated key] are all that is kept. Key and value projections of the latent are
absorbed into the query and the output, so that one key serves all heads:

    q_h = [Wk_h^T q_nope_h | rotated q_h]      o_h = Wv_h (softmax(scale q_h . row) latent)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphc.models import functional
from graphc.models.hybrid_config import HybridConfig
from graphc.models.layers import RMSNorm, linear, rotary, rotate, wide
from graphc.models.states import States

#: of the norms inside of latent attention, whatever the model's
INNER_EPS = 1e-6


class Indexer(nn.Module):
    """What the Lightning Indexer scores: queries of several heads, a weight a head, and one key."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.index_heads, config.index_dim
        self.rotated = 0 if config.rope == "none" else config.rope_dim
        self.layout = config.index_rope
        self.wq_b = linear(config.query_rank or config.hidden_size, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=INNER_EPS)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def forward(
        self, x: Tensor, compressed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(query [B, T, Hi, Di], weights [B, T, Hi], key [B, T, Di]); the scale of the scores is
        in the weights."""
        query = self.wq_b(compressed).unflatten(-1, [self.heads, self.dim])
        key = self.k_norm(self.wk(x)).unsqueeze(2)
        query, key = (self._rotate(part, cos, sin) for part in (query, key))
        weights = wide(self.weights_proj(x)) * (self.heads * self.dim) ** -0.5
        return query, weights, key.squeeze(2)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.rotated:
            return x
        turned, passed = x.split([self.rotated, self.dim - self.rotated], -1)
        return torch.cat([rotate(turned, cos, sin, self.layout), passed], -1)


class LatentAttention(nn.Module):
    """[B, T, D] -> [B, T, D]; keeps a row of latent_dim + rope_dim numbers a token, and a key of
    the indexer if it has one (sparse)."""

    def __init__(self, config: HybridConfig, layer: int, sparse: bool) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.heads
        self.nope, self.rope = config.nope_dim, config.rope_dim
        self.value, self.latent = config.value_dim, config.latent_dim
        self.rotated, self.theta = config.rope != "none", config.rope_theta
        self.count = config.index_topk
        self.scale = float((self.nope + self.rope) ** -0.5)
        size, width = config.hidden_size, self.heads * (self.nope + self.rope)
        if config.query_rank is None:
            self.q_proj = linear(size, width)
        else:
            self.q_a_proj = linear(size, config.query_rank)
            self.q_a_layernorm = RMSNorm(config.query_rank, INNER_EPS)
            self.q_b_proj = linear(config.query_rank, width)
        self.compressed = config.query_rank is not None
        self.kv_a_proj_with_mqa = linear(size, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, INNER_EPS)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, size)
        self.indexer = Indexer(config) if sparse else None

    def forward(self, x: Tensor, states: States) -> Tensor:
        cos, sin = rotary(x.shape[1], states.start, self.rope, self.theta)
        compressed, nope, turned = self.queries(x, cos, sin)
        latent, key = self.rows(x, cos, sin)
        rows = states.append(self.layer, "latent", latent, key)
        indices = None
        if self.indexer is not None:
            index_query, weights, index_key = self.indexer(x, compressed, cos, sin)
            keys = states.append(self.layer, "index", index_key)
            indices = functional.lightning_indexer(
                index_query, weights, keys, states.start, count=self.count
            )
        key_up, value_up = self.expansions()
        # [H, B T, nope] @ [H, nope, latent]: the key's expansion moves to the query's side
        absorbed = nope.flatten(0, 1).transpose(0, 1) @ key_up
        absorbed = absorbed.transpose(0, 1).view(*nope.shape[:3], self.latent)
        out = functional.latent_attention(
            torch.cat([absorbed, turned], -1), rows, states.start, indices,
            latent=self.latent, scale=self.scale,
        )  # fmt: skip
        made = out.flatten(0, 1).transpose(0, 1) @ value_up.transpose(1, 2)
        result: Tensor = self.o_proj(made.transpose(0, 1).reshape(*x.shape[:2], -1))
        return result

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what the indexer's queries are made of, [B, T, H, nope], rotated [B, T, H, rope])."""
        compressed = self.q_a_layernorm(self.q_a_proj(x)) if self.compressed else x
        made = self.q_b_proj(compressed) if self.compressed else self.q_proj(x)
        made = made.unflatten(-1, [self.heads, self.nope + self.rope])
        nope, turned = made.split([self.nope, self.rope], -1)
        if self.rotated:
            turned = rotate(turned, cos, sin, "interleaved")
        return compressed, nope, turned

    def rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(latent [B, T, latent], rotated key [B, T, rope]): what is kept of a token."""
        latent, key = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        if self.rotated:
            key = rotate(key.unsqueeze(2), cos, sin, "interleaved").squeeze(2)
        return self.kv_a_layernorm(latent), key

    def expansions(self) -> tuple[Tensor, Tensor]:
        """(Wk [H, nope, latent], Wv [H, value, latent])."""
        weight = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        key_up, value_up = weight.split([self.nope, self.value], 1)
        return key_up, value_up
