"""The sizes and choices of a hybrid model, and the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["kda", "dsa", "mla"]


@dataclass(frozen=True)
class HybridConfig:
    """A causal language model of interleaved attention kinds.

    layers: one kind a layer: "kda" (Kimi Delta Attention), "dsa" (latent attention over the keys
    that a Lightning Indexer chooses) or "mla" (latent attention over all keys).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Kind, ...]
    #: dense MLPs: their width, and how many of the first layers have one instead of experts
    intermediate_size: int
    first_dense: int = 1
    #: kda; gate_lower_bound None: the softplus gate, L < 0: log-decays in (L, 0)
    kda_heads: int = 4
    kda_head_dim: int = 32
    conv_width: int = 4
    gate_lower_bound: float | None = None
    allow_negative_eigenvalues: bool = False
    #: latent attention; query_rank None: queries straight from the hidden state
    heads: int = 4
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    latent_dim: int = 32
    query_rank: int | None = None
    rope: Literal["interleaved", "none"] = "interleaved"
    rope_theta: float = 10000.0
    #: Lightning Indexer; its first rope_dim channels are rotated, in the layout of index_rope
    index_heads: int = 4
    index_dim: int = 32
    index_topk: int = 64
    index_rope: Literal["half", "interleaved"] = "half"
    #: experts; groups and kept_groups 1: chosen among all
    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 64
    shared_experts: int = 1
    groups: int = 1
    kept_groups: int = 1
    normalize_weights: bool = True
    routed_scale: float = 1.0
    #: layers in a block of Attention Residuals; 0: the plain residual stream
    residual_block: int = 2
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.layers) - {"kda", "dsa", "mla"}
        if unknown:
            raise ValueError(f"layers are kda, dsa or mla, found {', '.join(sorted(unknown))}")
        if self.rope_dim % 2 or ("dsa" in self.layers and self.rope_dim > self.index_dim):
            raise ValueError("rope_dim must be even and at most index_dim")
        if self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError("groups must divide experts, kept_groups be one of them")
        if self.groups > 1 and self.experts // self.groups < 2:
            raise ValueError("a group has two experts or more")
        if self.gate_lower_bound is not None and self.gate_lower_bound >= 0:
            raise ValueError("gate_lower_bound is negative")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> HybridConfig:
        """From `to_dict`, or JSON of it. An unknown name is an error."""
        known = {field.name for field in dataclasses.fields(HybridConfig)}
        if wrong := sorted(set(values) - known):
            raise ValueError(f"no such field of a HybridConfig: {', '.join(wrong)}")
        given: dict[str, Any] = dict(values)
        given["layers"] = tuple(given["layers"])
        return HybridConfig(**given)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "layers": list(self.layers)}


_PATTERN: tuple[Kind, ...] = ("kda", "kda", "kda", "dsa")

#: everything once, for unit tests: under 1 M parameters
TINY = HybridConfig(
    vocab_size=96, hidden_size=64, layers=_PATTERN, intermediate_size=128,
    kda_heads=2, kda_head_dim=32, gate_lower_bound=-5.0,
    heads=2, nope_dim=16, rope_dim=16, value_dim=16, latent_dim=32, query_rank=32,
    index_heads=2, index_dim=32, index_topk=16,
    experts=4, experts_per_token=2, expert_size=32, routed_scale=2.5, tied=True,
)  # fmt: skip

#: the embedded default: bytes, and one more token that begins a text
EMBEDDED = HybridConfig(
    vocab_size=260, hidden_size=192, layers=_PATTERN * 2, intermediate_size=512,
    kda_heads=2, kda_head_dim=64, gate_lower_bound=-5.0,
    heads=4, nope_dim=32, rope_dim=16, value_dim=48, latent_dim=64, query_rank=96,
    index_heads=4, index_dim=32, index_topk=64,
    experts=8, experts_per_token=2, expert_size=96,
)  # fmt: skip

#: about 200 M parameters in the proportions of the large models
K31_MINI = HybridConfig(
    vocab_size=16384, hidden_size=768, layers=_PATTERN * 3, intermediate_size=2048,
    kda_heads=6, kda_head_dim=128, gate_lower_bound=-5.0,
    heads=8, nope_dim=64, rope_dim=32, value_dim=64, latent_dim=256, query_rank=384,
    index_heads=8, index_dim=128, index_topk=512,
    experts=16, experts_per_token=4, expert_size=384, routed_scale=2.5, residual_block=4,
)  # fmt: skip

PRESETS: dict[str, HybridConfig] = {"tiny": TINY, "embedded": EMBEDDED, "k31_mini": K31_MINI}
