"""The reference hybrid: a causal language model of Kimi Delta Attention, sparse latent attention,
Attention Residuals and a mixture of experts, in plain torch.

Nothing in graphc knows it. A capture that wants operators puts them in the place of functions of
`graphc.models.functional`, and pages in the place of `graphc.models.states.TensorStates`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphc.models.hybrid_config import PRESETS, HybridConfig
from graphc.models.kda import KimiDeltaAttention
from graphc.models.latent import LatentAttention
from graphc.models.layers import MLP, RMSNorm, linear
from graphc.models.moe import MixtureOfExperts, Router
from graphc.models.residuals import AttentionResidual, BlockStream, PlainStream
from graphc.models.states import NoStates, States


class Layer(nn.Module):
    """Attention, then an MLP, each behind a norm and reading its own mix of what came before."""

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        kind, size, eps = config.layers[index], config.hidden_size, config.norm_eps
        self.self_attn: nn.Module
        if kind == "kda":
            self.self_attn = KimiDeltaAttention(config, index)
        else:
            self.self_attn = LatentAttention(config, index, sparse=kind == "dsa")
        self.mlp: nn.Module
        if index < config.first_dense:
            self.mlp = MLP(size, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        block = config.residual_block
        self.attention_residual = AttentionResidual(size, eps) if block and index else None
        self.mlp_residual = AttentionResidual(size, eps) if block else None
        self.ends_block = block > 0 and (index + 1) % block == 0

    def forward(self, stream: BlockStream | PlainStream, states: States) -> None:
        """Reads its inputs from `stream` and adds its outputs to it."""
        x = self.input_layernorm(stream.input(self.attention_residual))
        stream.add(self.self_attn(x, states))
        x = self.post_attention_layernorm(stream.input(self.mlp_residual))
        stream.add(self.mlp(x))
        if self.ends_block:
            stream.end_block()


class Hybrid(nn.Module):
    """Tokens int64 [B, T] -> logits [B, T, vocab_size]."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.layers)))
        block = config.residual_block
        self.final_residual = (
            AttentionResidual(config.hidden_size, config.norm_eps) if block else None
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset()

    def reset(self) -> None:
        """Weights drawn from torch's generator: normal with the deviation 1 / sqrt(inputs),
        1 for embeddings of their own."""
        for module in self.modules():
            if isinstance(module, nn.Linear | Router):
                nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
        for name, parameter in self.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        tied = self.config.tied
        nn.init.normal_(self.embed_tokens.weight, std=self.config.hidden_size**-0.5 if tied else 1)
        for module in self.modules():
            if isinstance(module, KimiDeltaAttention):
                module.reset()

    def forward(
        self, input_ids: Tensor, states: States | None = None, logits_to_keep: int | Tensor = 0
    ) -> Tensor:
        """Args:
        input_ids: the next T tokens of B sequences.
        states: what came before; it has these tokens too afterwards. None: nothing did.
        logits_to_keep: only of so many last tokens, or of the tokens at these positions of
            input_ids (int64 [K]); 0: of all.
        """
        hidden = self.hidden(input_ids, NoStates() if states is None else states)
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits: Tensor = self.lm_head(hidden)
        return logits

    def hidden(self, input_ids: Tensor, states: States) -> Tensor:
        """[B, T, D] behind the last norm."""
        embedding = self.embed_tokens(input_ids)
        stream = BlockStream(embedding) if self.config.residual_block else PlainStream(embedding)
        for layer in self.layers:
            layer(stream, states)
        states.advance(input_ids.shape[1])
        out: Tensor = self.norm(stream.input(self.final_residual))
        return out


def hybrid(preset: str, seed: int = 0) -> Hybrid:
    """A model of random weights, the same on every machine; presets: tiny, embedded, k31_mini."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Hybrid(PRESETS[preset]).eval()
