"""How well narrowed keys rank: three measures of which keys an indexer chooses.

overlap  |Q n R| / k of the narrowed choice Q and the plain one R
mass     the share of the attention weight of R (softmax over R) that Q still covers
recall   the share of relevant keys that Q holds: the g keys of the largest attention weight over
         all keys that a query sees, g << k

Noise of the scores alone predicts the overlap: with n keys seen, normal scores and
rho = std(noisy - exact) / std(exact),

    1 - overlap = n / k phi(z) rho / sqrt(2 pi),    z = Phi^-1(1 - k / n)

The threshold falls where the density of scores is phi(z) / std; noise of deviation s carries a key
across it from either side with the expected distance s / sqrt(2 pi).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import torch
from torch import Tensor

from graphc.models.functional import select
from graphc.ops.lightning_indexer import candidates_for
from graphc.ops.records import record_format

#: numbers of a block of scores in memory at a time
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Form:
    """What queries and keys become before they are scored: "" as they are, "bfloat16", or a kind
    of MXFP8 (`graphc.ops.records`). rescore: with a second term of the keys, how many times as
    many as are wanted the first chooses (`candidates_for`); 0: there is none."""

    name: str
    kind: str = ""
    rescore: float = 0.0

    def terms(self, key: Tensor) -> list[Tensor]:
        """Keys [S, D] as the terms that scoring reads, float32."""
        first = self.narrowed(key)
        if not self.rescore:
            return [first]
        return [first, first + self.narrowed(key.float() - first)]

    def narrowed(self, numbers: Tensor) -> Tensor:
        """[..., D] as they are kept, in float32."""
        if not self.kind:
            return numbers.float()
        if self.kind == "bfloat16":
            return numbers.bfloat16().float()
        form = record_format(f"{self.kind}:{numbers.shape[-1]}")
        return form.decode(form.encode(numbers), torch.float32)


@dataclass(frozen=True)
class Asked:
    """Queries of one layer at `position` int64 [Q] of a sequence, and the keys they see.

    query [Q, Hi, Di], weights [Q, Hi], key [S, Di] of the indexer; attention [Q, H, W] and rows
    [S, W] of the attention that reads the choice of `count` keys, scale its factor.
    """

    position: Tensor
    query: Tensor
    weights: Tensor
    key: Tensor
    attention: Tensor
    rows: Tensor
    count: int
    scale: float

    def parts(self) -> Iterator[Asked]:
        """The same in parts whose scores [Q, S] take little memory."""
        step = max(1, _BLOCK // self.key.shape[0])
        for first in range(0, len(self.position), step):
            own = slice(first, first + step)
            yield replace(
                self, position=self.position[own], query=self.query[own],
                weights=self.weights[own], attention=self.attention[own],
            )  # fmt: skip


@dataclass
class Ranks:
    """Sums over queries of one layer and form; `means` makes figures of them."""

    queries: int = 0
    relevant: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, queries: int, relevant: int, **sums: float) -> None:
        """Adds `queries` queries with so many relevant keys together."""
        self.queries += queries
        self.relevant += relevant
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Of a query."""
        return {name: value / max(self.queries, 1) for name, value in self.sums.items()}

    def error(self, name: str, squares: str) -> float:
        """The standard error of a mean, queries being independent."""
        means, count = self.means(), max(self.queries, 1)
        return math.sqrt(max(0.0, means[squares] - means[name] ** 2) / count)


