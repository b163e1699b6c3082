"""Attention over chosen keys and over latent rows, executed for real against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import lightning_indexer, sparse_attention  # noqa: F401
from graphc.lowering.templates.row_source import seen_pairs
from tests.kernel_harness import available_isas, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
LATENT, SPARSE = "graphc.latent_attention.default", "graphc.sparse_attention.default"
INDEXER = "graphc.lightning_indexer.default"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def exact(operands: list[Any]) -> list[Any]:
    return [x.double() if x is not None and x.is_floating_point() else x for x in operands]


def check(
    isa: str, name: str, operands: list[Any], run: Any = None, **options: Any
) -> torch.Tensor:
    """Against the operator in float64."""
    (got,) = run_rule(name, operands, options, isa=isa, **(run or {}))
    operator = getattr(torch.ops.graphc, name.split(".")[1])
    reference = operator(*exact(operands), **options)
    dtype = operands[0].dtype
    assert got.dtype == dtype and got.shape == reference.shape
    error = float((got.double() - reference).abs().max())
    assert error / max(1.0, float(reference.abs().max())) < BOUND[dtype]
    return got


def cache(batch: int, places: int, size: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Shuffled pages of `size` rows, some of them nobody's, and a table of `places` a sequence."""
    pages = torch.randn(batch * places + 3, size, width).to(dtype)
    return [pages, torch.randperm(len(pages))[: batch * places].view(batch, places).int()]


