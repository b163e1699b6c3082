"""A layer of a decoder by itself, called as transformers wrote it: plain inputs, caches that are
plain tensors, masks that are made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.built import Built
from tests.tiny_decoders import make


class Caches:
    """What a layer asks of a cache, over tensors."""

    def __init__(self, *tensors: Tensor, place: Tensor | None = None) -> None:
        self.tensors, self.place = list(tensors), place

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor:
        return self.tensors[0]

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor:
        return self.tensors[1]

    def update_recurrent_state(self, state: Tensor, *_: Any) -> None:
        self.tensors[1].copy_(state)

    def update(self, latent: Tensor, rope: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for kept, new in zip(self.tensors, (latent, rope), strict=False):
            kept.index_copy_(2, self.place, new)
        return self.tensors[0], self.tensors[1]

    def update_indexer(self, key: Tensor, _: int) -> Tensor:
        return self.tensors[2].index_copy_(1, self.place, key)


class Linear(nn.Module):
    """Kimi Delta Attention over a prompt, or over one token with its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make("kimi_linear").model.layers[0].self_attn

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        made: Tensor = self.layer(x, cache=Caches(*states) if states else None)
        return made


class Sparse(nn.Module):
    """DeepSeek Sparse Attention over a prompt, or over one token with full caches."""

    def __init__(self, boolean: bool = False) -> None:
        super().__init__()
        model = make("deepseek_v32")
        self.rotary, self.layer = model.model.rotary_emb, model.model.layers[1].self_attn
        self.layer.config._attn_implementation = "sdpa"
        self.boolean = boolean

    def forward(self, x: Tensor, place: Tensor, *caches: Tensor) -> Tensor:
        held = Caches(*caches, place=place) if caches else None
        keys = caches[0].shape[2] if caches else x.shape[1]
        mask = torch.zeros(1, 1, x.shape[1], keys)
        if not caches:
            hidden = torch.arange(keys) > torch.arange(keys)[:, None]
            mask = mask.masked_fill(hidden, torch.finfo(x.dtype).min)
            mask = ~hidden[None, None] if self.boolean else mask
        made: Tensor = self.layer(x, self.rotary(x, place[None]), mask, cache=held)[0]
        return made


def _eager(module: nn.Module, *args: Tensor) -> Tensor:
    """What the module gives where topk takes the first of equal scores, as graphc does: clipped
    scores are often equal, and torch takes any."""

    def topk(scores: Tensor, count: int, dim: int = -1) -> Any:
        order = scores.sort(dim=dim, descending=True, stable=True)
        parts = [part.narrow(dim, 0, count) for part in order]
        return torch.return_types.topk(parts)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        made: Tensor = module(*args)
        return made


def _applied(built: Built, name: str) -> int:
    return sum(len(record.matches) for record in built.report.passes if record.name == name)


@torch.no_grad()
def test_a_delta_rule_over_a_prompt() -> None:
    module, x = Linear(), torch.randn(2, 150, 128)
    built = Built(module, (x,), dynamic=({1: torch.export.Dim("T", min=2, max=600)},))
    try:
        assert not built.fallbacks
        for length in (150, 3, 64, 333):
            x = torch.randn(2, length, 128)
            torch.testing.assert_close(built(x), module(x), rtol=1e-4, atol=1e-5)
    finally:
        built.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_delta_rule_step_writes_its_states(dtype: torch.dtype) -> None:
    module = Linear().to(dtype)
    x = torch.randn(1, 1, 128).to(dtype)
    states = [torch.randn(1, 384, 3).to(dtype), 0.1 * torch.randn(1, 4, 32, 32)]
    wanted = [s.clone() for s in states]
    want = module(x, *wanted)
    built = Built(module, (x, *states))
    try:
        assert not built.fallbacks
        made = built(x, *states)
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        for found, true in zip((made, *states), (want, *wanted), strict=True):
            assert float((found.float() - true.float()).norm() / true.float().norm()) < bound
    finally:
        built.close()


@pytest.mark.parametrize(("length", "absorbed"), [(90, 1), (60, 0), (9, 0)])
@pytest.mark.parametrize("boolean", [False, True])
@torch.no_grad()
def test_sparse_attention_over_a_prompt(boolean: bool, length: int, absorbed: int) -> None:
    """16 keys are chosen: where little more is seen, attention is under a mask of theirs; where no
    more is seen, there is nothing to choose."""
    module = Sparse(boolean)
    inputs = (torch.randn(1, length, 128), torch.arange(length))
    built = Built(module, inputs)
    try:
        operators = {node.target for node in built.captured.graph.nodes}
        assert "aten.topk.default" in operators and not built.fallbacks
        assert _applied(built, "chosen_keys") == 1
        assert _applied(built, "absorbed_latent") == absorbed
        for _ in range(2):
            inputs = (torch.randn(1, length, 128), torch.arange(length))
            wanted = _eager(module, *inputs)
            torch.testing.assert_close(built(*inputs), wanted, rtol=1e-4, atol=1e-5)
    finally:
        built.close()


@torch.no_grad()
def test_a_sparse_step_over_full_caches() -> None:
    module = Sparse()
    made = (torch.randn(1, 1, 80, 32), torch.randn(1, 1, 80, 16), torch.randn(1, 80, 32))
    inputs = (torch.randn(1, 1, 128), torch.tensor([79]))
    built = Built(module, (*inputs, *made))
    try:
        assert not built.fallbacks
        assert _applied(built, "chosen_keys") == _applied(built, "absorbed_latent") == 1
        wanted = [t.clone() for t in made]
        want = _eager(module, *inputs, *wanted)
        torch.testing.assert_close(built(*inputs, *made), want, rtol=1e-4, atol=1e-5)
        for found, true in zip(made, wanted, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)
    finally:
        built.close()