def scores(query: Tensor, weights: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """sum_h weights[q, h] relu(query[q, h] . key[s]), -inf behind position[q]: float32 [Q, S].

    query [Q, H, D], weights [Q, H], key [S, D], position int64 [Q].
    """
    made = torch.empty(query.shape[0], key.shape[0])
    step = max(1, _BLOCK // (query.shape[1] * key.shape[0]))
    wide = key.float().T.contiguous()
    for first in range(0, query.shape[0], step):
        rows = slice(first, first + step)
        dots = (query[rows].float().flatten(0, 1) @ wide).relu_()
        dots = dots.view(-1, query.shape[1], key.shape[0])
        made[rows] = (weights[rows].float().unsqueeze(1) @ dots).squeeze(1)
    return made.masked_fill_(_later(position, key.shape[0]), -torch.inf)


def attention_mass(query: Tensor, rows: Tensor, position: Tensor, scale: float) -> Tensor:
    """softmax over the rows up to position[q] of scale query[q, h] . rows[s], the mean over heads:
    float32 [Q, S]. query [Q, H, W], rows [S, W]."""
    made = torch.empty(query.shape[0], rows.shape[0])
    step = max(1, _BLOCK // (query.shape[1] * rows.shape[0]))
    wide, later = rows.float().T.contiguous() * scale, _later(position, rows.shape[0])
    for first in range(0, query.shape[0], step):
        part = slice(first, first + step)
        dots = (query[part].float().flatten(0, 1) @ wide).view(-1, query.shape[1], rows.shape[0])
        dots.masked_fill_(later[part].unsqueeze(1), -torch.inf)
        made[part] = torch.softmax(dots, -1).mean(1)
    return made


def choice(asked: Asked, form: Form) -> tuple[Tensor, Tensor]:
    """(bool [Q, S], the keys that an indexer of this form chooses; the scores [Q, S] that decide).

    With a second term, those of both terms decide among the candidates of the first."""
    terms = form.terms(asked.key)
    query = form.narrowed(asked.query)
    first = scores(query, asked.weights, terms[0], asked.position)
    if len(terms) == 1:
        return select(first, asked.count), first
    among = select(first, candidates_for(asked.count, form.rescore))
    again = scores(asked.query, asked.weights, terms[1], asked.position)
    return select(again.masked_fill(~among, -torch.inf), asked.count), again


def noise(noisy: Tensor, exact: Tensor) -> Tensor:
    """rho of each query [Q]: std(noisy - exact) / std(exact) over the keys that it sees."""
    seen = exact > -torch.inf
    count = seen.sum(-1)

    def deviation(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0.0).double()
        return (x.square().sum(-1) / count - (x.sum(-1) / count).square()).clamp(min=0).sqrt()

    return deviation(noisy - exact) / deviation(exact)


def predicted_loss(rho: Tensor, count: int, seen: Tensor) -> Tensor:
    """1 - overlap of each query, as noise alone predicts it; rho, seen (keys) [Q]; none where all
    are chosen."""
    normal = NormalDist()
    dense = [normal.pdf(normal.inv_cdf(1 - count / n)) if n > count else 0.0 for n in seen.tolist()]
    return seen.double() / count * torch.tensor(dense).double() * rho / math.sqrt(2 * math.pi)


def relevant_keys(mass: Tensor, count: int) -> Tensor:
    """bool [Q, S]: the `count` keys of the largest attention weight."""
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(1, mass.topk(count, -1).indices, True)


def _later(position: Tensor, keys: int) -> Tensor:
    return torch.arange(keys) > position.unsqueeze(1)


PLAIN, ROUNDED = Form("plain"), Form("bfloat16", "bfloat16")


def measure(asked: Asked, forms: Sequence[Form], relevant: int, into: dict[str, Ranks]) -> None:
    """Adds to each form's sums, by the form's name.

    rho, predicted, overlap, mass: against the choice of the keys as they are; with `_bf16`
    behind: against that of queries and keys rounded to bfloat16. recall: of the `relevant` best;
    covered: the share of the attention weight over all keys that is covered. dropped, lost: how
    much less of both than those choices have, and squares of that.
    """
    exact = choice(asked, PLAIN)
    references = {"": exact, "_bf16": choice(asked, ROUNDED)}
    mass = attention_mass(asked.attention, asked.rows, asked.position, asked.scale)
    best = relevant_keys(mass, relevant)
    seen = (asked.position + 1).clamp(max=asked.key.shape[0])
    total = seen.clamp(max=asked.count)
    for form in forms:
        chosen, noisy = exact if form == PLAIN else choice(asked, form)
        sums: dict[str, float] = {}
        found = (chosen & best).sum(-1) / relevant
        covered = (mass * chosen).sum(-1)
        for name, (plain, scored) in references.items():
            rho = noise(noisy, scored)
            both = chosen & plain
            weight = (mass * plain).sum(-1)
            dropped = (plain & best).sum(-1) / relevant - found
            lost = (weight - covered).double()
            sums |= {
                f"rho{name}": float(rho.sum()),
                f"predicted{name}": float((1 - predicted_loss(rho, asked.count, seen)).sum()),
                f"overlap{name}": _total(both.sum(-1) / total),
                f"mass{name}": _total((mass * both).sum(-1) / weight),
                f"dropped{name}": _total(dropped),
                f"dropped_squares{name}": _total(dropped.square()),
                f"lost{name}": _total(lost),
                f"lost_squares{name}": _total(lost.square()),
            }
        sums["recall"] = _total(found)
        sums["covered"] = _total(covered)
        count = len(asked.position)
        into.setdefault(form.name, Ranks()).add(count, count * relevant, **sums)


def _total(values: Tensor) -> float:
    return float(values.double().sum())