def choices(start: torch.Tensor, queries: int, rows: int, count: int) -> torch.Tensor:
    """[B, T, count]: random positions in ascending order, -1 behind those a query can see; some
    lie after the query."""
    out = torch.full((len(start), queries, count), -1, dtype=torch.int32)
    for b in range(len(start)):
        for t in range(queries):
            some = torch.randperm(min(rows, int(start[b]) + t + 3))[:count].sort().values
            out[b, t, : len(some)] = some
    return out


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_latent_widths_and_heads(isa: str, dtype: torch.dtype) -> None:
    for heads, latent, rope in [
        (16, 512, 64), (8, 512, 64), (1, 32, 16), (3, 256, 32), (9, 128, 64), (40, 32, 16),
        (16, 48, 0), (6, 16, 2), (24, 80, 18),
    ]:  # fmt: skip
        pages, table = cache(2, 20, 16, latent + rope, dtype)
        start = starts(311, 5)
        q = torch.randn(2, 3, heads, latent + rope).to(dtype)
        for indices in (None, choices(start, 3, 320, 150)):
            check(isa, LATENT, [q, pages, table, start, indices], latent=latent, scale=0.1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_latent_rows_in_two_parts(isa: str, dtype: torch.dtype) -> None:
    for heads, latent, rope in [(16, 512, 64), (8, 512, 64), (3, 256, 32), (9, 20, 2), (5, 36, 6)]:
        pages, table = cache(2, 20, 16, latent, dtype)
        wide = torch.randn(len(pages), 16, rope + 3).to(dtype)
        behind = wide[:, :, 1 : rope + 1]  # rows of a wider tensor
        start = starts(311, 5)
        q = torch.randn(2, 3, heads, latent + rope).to(dtype)
        for indices in (None, choices(start, 3, 320, 150)):
            operands = [q, pages, table, start, indices, behind]
            check(isa, LATENT, operands, latent=latent - latent % 16, scale=0.1)
    odd = [q[..., :11], pages[..., :9], table, start, None, behind[..., :2]]
    with pytest.raises(Refuse, match="behind them"):
        lower(LATENT, odd, {"latent": 8, "scale": 0.1}, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_latent_pages(isa: str, size: int) -> None:
    """Sequences that end in a page, at its end and behind it; missing pages are rows of zeros."""
    for dtype in (torch.float32, torch.bfloat16):
        pages, table = cache(3, 5, size, 48, dtype)
        table[2, 1:3] = -1
        start = starts(0, 2 * size - 1, 4 * size)
        for queries in (1, 2, 10):
            q = torch.randn(3, queries, 4, 48).to(dtype)
            check(isa, LATENT, [q, pages, table, start], latent=32, scale=0.2)
            chosen = choices(start, queries, 5 * size, 20)
            check(isa, LATENT, [q, pages, table, start, chosen], latent=32, scale=0.2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [5, 16])
def test_rows_in_chunks(isa: str, dtype: torch.dtype, heads: int) -> None:
    """Few queries share out long caches: the same bits however the range is cut."""
    pages, table = cache(3, 64, 64, 48, dtype)
    start = starts(4000, 3, 513)
    q = torch.randn(3, 2, heads, 48).to(dtype)
    for indices in (None, choices(start, 2, 4096, 2048)):
        operands = [q, pages, table, start, indices]
        results = [
            check(isa, LATENT, operands, {"parts": parts}, latent=32, scale=0.3)
            for parts in (1, 2, 7)
        ]
        assert all(torch.equal(results[0], other) for other in results)
        steps = lower(LATENT, operands, {"latent": 32, "scale": 0.3}, isa=isa).steps
        assert len(steps) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_queries_without_rows(isa: str, dtype: torch.dtype) -> None:
    pages, table = cache(1, 4, 16, 48, dtype)
    q = torch.randn(1, 3, 4, 48).to(dtype)
    indices = torch.full((1, 3, 9), -1, dtype=torch.int32)
    indices[0, 1, 4] = 20  # alone, between others that are not there
    indices[0, 2] = 40  # after the query
    operands = [q, pages, table, starts(30), indices]
    got = check(isa, LATENT, operands, latent=32, scale=1.0)
    assert not got[:, ::2].any() and torch.equal(
        got[0, 1], pages[table[0, 1], 4, :32].expand(4, 32)
    )
    k, v = torch.randn(1, 4, 64, 24).to(dtype), torch.randn(1, 4, 64, 33).to(dtype)
    got = check(isa, SPARSE, [q[..., :24].transpose(1, 2), k, v, indices, starts(30)], scale=1.0)
    assert not got[:, ::2].any() and torch.equal(got[0, 1], v[0, :, 20])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_latent_scores_of_any_size(isa: str, dtype: torch.dtype) -> None:
    """Large scores of either sign, equal ones, and scales that are negative or zero."""
    pages, table = cache(1, 10, 64, 64, dtype)
    q = torch.randn(1, 2, 7, 64).to(dtype)
    q[0, 0] *= 100.0
    for scale in (1.0, -1.0, 0.0):
        check(isa, LATENT, [q, pages, table, starts(600)], latent=64, scale=scale)
    same = pages[:1, :1].expand(pages.shape).contiguous()
    got = check(isa, LATENT, [q * 30, same, table, starts(600)], latent=64, scale=1.0)
    torch.testing.assert_close(got, same[0, :1, None].expand(1, 2, 7, 64), rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays_with_its_query(isa: str) -> None:
    pages, table = cache(1, 10, 64, 64, torch.float32)
    q = torch.randn(1, 9, 4, 64)
    q[0, 5, 2, 3] = torch.nan
    (got,) = run_rule(LATENT, [q, pages, table, starts(500)], {"latent": 32, "scale": 0.1}, isa=isa)
    assert got[0, 5, 2].isnan().all() and int(got.isnan().sum()) == 32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_expanded_heads(isa: str, dtype: torch.dtype) -> None:
    for batch, heads, queries, d, dv, rows, count in [
        (2, 3, 5, 48, 33, 70, 20), (1, 2, 9, 192, 128, 300, 200), (1, 1, 1, 1, 1, 1, 1),
        (1, 4, 3, 17, 200, 90, 7),
    ]:  # fmt: skip
        q, k, v = (
            torch.randn(batch, heads, n, width).to(dtype)
            for n, width in ((queries, d), (rows, d), (rows, dv))
        )
        start = starts(*torch.randint(0, rows - queries + 1, (batch,)).tolist())
        indices = choices(start, queries, rows, count)
        check(isa, SPARSE, [q, k, v, indices, start], scale=d**-0.5)
        check(isa, SPARSE, [q, k, v, indices], scale=-0.5)


def test_expanded_heads_with_strides() -> None:
    joint = torch.randn(2, 40, 3, 64 + 32)
    k, v = (x.transpose(1, 2) for x in (joint[..., :64], joint[..., 64:]))
    q = torch.randn(2, 6, 3, 64).transpose(1, 2)
    indices = choices(starts(30, 30), 6, 40, 12)
    check(ISAS[0], SPARSE, [q, k, v, indices, starts(30, 7)], scale=0.125)
    check(ISAS[0], SPARSE, [q, k[:, :1].expand(2, 3, 40, 64), v, indices], scale=0.125)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 31, 32, 33, 80])
def test_chosen_by_the_indexer(isa: str, queries: int) -> None:
    """The layer of DeepSeek Sparse Attention: absorbed against expanded heads, and dense as long as
    there are no more keys than are chosen."""
    count, heads, latent, rope, d = 32, 4, 64, 16, 24
    index_q, index_k = torch.randn(1, queries, 8, 32), torch.randn(1, queries, 32)
    operands = [index_q, torch.randn(1, queries, 8), index_k]
    (chosen,) = run_rule(INDEXER, operands, {"count": count}, isa=isa)
    c, k_rope = torch.randn(queries, latent), torch.randn(queries, rope)
    up_k, up_v = torch.randn(heads, d, latent) * 0.1, torch.randn(heads, d, latent) * 0.1
    q_nope, q_rope = torch.randn(1, queries, heads, d), torch.randn(1, queries, heads, rope)
    scale = (d + rope) ** -0.5
    pages, table = cache(1, -(-queries // 16), 16, latent + rope, torch.float32)
    rows = torch.cat([c, k_rope], -1)
    for s in range(queries):
        pages[table[0, s // 16], s % 16] = rows[s]
    absorbed = torch.cat([torch.einsum("bthd,hdl->bthl", q_nope, up_k), q_rope], -1)
    options = {"latent": latent, "scale": scale}
    (got,) = run_rule(LATENT, [absorbed, pages, table, starts(0), chosen], options, isa=isa)
    got = torch.einsum("bthl,hdl->bthd", got, up_v)

    k = torch.cat([torch.einsum("sl,hdl->hsd", c, up_k), k_rope.expand(heads, -1, -1)], -1)[None]
    v = torch.einsum("sl,hdl->hsd", c, up_v)[None]
    q = torch.cat([q_nope, q_rope], -1).transpose(1, 2)
    (expanded,) = run_rule(SPARSE, [q, k, v, chosen], {"scale": scale}, isa=isa)
    torch.testing.assert_close(got, expanded, rtol=1e-5, atol=2e-6)
    if queries <= count:
        dense = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=True
        )
        torch.testing.assert_close(expanded, dense.transpose(1, 2), rtol=1e-5, atol=2e-6)


def test_symbolic_lengths() -> None:
    for batch, queries, places in [(1, 1, 3), (2, 9, 7), (3, 40, 20)]:
        pages, table = cache(batch, places, 16, 48, torch.float32)
        start = torch.randint(0, 16 * places - queries + 1, (batch,)).int()
        q = torch.randn(batch, queries, 5, 48)
        symbols = {(0, 0): "B", (2, 0): "B", (3, 0): "B", (0, 1): "T", (1, 0): "N", (2, 1): "M"}
        run = {"symbols": symbols}
        check(ISAS[0], LATENT, [q, pages, table, start], run, latent=32, scale=0.2)
        del symbols[0, 1]
        check(ISAS[0], LATENT, [q, pages, table, start], run, latent=32, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [8, 16])
def test_error_is_not_above_torch(dtype: torch.dtype, heads: int) -> None:
    pages, table = cache(1, 64, 64, 576, dtype)
    start = starts(4000)
    q = torch.randn(1, 1, heads, 576).to(dtype)
    indices = choices(start, 1, 4000, 2048)
    options = {"latent": 512, "scale": 576**-0.5}
    operands = [q, pages, table, start, indices]
    reference = torch.ops.graphc.latent_attention(*exact(operands), **options)
    (got,) = run_rule(LATENT, operands, options, isa=ISAS[0])
    rows = pages[table[0].long()].flatten(0, 1)[indices[0, 0].long()]
    weights = torch.softmax(q[0, 0] @ rows.T * 576**-0.5, -1)  # what eager torch would do
    torchs = (weights @ rows[:, :512])[None, None]
    ours, theirs = ((x.double() - reference).square().mean().sqrt() for x in (got, torchs))
    assert ours <= 1.02 * theirs, f"{ours:.3e} against {theirs:.3e}"


@pytest.mark.parametrize("most", [3, 20, None])
@pytest.mark.parametrize("queries", [1, 7, 10, 12])
def test_pairs_of_queries_and_rows(queries: int, most: int | None) -> None:
    seen = [n for n in range(11 - queries, 11) if n > 0]  # the last query sees all ten rows
    expected = sum(n if most is None else min(n, most) for n in seen)
    assert seen_pairs(10, queries, most) == expected


def test_refusals() -> None:
    pages, table = cache(1, 2, 16, 31, torch.bfloat16)
    q = torch.zeros(1, 1, 2, 31)
    options = {"latent": 16, "scale": 1.0}
    with pytest.raises(Refuse, match="odd"):
        lower(LATENT, [q.bfloat16(), pages, table, starts(0)], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="over"):
        lower(LATENT, [q, pages, table, starts(0)], options, isa=ISAS[0])
    k = torch.zeros(1, 2, 4, 8)
    with pytest.raises(Refuse, match="over"):
        lower(SPARSE, [k, k, k.half(), torch.zeros(1, 4, 1).int()], {"scale": 1.0}, isa=ISAS[0])
    with pytest.raises(Refuse, match="int32"):
        lower(SPARSE, [k, k, k, torch.zeros(1, 4, 1).long()], {"scale": 1.0}, isa=ISAS[0])
