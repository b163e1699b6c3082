"""Plans over the same tokens, side by side: log-losses, and how far their results drift apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphc.quality.probes import Indexer
from graphc.quality.ranking import Asked
from graphc.quality.report import ErrorRecord, PerplexityRecord, Stretch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graphc.runtime.decoder import Decoder
    from graphc.runtime.decoder import Sequence as Text

PLAIN = "none"
LOGITS = "logits"
#: tokens whose differences of the log-loss are averaged before their spread is looked at:
#: neighbours are alike
BLOCK = 256


def floats(array: NDArray[Any]) -> Tensor:
    """float32 of a plan's numbers; bfloat16 comes as its bits or as a type of ml_dtypes."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).float()
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def windows(tokens: NDArray[np.int64], length: int, budget: int) -> list[NDArray[np.int64]]:
    """Pieces of `length` + 1 tokens, evenly spread over the text, which do not overlap by more
    than one token; as many as fit into the text and into `budget` tokens, one at least where the
    text has as many."""
    fits = (len(tokens) - 1) // length
    count = min(fits, max(1, budget // length))
    starts = np.linspace(0, len(tokens) - 1 - length, max(count, 0)).astype(int)
    return [tokens[first : first + length + 1] for first in starts.tolist()]


@dataclass
class Stretches:
    """Sums by position: below 256, then in steps of doubled size."""

    length: int
    sums: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    @property
    def edges(self) -> list[int]:
        made = [0, min(256, self.length)]
        while made[-1] < self.length:
            made.append(min(2 * made[-1], self.length))
        return made

    def add(self, first: int, values: Tensor, *key: str) -> None:
        """Adds values [T] at the positions first.. to the sums of `key`."""
        edges = self.edges
        place = torch.bucketize(
            torch.arange(first, first + len(values)), torch.tensor(edges), right=True
        )
        held = self.sums.setdefault(key, torch.zeros(len(edges) - 1, dtype=torch.float64))
        held.index_add_(0, place - 1, values.double())

    def table(self, values: Sequence[float]) -> list[Stretch]:
        edges = self.edges
        return [Stretch(a, b, value) for a, b, value in zip(edges, edges[1:], values, strict=False)]


class Drift:
    """Log-losses of plans on windows of one length, and the errors of what they compute."""

    def __init__(self, length: int, parts: Sequence[str]) -> None:
        self.parts = (*parts, LOGITS)
        self.losses: dict[str, list[Tensor]] = {}
        self._squares = Stretches(length)

    def add(self, name: str, first: int, answer: Mapping[str, NDArray[Any]],
            plain: Mapping[str, NDArray[Any]], targets: NDArray[np.int64]) -> None:  # fmt: skip
        """What a plan answered to the tokens at first.., the plain plan's answer, what follows
        each of them."""
        logits = floats(answer[LOGITS])[0]
        loss = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(targets), reduction="none"
        )
        self.losses.setdefault(name, []).append(loss)
        self._squares.add(first, loss, name)
        for part in self.parts:
            exact = floats(plain[part])[0]
            if name == PLAIN:
                self._squares.add(first, exact.square().sum(-1), PLAIN, part)
            else:
                apart = (floats(answer[part])[0] - exact).square().sum(-1)
                self._squares.add(first, apart, name, part)

    def perplexity(self, name: str) -> PerplexityRecord:
        """Against the plain plan."""
        own, plain = torch.cat(self.losses[name]), torch.cat(self.losses[PLAIN])
        change, error = paired(own - plain)
        sums, counts = self._squares.sums[name,], self._counts(len(own))
        bits = (sums / counts / math.log(2)).tolist()
        return PerplexityRecord(
            name, math.exp(float(own.double().mean())), 100 * math.expm1(change), 100 * error,
            self._squares.table(bits),
        )  # fmt: skip

    def _counts(self, tokens: int) -> Tensor:
        edges = torch.tensor(self._squares.edges, dtype=torch.float64)
        return edges.diff() * (tokens / self._squares.length)

    def errors(self, name: str) -> list[ErrorRecord]:
        """Of every part, the worst first."""
        made: list[ErrorRecord] = []
        for part in self.parts:
            apart, exact = self._squares.sums[name, part], self._squares.sums[PLAIN, part]
            by_position = (100 * (apart / exact).sqrt()).tolist()
            whole = 100 * math.sqrt(float(apart.sum() / exact.sum()))
            made.append(ErrorRecord(name, part, whole, self._squares.table(by_position)))
        return sorted(made, key=lambda record: -record.error)


def paired(differences: Tensor) -> tuple[float, float]:
    """(mean, its standard error) of differences at tokens that follow one another."""
    values = differences.double()
    size = BLOCK if len(values) >= 16 * BLOCK else 1
    blocks = values[: len(values) // size * size].view(-1, size).mean(1)
    error = float(blocks.std() / math.sqrt(len(blocks))) if len(blocks) > 1 else math.nan
    return float(values.mean()), error


@dataclass
class Sampled:
    """What the indexers of a plain plan were asked at some positions of one sequence."""

    indexers: Sequence[Indexer]
    position: Tensor  # int64 [Q], ascending
    held: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, first: int, answer: Mapping[str, NDArray[Any]], length: int) -> None:
        """The answer to the tokens first .. first + length."""
        here = self.position[(self.position >= first) & (self.position < first + length)] - first
        for indexer in self.indexers:
            for name in (indexer.query, indexer.weights, indexer.attention):
                self.held.setdefault(name, []).append(floats(answer[name][0])[here])

    def asked(self, indexer: Indexer, text: Text) -> Asked:
        """With the keys and rows that the sequence has in the end."""
        held = {name: torch.cat(parts) for name, parts in self.held.items()}
        return Asked(
            position=self.position,
            query=held[indexer.query],
            weights=held[indexer.weights],
            key=floats(text.rows(indexer.keys)),
            attention=held[indexer.attention],
            rows=floats(text.rows(indexer.rows)),
            count=indexer.count,
            scale=indexer.scale,
        )


def positions(length: int, count: int, queries: int, seed: int) -> Tensor:
    """int64 [Q]: drawn among those that see more keys than are chosen, ascending."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(max(0, length - count), generator=generator)[:queries]
    return order.sort().values + count


def follow(
    plans: Mapping[str, Decoder], window: NDArray[np.int64], drift: Drift, sampled: Sampled
) -> list[Asked]:
    """Runs all plans over one window; gives what the indexers of the plain plan were asked."""
    length = len(window) - 1
    chunk = min(plan.facts.chunk for plan in plans.values())
    with ExitStack() as stack:
        texts = {name: stack.enter_context(plan.sequence()) for name, plan in plans.items()}
        for first in range(0, length, chunk):
            piece = window[first : min(first + chunk, length)]
            targets = window[first + 1 : first + 1 + len(piece)]
            plain = texts[PLAIN].score(piece)
            sampled.add(first, plain, len(piece))
            drift.add(PLAIN, first, plain, plain, targets)
            for name, text in texts.items():
                if name != PLAIN:
                    drift.add(name, first, text.score(piece), plain, targets)
        return [sampled.asked(indexer, texts[PLAIN]) for indexer in sampled.indexers]
