"""transformers' own extension points, answered with operators of graphc."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphc.errors import UnsupportedError
from graphc.frontends.decoder.book import current_book

#: attention over the past of the current book; no mask is ever made
ATTENTION = "graphc"
#: the same for models whose layers cut a mask for their indexer: it is one operator
INDEXED = "graphc_indexed"
EXPERTS = "graphc"


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, *, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, indices: torch.Tensor | None = None, **unused: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """query [B, H, T, D], key and value [B, Hk, S, D] -> [B, T, H, Dv].

    The keys that an indexer chose come as `indices`, or in the place of the mask: int32 [B, T, K].
    """
    book = current_book()
    if book is None:
        raise UnsupportedError("attention of a decoder outside of a capture with states")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        indices = attention_mask
    if indices is not None:
        out = torch.ops.graphc.sparse_attention(query, key, value, indices, book.start, scale=scale)
        return out, None
    sinks = None if s_aux is None else s_aux.reshape(-1, 1, 1)
    out = torch.ops.graphc.cached_attention(
        query, key, value, book.start, scale=scale, soft_cap=float(softcap or 0.0), sinks=sinks,
        back=None if sliding_window is None else sliding_window - 1,
    )  # fmt: skip
    return out, None


def position_mask(*, q_length: int, kv_length: int, **unused: Any) -> torch.Tensor:
    """bool [B, 1, T, S]: the keys each query may see."""
    book = current_book()
    if book is None:
        raise UnsupportedError("a mask of a decoder outside of a capture with states")
    mask: torch.Tensor = torch.ops.graphc.position_mask(book.start, q_length, kv_length)
    return mask


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Gated experts with SiLU are one operator; others go transformers' grouped way."""
    plain = (
        getattr(module, "has_gate", True)
        and not getattr(module, "has_bias", False)
        and not getattr(module, "is_transposed", False)
        and not getattr(module, "has_post_expert_norm", False)
        and getattr(module, "is_concatenated", True)
        and getattr(type(module), "_apply_gate", _default_apply_gate) is _default_apply_gate
        and isinstance(getattr(module, "act_fn", None), (torch.nn.SiLU, SiLUActivation))
    )
    if not plain:
        grouped: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
            module, hidden_states, top_k_index, top_k_weights
        )
        return grouped
    made: torch.Tensor = torch.ops.graphc.experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
    )
    return made


def install(model: Any) -> None:
    """Makes a transformers model call graphc's attention, masks and experts from now on."""
    for name in (ATTENTION, INDEXED):
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(INDEXED, position_mask)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
    config = model.config.get_text_config()
    indexed = getattr(config, "index_topk", None) is not None
    for part in {id(c): c for c in (model.config, config)}.values():
        part._attn_implementation = INDEXED if indexed else ATTENTION
        part._experts_implementation = EXPERTS
