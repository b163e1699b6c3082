"""Tiny causal language models of transformers with random weights, one of each family."""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "qk_nope_head_dim": 32,
}  # fmt: skip
_SPARSE = {
    "q_lora_rank": 64, "n_routed_experts": 8, "first_k_dense_replace": 1, "index_topk": 16,
    "index_head_dim": 32, "index_n_heads": 4,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 32}
_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_GROUPED, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "num_hidden_layers": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {
        **_GROUPED, **_MOE, "num_hidden_layers": 2, "num_experts": 8, "decoder_sparse_step": 1,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", {
        **_GROUPED, **_MOE, "num_hidden_layers": 4, "num_experts": 8, "linear_key_head_dim": 32,
        "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }),
    "kimi_linear": ("KimiLinearForCausalLM", {
        **_LATENT, **_MOE, "num_hidden_layers": 4, "n_shared_experts": 1, "q_lora_rank": None,
        "n_group": 1, "topk_group": 1, "num_local_experts": 8, "linear_head_dim": 32,
        "linear_num_heads": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    }),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {
        **_LATENT, **_MOE, **_SPARSE, "num_hidden_layers": 3, "n_group": 2, "topk_group": 1,
    }),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {
        **_LATENT, **_MOE, **_SPARSE, "num_hidden_layers": 4, "n_group": 1, "topk_group": 1,
        "indexer_types": ["full", "full", "shared", "full"],
    }),
    "glm5_next": ("Glm5NextForConditionalGeneration", {
        **_LATENT, **_MOE, "qk_rope_head_dim": 0, "num_hidden_layers": 4, "q_lora_rank": 64,
        "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "index_topk": 16, "index_kpool": 4,
        "index_head_dim": 32, "index_n_heads": 4, "linear_head_dim": 32, "linear_num_heads": 4,
        "hc_mult": 2, "hc_sinkhorn_iters": 5, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
    }),
}  # fmt: skip
FAMILIES = tuple(_CONFIGS)


#: choices that no rounding can change: every expert, every key
_SETTLED = {"num_experts_per_tok": 8, "topk_group": 1, "n_group": 1, "index_topk": 4096}


def make(family: str, *, settled: bool = False) -> Any:
    """The same weights at every call. settled: all experts and keys are chosen, not the best."""
    import transformers

    name, fields = _CONFIGS[family]
    cls = getattr(transformers, name)
    fields = {**_COMMON, **fields}
    if settled:
        fields |= {name: value for name, value in _SETTLED.items() if name in fields}
    if "vision_config" in cls.config_class.sub_configs:
        fields = {"text_config": fields, "vision_config": _VISION}
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields)).eval()
    for place, parameter in model.named_parameters():
        if "kpool_compress" in place:  # initialised to what hides how tokens are told apart
            torch.nn.init.normal_(parameter)
    return model
