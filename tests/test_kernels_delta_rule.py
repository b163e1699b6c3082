"""The delta rule's kernels against the recurrence in float64, on every ISA level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401  (the operator)
from tests.eager import ISAS, refused
from tests.kernel_harness import lookup, run_rule
from tests.kernel_in_place import run_in_place

NAME = "graphc.delta_rule.default"
LENGTHS = (1, 2, 3, 8, 9, 15, 16, 17, 63, 65, 130)
#: of the largest number in a result
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mild(shape: Sequence[int]) -> torch.Tensor:
    return -torch.nn.functional.softplus(torch.randn(*shape) - 2)


def bounded(shape: Sequence[int]) -> torch.Tensor:
    return -5 * torch.sigmoid(2 * torch.randn(*shape))


def mixed(shape: Sequence[int]) -> torch.Tensor:
    g = torch.where(torch.rand(*shape) < 0.5, -1e-4 * torch.rand(*shape), -5 * torch.rand(*shape))
    return torch.where(torch.rand(*shape) < 0.1, -40 * torch.rand(*shape), g)


def all_of(value: float) -> Callable[[Sequence[int]], torch.Tensor]:
    return lambda shape: torch.full(tuple(shape), value)


def unbounded(shape: Sequence[int]) -> torch.Tensor:
    return -torch.exp(3 * torch.randn(*shape)) - 100 * (torch.rand(*shape) < 0.2)


GATES = {
    "mild": mild, "bounded": bounded, "all -5": all_of(-4.999), "mixed": mixed,
    "unbounded": unbounded, "hard": all_of(-20.0), "harder": all_of(-200.0), "none": all_of(0.0),
}  # fmt: skip


def case(
    batch: int, tokens: int, heads: int, channels: int, width: int, *, key_heads: int = 0,
    dtype: torch.dtype = torch.float32, by_head: bool = False, state: bool = True,
    gate: Callable[[Sequence[int]], torch.Tensor] = mild,
) -> list[Any]:  # fmt: skip
    """Arguments; query, key and value are views of one tensor, as models make them."""
    key_heads = key_heads or heads
    keys = key_heads * channels
    joined = torch.randn(batch, tokens, 2 * keys + heads * width).to(dtype)
    q, k = (joined[..., i * keys :][..., :keys] for i in range(2))
    q, k = (x.view(batch, tokens, key_heads, channels) for x in (q, k))
    v = joined[..., 2 * keys :].view(batch, tokens, heads, width)
    g = gate((batch, tokens, heads) if by_head else (batch, tokens, heads, channels))
    before = torch.randn(batch, heads, channels, width) if state else None
    return [before, q, k, v, g, torch.rand(batch, tokens, heads)]


def exact(args: Sequence[Any], **kw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
    ]
    o, s = lookup(NAME)(*wide, **kw)
    return o, s


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert bool(torch.isfinite(ours).all())
    return float((ours.double() - truth).abs().max() / (truth.abs().max() + 1e-30))


def verify(isa: str, args: Sequence[Any], *, bound: float = 0.0, parts: int = 3, **kw: Any) -> None:
    kw = {"scale": args[1].shape[-1] ** -0.5, "normalize": True, **kw}
    ours, after = run_rule(NAME, args, kw, isa=isa, parts=parts)
    truth, state = exact(args, **kw)
    bound = bound or BOUND[ours.dtype]
    assert ours.dtype == args[3].dtype and after.dtype == torch.float32
    assert error(ours, truth) <= bound
    assert error(after, state) <= bound


@pytest.mark.parametrize("by_head", (False, True))
@pytest.mark.parametrize("dtype", BOUND)
def test_lengths_and_shapes(isa: str, dtype: torch.dtype, by_head: bool) -> None:
    for tokens in LENGTHS:
        state = tokens % 3 != 0
        verify(isa, case(1, tokens, 2, 32, 64, dtype=dtype, by_head=by_head, state=state))
    for tokens in (2, 5, 7, 40):
        for heads, key_heads, channels, width in (
            (4, 2, 128, 128), (3, 1, 16, 48), (2, 2, 20, 33), (1, 1, 2, 2), (2, 2, 144, 16),
            (1, 1, 5, 272),
        ):  # fmt: skip
            args = case(2, tokens, heads, channels, width, key_heads=key_heads, dtype=dtype,
                        by_head=by_head)  # fmt: skip
            # roundings of a few channels do not average out
            verify(isa, args, bound=BOUND[dtype] * (3 if channels < 16 else 1))


@pytest.mark.parametrize("gate", GATES)
def test_gates(isa: str, gate: str) -> None:
    """No decay, however strong, makes NaN, and none costs accuracy."""
    for by_head in (False, True):
        for tokens in (6, 83):
            args = case(1, tokens, 2, 64, 32, by_head=by_head, gate=GATES[gate])
            verify(isa, args)
            args[0] = None
            verify(isa, args)
            for dtype in (torch.bfloat16,):
                verify(isa, [None, *(x.to(dtype) for x in args[1:4]), *args[4:]])


def test_near_equal_keys(isa: str) -> None:
    """The substitution where each token takes back what the one before it wrote."""
    for by_head in (False, True):
        for tokens in (7, 100):
            args = case(1, tokens, 1, 64, 64, by_head=by_head, gate=all_of(0.0))
            args[2] = torch.randn(64) + 1e-3 * torch.randn(1, tokens, 1, 64)
            args[5] = torch.ones(1, tokens, 1)
            verify(isa, args)
            short = [args[0], *(x.bfloat16() for x in args[1:4]), *args[4:]]
            verify(isa, short, bound=2e-2)


def test_accuracy(isa: str) -> None:
    """As close to float64 as the recurrence in float32, over many tokens that hardly fade."""
    args = case(1, 1000, 1, 64, 32, gate=all_of(-1e-4), state=False)
    kw = {"scale": 0.125, "normalize": True}
    ours, truth, eager = (
        run_rule(NAME, args, kw, isa=isa),
        exact(args, **kw),
        lookup(NAME)(*args, **kw),
    )
    for a, b, c in zip(ours, truth, eager, strict=True):
        assert error(a, b) <= error(c, b) + 1e-7


def test_options(isa: str) -> None:
    """Without normalisation, with another scale, beta and decay of other dtypes, odd strides."""
    for tokens in (4, 21):
        args = case(2, tokens, 2, 32, 32)
        args[1:3] = [torch.nn.functional.normalize(x, dim=-1) for x in args[1:3]]
        verify(isa, args, normalize=False, scale=-2.5)
        for dtype in (torch.bfloat16, torch.float16):
            verify(isa, [*args[:5], args[5].to(dtype)])
            verify(isa, [*args[:4], args[4].to(dtype), args[5].to(dtype)])
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[1:]]
        verify(isa, [args[0], *turned])
        flipped = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in args[1:5]]
        verify(isa, [args[0].transpose(2, 3).contiguous().transpose(2, 3), *flipped, args[5]])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_strength(isa: str, dtype: torch.dtype) -> None:
    """The sigmoid of beta is taken inside, whatever memory the logits are in."""
    for tokens in (1, 5, 8, 9, 40):
        args = case(2, tokens, 2, 32, 48, dtype=dtype)
        logits = (4 * torch.randn(2, tokens, 7)).to(dtype)
        logits[0, 0, 3] = 100.0
        args[5] = logits[..., 3:5]
        for strength in (1.0, 2.0):
            verify(isa, args, strength=strength)


@pytest.mark.parametrize("by_head", (False, True))
def test_split_anywhere(isa: str, by_head: bool) -> None:
    """Going on from a state is going on."""
    kw: dict[str, Any] = {"scale": 0.2, "normalize": True}
    args = case(1, 70, 2, 32, 48, by_head=by_head)
    whole = run_rule(NAME, args, kw, isa=isa)
    for cut in (1, 5, 16, 30, 63, 69):
        first = run_rule(NAME, [args[0], *(x[:, :cut] for x in args[1:])], kw, isa=isa)
        rest = run_rule(NAME, [first[1], *(x[:, cut:] for x in args[1:])], kw, isa=isa)
        assert error(torch.cat([first[0], rest[0]], 1), whole[0].double()) <= 2e-6
        assert error(rest[1], whole[1].double()) <= 2e-6


def test_padding(isa: str) -> None:
    """Tokens with k = 0, beta = 0 and g = 0 change nothing, to the bit."""
    kw: dict[str, Any] = {"scale": 0.2, "normalize": True}
    for dtype in (torch.float32, torch.bfloat16):
        args = case(1, 37, 2, 32, 32, dtype=dtype)
        for x in (args[2], args[4], args[5]):
            x[:, 20:] = 0
        padded = run_rule(NAME, args, kw, isa=isa)
        plain = run_rule(NAME, [args[0], *(x[:, :20] for x in args[1:])], kw, isa=isa)
        assert torch.equal(padded[1], plain[1])
        assert torch.equal(padded[0][:, :20], plain[0])


def test_slots(isa: str) -> None:
    """States in any slots, in place and copied; the other slots stay."""
    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (20, torch.float32)):
        args = case(3, tokens, 2, 32, 48, dtype=dtype)
        args[0] = torch.randn(6, 2, 32, 48)
        slots = torch.tensor([4, 0, 5], dtype=torch.int32)
        kw = {"scale": 0.2, "normalize": True}
        truth = exact([*args, slots], **kw)
        for run in (run_rule, run_in_place):
            ours = run(NAME, [*args, slots], kw, isa=isa)
            for a, b in zip(ours, truth, strict=True):
                assert error(a, b) <= BOUND[dtype]
            assert torch.equal(ours[1][1:4], args[0][1:4])


def test_in_place(isa: str) -> None:
    for tokens in (1, 2, 20):
        args = case(2, tokens, 2, 32, 48)
        kw = {"scale": 0.2}
        args[2] = torch.nn.functional.normalize(args[2], dim=-1)
        for a, b in zip(run_in_place(NAME, args, kw, isa=isa), exact(args, **kw), strict=True):
            assert error(a, b) <= 2e-6


def test_pieces(isa: str) -> None:
    """Results don't depend on how the range is handed out, on which columns go together."""
    kw = {"scale": 0.1, "normalize": True}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 4, 40, 600):  # heads take turns after 256
            args = case(1, tokens, 2, 32, 160, dtype=dtype)
            first = run_rule(NAME, args, kw, isa=isa, parts=1)
            for parts in (2, 3, 10):
                again = run_rule(NAME, args, kw, isa=isa, parts=parts)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_symbols(isa: str) -> None:
    args = case(2, 19, 2, 16, 32)
    names = {
        (0, 0): "B",
        **{(i, 0): "B" for i in range(1, 6)},
        **{(i, 1): "T" for i in range(1, 6)},
    }
    ours = run_rule(NAME, args, {"scale": 0.3}, isa=isa, symbols=names)
    for a, b in zip(ours, exact(args, scale=0.3), strict=True):
        assert error(a, b) <= 5e-6


