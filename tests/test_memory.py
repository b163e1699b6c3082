"""Memory planning: random intervals, shapes of real graphs, and a judge that must object."""

from __future__ import annotations

import random
import time

import pytest

from graphc.errors import InternalError, UsageError
from graphc.plan import Fallback, Kernel, Step
from graphc.runtime.pool import Region
from passes.memory.check_memory import check_memory, lower_bound
from passes.memory.lifetimes import Interval, intervals, lifetimes
from passes.memory.plan_memory import PAGE, place


def random_intervals(seed: int) -> list[Interval]:
    chance = random.Random(seed)
    steps = chance.randrange(1, 60)
    result = []
    for _ in range(chance.randrange(1, 120)):
        first = chance.randrange(steps)
        last = min(steps - 1, first + int(chance.expovariate(0.3)))
        size = chance.choice([0, 4, 64, 100, 4096, chance.randrange(1, 10**6)])
        result.append(Interval(first, last, size))
    return result


def brute_bound(items: list[Interval]) -> int:
    return max(
        sum(i.nbytes for i in items if i.first <= step <= i.last)
        for step in range(max(i.last for i in items) + 1)
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_intervals(seed: int) -> None:
    items = random_intervals(seed)
    placement = place(items, work=100_000)
    facts = check_memory(items, placement.offsets, placement.arena_bytes)
    assert facts.lower_bound == brute_bound(items)
    assert facts.naive_bytes == sum(i.nbytes for i in items)
    assert facts.lower_bound <= facts.arena_bytes
    # every pair, without the judge's sweep
    for a, (x, p) in enumerate(zip(items, placement.offsets, strict=True)):
        for y, q in list(zip(items, placement.offsets, strict=True))[:a]:
            if x.first <= y.last and y.first <= x.last and x.nbytes and y.nbytes:
                assert p + x.nbytes <= q or q + y.nbytes <= p
    assert place(items, work=100_000) == placement  # deterministic


def decoder(layers: int, length: int, width: int) -> list[Interval]:
    """Residual stream, norm, q/k/v, attention, gate/up/down: buffers of one decoder pass."""
    row = length * width * 4
    items, t = [], 0
    for _ in range(layers):
        items += [
            Interval(t, t + 6, row),  # residual, read again by the first add
            Interval(t + 1, t + 4, row),  # norm
            Interval(t + 2, t + 5, row), Interval(t + 3, t + 5, row // 4),
            Interval(t + 4, t + 5, row // 4),
            Interval(t + 5, t + 6, row),  # attention
            Interval(t + 6, t + 11, row),  # after the first add
            Interval(t + 7, t + 9, row),
            Interval(t + 8, t + 10, row * 4), Interval(t + 9, t + 10, row * 4),
            Interval(t + 10, t + 11, row * 4),
        ]  # fmt: skip
        t += 11
    return items


def cnn(stages: int, channels: int, side: int) -> list[Interval]:
    """Skip connections of growing channels and shrinking maps, kept for an upsampling path."""
    items, t = [], 0
    kept: list[tuple[int, int]] = []
    for stage in range(stages):
        size = channels * 2**stage * (side >> stage) ** 2 * 4
        for _ in range(3):
            items += [Interval(t, t + 2, size), Interval(t + 1, t + 2, size * 3)]
            t += 2
        kept.append((t, size))
        t += 1
    for begin, size in reversed(kept):
        items += [Interval(begin, t + 1, size), Interval(t, t + 1, size * 2)]
        t += 1
    return items


def encoder(layers: int, heads: int, length: int, width: int) -> list[Interval]:
    row = length * width * 4 + 4
    items, t = [], 0
    for _ in range(layers):
        items += [Interval(t, t + 5, row)]
        items += [Interval(t + 1, t + 2, row), Interval(t + 1, t + 3, row)]
        items += [Interval(t + 1, t + 3, row), Interval(t + 2, t + 3, heads * length**2 * 4)]
        items += [Interval(t + 3, t + 4, row), Interval(t + 4, t + 5, row)]
        items += [Interval(t + 5, t + 7, row), Interval(t + 6, t + 7, 4 * row)]
        t += 7
    return items


@pytest.mark.parametrize(
    "items",
    [decoder(32, 512, 768), decoder(4, 7, 96), cnn(5, 32, 224), cnn(3, 16, 65),
     encoder(12, 12, 256, 384), encoder(6, 12, 16, 384), encoder(12, 12, 77, 385)],
)  # fmt: skip
def test_graph_shapes_reach_the_bound(items: list[Interval]) -> None:
    placement = place(items)
    facts = check_memory(items, placement.offsets, placement.arena_bytes)
    assert facts.arena_bytes <= 1.02 * facts.lower_bound


def test_pages() -> None:
    big = [Interval(0, 9, 100_000), Interval(0, 9, 2_000_000), Interval(0, 9, 64)]
    placement = place(big)
    assert all(p % PAGE == 0 for i, p in zip(big, placement.offsets, strict=True) if i[2] >= PAGE)
    # pages would cost a third here
    small = [Interval(0, 9, 5000) for _ in range(20)]
    placement = place(small)
    facts = check_memory(small, placement.offsets, placement.arena_bytes)
    assert facts.arena_bytes <= 1.02 * facts.lower_bound


def test_large_graphs_are_planned_in_bounded_time() -> None:
    chance = random.Random(7)
    items = []
    for k in range(5000):
        span = 400 if k % 50 == 0 else chance.randrange(1, 12)
        items.append(Interval(k, min(4999, k + span), chance.randrange(1, 1 << 20)))
    begin = time.process_time()
    placement = place(items)
    assert time.process_time() - begin < 15  # about 2 s; a quadratic planner takes minutes
    check_memory(items, placement.offsets, placement.arena_bytes)


def test_empty() -> None:
    assert place([]).arena_bytes == 0
    assert check_memory([], [], 0).lower_bound == 0
    assert lower_bound([Interval(3, 3, 8)]) == 8


@pytest.mark.parametrize("seed", range(20))
def test_the_judge_objects(seed: int) -> None:
    chance = random.Random(seed)
    items = [i for i in random_intervals(seed) if i.nbytes]
    placement = place(items, work=1000)
    pairs = [
        (a, b)
        for a, x in enumerate(items)
        for b, y in enumerate(items)
        if a != b and x.first <= y.last and y.first <= x.last
    ]
    if not pairs:
        pytest.skip("nothing is live together")
    a, b = chance.choice(pairs)
    offsets = list(placement.offsets)
    offsets[a] = offsets[b]
    with pytest.raises(InternalError, match="overlap"):
        check_memory(items, offsets, placement.arena_bytes + max(i.nbytes for i in items))


@pytest.mark.parametrize(
    ("item", "offset", "arena"),
    [(Interval(0, 1, 64), 32, 128), (Interval(0, 1, 64), 128, 128), (Interval(0, 1, 8), -64, 128),
     (Interval(2, 1, 8), 0, 128)],
)  # fmt: skip
def test_the_judge_objects_to_bad_places(item: Interval, offset: int, arena: int) -> None:
    with pytest.raises(InternalError):
        check_memory([item], [offset], arena)


def test_lifetimes_from_steps() -> None:
    def native(reads: list[int], writes: list[int]) -> Step:
        pairs = [(b, 0) for b in reads + writes]
        return Step(kernel=Kernel("k", pairs, [], 0, 1, 0, reads, writes))

    leaf = {"buffer": 2, "dtype": "float32", "shape": [], "strides": [], "offset": 0}
    steps = [
        native([0], [1]),
        native([1], [2]),
        Step(fallback=Fallback("aten.cat.default", [[leaf, 4]], {}, [3, -1], [], [], [])),
        native([3, 1], [4]),
    ]
    spans = lifetimes(steps)
    assert spans == {0: (0, 0), 1: (0, 3), 2: (1, 2), 3: (2, 3), 4: (3, 3)}
    assert intervals(spans, {4: 8, 1: 16, 9: 1}) == {4: Interval(3, 3, 8), 1: Interval(0, 3, 16)}


def test_an_arena_larger_than_memory_is_reserved() -> None:
    region = Region(1 << 42)
    region.bytes[0], region.bytes[-1] = 1, 2
    assert (int(region.bytes[0]), int(region.bytes[-1])) == (1, 2)


def test_an_impossible_arena_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot reserve"):
        Region(1 << 60)
