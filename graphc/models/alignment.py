"""Training of the Lightning Indexer beside the attention it chooses for (DeepSeek-V3.2).

The indexer gets no gradient from the model's loss, for a choice has none. Its scores, as a
distribution over keys, are drawn towards the attention's own (summed over heads) by their
Kullback-Leibler divergence: over all keys while attention is dense, over the chosen ones once it is
sparse. Nothing flows from there into the rest of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphc.models import functional
from graphc.models.latent import Indexer, LatentAttention
from graphc.models.layers import rotary
from graphc.models.states import NoStates, States

#: queries whose scores are in memory at a time
_QUERIES = 128


class Alignment:
    """Takes the place of a layer's forward, with the same results and the loss beside them:
    `layer.forward = Alignment(layer)`. Keys and values are expanded by head, which is the cheaper
    form where every query meets every key.

    sparse: attention reads the chosen keys only. sample: so many neighbouring queries of each
    sequence enter the loss, at a place of their own each time; 0: no loss. loss: of the last call.
    """

    def __init__(self, layer: LatentAttention, sample: int = _QUERIES) -> None:
        if layer.indexer is None:
            raise ValueError("a layer without an indexer has nothing to align")
        self.layer, self.indexer = layer, layer.indexer
        self.sparse, self.sample = False, sample
        self.loss = torch.zeros([])

    def __call__(self, x: Tensor, states: States) -> Tensor:
        if not isinstance(states, NoStates):
            raise ValueError("training begins with the first token of a sequence")
        layer = self.layer
        cos, sin = rotary(x.shape[1], None, layer.rope, layer.theta)
        compressed, nope, turned = layer.queries(x, cos, sin)
        latent, shared = layer.rows(x, cos, sin)
        made = layer.kv_b_proj(latent).unflatten(-1, [layer.heads, layer.nope + layer.value])
        key, value = made.split([layer.nope, layer.value], -1)
        shared = shared.unsqueeze(2).expand(-1, -1, layer.heads, -1)
        query, key, value = (
            part.transpose(1, 2)
            for part in (torch.cat([nope, turned], -1), torch.cat([key, shared], -1), value)
        )
        scored = self.indexer(x.detach(), compressed.detach(), cos, sin)
        chosen = None
        if self.sparse:
            index_query, weights, index_key = (part.detach() for part in scored)
            chosen = chosen_keys(index_query, weights, index_key, layer.count)
        out = F.scaled_dot_product_attention(
            query, key, value, None if chosen is None else chosen.unsqueeze(1),
            is_causal=chosen is None, scale=layer.scale,
        )  # fmt: skip
        if self.sample:
            self.loss = self._divergence(query.detach(), key.detach(), scored, chosen)
        result: Tensor = layer.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _divergence(
        self, query: Tensor, key: Tensor, scored: tuple[Tensor, Tensor, Tensor],
        chosen: Tensor | None,
    ) -> Tensor:  # fmt: skip
        length = query.shape[2]
        count = min(self.sample, length)
        first = int(torch.randint(length - count + 1, []))
        rows = slice(first, first + count)
        scores = functional.index_scores(
            scored[0][:, rows], scored[1][:, rows], scored[2], first, None
        )
        hidden = scores == -torch.inf if chosen is None else ~chosen[:, rows]
        with torch.no_grad():
            main = query[:, :, rows] @ key.transpose(2, 3) * self.layer.scale
            target = torch.softmax(main.masked_fill(hidden.unsqueeze(1), -torch.inf), -1).mean(1)
        ours = torch.log_softmax(scores.masked_fill(hidden, -torch.inf), -1)
        each = target * (target.clamp(min=1e-9).log() - ours.masked_fill(hidden, 0.0))
        return each.sum(-1).mean()


def chosen_keys(query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
    """bool [B, T, T]: what `functional.lightning_indexer` chooses, as a mask."""
    parts = []
    for first in range(0, query.shape[1], _QUERIES):
        rows = slice(first, first + _QUERIES)
        end = first + _QUERIES
        scores = functional.index_scores(
            query[:, rows], weights[:, rows], key[:, :end], first, None
        )
        chosen = functional.select(scores, count)
        parts.append(F.pad(chosen, [0, key.shape[1] - chosen.shape[2]]))
    return torch.cat(parts, 1)


def align(model: torch.nn.Module) -> list[Alignment]:
    """Puts an `Alignment` into every sparse layer of a model."""
    found = []
    for module in model.modules():
        if isinstance(module, LatentAttention) and isinstance(module.indexer, Indexer):
            alignment = Alignment(module)
            module.forward = alignment  # type: ignore[method-assign]
            found.append(alignment)
    return found
