"""Pooled keys and the choice among pools, executed for real."""

from __future__ import annotations

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import lightning_indexer, pooled_indexer  # noqa: F401
from graphc.ops.records import record_format
from tests.kernel_harness import Constant, available_isas, lower, run_rule
from tests.kernel_in_place import run_in_place

torch.set_num_threads(1)
ISAS = available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POOL, RING = "graphc.pool_keys.default", "graphc.append_ring.default"
INDEXER = "graphc.pooled_indexer.default"
ops = torch.ops.graphc


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: scores are exact, and many are equal."""
    return torch.randint(-3, 4, shape).to(dtype)


def tables(batch: int, columns: int, spare: int = 3) -> torch.Tensor:
    return torch.randperm(batch * columns + spare)[: batch * columns].view(batch, columns).int()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pool", "width"), [(1, 8), (2, 17), (4, 32), (16, 128), (16, 1)])
def test_pooled_keys(isa: str, dtype: torch.dtype, pool: int, width: int) -> None:
    rows, last = 4, pool - 1
    for length, starts in [(1, (0, last)), (3, (5, 3 * pool + last)), (50, (0, 3)), (pool, (1, 9))]:
        columns = -(-(max(starts) + length) // (pool * rows))
        table = tables(2, columns)
        if columns > 1:
            table[1, 1] = -1
        pages = torch.randn(2 * columns + 3, rows, width).to(dtype)
        ring = torch.randn(5, pool, 2 * width).to(dtype)
        joint = torch.randn(2, length, 2 * width + 3).to(dtype) * 3
        key, gate = joint[..., 1 : width + 1], joint[..., width + 3 :]
        bias = torch.randn(pool, width)
        operands = [pages, ring, key, gate, bias, table, ints(*starts), ints(4, 1)]
        exact = ops.pool_keys(*(x.double() if x.is_floating_point() else x for x in operands))
        eager = ops.pool_keys(*operands)
        (got,) = run_rule(POOL, [*operands[:4], Constant(bias), *operands[5:]], isa=isa)
        (here,) = run_in_place(POOL, operands, isa=isa, result=0)
        assert torch.equal(got, here)
        unchanged = (exact == pages.double()).all(-1)
        assert torch.equal(got[unchanged], pages[unchanged])
        error, eager_error = (float((x.double() - exact).square().mean()) for x in (got, eager))
        unit = 2.0**-24 * float(exact.abs().max())
        assert error**0.5 <= 1.02 * eager_error**0.5 + unit


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [1, 4, 16])
def test_rings(isa: str, dtype: torch.dtype, pool: int) -> None:
    for length, starts in [(1, (0, 7)), (3, (2, pool - 1)), (40, (0, 5)), (pool, (3, 16))]:
        ring = torch.randn(4, pool, 2 * 24).to(dtype)
        joint = torch.randn(2, length, 60).to(dtype)
        rows = [joint[..., :24], joint[..., 30:54]]
        operands = [ring, rows, ints(*starts), ints(3, 0)]
        expected = ops.append_ring(*operands)
        assert torch.equal(run_rule(RING, operands, isa=isa)[0], expected)
        assert torch.equal(run_in_place(RING, operands, isa=isa, result=0)[0], expected)
        assert torch.equal(expected[1:3], ring[1:3])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pool", [4, 16])
def test_pieces_leave_the_same(isa: str, pool: int) -> None:
    """Bit for bit, whatever pieces the tokens come in."""
    length, width = 100, 40
    key, gate = torch.randn(1, length, width), torch.randn(1, length, width)
    bias, table, slots = torch.randn(pool, width), tables(1, 7), ints(1)

    def play(cuts: list[int]) -> torch.Tensor:
        pages = torch.zeros(10, 64 // pool, width)
        ring = torch.full((2, pool, 2 * width), torch.nan)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            some, start = (key[:, begin:end], gate[:, begin:end]), ints(begin)
            (pages,) = run_rule(POOL, [pages, ring, *some, bias, table, start, slots], isa=isa)
            (ring,) = run_rule(RING, [ring, list(some), start, slots], isa=isa)
        return pages

    once = play([0, length])
    assert torch.equal(play([0, 17, 18, 49, 51, 80, length]), once)
    assert torch.equal(play(list(range(length + 1))), once)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_pools(isa: str, dtype: torch.dtype) -> None:
    for pool, count, length, starts in [
        (4, 3, 1, (0, 30)), (4, 3, 1, (3, 63)), (4, 3, 70, (0, 57)), (16, 2, 33, (15, 90)),
        (1, 9, 20, (0, 40)), (16, 8, 5, (0, 200)), (2, 40, 9, (100, 7)),
    ]:  # fmt: skip
        rows, heads, width = 64 // pool, 6, 32
        columns = -(-(max(starts) + length) // 64)
        table = tables(2, columns)
        pages = whole(2 * columns + 3, rows, width, dtype=dtype)
        q, w = whole(2, length, heads, width, dtype=dtype), whole(2, length, heads)
        operands, sizes = [q, w, pages, table, ints(*starts)], {"count": count, "pool": pool}
        expected = ops.pooled_indexer(*operands, **sizes)
        symbols = {(0, 0): "B", (1, 0): "B", (3, 0): "B", (0, 1): "T", (1, 1): "T", (3, 1): "M"}
        for known in (None, symbols):
            (got,) = run_rule(INDEXER, operands, sizes, isa=isa, symbols=known)
            assert torch.equal(got, expected), (pool, count, length, starts)


@pytest.mark.parametrize("isa", ISAS)
def test_long_caches_in_chunks(isa: str) -> None:
    columns = 4 * lightning_indexer.CHUNK // 16
    pages, table = whole(2 * columns + 3, 16, 16), tables(2, columns)
    starts = ints(columns * 64 - 2, 5001)
    operands = [whole(2, 2, 4, 16), whole(2, 2, 4), pages, table, starts]
    sizes = {"count": 100, "pool": 4}
    context = lower(INDEXER, operands, sizes, isa=isa)
    assert [step.symbol for step in context.steps] == [
        "lightning_indexer_f32", "lightning_indexer_merge_f32", "gc_pooled_positions",
    ]  # fmt: skip
    expected = ops.pooled_indexer(*operands, **sizes)
    for parts in (1, 5):
        assert torch.equal(run_rule(INDEXER, operands, sizes, isa=isa, parts=parts)[0], expected)


def test_what_is_seen() -> None:
    """Every query has its own tokens behind the last whole pool, and no later ones."""
    table, pages = tables(1, 2), torch.randn(5, 16, 8)
    q, w = torch.randn(1, 100, 2, 8), torch.randn(1, 100, 2)
    (got,) = run_rule(INDEXER, [q, w, pages, table, ints(0)], {"count": 5, "pool": 4}, isa=ISAS[0])
    for t in range(100):
        chosen = got[0, t][got[0, t] >= 0].tolist()
        seen = t + 1
        assert len(chosen) == min(seen, 20 + seen % 4)
        assert chosen == sorted(set(chosen)) and chosen[-1:] <= [t]
        assert chosen[len(chosen) - seen % 4 :] == list(range(seen - seen % 4, seen))
        assert got[0, t, len(chosen) :].tolist() == [-1] * (23 - len(chosen))


def test_refusals() -> None:
    key, start, slots = torch.zeros(1, 2, 8), ints(0), ints(0)
    pages, ring, bias = torch.zeros(2, 4, 8), torch.zeros(1, 4, 16), torch.zeros(4, 8)
    good = [pages, ring, key, key, bias, ints(0).view(1, 1), start, slots]
    lower(POOL, good, isa=ISAS[0])
    for place, bad, why in [
        (0, pages.bfloat16(), "pooled keys over"), (2, key[..., :4], "widths"),
        (4, bias.bfloat16(), "bias of bfloat16"), (7, slots.long(), "slots of int64"),
    ]:  # fmt: skip
        with pytest.raises(Refuse, match=why):
            lower(POOL, [*good[:place], bad, *good[place + 1 :]], isa=ISAS[0])
    with pytest.raises(Refuse, match="3 parts"):
        lower(RING, [torch.zeros(1, 4, 24), [key] * 3, start, slots], isa=ISAS[0])
    with pytest.raises(Refuse, match="a ring over"):
        lower(RING, [ring, [key.bfloat16(), key], start, slots], isa=ISAS[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records(isa: str, dtype: torch.dtype) -> None:
    """Pools kept in records and chosen from them; what is chosen is as in plain pages of the same
    numbers."""
    form = record_format("mxfp8_floor:40")
    table, starts = tables(2, 20), ints(300, 17)
    pages = form.encode(torch.randn(43, 4, 40))
    ring, bias = torch.randn(5, 4, 80).to(dtype), torch.randn(4, 40)
    key, gate = torch.randn(2, 9, 40).to(dtype), torch.randn(2, 9, 40).to(dtype)
    operands = [pages, ring, key, gate, bias, table, starts, ints(4, 1)]
    keywords = {"format": str(form)}
    (got,) = run_rule(POOL, operands, keywords, isa=isa)
    expected = ops.pool_keys(*operands, **keywords)
    changed = (expected != pages).any(-1)
    assert torch.equal(got[~changed], pages[~changed]) and 4 <= int(changed.sum()) <= 5
    read = form.decode(got, torch.float32) - form.decode(expected, torch.float32)
    assert float(read.abs().max()) <= 0.13  # a step of E4M3 where exp rounds otherwise

    query, weights = whole(2, 9, 3, 40, dtype=dtype), whole(2, 9, 3)
    keys = whole(43, 4, 40)
    options = {"count": 6, "pool": 4}
    arguments = [query, weights, form.encode(keys), table, starts]
    (chosen,) = run_rule(INDEXER, arguments, {**options, **keywords}, isa=isa)
    arguments[2] = keys.to(dtype)
    assert torch.equal(chosen, ops.pooled_indexer(*arguments, **options))
