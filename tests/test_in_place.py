"""Updates written where an input or a state lives, and concatenations read in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphc.errors import InputRejectedError
from tests.built import Built, Call, agree

sdpa = torch.nn.functional.scaled_dot_product_attention
SLOTS = 40


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def cache() -> torch.Tensor:
    return torch.randn(1, 2, SLOTS, 16)


def token() -> torch.Tensor:
    return torch.randn(1, 2, 1, 16)


def whole_copies(built: Built, elements: int = SLOTS * 32) -> int:
    """Steps that write all of a cache, whatever they are called."""
    program = built.session.plan.programs[0]
    sizes = {
        k for k, buffer in enumerate(program.buffers)
        if program.expressions[buffer.nbytes] == [elements * 4]
    }  # fmt: skip
    return sum(
        bool(sizes & set(step.kernel.writes)) and "scatter" not in step.kernel.label
        for step in program.steps
        if step.kernel is not None
    )


def follow(function: Callable[..., Any], copies: int | None, *given: Any) -> None:
    """Results and inputs are those of eager torch, call after call; the number of whole copies is
    `copies`."""
    built = Built(Call(function), tuple(x.clone() for x in given))
    try:
        ours, theirs = [x.clone() for x in given], [x.clone() for x in given]
        for _ in range(3):
            agree(built(*ours), function(*theirs), 1e-5, 1e-5)
            agree(ours, theirs, 1e-6, 1e-6, "inputs")
        if copies is not None:
            assert whole_copies(built) == copies
        strided = [x.clone() for x in given]
        strided[0] = torch.stack([given[0], given[0]], -1)[..., 0]  # not as the plan has it
        fresh = [x.clone() for x in given]
        agree(built(*strided), function(*fresh), 1e-5, 1e-5)
        agree(strided, fresh, 1e-6, 1e-6, "strided inputs")
    finally:
        built.close()


def test_a_cache_is_written_in_place() -> None:
    def step(kc: Any, vc: Any, q: Any, k: Any, v: Any, at: Any) -> Any:
        kc.index_copy_(2, at, k)
        vc.index_copy_(2, at, v)
        return sdpa(q, kc, vc)

    follow(step, 0, cache(), cache(), token(), token(), token(), torch.tensor([7]))


def test_several_writes_one_after_the_other() -> None:
    def step(c: Any, k: Any, at: Any) -> Any:
        c.index_copy_(2, at, k)
        c[:, :, 3] = k[:, :, 0]
        c[:, :, 5:7] = k
        return c[:, :, 2:8] * 2

    follow(step, 0, cache(), token(), torch.tensor([39]))


def test_the_old_content_read_before_it_is_written() -> None:
    def step(c: Any, k: Any, at: Any) -> Any:
        seen = sdpa(k, torch.cat((c[:, :, 1:], k), 2), c)
        c.index_copy_(2, at, seen)
        return seen

    follow(step, None, cache(), token(), torch.tensor([0]))


def test_the_old_content_read_later_is_kept() -> None:
    def beside(c: Any, k: Any, at: Any) -> Any:
        old = c.transpose(1, 2)[:, 3:]
        kept = old.clone()
        c.index_copy_(2, at, k)
        return kept, c.sum() + kept.sum()

    def source(c: Any, k: Any, at: Any) -> Any:
        c[:, :, 1:] = c[:, :, :-1].clone()
        c.index_copy_(2, at, c[:, :, 4:5].clone())
        return k + 1

    def both(c: Any, d: Any, at: Any) -> Any:
        old = c.clone()
        c.index_copy_(2, at, d[:, :, :1])
        d.copy_(old)
        return (c - d).sum()

    follow(beside, None, cache(), token(), torch.tensor([0]))
    follow(source, None, cache(), token(), torch.tensor([2]))
    follow(both, None, cache(), cache(), torch.tensor([4]))


def test_row_major_copies_are_not_of_the_old_content() -> None:
    def step(c: Any, w: Any, at: Any) -> Any:
        first = c.transpose(2, 3).reshape(2, -1)[:, :SLOTS] @ w
        c.index_copy_(2, at, torch.tanh(first)[None, :, None, :16])
        return first, c.transpose(2, 3).reshape(2, -1)[:, :SLOTS] @ w

    follow(step, None, cache(), torch.randn(SLOTS, 16), torch.tensor([1]))


def test_a_new_value_is_made_in_place() -> None:
    def step(c: Any, x: Any) -> Any:
        c.copy_(torch.sigmoid(x) * 3)
        return c[0, 0]

    built = Built(Call(step), (cache(), cache()))
    try:
        assert whole_copies(built) == 1  # the loop itself
    finally:
        built.close()
    follow(step, 1, cache(), cache())


class Cached(nn.Module):
    """A state written at a position, as static caches are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, SLOTS, 16))

    def forward(self, k: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, at, k)
        return sdpa(k, self.keys, self.keys, (torch.arange(SLOTS) <= at)[None])


