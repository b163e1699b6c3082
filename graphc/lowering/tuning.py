"""Choices that a rule leaves to measurement: which of a few tile sizes or kernels is faster here.

A rule asks `ctx.choose(Choice("product.rows", (84, 168), 84), node, m, n, k)` and gets the default,
or with `--tune` the winner measured for such sizes on this CPU. Every candidate must be correct for
every size: a choice is about time alone. graphc.tuner measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from graphc.ir.types import Dim

Candidate = int | str


@dataclass(frozen=True)
class Choice:
    """A name ("product.rows"), the values that compete, and the one taken without measurement."""

    name: str
    candidates: tuple[Candidate, ...]
    default: Candidate

    def __post_init__(self) -> None:
        if self.default not in self.candidates:
            raise ValueError(f"the default of {self.name} is none of its candidates")


@dataclass
class Tuning:
    """What a lowering decides by. winners: by key, of earlier measurements; trial: overrides by
    choice name, while a candidate is measured. lengths: what symbols are tuned for, one entry per
    bucket. `asked` collects every choice that came up, by key."""

    winners: Mapping[str, Candidate] = field(default_factory=dict)
    trial: Mapping[str, Candidate] = field(default_factory=dict)
    lengths: tuple[Mapping[str, int], ...] = ()
    asked: dict[str, Choice] = field(default_factory=dict)

    def decide(self, choice: Choice, facts: tuple[Dim | str, ...]) -> tuple[str, Candidate]:
        """The key of a choice for these facts (sizes, dtypes), and its value."""
        key = f"{choice.name} {' '.join(self._fact(fact) for fact in facts)}"
        self.asked[key] = choice
        value = self.trial.get(choice.name, self.winners.get(key, choice.default))
        return key, value if value in choice.candidates else choice.default

    def _fact(self, fact: Dim | str) -> str:
        """A size as its values at the lengths tuned for: "2048", or "512|2048" for two buckets."""
        if isinstance(fact, int | str):
            return str(fact)
        values = []
        for lengths in self.lengths:
            known = {s: lengths[s.name] for s in fact.free_symbols if s.name in lengths}
            values.append(str(fact.xreplace({s: sympy.Integer(v) for s, v in known.items()})))
        return "|".join(values) or "?"
