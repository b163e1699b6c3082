"""Qwen3-Next: Gated DeltaNet beside gated attention."""

from graphc.frontends.decoder.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    delta_rule,
)

MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"
REBIND = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "torch_recurrent_gated_delta_rule": delta_rule,
    "causal_conv1d_fn": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
}
