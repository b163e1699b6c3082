"""Training of sparse attention and its indexer on sequences too long for all queries to meet all
keys.

Attention reads the chosen keys only, as it does when it serves. At some queries, spread over the
sequence, two divergences are taken over all the keys that they see:

indexer   KL(attention, mean over heads || softmax of the scores), as in `alignment`; queries and
          keys of the indexer get noise relative to each number, as narrow formats of floating
          point put it there, so that scores which differ little in the end decide little
coverage  KL(attention over the chosen keys || attention over all) = -log of the weight that the
          choice covers, mean over heads: without it nothing keeps attention from spreading over
          ever more keys that it never reads
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphc.models import functional
from graphc.models.alignment import Alignment
from graphc.models.latent import LatentAttention
from graphc.models.layers import rotary
from graphc.models.states import NoStates, States

#: queries whose scores are in memory at a time: of the choice, and of the loss, which keeps more
_QUERIES, _SAMPLED = 128, 64


class LongAlignment(Alignment):
    """Takes the place of a sparse layer's forward for one sequence, as `Alignment` does.

    noise: relative deviation. coverage: weight of that divergence in `loss`; covered: the share of
    the attention weight (its geometric mean) at the last call.
    """

    def __init__(self, layer: LatentAttention, sample: int = 256) -> None:
        super().__init__(layer, sample)
        self.sparse = True
        self.noise = self.coverage = self.covered = 0.0
        self._seen: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, states: States) -> Tensor:
        if not isinstance(states, NoStates) or x.shape[0] != 1:
            raise ValueError("long training takes one sequence from its first token on")
        layer = self.layer
        cos, sin = rotary(x.shape[1], None, layer.rope, layer.theta)
        compressed, nope, turned = layer.queries(x, cos, sin)
        rows = torch.cat(layer.rows(x, cos, sin), -1)
        scored = self.indexer(x.detach(), compressed.detach(), cos, sin)
        with torch.no_grad():
            chosen = best_keys(scored[0][0], scored[1][0], scored[2][0], layer.count)
        key_up, value_up = layer.expansions()
        absorbed = nope[0].transpose(0, 1) @ key_up
        query = torch.cat([absorbed.transpose(0, 1).unsqueeze(0), turned], -1)
        out = functional.latent_attention(
            query, rows, None, chosen.unsqueeze(0), latent=layer.latent, scale=layer.scale
        )
        if self.sample:
            self._losses(query[0], rows[0], scored, chosen)
        self._seen = tuple(part.detach() for part in (x, compressed, query, rows))
        made = (out[0].transpose(0, 1) @ value_up.transpose(1, 2)).transpose(0, 1)
        result: Tensor = layer.o_proj(made.reshape(*x.shape[:2], -1))
        return result

    def _losses(
        self, query: Tensor, rows: Tensor, scored: tuple[Tensor, Tensor, Tensor], chosen: Tensor
    ) -> None:
        index_query, weights, key = (part[0] for part in scored)
        place = torch.randperm(rows.shape[0])[: self.sample].sort().values
        found = []
        for part in place.split(_SAMPLED):
            end = int(part[-1]) + 1
            found.append(
                checkpoint(
                    self._divergences, part, query[part], rows[:end], index_query[part],
                    weights[part], key[:end], chosen[part], use_reentrant=False,
                )
            )  # fmt: skip
        apart, missed = torch.cat(found, 1).mean(1)
        self.covered = float(torch.exp(-missed.detach()))
        self.loss = apart + self.coverage * missed if self.coverage else apart

    def again(self) -> Tensor:
        """The indexer's divergence at other queries of the last sequence, which is no longer run
        for it: an indexer follows its attention sooner than the model takes a step."""
        x, compressed, query, rows = self._seen
        cos, sin = rotary(x.shape[1], None, self.layer.rope, self.layer.theta)
        index_query, weights, key = (p[0] for p in self.indexer(x, compressed, cos, sin))
        place = torch.randperm(x.shape[1])[:_SAMPLED].sort().values
        main = self._attention(place, query[0, place], rows[0]).exp().mean(1)
        return self._apart(place, main, index_query[place], weights[place], key).mean()

    def _divergences(
        self, place: Tensor, query: Tensor, rows: Tensor, index_query: Tensor, weights: Tensor,
        key: Tensor, chosen: Tensor,
    ) -> Tensor:  # fmt: skip
        """Of the indexer and of coverage, [2, Q]."""
        main = self._attention(place, query, rows)
        none = (chosen < 0).unsqueeze(1)
        read = main.gather(2, chosen.clamp(min=0).long().unsqueeze(1).expand(-1, main.shape[1], -1))
        missed = -torch.logsumexp(read.masked_fill(none, -torch.inf), -1).mean(1)
        target = main.detach().exp().mean(1)
        return torch.stack([self._apart(place, target, index_query, weights, key), missed])

    def _attention(self, place: Tensor, query: Tensor, rows: Tensor) -> Tensor:
        """Logarithm of the weights over all keys up to `place`, [Q, H, S]."""
        hidden = _later(place, rows.shape[0]).unsqueeze(1)
        dots = (query.flatten(0, 1) @ rows.T).view(*query.shape[:2], -1) * self.layer.scale
        return torch.log_softmax(dots.masked_fill(hidden, -torch.inf), -1)

    def _apart(
        self, place: Tensor, target: Tensor, index_query: Tensor, weights: Tensor, key: Tensor
    ) -> Tensor:
        """KL(target || softmax of the noisy scores) of each query, target [Q, S]."""
        hidden = _later(place, key.shape[0])
        index_query, key = (
            part * (1 + self.noise * torch.randn_like(part)) for part in (index_query, key)
        )
        dots = (index_query.flatten(0, 1) @ key.T).relu().view(*index_query.shape[:2], -1)
        scores = (weights.unsqueeze(1) @ dots).squeeze(1).masked_fill(hidden, -torch.inf)
        ours = torch.log_softmax(scores, -1).masked_fill(hidden, 0.0)
        return (target * (target.clamp(min=1e-9).log() - ours)).sum(-1)


def _later(place: Tensor, keys: int) -> Tensor:
    """bool [Q, S]: the keys behind a query."""
    return torch.arange(keys) > place.unsqueeze(1)


def best_keys(query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
    """int32 [T, count]: the keys of the best scores up to each query, in no order, then -1 where
    there are fewer. query [T, Hi, Di], weights [T, Hi], key [T, Di]; which of equal scores are
    taken is not said."""
    made = torch.full([query.shape[0], count], -1, dtype=torch.int32)
    for first in range(0, query.shape[0], _QUERIES):
        rows = slice(first, first + _QUERIES)
        end = min(first + _QUERIES, query.shape[0])
        scores = functional.index_scores(
            query[None, rows], weights[None, rows], key[None, :end], first, None
        )
        best = scores[0].topk(min(count, end), -1, sorted=False)
        found = torch.where(best.values > -torch.inf, best.indices, -1)
        made[rows, : found.shape[1]] = found.to(torch.int32)
    return made
