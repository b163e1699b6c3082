"""The language for operators over sequence state: meaning, laws, what is derived."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import graphc.dsl.operators
from graphc.dsl import Affine, SequenceOperator, SequenceOperatorError, define, number, rows
from graphc.dsl.laws import check, laws
from graphc.dsl.layout import state_layout, summary_layout
from graphc.dsl.operator import trace
from graphc.dsl.operators.gated_linear_attention import GatedLinearAttention
from graphc.dsl.operators.kda import KimiDeltaAttention
from graphc.dsl.ranges import compose, starts, summarize
from graphc.dsl.registry import DEFINED, run
from graphc.dsl.tiles import K, T, Tile, V, normalized, solve, tile

OPS = torch.ops.graphc
#: the others are of other tests
BUILT_IN = [f"graphc.{name}.default" for name in graphc.dsl.operators.__all__]
OPERATORS = Path(inspect.getfile(graphc.dsl.operators)).parent


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(by_head: bool = False, tokens: int = 37, key_heads: int = 2) -> list[Any]:
    """Of delta rules, in float64."""
    q, k = (torch.randn(2, tokens, key_heads, 8) for _ in range(2))
    g = -torch.rand(2, tokens, 4) if by_head else -torch.rand(2, tokens, 4, 8)
    beta = torch.rand(2, tokens, 4)
    found = [torch.randn(2, 4, 8, 6), q, k / 8, torch.randn(2, tokens, 4, 6), g, beta]
    return [x.double() for x in found]


@pytest.mark.parametrize("path", sorted(OPERATORS.glob("*.py")), ids=lambda p: str(p.stem))
def test_operators_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("normalize", (False, True))
def test_delta_rules_are_the_recurrence(normalize: bool) -> None:
    for by_head, name in ((False, "kda"), (True, "gated_delta_net")):
        args, kw = operands(by_head), {"scale": 0.3, "normalize": normalize}
        ours, truth = getattr(OPS, name)(*args, **kw), OPS.delta_rule(*args, **kw)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        args[0] = None
        torch.testing.assert_close(
            getattr(OPS, name)(*args, **kw), OPS.delta_rule(*args, **kw), rtol=1e-11, atol=1e-12
        )


def test_gated_linear_attention_is_its_recurrence() -> None:
    state, q, k, v, g, _ = operands(key_heads=4)
    out, after = OPS.gated_linear_attention(state, q, k, v, g, scale=0.3)
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state + torch.einsum(
            "bhk,bhv->bhkv", k[:, t], v[:, t]
        )
        o = 0.3 * torch.einsum("bhk,bhkv->bhv", q[:, t], state)
        torch.testing.assert_close(out[:, t], o, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(after, state, rtol=1e-11, atol=1e-12)


def test_mamba2_ssd_is_its_recurrence() -> None:
    state, c, b, x, g, step = operands(by_head=True, key_heads=1)
    out, after = OPS.mamba2_ssd(state, c, b, x, g, step)
    for t in range(c.shape[1]):
        written = step[:, t, :, None, None] * b[:, t].unsqueeze(-1) * x[:, t].unsqueeze(-2)
        state = g[:, t, :, None, None].exp() * state + written
        torch.testing.assert_close(
            out[:, t], (state * c[:, t].unsqueeze(-1)).sum(-2), rtol=1e-11, atol=1e-12
        )
    torch.testing.assert_close(after, state, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
def test_any_chunk_is_the_same(name: str) -> None:
    """One token at a time, as in decoding, and any other number."""
    operator, short = DEFINED[name], name.split(".")[1]
    given = named(short, operands(by_head="net" in name or "ssd" in name))
    truth = run(operator, given, 1)
    for chunk in (5, 16, 64):
        for a, b in zip(run(operator, given, chunk), truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_slots_and_types() -> None:
    args = operands()
    states, slots = torch.randn(5, 4, 8, 6).double(), torch.tensor([3, 0], dtype=torch.int32)
    out, after = OPS.kda(states, *args[1:], slots, scale=0.3)
    want = OPS.delta_rule(states, *args[1:], slots, scale=0.3)
    torch.testing.assert_close((out, after), want, rtol=1e-11, atol=1e-12)
    short = [None, *(x.bfloat16() for x in args[1:4]), *args[4:]]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPS.kda(*short, scale=0.3)
    for real, made in zip(OPS.kda(*short, scale=0.3), fake, strict=True):
        assert (real.shape, real.dtype) == (made.shape, made.dtype)
    assert str(OPS.kda.default._schema) == (
        "graphc::kda(Tensor? state, Tensor query, Tensor key, Tensor value, Tensor decay, "
        "Tensor beta, Tensor? slots=None, *, float scale, bool normalize=False) "
        "-> (Tensor, Tensor)"
    )


def test_layouts() -> None:
    state = state_layout(32, 128, 128)
    assert state.shape == (32, 128, 128) and state.nbytes == 2 << 20
    factor, offset = summary_layout(KimiDeltaAttention(), 32, 128, 64)
    assert (factor.shape, offset.shape) == ((32, 128, 128), (32, 128, 64))
    factor, offset = summary_layout(GatedLinearAttention(), 32, 128, 64)
    assert (factor.shape, factor.dtype, factor.nbytes) == ((32, 128, 1), "float32", 16384)


def named(name: str, args: list[Any]) -> dict[str, Any]:
    """Arguments of a call by name, with options."""
    found = {"state": args[0], "slots": None, "scale": 0.3, "normalize": True}
    names = DEFINED[f"graphc.{name}.default"].of_kind("rows", "decay", "column")
    return found | dict(zip(names, args[1:], strict=False))


@pytest.mark.parametrize("name", ("kda", "gated_delta_net", "gated_linear_attention", "mamba2_ssd"))
def test_ranges_on_devices(name: str) -> None:
    """Three devices that exchange summaries do what one does; slow gates, so that a wrong factor
    would show."""
    operator = DEFINED[f"graphc.{name}.default"]
    args = operands(by_head="net" in name or "ssd" in name)
    args[4] = 0.01 * args[4]
    whole = run(operator, named(name, args))
    cuts = (0, 5, 21, 37)
    parts = [
        named(name, [args[0], *(x[:, a:b] for x in args[1:])])
        for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    definition = trace(operator, frozenset(named_flags(operator)))
    summaries = [summarize(operator, part) for part in parts]
    *begin, end = starts(definition, summaries, args[0])
    outputs = [
        run(operator, {**part, "state": state})[0]
        for part, state in zip(parts, begin, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(outputs, 1), whole[0], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(end, whole[1], rtol=1e-10, atol=1e-11)
    joined = compose(definition, compose(definition, *summaries[:2]), summaries[2])
    for a, b, layout in zip(
        joined, summarize(operator, named(name, args)), summary_layout(operator, 4, 8, 6),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a.expand(b.shape), b, rtol=1e-10, atol=1e-11)
        assert b.shape[1:] == layout.shape


def named_flags(operator: SequenceOperator) -> set[tuple[str, bool]]:
    """The flags of `named` that an operator has."""
    return {(name, True) for name in operator.of_kind("flag")}


def test_summaries_of_short_types_are_float32() -> None:
    args = [x.bfloat16() for x in operands()[:4]] + [x.float() for x in operands()[4:]]
    factor, offset = summarize(DEFINED["graphc.kda.default"], named("kda", args))
    assert factor.dtype == offset.dtype == torch.float32
    with pytest.raises(ValueError, match="no tokens"):
        summarize(DEFINED["graphc.kda.default"], named("kda", [x[:, :0] for x in args]))


# -- laws ---------------------------------------------------------------------------------------


class WrongOrder(KimiDeltaAttention):
    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(first.factor @ second.factor, first.factor @ second.offset + first.offset)


class ForgetsFactor(GatedLinearAttention):
    def summary(self, c: Any) -> Affine:
        return Affine(1.0 * c.decay.total * c.decay.total, super().summary(c).offset)


class NoTransition(KimiDeltaAttention):
    """M = 0: with ordinary gates this goes unnoticed."""

    def summary(self, c: Any) -> Affine:
        right = super().summary(c)
        return Affine(0.0 * right.factor, right.offset)


class Sums(GatedLinearAttention):
    """Associative, but not what a sequence does."""

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor * first.factor, first.offset + second.offset)


class NoMemory(GatedLinearAttention):
    """Outputs do not read the state before the chunk."""

    def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
        output, after = super().apply(c, state)
        return output - (c.scale * c.query * c.decay.prefix) @ state, after


class NotAssociative(GatedLinearAttention):
    def compose(self, first: Affine, second: Affine) -> Affine:
        right = super().compose(first, second)
        return Affine(right.factor, right.offset + 0.5 * first.offset * second.offset)


class Lossy(KimiDeltaAttention):
    summary_dtype = "bfloat16"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (WrongOrder, "wrong order"), (ForgetsFactor, "not what summary says"),
        (NoTransition, "not what summary says"), (Sums, "compose.first, second. is not"),
        (NoMemory, "split after token 1 gives other outputs"),
        (Lossy, "summaries of bfloat16 lose the state"),
    ],
)  # fmt: skip
def test_broken_laws(wrong: type[SequenceOperator], text: str) -> None:
    """Each mistake is found where the operator is defined, and named."""
    wrong.name = "broken"
    with pytest.raises(SequenceOperatorError, match=f"broken: .*{text}"):
        define(wrong())
    assert "graphc.broken.default" not in DEFINED


def test_laws_of_monoids() -> None:
    """The later laws are checked for themselves, not only where an earlier one fails."""

    def broken(operator: SequenceOperator) -> str:
        found = laws(operator, trace(operator, frozenset()))
        return ", ".join(law.law for law in found if law.error > 1e-9)

    NotAssociative.name = "not_associative"
    assert "not associative" in broken(NotAssociative())

    class NotNeutral(GatedLinearAttention):
        name = "not_neutral"

        def compose(self, first: Affine, second: Affine) -> Affine:
            right = super().compose(first, second)
            return Affine(right.factor, right.offset + 0.1 * second.factor)

    assert "neutral on the left" in broken(NotNeutral())


def test_errors_bound_rounding() -> None:
    """What is right is right by a wide margin."""
    for operator in map(DEFINED.__getitem__, BUILT_IN):
        flags = frozenset((name, True) for name in operator.of_kind("flag"))
        assert max(law.error for law in laws(operator, trace(operator, flags))) < 1e-12
        check(operator)


def test_names() -> None:
    with pytest.raises(SequenceOperatorError, match="kda is defined already"):
        define(KimiDeltaAttention())

    class Taken(GatedLinearAttention):
        name = "taken"
        state = number()

    with pytest.raises(SequenceOperatorError, match=r"cannot be called \['state'\]"):
        define(Taken())

    class NoValues(SequenceOperator):
        name = "no_values"
        query = rows(K)

    with pytest.raises(SequenceOperatorError, match="no operand has rows over V"):
        define(NoValues())


def test_shapes_that_do_not_fit() -> None:
    keys, values = tile("rows", shape=(T, K), data="a"), tile("rows", shape=(T, V), data="b")
    for mistake in (
        lambda: keys + values, lambda: keys @ values, lambda: normalized(values),
        lambda: solve(keys, values),
    ):  # fmt: skip
        with pytest.raises(SequenceOperatorError):
            mistake()

    class Transposed(GatedLinearAttention):
        name = "transposed"

        def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
            output, after = super().apply(c, state)
            return output, after.T

    with pytest.raises(SequenceOperatorError, match="the state of apply is"):
        trace(Transposed(), frozenset())


def test_the_document() -> None:
    """docs/dsl.md: its operator, and what it says of a mistake."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "dsl.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "dsl.md", "exec"), names)
    state, q, k, v, g, _ = operands(key_heads=4)
    torch.testing.assert_close(
        OPS.my_linear_attention(state, q, k, v, g, scale=0.5),
        OPS.gated_linear_attention(state, q, k, v, g, scale=0.5),
        rtol=0,
        atol=0,
    )
    right = names["GatedLinearAttention"]
    wrong = type("Wrong", (right,), {"compose": lambda self, a, b: right.compose(self, b, a)})
    with pytest.raises(SequenceOperatorError) as found:
        check(wrong())
    (said,) = re.findall(r"```\n(my_linear.*?)\n```", text, re.DOTALL)
    message = str(found.value)
    assert message.splitlines()[:2] == said.splitlines()
