"""The Lightning Indexer, executed for real: it chooses the keys that the operator chooses."""

from __future__ import annotations

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import lightning_indexer
from graphc.ops.records import record_format
from tests.kernel_harness import available_isas, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE, PAGED = "graphc.lightning_indexer.default", "graphc.paged_lightning_indexer.default"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def whole(*shape: int, dtype: torch.dtype, most: int = 3) -> torch.Tensor:
    """Small integers, -0 among them: scores are exact in every dtype, and many are equal."""
    values = torch.randint(-most, most + 1, shape).float()
    return torch.where((values == 0) & (torch.rand(shape) < 0.5), -0.0, values).to(dtype)


def scores(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, T, S] in float64."""
    dots = torch.einsum("bthd,bsd->bths", q.double(), k.double()).relu()
    return torch.einsum("bth,bths->bts", w.double(), dots)


def paged(key: torch.Tensor, size: int, spare: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, D] in shuffled pages of `size` rows, and their table."""
    batch, length, width = key.shape
    count = -(-length // size)
    pages = torch.full((batch * count + spare, size, width), 7.0, dtype=key.dtype)
    table = torch.randperm(len(pages))[: batch * count].view(batch, count).int()
    for b in range(batch):
        for s in range(length):
            pages[table[b, s // size], s % size] = key[b, s]
    return pages, table


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(isa: str, dtype: torch.dtype) -> None:
    for batch, length, heads, d, count in [
        (1, 1, 4, 16, 8), (1, 7, 4, 16, 8), (1, 8, 4, 16, 8), (1, 9, 4, 16, 8), (2, 70, 8, 64, 16),
        (1, 600, 3, 32, 64), (1, 1000, 16, 128, 100), (1, 530, 1, 48, 17), (1, 61, 64, 128, 5),
        (1, 33, 5, 17, 3), (3, 40, 7, 1, 1), (1, 1100, 2, 16, 700),
    ]:  # fmt: skip
        q, k = whole(batch, length, heads, d, dtype=dtype), whole(batch, length, d, dtype=dtype)
        w = whole(batch, length, heads, dtype=dtype)
        expected = torch.ops.graphc.lightning_indexer(q, w, k, count=count)
        (got,) = run_rule(DENSE, [q, w, k], {"count": count}, isa=isa)
        assert torch.equal(got, expected), (batch, length, heads, d, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_better_key_is_left_out(isa: str, dtype: torch.dtype) -> None:
    """Of scores that differ by rounding alone any may be chosen; no others."""
    q, k = torch.randn(1, 700, 8, 64).to(dtype), torch.randn(1, 700, 64).to(dtype)
    w = torch.randn(1, 700, 8)
    (got,) = run_rule(DENSE, [q, w, k], {"count": 90}, isa=isa)
    exact = scores(q, w, k)[0]
    for t in range(700):
        chosen = torch.zeros(700, dtype=torch.bool)
        chosen[got[0, t][got[0, t] >= 0].long()] = True
        assert int(chosen.sum()) == min(t + 1, 90) and not chosen[t + 1 :].any()
        assert (got[0, t, : min(t + 1, 90)].diff() > 0).all()
        left = exact[t, : t + 1][~chosen[: t + 1]]
        if len(left):
            assert exact[t][chosen].min() > left.max() - 1e-5 * exact[t].abs().max()


@pytest.mark.parametrize("isa", ISAS)
def test_ties_and_zeros(isa: str) -> None:
    """The rule's own example, rows of zeros alone, and infinities."""
    key = torch.tensor([0.0, -0.0, 1.0, 0.0, -1.0, 0.0]).view(1, 6, 1)
    (got,) = run_rule(DENSE, [torch.ones(1, 6, 1, 1), torch.ones(1, 6, 1), key], {"count": 3},
                      isa=isa)  # fmt: skip
    assert got[0, 5].tolist() == [0, 1, 2]
    q, k = torch.ones(1, 1500, 2, 16), -torch.ones(1, 1500, 16)
    for weight in (1.0, -1.0, 0.0):  # all scores are 0, of either sign
        (got,) = run_rule(DENSE, [q, torch.full((1, 1500, 2), weight), k], {"count": 33}, isa=isa)
        assert torch.equal(got[0, 40:], torch.arange(33).int().expand(1460, 33))
    k = whole(1, 1500, 16, dtype=torch.float32)
    k[0, 777, 0], k[0, 70, 3], k[0, 71, 3] = torch.inf, torch.nan, -torch.nan
    q = torch.rand(1, 1500, 2, 16) + 0.5
    w = -torch.ones(1, 1500, 2)
    expected = torch.ops.graphc.lightning_indexer(q, w, k, count=33)
    (got,) = run_rule(DENSE, [q, w, k], {"count": 33}, isa=isa)
    same = (got == expected).all(-1)[0]
    assert same[:33].all() and {70, 71} <= set(got[0, 1400].tolist())
    assert 777 not in got[0, 1400].tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_pages(isa: str, size: int) -> None:
    """Sequences of different lengths, which end in a page, at its end and behind it."""
    for length, start, count in [
        (1, 0, 4),
        (1, 2 * size - 1, 9),
        (5, 3 * size - 3, 40),
        (70, 5, 30),
    ]:
        starts = torch.tensor([start, max(0, 3 * size - length)], dtype=torch.int32)
        key = whole(2, int(starts.max()) + length, 32, dtype=torch.bfloat16)
        pages, table = paged(key, size)
        q = whole(2, length, 6, 32, dtype=torch.bfloat16)
        w = whole(2, length, 6, dtype=torch.float32)
        expected = torch.ops.graphc.paged_lightning_indexer(q, w, pages, table, starts, count=count)
        (got,) = run_rule(PAGED, [q, w, pages, table, starts], {"count": count}, isa=isa)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_missing_pages_are_zero_keys(isa: str) -> None:
    pages, table = paged(whole(1, 256, 16, dtype=torch.float32), 16)
    table[0, 3:9] = -1
    q, w = whole(1, 20, 3, 16, dtype=torch.float32), whole(1, 20, 3, dtype=torch.float32)
    operands = [q, w, pages, table, torch.tensor([230], dtype=torch.int32)]
    expected = torch.ops.graphc.paged_lightning_indexer(*operands, count=70)
    assert torch.equal(run_rule(PAGED, operands, {"count": 70}, isa=isa)[0], expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_and_decode_agree(isa: str, dtype: torch.dtype) -> None:
    """The same keys whatever queries come together: scores are summed up in one order."""
    length, heads, d, count = 900, 12, 64, 120
    q, k = torch.randn(1, length, heads, d).to(dtype), torch.randn(1, length, d).to(dtype)
    w = torch.randn(1, length, heads)
    (whole_prefill,) = run_rule(DENSE, [q, w, k], {"count": count}, isa=isa)
    pages, table = paged(k, 64)
    for first, last in [(0, 333), (333, 334), (334, 800), (800, 804), (899, 900)]:
        start = torch.tensor([first], dtype=torch.int32)
        operands = [q[:, first:last], w[:, first:last], pages, table, start]
        (piece,) = run_rule(PAGED, operands, {"count": count}, isa=isa)
        assert torch.equal(piece, whole_prefill[:, first:last])
    starts = torch.tensor([899, 40, 500, 119], dtype=torch.int32)
    where = starts.long()
    operands = [q[0, where, None], w[0, where, None], pages, table.expand(4, -1), starts]
    (decoded,) = run_rule(PAGED, operands, {"count": count}, isa=isa)
    assert torch.equal(decoded[:, 0], whole_prefill[0, where])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [50, 2048])
def test_long_caches_in_chunks(isa: str, count: int) -> None:
    capacity = 4 * lightning_indexer.CHUNK
    starts = torch.tensor([capacity - 2, 40, 5000, count - 1], dtype=torch.int32)
    pages, table = paged(whole(4, capacity, 16, dtype=torch.bfloat16), 128)
    q, w = whole(4, 2, 4, 16, dtype=torch.bfloat16), whole(4, 2, 4, dtype=torch.float32)
    operands = [q, w, pages, table, starts]
    symbols = {(0, 0): "B", (3, 0): "B", (3, 1): "M"}
    expected = torch.ops.graphc.paged_lightning_indexer(*operands, count=count)
    results = [
        run_rule(PAGED, operands, {"count": count}, isa=isa, parts=parts, symbols=known)[0]
        for parts, known in ((1, None), (5, None), (3, symbols))
    ]
    assert all(torch.equal(got, expected) for got in results)
    assert len(lower(PAGED, operands, {"count": count}, isa=isa).steps) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_sorted_scores(isa: str, order: str) -> None:
    """The worst case of a running bound, and the best."""
    ramp = torch.arange(3000.0) - 1500
    k = (ramp if order == "ascending" else -ramp).view(1, 3000, 1)
    q, w = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1), torch.tensor([[[1.0, -1.0]]])
    start = torch.tensor([2990], dtype=torch.int32)
    (got,) = run_rule(DENSE, [q, w, k, start], {"count": 200}, isa=isa)
    first = 2791 if order == "ascending" else 0
    assert got[0, 0].tolist() == list(range(first, first + 200))


def test_symbolic_lengths() -> None:
    for batch, length in [(1, 3), (2, 77), (1, 500)]:
        q, k = (whole(batch, length, *n, dtype=torch.float32) for n in ((4, 32), (32,)))
        w = whole(batch, length, 4, dtype=torch.float32)
        symbols = {(i, 0): "B" for i in range(3)} | {(i, 1): "T" for i in range(3)}
        (got,) = run_rule(DENSE, [q, w, k], {"count": 20}, isa=ISAS[0], symbols=symbols)
        assert torch.equal(got, torch.ops.graphc.lightning_indexer(q, w, k, count=20))
        last = [q[:, -1:], w[:, -1:], k, torch.full((batch,), length - 1, dtype=torch.int32)]
        symbols = {(0, 0): "B", (2, 1): "S"}  # it is known at run time that there is one chunk
        (decoded,) = run_rule(DENSE, last, {"count": 20}, isa=ISAS[0], symbols=symbols)
        assert torch.equal(decoded[:, 0], got[:, -1])


def test_strided_operands() -> None:
    """Queries and weights as slices of one projection, keys as part of wider rows."""
    joint = whole(2, 90, 4 * 32 + 4, dtype=torch.float32)
    q, w = joint[..., :128].unflatten(-1, (4, 32)), joint[..., 128:]
    k = whole(2, 90, 80, dtype=torch.float32)[..., 16:48]
    (got,) = run_rule(DENSE, [q, w, k], {"count": 20}, isa=ISAS[0])
    assert torch.equal(got, torch.ops.graphc.lightning_indexer(q, w, k, count=20))
    q = q.transpose(2, 3).contiguous().transpose(2, 3)
    (got,) = run_rule(DENSE, [q, w, k], {"count": 20}, isa=ISAS[0])
    assert torch.equal(got, torch.ops.graphc.lightning_indexer(q, w, k, count=20))


def test_refusals() -> None:
    q, w, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1), torch.zeros(1, 2, 4)
    for operands in ([q.bfloat16(), w, k], [q.double(), w, k.double()], [q, w.double(), k]):
        with pytest.raises(Refuse):
            lower(DENSE, operands, {"count": 1}, isa=ISAS[0])
    start = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(Refuse, match="int32"):
        lower(DENSE, [q, w, k, start], {"count": 1}, isa=ISAS[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_records(isa: str, dtype: torch.dtype, rule: str) -> None:
    """Keys in records, queries narrowed likewise; small integers are exact in all of it."""
    for batch, length, start, heads, d, count, together in [
        (1, 1, 900, 4, 32, 64, ""), (2, 70, 0, 8, 64, 16, "@16"), (2, 3, 5, 5, 33, 4, ""),
        (1, 300, 400, 16, 128, 100, "@16"), (1, 2, 9000, 3, 128, 70, "@16"),
        (1, 1, 5000, 7, 192, 70, "@16"), (1, 1, 4100, 9, 64, 1, ""),
    ]:  # fmt: skip
        q, w = whole(batch, length, heads, d, dtype=dtype), whole(batch, length, heads, dtype=dtype)
        form = record_format(f"mxfp8_{rule}:{d}{together}")
        keys = whole(batch, start + length, d, dtype=torch.float32)
        pages, table = paged(form.encode(keys), 16)
        pages = form.spread(pages)
        starts = torch.full((batch,), start, dtype=torch.int32)
        dense = torch.ops.graphc.lightning_indexer(q, w, keys.to(dtype), starts, count=count)
        keywords = {"count": count, "format": str(form)}
        (got,) = run_rule(PAGED, [q, w, pages, table, starts], keywords, isa=isa)
        assert torch.equal(got, dense), (length, heads, d)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("together", ["", "@16"])
def test_scales_of_every_size(isa: str, together: str) -> None:
    """Blocks of zeros, of the smallest and the largest numbers, and of none, among the others."""
    form = record_format(f"mxfp8_floor:64{together}")
    keys = torch.randn(1, 640, 64).abs() * torch.exp2(torch.randint(-30, 30, (1, 640, 1)).float())
    keys[0, 100:300:7] = 0.0
    keys[0, 103, :32] = 1e-38
    keys[0, 330, 32:] = 3e38
    keys[0, 400, 3] = torch.inf
    pages, table = paged(form.encode(keys), 16)
    q, w = torch.rand(1, 1, 4, 64).bfloat16(), torch.ones(1, 1, 4)
    start = torch.tensor([639], dtype=torch.int32)
    keywords = {"count": 40, "format": str(form)}
    arguments = [q, w, form.spread(pages), table, start]
    (got,) = run_rule(PAGED, arguments, keywords, isa=isa)
    expected = torch.ops.graphc.paged_lightning_indexer(*arguments, **keywords)
    assert torch.equal(got, expected)
    assert {330, 400} <= set(got[0, 0].tolist())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_of_two_terms(isa: str, dtype: torch.dtype) -> None:
    """Candidates by the first terms, the choice among them by both."""
    torch.manual_seed(3)
    for length, start, heads, d, count, together in [
        (1, 2000, 4, 64, 100, ""), (40, 700, 16, 128, 50, "@16"),
    ]:  # fmt: skip
        form = record_format(f"mxfp8_floor:{d}{together}")
        q, w = torch.randn(1, length, heads, d).to(dtype), torch.rand(1, length, heads)
        keys = torch.randn(1, start + length, d).to(dtype)
        count_pages = -(-keys.shape[1] // 16)
        table = torch.randperm(count_pages + 2)[:count_pages].view(1, -1).int()
        pages = torch.zeros(count_pages + 2, 2, 16, form.bytes, dtype=torch.uint8)
        zero = torch.zeros(1, dtype=torch.int32)
        pages = torch.ops.graphc.append_records(
            pages, [keys], table, zero, format=str(form), terms=2
        )
        starts = torch.full((1,), start, dtype=torch.int32)
        keywords = {"count": count, "format": str(form), "candidates": count + count // 5}
        arguments = [q, w, pages, table, starts]
        (got,) = run_rule(PAGED, arguments, keywords, isa=isa)
        expected = torch.ops.graphc.paged_lightning_indexer(*arguments, **keywords)
        plain = torch.ops.graphc.lightning_indexer(q, w, keys, starts, count=count)
        once = torch.ops.graphc.paged_lightning_indexer(
            q, w, pages[:, 0].contiguous(), table, starts, count=count, format=str(form)
        )
        assert _shared(got, expected) > 0.9985  # sums in another order
        assert _shared(got, plain) > max(0.985, _shared(once, plain))


def _shared(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean share of the choices in `one` that are in `other`."""
    hits = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(one[0], other[0], strict=True)]
    return sum(hits) / one.numel()


@pytest.mark.parametrize("isa", ISAS)
def test_a_record_that_is_no_number_is_seen(isa: str) -> None:
    """Its key is above all, as NaN is in plain keys; no other key changes."""
    form = record_format("mxfp8_floor:32")
    keys = torch.rand(1, 64, 32)
    keys[0, 20, 7] = torch.inf
    pages, table = paged(form.encode(keys), 16)
    arguments = [
        torch.rand(1, 1, 2, 32),
        torch.ones(1, 1, 2),
        pages,
        table,
        torch.tensor([63]).int(),
    ]
    keywords = {"count": 5, "format": str(form)}
    (got,) = run_rule(PAGED, arguments, keywords, isa=isa)
    assert 20 in got[0, 0].tolist()
    others = [p for p in got[0, 0].tolist() if p != 20]
    clear, place = paged(form.encode(torch.cat([keys[:, :20], keys[:, 21:]], 1)), 16)
    arguments[2:] = [clear, place, torch.tensor([62]).int()]
    keywords["count"] = 4
    (without,) = run_rule(PAGED, arguments, keywords, isa=isa)
    assert others == [p + (p >= 20) for p in without[0, 0].tolist()]
