"""From the scores of the next token to the token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphc.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Sampler:
    """Greedy at temperature 0, else a draw from softmax(logits / temperature).

    top_k: of the most likely tokens only (0: all). top_p: of the fewest tokens that have this
    probability together (arXiv:1904.09751). The same seed draws the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                "expected a temperature and top-k of at least 0 and a top-p within (0, 1], found "
                f"{self.temperature}, {self.top_k} and {self.top_p}"
            )
        self._random = np.random.default_rng(self.seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """The next token of logits [V]; of equal scores the lowest one."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        scores = logits[order].astype(np.float64) / self.temperature
        weights = np.exp(scores - scores[0])
        weights /= weights.sum()
        if self.top_p < 1:
            kept = int(np.searchsorted(weights.cumsum(), self.top_p)) + 1
            order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
        return int(order[self._random.choice(len(order), p=weights)])