def test_no_tokens(isa: str) -> None:
    args = case(1, 0, 1, 16, 32)
    out, after = run_rule(NAME, args, {"scale": 1.0}, isa=isa)
    assert out.shape == (1, 0, 1, 32) and torch.equal(after, args[0])


def test_golden_case(isa: str) -> None:
    """Three tokens worked out by hand, two by two channels."""
    rows = {
        "q": [[1, 0], [0, 1], [0.6, 0.8]], "k": [[1, 0], [0.6, 0.8], [0, 1]],
        "v": [[1, 2], [3, -1], [0.5, 0.5]], "g": [[-0.1, -0.2], [-0.5, 0], [-1, -0.25]],
    }  # fmt: skip
    q, k, v, g = (torch.tensor(rows[name]).view(1, 3, 1, 2).float() for name in "qkvg")
    beta = torch.tensor([0.5, 1, 0.25]).view(1, 3, 1)
    out, state = run_rule(NAME, [None, q, k, v, g, beta], {"scale": 0.5**0.5}, isa=isa)
    expected = torch.tensor([
        [0.3535533906, 0.7071067812], [1.5941246087, -0.7715487573], [1.1268475806, -0.3228794947]
    ])  # fmt: skip
    torch.testing.assert_close(out.view(3, 2), expected, rtol=1e-6, atol=1e-6)
    last = torch.tensor([[0.7335846454, -0.0779243622], [1.4418154300, -0.5123324288]])
    torch.testing.assert_close(state.view(2, 2), last, rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    args = case(1, 2, 2, 16, 16)
    kw = {"scale": 1.0}
    refused(NAME, [None, *(x.double() for x in args[1:])], **kw)
    refused(NAME, [args[0].bfloat16(), *args[1:]], **kw)
    refused(NAME, [args[0], args[1].bfloat16(), *args[2:]], **kw)