def test_a_state_is_written_in_place() -> None:
    built, module = Built(Cached(), (token(), torch.tensor([0]))), Cached()
    try:
        for position in range(4):
            k, at = token(), torch.tensor([position])
            agree(built(k, at), module(k, at), 1e-5, 1e-5)
            agree(torch.from_numpy(built.session.states["keys"].copy()), module.keys, 0, 0)
        assert whole_copies(built) == 0
    finally:
        built.close()


def delta_rule(state: Any, k: Any) -> Any:
    gates = -k.abs(), k[..., 0].sigmoid()
    return torch.ops.graphc.delta_rule(state, k, k, k, *gates, scale=1.0, normalize=True)


def test_a_recurrent_state_is_overwritten() -> None:
    """What a caller copies into it is made there: also where it is a result as well."""

    def step(state: Any, k: Any) -> Any:
        out, after = delta_rule(state, k)
        state.copy_(after)
        return out

    def shown(state: Any, k: Any) -> Any:
        out, after = delta_rule(state, k)
        state.copy_(after)
        return out, after

    def swapped(state: Any, other: Any, k: Any) -> Any:
        out, after = delta_rule(state, k)
        state.copy_(other)
        other.copy_(after)
        return out

    state, other, k = torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 1, 2, 16)
    follow(step, None, state, k)
    follow(shown, None, state, k)
    follow(swapped, None, state, other, k)
    built = Built(Call(step), (state, k))
    try:
        assert whole_copies(built, 2 * 16 * 16) == 1  # by the operator itself
        assert len(built.session.plan.programs[0].steps) <= 3
    finally:
        built.close()


def test_a_rejected_call_changes_nothing() -> None:
    def step(c: Any, k: Any, at: Any) -> Any:
        c.index_copy_(2, at, k)
        return c * 1

    c = cache()
    built = Built(Call(step), (c.clone(), token(), torch.tensor([0])))
    try:
        kept = c.clone()
        with pytest.raises(InputRejectedError):
            built(c, token().double(), torch.tensor([0]))
        assert torch.equal(c, kept)
    finally:
        built.close()


def test_a_concatenation_is_read_in_parts() -> None:
    def step(kc: Any, vc: Any, q: Any, k: Any, v: Any) -> Any:
        keys, values = torch.cat((kc[:, :, 1:], k), 2), torch.cat((vc[:, :, 1:], v), 2)
        return sdpa(q, keys, values)

    def later(kc: Any, vc: Any, q: Any, k: Any, v: Any) -> Any:  # heads behind positions
        keys = torch.cat((kc.transpose(1, 2), k.transpose(1, 2)), 1).transpose(1, 2)
        return sdpa(q, keys, torch.cat((vc, v), 2))

    def returned(kc: Any, vc: Any, q: Any, k: Any, v: Any) -> Any:
        keys, values = torch.cat((kc, k), 2), torch.cat((vc, v), 2)
        return sdpa(q, keys, values), keys, values

    given = cache(), cache(), token(), token(), token()
    for function, size, copies in ((step, SLOTS, 0), (later, SLOTS + 1, 0), (returned, 41, 4)):
        built = Built(Call(function), given)
        try:
            agree(built(*given), function(*given), 1e-5, 1e-5)
            assert whole_copies(built, size * 32) == copies, function.__name__
        finally:
            built.close()
