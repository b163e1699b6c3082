"""Kimi Linear: Kimi Delta Attention beside latent attention without rotation."""

from graphc.frontends.decoder.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    delta_rule,
)

MODULE = "transformers.models.kimi_linear.modeling_kimi_linear"
REBIND = {
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "causal_conv1d_fn": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
}
