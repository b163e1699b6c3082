"""GLM-5.3: Kimi Delta Attention with a bounded gate beside sparse attention over pooled keys."""

from graphc.frontends.decoder.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    delta_rule,
)

MODULE = "transformers.models.glm5_next.modeling_glm5_next"
REBIND = {
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "causal_conv1d_fn": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
}
