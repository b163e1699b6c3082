"""The laws that an operator over sequence state obeys, checked on small random numbers in float64.

Gates are slow (a hundredth of usual ones): with usual ones a state has forgotten what it was after
a few tokens, and a wrong factor of a summary would go unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graphc.dsl.interpret import evaluate
from graphc.dsl.operator import STATE, Affine, Definition, SequenceOperator, given, trace
from graphc.dsl.tiles import K, SequenceOperatorError, Tile, V

TOKENS, CHANNELS, WIDTH = 7, 4, 3
CUTS = (1, 3, 6)
#: of the largest number of a result; rounding is a thousandth of it
BOUND = 1e-9

_Values = dict[str, torch.Tensor]
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Broken:
    """A law, and by how much it is broken, as a share of the largest number."""

    law: str
    error: float


def check(operator: SequenceOperator) -> None:
    """Raises SequenceOperatorError with the first law that is broken, for any setting of flags."""
    if operator.summary_dtype not in ("float32", "float64"):
        raise SequenceOperatorError(
            f"{operator.name}: summaries of {operator.summary_dtype} lose the state",
            hint="exchange them in float32",
        )
    names = sorted(operator.of_kind("flag"))
    for setting in itertools.product((False, True), repeat=len(names)):
        flags = frozenset(zip(names, setting, strict=True))
        for broken in laws(operator, trace(operator, flags)):
            if not broken.error <= BOUND:  # NaN is broken too
                raise SequenceOperatorError(
                    f"{operator.name}: {broken.law}",
                    where=f"differs by {broken.error:.1e} of the largest number; "
                    f"at most {BOUND:.0e} is rounding",
                    hint="docs/dsl.md says what each law asks for",
                )


def laws(operator: SequenceOperator, definition: Definition) -> Iterator[Broken]:
    """Every law with its error, in the order in which a mistake is easiest to find."""
    random = _Random(operator)
    tokens = random.operands()
    state = random.tensor(CHANNELS, WIDTH)
    whole = _apply(definition, tokens, state)
    summary = _summary(definition, tokens)
    yield Broken(
        "apply's state is not what summary says: S_after != factor S + offset",
        _error(_act(definition, summary, state), whole[1]),
    )
    for cut in CUTS:
        first, second = _cut(tokens, 0, cut), _cut(tokens, cut, TOKENS)
        o1, middle = _apply(definition, first, state)
        o2, last = _apply(definition, second, middle)
        yield Broken(
            f"a pass split after token {cut} gives other outputs",
            _error(torch.cat([o1, o2], -2), whole[0]),
        )
        yield Broken(f"a pass split after token {cut} ends in another state",
                     _error(last, whole[1]))  # fmt: skip
        joined = _compose(definition, _summary(definition, first), _summary(definition, second))
        yield Broken(
            "compose(first, second) is not the summary of both ranges, first before second "
            "(are the operands in the wrong order?)",
            _error_of_pairs(joined, summary),
        )
    yield from _monoid(definition, random)


def _monoid(definition: Definition, random: _Random) -> Iterator[Broken]:
    a, b, c = (_summary(definition, random.operands()) for _ in range(3))
    left = _compose(definition, _compose(definition, a, b), c)
    right = _compose(definition, a, _compose(definition, b, c))
    yield Broken("compose is not associative", _error_of_pairs(left, right))
    identity = _identity(definition)
    for side, found in (
        ("left", _compose(definition, identity, a)), ("right", _compose(definition, a, identity)),
    ):  # fmt: skip
        yield Broken(f"the summary of no tokens is not neutral on the {side} of compose",
                     _error_of_pairs(found, a))  # fmt: skip


class _Random:
    def __init__(self, operator: SequenceOperator) -> None:
        self.operator = operator
        self.generator = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def operands(self) -> _Values:
        """Of one head: rows, slow decays, columns between 0 and 1."""
        sizes = {K: CHANNELS, V: WIDTH}
        found: _Values = {}
        for name, operand in self.operator.operands().items():
            if operand.kind == "number":
                found[name] = torch.tensor([[0.7]], dtype=torch.float64)
            elif operand.kind != "flag":
                x = self.tensor(TOKENS, sizes.get(operand.axis, 1))
                if operand.kind == "decay":
                    x = -0.01 * torch.nn.functional.softplus(x)
                elif operand.kind == "column":
                    x = torch.sigmoid(x)
                elif operand.axis == K:  # short keys, so that no law is hidden by growing states
                    x = 0.5 * x
                found[name] = x
        return found


def _cut(tokens: _Values, begin: int, end: int) -> _Values:
    return {n: x[begin:end] if x.shape[0] == TOKENS else x for n, x in tokens.items()}


def _pair(affine: Affine, values: _Values) -> _Pair:
    factor, offset = evaluate((affine.factor, affine.offset), values, CHANNELS)
    return factor, offset


def _apply(definition: Definition, tokens: _Values, state: torch.Tensor) -> _Pair:
    values = {**tokens, "state": state}
    output, after = evaluate((definition.output, definition.after), values, CHANNELS)
    return output, after


def _summary(definition: Definition, tokens: _Values) -> _Pair:
    return _pair(definition.summary, tokens)


def _compose(definition: Definition, first: _Pair, second: _Pair) -> _Pair:
    return _pair(definition.composed, {
        "first.factor": first[0], "first.offset": first[1],
        "second.factor": second[0], "second.offset": second[1],
    })  # fmt: skip


def _act(definition: Definition, summary: _Pair, state: torch.Tensor) -> torch.Tensor:
    root: Tile = given("first", definition.summary.factor).act(STATE)
    values = {"first.factor": summary[0], "first.offset": summary[1], "state": state}
    return evaluate((root,), values, CHANNELS)[0]


def _identity(definition: Definition) -> _Pair:
    """The summary of no tokens."""
    rows, columns = (CHANNELS if axis == K else 1 for axis in definition.summary.factor.shape)
    factor = torch.eye(rows) if columns > 1 else torch.ones(rows, 1)
    return factor.double(), torch.zeros(CHANNELS, WIDTH, dtype=torch.float64)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _error_of_pairs(found: _Pair, wanted: _Pair) -> float:
    return max(_error(a, b) for a, b in zip(found, wanted, strict=True))
