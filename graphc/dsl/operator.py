"""What an author writes: the operands of an operator over sequence state, and three methods.

The state of a head is S [K, V]. Over any range of tokens an operator of this kind takes it to
`factor S + offset`, where neither depends on S: that is the summary of the range. Everything else
(operator, kernels, state layout, exchange between devices) is derived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from graphc.dsl.tiles import ONE, Decay, K, SequenceOperatorError, T, Tile, V, tile


@dataclass(frozen=True)
class Operand:
    """kind: "rows" [B, T, heads, axis], "decay" [B, T, H, K] or [B, T, H], "column" [B, T, H],
    "number" (a float) or "flag" (a bool that the methods ask for, False unless it is given)."""

    kind: str
    axis: str = ONE


def rows(axis: str) -> Any:
    """Rows of K or V channels; there may be fewer heads of them, each for a group of heads."""
    if axis not in (K, V):
        raise SequenceOperatorError(f"rows are over K or V, not {axis}")
    return Operand("rows", axis)


def log_decay(axis: str = ONE) -> Any:
    """The logarithm, at most 0, of how much of the state a token leaves: by K or one for a head."""
    if axis not in (K, ONE):
        raise SequenceOperatorError(f"a decay is over K or one for a head, not over {axis}")
    return Operand("decay", axis)


def column() -> Any:
    """One number for each token and head."""
    return Operand("column")


def number() -> Any:
    """A float of the call."""
    return Operand("number")


def flag() -> Any:
    """A bool of the call."""
    return Operand("flag")


@dataclass(frozen=True)
class Affine:
    """A summary: S becomes `factor S + offset`. factor: [K, K], or [K, 1] or [1, 1] where it only
    scales rows; offset [K, V]."""

    factor: Tile
    offset: Tile

    def act(self, state: Tile) -> Tile:
        """The state behind the range."""
        if self.factor.shape == (K, K):
            return self.factor @ state + self.offset
        return self.factor * state + self.offset


class Chunk:
    """The operands of a range of tokens as tiles, by their names; `identity` is I [K, K]."""

    def __init__(self, operands: dict[str, Operand], flags: dict[str, bool]) -> None:
        self._operands, self._flags = operands, flags
        self.identity = tile("identity", shape=(K, K))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._operands:
            raise AttributeError(f"an operand {name!r} is not declared")
        operand = self._operands[name]
        if operand.kind == "flag":
            return self._flags[name]
        if operand.kind == "decay":
            return Decay(name, operand.axis)
        if operand.kind == "number":
            return tile("number", shape=(ONE, ONE), data=name)
        return tile(operand.kind, shape=(T, operand.axis), data=name)


class SequenceOperator:
    """Base of all definitions; docs/dsl.md shows one."""

    #: of the operator, graphc::<name>
    name: ClassVar[str]
    #: of the summaries that devices exchange
    summary_dtype: ClassVar[str] = "float32"

    def summary(self, c: Any) -> Affine:
        """What the tokens of the chunk do to any state."""
        raise NotImplementedError

    def compose(self, first: Affine, second: Affine) -> Affine:
        """The summary of two ranges, `first` before `second`."""
        raise NotImplementedError

    def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
        """(the outputs [T, V], the state behind the chunk) from the state before it."""
        raise NotImplementedError

    @classmethod
    @cache
    def operands(cls) -> dict[str, Operand]:
        """The declarations, in their order."""
        found = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Operand)
        }
        if taken := found.keys() & {"state", "slots", "identity"}:
            raise SequenceOperatorError(f"{cls.name}: operands cannot be called {sorted(taken)}")
        if not any(x.kind == "rows" and x.axis == V for x in found.values()):
            raise SequenceOperatorError(f"{cls.name}: no operand has rows over V")
        if not any(x.axis == K for x in found.values()):
            raise SequenceOperatorError(f"{cls.name}: no operand is over K")
        return found

    @classmethod
    def of_kind(cls, *kinds: str) -> dict[str, Operand]:
        """The operands of some kinds, in their order."""
        return {n: x for n, x in cls.operands().items() if x.kind in kinds}


@dataclass(frozen=True)
class Definition:
    """An operator's expressions for one setting of its flags."""

    output: Tile
    after: Tile
    summary: Affine
    composed: Affine


STATE = tile("state", shape=(K, V))


def given(which: str, factor: Tile) -> Affine:
    """A summary as an operand, of the kind that has `factor`."""
    return Affine(
        tile("given", shape=factor.shape, data=f"{which}.factor"),
        tile("given", shape=(K, V), data=f"{which}.offset"),
    )


@cache
def trace(operator: SequenceOperator, flags: frozenset[tuple[str, bool]]) -> Definition:
    """The expressions that the methods write. Raises SequenceOperatorError for wrong shapes."""
    c = Chunk(operator.operands(), dict(flags))
    output, after = operator.apply(c, STATE)
    summary = operator.summary(c)
    factor = summary.factor.shape
    if factor not in ((K, K), (K, ONE), (ONE, ONE)):
        raise SequenceOperatorError(f"{operator.name}: a summary's factor is {summary.factor}")
    composed = operator.compose(given("first", summary.factor), given("second", summary.factor))
    for what, found, shape in (
        ("the output of apply", output, (T, V)), ("the state of apply", after, (K, V)),
        ("the offset of summary", summary.offset, (K, V)),
        ("the factor of compose", composed.factor, factor),
        ("the offset of compose", composed.offset, (K, V)),
    ):  # fmt: skip
        if found.shape != shape:
            expected = ", ".join(shape)
            raise SequenceOperatorError(f"{operator.name}: {what} is {found}, not [{expected}]")
    return Definition(output, after, summary, composed)
