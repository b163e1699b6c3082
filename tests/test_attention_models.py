"""Published attention variants, as transformers writes them: fused, and equal to eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.built import Built

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "head_dim": 8, "sliding_window": 8,
}  # fmt: skip
#: name -> (configuration, class, what graphc.attention must have been given in some layer)
MODELS: dict[str, Callable[[], tuple[Any, str, set[str]]]] = {
    "mistral": lambda: (
        transformers.MistralConfig(**SMALL), "MistralModel", {"back", "ahead", "enable_gqa"},
    ),
    "gemma2": lambda: (
        transformers.Gemma2Config(**SMALL), "Gemma2Model",
        {"back", "ahead", "soft_cap", "enable_gqa"},
    ),
    "gpt_oss": lambda: (
        transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        "GptOssModel", {"back", "ahead", "sinks", "enable_gqa"},
    ),
    "bloom": lambda: (
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "BloomModel", {"ahead"},
    ),
    "mpt": lambda: (
        transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
        "MptModel", {"ahead"},
    ),
}  # fmt: skip


class Tokens(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(tokens, use_cache=False).last_hidden_state
        return result


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str) -> None:
    config, architecture, expected = MODELS[name]()
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():  # some classes leave parameters empty
        torch.nn.init.normal_(parameter, std=0.05)
    module = Tokens(model).requires_grad_(False)
    length = torch.export.Dim("T", min=2, max=100)
    built = Built(module, (torch.randint(64, (1, 24)),), dynamic=({1: length},))
    try:
        records = {r.name: r for r in built.report.passes}
        matches = [m for m in records["causal_attention"].matches if m.rule == "causal_mask"]
        assert len(matches) == 2
        text = (built.plan / "graph.txt").read_text()
        lines = [line for line in text.splitlines() if "graphc.attention" in line]
        assert len(lines) == 2
        assert all(any(f"{word}=" in line for line in lines) for word in expected)
        for tokens in (torch.randint(64, (1, t)) for t in (2, 24, 70)):
            torch.testing.assert_close(built(tokens), module(tokens), atol=2e-5, rtol=2e-4)
    finally:
        built.close()


class Table(torch.nn.Module):
    """A causal mask cut out of a table made for the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1, 1, 80, 80).tril())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        scores = q @ k.transpose(-2, -1) * 0.25
        hidden = self.table[:, :, :length, :length] == 0
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def test_a_table_of_positions() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    length = torch.export.Dim("T", min=2, max=80)
    built = Built(Table(), (q, k, v), dynamic=({2: length},) * 3)
    try:
        text = (built.plan / "graph.txt").read_text()
        assert "is_causal=True" in text and "aten.any" not in text
        for t in (2, 70):
            parts = tuple(x[:, :, :t].contiguous() for x in (q, k, v))
            torch.testing.assert_close(built(*parts), Table()(*parts))
    finally:
        built.close()
