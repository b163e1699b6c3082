"""Kernels generated from definitions over sequence state, on every ISA level, against the float64
of the definitions; the delta rules also against the operator that is written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import graphc.dsl.operators  # noqa: F401  (the operators)
from graphc.dsl import (
    K,
    SequenceOperator,
    V,
    define,
    exp,
    log_decay,
    rows,
    scores,
    sigmoid,
    solve,
)  # fmt: skip
from graphc.dsl.operator import Affine, column, number
from tests.built import Built
from tests.eager import ISAS, PLAIN, refused
from tests.kernel_harness import lookup, run_rule
from tests.kernel_in_place import run_in_place
from tests.test_kernels_delta_rule import BOUND, GATES, all_of, case, error, mild

LENGTHS = (1, 2, 3, 8, 9, 16, 17, 40)
BY_HEAD = ("gated_delta_net", "mamba2_ssd")
OPTIONS: dict[str, dict[str, Any]] = {
    "kda": {"scale": 0.2, "normalize": True}, "gated_delta_net": {"scale": 0.2, "normalize": True},
    "gated_linear_attention": {"scale": 0.2}, "mamba2_ssd": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def overload(name: str) -> str:
    return f"graphc.{name}.default"


def arguments(
    name: str, shape: Sequence[int], key_heads: int = 0, dtype: torch.dtype = torch.float32,
    state: bool = True, gate: Callable[[Sequence[int]], torch.Tensor] = mild,
) -> list[Any]:  # fmt: skip
    args = case(*shape, key_heads=key_heads, dtype=dtype, by_head=name in BY_HEAD, state=state,
                gate=gate)  # fmt: skip
    return args[:5] if name == "gated_linear_attention" else args


def exact(name: str, args: Sequence[Any], **kw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
    ]
    o, s = lookup(overload(name))(*wide, **kw)
    return o, s


def verify(isa: str, name: str, args: Sequence[Any], bound: float = 0.0, **kw: Any) -> None:
    kw = {**OPTIONS.get(name, {}), **kw}
    ours, truth = run_rule(overload(name), args, kw, isa=isa), exact(name, args, **kw)
    assert ours[0].dtype == args[1].dtype and ours[1].dtype == torch.float32
    for a, b in zip(ours, truth, strict=True):
        assert error(a, b) <= (bound or BOUND[args[1].dtype])


@pytest.mark.parametrize("isa", PLAIN)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "kda"])
def test_lengths_and_shapes(isa: str, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in LENGTHS:
            state = tokens % 3 != 0
            verify(isa, name, arguments(name, (1, tokens, 2, 32, 64), dtype=dtype, state=state))
        for tokens in (2, 5, 40):
            for heads, key_heads, channels, width in (
                (4, 2, 128, 128), (3, 1, 16, 48), (2, 2, 20, 33), (1, 1, 144, 16),
            ):  # fmt: skip
                shape = (2, tokens, heads, channels, width)
                verify(isa, name, arguments(name, shape, key_heads, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", BOUND)
def test_kda_is_the_delta_rule(isa: str, dtype: torch.dtype) -> None:
    """In the same bounds as the kernels written by hand, for every family of gates."""
    for gate in GATES.values():
        for tokens in (1, 6, 83):
            args = arguments("kda", (1, tokens, 2, 64, 32), dtype=dtype, gate=gate)
            kw = OPTIONS["kda"]
            ours = run_rule(overload("kda"), args, kw, isa=isa)
            wide = [x.double() for x in args]
            for a, b in zip(ours, lookup("graphc.delta_rule.default")(*wide, **kw), strict=True):
                assert error(a, b) <= BOUND[dtype]
    verify(isa, "kda", arguments("kda", (2, 37, 2, 20, 33), dtype=dtype, state=False))
    if dtype == torch.float32:
        near = arguments("kda", (1, 100, 1, 64, 64), gate=all_of(0.0))
        near[2] = torch.randn(64) + 1e-3 * torch.randn(1, 100, 1, 64)
        near[5] = torch.ones(1, 100, 1)
        verify(isa, "kda", near)


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str) -> None:
    """No decay, however strong, makes NaN, and none costs accuracy."""
    for name in ("gated_delta_net", "gated_linear_attention"):
        for tokens in (6, 83):
            verify(ISAS[-1], name, arguments(name, (1, tokens, 2, 64, 32), gate=GATES[gate]))
    args = arguments("gated_delta_net", (1, 83, 2, 64, 32), gate=GATES[gate])
    ours = run_rule(overload("gated_delta_net"), args, OPTIONS["kda"], isa=ISAS[-1])
    wide = [x.double() for x in args]
    truth = lookup("graphc.delta_rule.default")(*wide, **OPTIONS["kda"])
    for a, b in zip(ours, truth, strict=True):
        assert error(a, b) <= 2e-6


@pytest.mark.parametrize("isa", PLAIN)
def test_slots_and_in_place(isa: str) -> None:
    """States in any slots, in place and copied; the other slots stay."""
    for name in ("gated_linear_attention", "gated_delta_net"):
        for tokens in (1, 3, 20):
            args = arguments(name, (3, tokens, 2, 32, 48))
            args[0] = torch.randn(6, 2, 32, 48)
            slots = torch.tensor([4, 0, 5], dtype=torch.int32)
            truth = exact(name, [*args, slots], **OPTIONS[name])
            for run in (run_rule, run_in_place):
                ours = run(overload(name), [*args, slots], OPTIONS[name], isa=isa)
                for a, b in zip(ours, truth, strict=True):
                    assert error(a, b) <= 2e-6
                assert torch.equal(ours[1][1:4], args[0][1:4])


@pytest.mark.parametrize("isa", PLAIN)
def test_split_and_pieces(isa: str) -> None:
    """Going on from a state is going on; results do not depend on how the range is handed out."""
    for name in ("gated_linear_attention", "gated_delta_net"):
        kw, run = OPTIONS[name], overload(name)
        args = arguments(name, (1, 70, 2, 32, 160))
        whole = run_rule(run, args, kw, isa=isa)
        for cut in (1, 16, 30, 69):
            first = run_rule(run, [args[0], *(x[:, :cut] for x in args[1:])], kw, isa=isa)
            rest = run_rule(run, [first[1], *(x[:, cut:] for x in args[1:])], kw, isa=isa)
            assert error(torch.cat([first[0], rest[0]], 1), whole[0].double()) <= 2e-6
            assert error(rest[1], whole[1].double()) <= 2e-6
        for tokens in (1, 4, 40):
            some = [args[0], *(x[:, :tokens] for x in args[1:])]
            one = run_rule(run, some, kw, isa=isa, parts=1)
            for parts in (2, 10):
                again = run_rule(run, some, kw, isa=isa, parts=parts)
                assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def test_strides_dtypes_and_symbols() -> None:
    isa, name = ISAS[-1], "gated_delta_net"
    for tokens in (4, 21):
        args = arguments(name, (2, tokens, 2, 32, 32))
        for dtype in (torch.bfloat16, torch.float16):
            verify(isa, name, [*args[:4], args[4].to(dtype), args[5].to(dtype)])
        verify(isa, name, [args[0], *(x.transpose(1, 2).contiguous().transpose(1, 2)
                                      for x in args[1:])])  # fmt: skip
        flipped = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in args[1:4]]
        verify(isa, name, [args[0], *flipped, *args[4:]])
        names = {(0, 0): "B", **{(i, d): "BT"[d] for i in range(1, 6) for d in (0, 1)}}
        ours = run_rule(overload(name), args, OPTIONS[name], isa=isa, symbols=names)
        for a, b in zip(ours, exact(name, args, **OPTIONS[name]), strict=True):
            assert error(a, b) <= 2e-6
    args = arguments(name, (1, 0, 1, 32, 32))
    out, after = run_rule(overload(name), args, OPTIONS[name], isa=isa)
    assert out.shape == (1, 0, 1, 32) and torch.equal(after, args[0])


def test_accuracy() -> None:
    """As close to float64 as the recurrence in float32, over many tokens that hardly fade."""
    args = arguments("kda", (1, 1000, 1, 64, 32), gate=all_of(-1e-4), state=False)
    kw = OPTIONS["kda"]
    eager, truth = lookup("graphc.delta_rule.default")(*args, **kw), exact("kda", args, **kw)
    for isa in PLAIN:
        ours = run_rule(overload("kda"), args, kw, isa=isa)
        for a, b, c in zip(ours, truth, eager, strict=True):
            assert error(a, b) <= error(c, b) + 1e-7


class Everything(SequenceOperator):
    """What the built-in operators do not use: two tails and two packs, gates inside, subtraction,
    a negative factor, no factor of the state but its decay."""

    name = "test_everything"
    a, b, c, v, w = rows(K), rows(K), rows(K), rows(V), rows(V)
    decay, gate, shift = log_decay(K), column(), number()

    def parts(self, c: Any) -> tuple[Any, Any]:
        return sigmoid(c.gate) * c.v - c.shift, exp(-c.w) * 0.5

    def summary(self, c: Any) -> Affine:
        first, second = self.parts(c)
        tail = (c.b * c.decay.suffix).T @ first - (c.c * c.decay.suffix).T @ second
        return Affine(c.decay.total, tail)

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor * first.factor, second.factor * first.offset + second.offset)

    def apply(self, c: Any, state: Any) -> tuple[Any, Any]:
        first, second = self.parts(c)
        seen = [
            (x * c.decay.prefix) @ state
            + scores(x, c.b, c.decay) @ first - scores(x, c.c, c.decay) @ second
            for x in (c.a, c.b * c.gate, c.a + c.c)
        ]  # fmt: skip
        output = seen[0] * c.gate - 2 * seen[1] * sigmoid(seen[2])
        return output, self.summary(c).act(state)


define(Everything())


def test_an_operator_that_uses_everything() -> None:
    for isa in PLAIN:
        for tokens in (1, 5, 37):
            a, b, c = (0.3 * torch.randn(2, tokens, 2, 32) for _ in range(3))
            v, w = (torch.randn(2, tokens, 2, 48) for _ in range(2))
            g, gate = mild((2, tokens, 2, 32)), torch.randn(2, tokens, 2)
            args = [torch.randn(2, 2, 32, 48), a, b, c, v, w, g, gate]
            verify(isa, "test_everything", args, bound=5e-6, shift=0.25)


class Shared(SequenceOperator):
    """Parts that several others read, none of which may be written over for one of them."""

    name = "test_shared"
    q, k, v, decay, beta = rows(K), rows(K), rows(V), log_decay(), column()

    def told(self, c: Any) -> Any:
        return c.beta * scores(c.k, c.k, c.decay, strict=True)

    def summary(self, c: Any) -> Affine:
        taken = solve(self.told(c), c.beta * (c.k * c.decay.prefix))
        tail = (c.k * c.decay.suffix).T
        written = tail @ solve(self.told(c), c.beta * c.v)
        return Affine(c.decay.total * c.identity - tail @ taken, written)

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor @ first.factor, second.factor @ first.offset + second.offset)

    def apply(self, c: Any, state: Any) -> tuple[Any, Any]:
        wrong = c.beta * (c.v - (c.k * c.decay.prefix) @ state)
        written, twice = solve(self.told(c), wrong), solve(self.told(c), 2 * wrong)
        shown = 0.5 * scores(c.q, c.k, c.decay)
        seen = (c.q * c.decay.prefix) @ state + shown @ (written + 0.5 * twice)
        output = seen * c.beta + (seen - 0.5 * seen) * 3 + sigmoid(seen - twice) + written
        tail = (c.k * c.decay.suffix).T
        return output, c.decay.total * state + tail @ written


define(Shared())


def test_what_is_shared_is_not_written_over() -> None:
    for tokens in (1, 5, 37):
        q, k = (0.3 * torch.randn(2, tokens, 2, 32) for _ in range(2))
        v, g, beta = torch.randn(2, tokens, 2, 48), mild((2, tokens, 2)), torch.rand(2, tokens, 2)
        args = [torch.randn(2, 2, 32, 48), q, k, v, g, beta]
        verify(ISAS[-1], "test_shared", args, bound=5e-6)
        verify(ISAS[0], "test_shared", args, bound=5e-6)


class DeltaNet(SequenceOperator):
    """The delta rule (arXiv:2406.06484): nothing is forgotten."""

    name = "test_delta_net"
    q, k, v, beta = rows(K), rows(K), rows(V), column()

    def summary(self, c: Any) -> Affine:
        told = c.beta * scores(c.k, c.k, strict=True)
        taken = solve(told, c.beta * c.k)
        return Affine(c.identity - c.k.T @ taken, c.k.T @ solve(told, c.beta * c.v))

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor @ first.factor, second.factor @ first.offset + second.offset)

    def apply(self, c: Any, state: Any) -> tuple[Any, Any]:
        told = c.beta * scores(c.k, c.k, strict=True)
        written = solve(told, c.beta * (c.v - c.k @ state))
        return c.q @ state + scores(c.q, c.k) @ written, state + c.k.T @ written


define(DeltaNet())


def test_nothing_is_forgotten() -> None:
    """Scores and a state without a decay; the delta rule with g = 0."""
    for tokens in (1, 5, 37):
        args = case(2, tokens, 4, 32, 48, key_heads=2, gate=all_of(0.0))
        args[2] = torch.nn.functional.normalize(args[2], dim=-1)
        some = [*args[:4], args[5]]
        for isa in (ISAS[0], ISAS[-1]):
            verify(isa, "test_delta_net", some)
            ours = run_rule(overload("test_delta_net"), some, {}, isa=isa)
            wide = [x.double() for x in args]
            truth = lookup("graphc.delta_rule.default")(*wide, scale=1.0)
            for a, b in zip(ours, truth, strict=True):
                assert error(a, b) <= 2e-6


class Layer(torch.nn.Module):
    """A layer of a model with states in slots."""

    def __init__(self) -> None:
        super().__init__()
        self.states: torch.Tensor
        self.register_buffer("states", torch.randn(4, 2, 32, 32))

    def forward(self, x: torch.Tensor, g: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        q, k, v = x.chunk(3, -1)
        call = torch.ops.graphc.gated_linear_attention
        out, after = call(self.states, q, k, v, -torch.exp(g), slots, scale=0.3)
        self.states.copy_(after)
        out = torch.sigmoid(out)
        return out


def test_in_a_plan() -> None:
    """Captured with symbols, built, run: nothing falls back, the states stay where they are."""
    batch, tokens = (torch.export.Dim(name, max=32) for name in ("batch", "tokens"))
    dynamic = {"x": {0: batch, 1: tokens}, "g": {0: batch, 1: tokens}, "slots": {0: batch}}

    def inputs(count: int, length: int) -> tuple[torch.Tensor, ...]:
        slots = torch.randperm(4)[:count].int()
        return torch.randn(count, length, 2, 96), torch.randn(count, length, 2, 32), slots

    module = Layer()
    start = module.states.clone()
    built = Built(module, inputs(2, 3), dynamic=dynamic)
    try:
        assert not built.fallbacks
        module.states.copy_(start)
        for shape in ((1, 20), (3, 1), (2, 5), (3, 1)):
            args = inputs(*shape)
            torch.testing.assert_close(built(*args), module(*args), rtol=1e-5, atol=1e-5)
        states = torch.from_numpy(built.session.states["states"].copy())
        torch.testing.assert_close(states, module.states, rtol=1e-5, atol=1e-5)
        kernels = [step.kernel for step in built.session.plan.programs[0].steps]
        assert not any("copy" in kernel.symbol for kernel in kernels if kernel is not None)
    finally:
        built.close()


def test_refusals() -> None:
    name, kw = overload("gated_linear_attention"), {"scale": 1.0}
    args = arguments("gated_linear_attention", (1, 2, 2, 16, 16))
    refused(name, [None, *(x.double() for x in args[1:])], **kw)
    refused(name, [args[0].bfloat16(), *args[1:]], **kw)
    refused(name, [args[0], args[1].bfloat16(), *args[2:]], **kw)
