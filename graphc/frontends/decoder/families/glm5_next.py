"""GLM-5.3: Kimi Delta Attention with a bounded gate beside sparse attention over pooled keys."""

from __future__ import annotations

from typing import Any

import torch

from graphc.errors import UnsupportedError
from graphc.frontends.decoder.book import current_book
from graphc.frontends.decoder.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    delta_rule,
)


def choose_positions(
    self: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, **unused: Any
) -> torch.Tensor:
    """The indexer (`graphc.ops.pooled_indexer`): positions int32 [B, T, K], -1 behind the last."""
    book = current_book()
    if book is None:
        raise UnsupportedError("an indexer of a decoder outside of a capture with states")
    if not self.index_kpool_always_select_tail:
        raise UnsupportedError("an indexer over pools that leaves out the incomplete one")
    key = self.k_norm(self.wk(hidden_states))
    gate = torch.nn.functional.linear(hidden_states, self.index_kpool_compress_gate)
    pages = book.append_pooled(
        f"layers.{self.layer_idx}.indexer", key, gate, self.index_kpool_compress_ape
    )
    query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
    chosen: torch.Tensor = torch.ops.graphc.pooled_indexer(
        query, weights * (self.n_heads**-0.5 * self.softmax_scale), pages, book.table, book.start,
        count=self.index_topk // self.index_kpool, pool=self.index_kpool,
    )  # fmt: skip
    return chosen


def positions_as_mask(self: Any, topk_indices: torch.Tensor, **unused: Any) -> torch.Tensor:
    """What attention (`graphc.frontends.decoder.hooks`) takes in the place of a mask."""
    return topk_indices


def limited_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts whose gate and values are limited before they are multiplied."""
    made: torch.Tensor = torch.ops.graphc.experts(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj,
        limit=self.swiglu_limit,
    )  # fmt: skip
    return made


MODULE = "transformers.models.glm5_next.modeling_glm5_next"
REBIND = {
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "causal_conv1d_fn": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
    "Glm5NextTextExperts.forward": limited_experts,
    "Glm5NextTextIndexer.forward": choose_positions,
    "Glm5NextTextAttention.build_attention_mask_from_topk": positions_as_mask,
}
