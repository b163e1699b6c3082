"""Attention over latent rows in records, executed for real against float64 over what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.cpu import features
from graphc.lowering.context import Refuse
from graphc.lowering.templates import sparse_attention  # noqa: F401
from graphc.ops.records import record_format
from tests.kernel_harness import available_isas, lower, run_rule
from tests.test_kernels_sparse import BOUND, LATENT, choices, exact, starts

torch.set_num_threads(1)
ISAS = available_isas()
#: levels at which bf16 are multiplied as they are
PAIRS = ("avx512",) if "avx512_bf16" in (features() or ()) else ()
FORMATS = ("fp8_pow2:{0}+bf16:{1}", "fp8:{0}+bf16:{1}", "fp8_pow2:{2}", "mxfp8_floor:{0}+f16:{1}")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


def cache(batch: int, places: int, size: int, form: str) -> list[torch.Tensor]:
    """Shuffled pages of records, whose tiles have magnitudes of their own, and their table."""
    found = record_format(form)
    rows = torch.randn(batch * places + 3, size, found.width)
    rows *= torch.exp2(torch.randint(-2, 1, (*rows.shape[:2], 1)).float())
    table = torch.randperm(len(rows))[: batch * places].view(batch, places).int()
    return [found.encode(rows), table]


def check(isa: str, operands: list[Any], form: str, run: Any = None, **options: Any) -> Any:
    """Against attention in float64 over the numbers of the records."""
    dtype = operands[0].dtype
    options = {"scale": 0.1, **options}
    (got,) = run_rule(LATENT, operands, {**options, "format": form}, isa=isa, **(run or {}))
    rows = record_format(form).decode(operands[1], torch.float64)
    held = exact([operands[0], rows, *operands[2:]])
    reference = torch.ops.graphc.latent_attention(*held, **options)
    assert got.dtype == dtype and got.shape == reference.shape
    error = float((got.double() - reference).abs().max())
    assert error / max(1.0, float(reference.abs().max())) < BOUND[dtype]
    return got


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("form", FORMATS)
def test_widths_and_heads(isa: str, dtype: torch.dtype, form: str) -> None:
    for heads, latent, rope in [
        (16, 512, 64), (8, 512, 64), (1, 32, 16), (3, 256, 32), (9, 130, 64), (40, 36, 16),
        (6, 18, 2),
    ]:  # fmt: skip
        own = form.format(latent, rope, latent + rope)
        pages, table = cache(2, 20, 16, own)
        start = starts(311, 5)
        q = torch.randn(2, 3, heads, latent + rope).to(dtype)
        for indices in (None, choices(start, 3, 320, 150)):
            check(isa, [q, pages, table, start, indices], own, latent=latent)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [16, 64])
def test_pages_that_end_and_are_missing(isa: str, size: int) -> None:
    form = "fp8_pow2:32+bf16:16"
    for dtype in (torch.float32, torch.bfloat16):
        pages, table = cache(3, 5, size, form)
        table[2, 1:3] = -1
        start = starts(0, 2 * size - 1, 4 * size)
        for queries in (1, 10):
            q = torch.randn(3, queries, 4, 48).to(dtype)
            chosen = choices(start, queries, 5 * size, 21)
            operands = [q, pages, table, start]
            for indices in ([], [chosen]):
                (got,) = run_rule(
                    LATENT,
                    operands + indices,
                    {"latent": 32, "scale": 0.2, "format": form},
                    isa=isa,
                )
                rows = record_format(form).decode(pages, torch.float64)
                held = [q.double(), rows, table, start, *indices]
                expected = torch.ops.graphc.latent_attention(*held, latent=32, scale=0.2)
                torch.testing.assert_close(
                    got.double(), expected, atol=2 * BOUND[dtype], rtol=BOUND[dtype]
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("heads", [5, 16])
def test_chunks(isa: str, dtype: torch.dtype, heads: int) -> None:
    """Few queries share out long caches: the same bits however the range is cut."""
    form = "fp8:32+bf16:16"
    pages, table = cache(3, 64, 64, form)
    start = starts(4000, 3, 513)
    q = torch.randn(3, 2, heads, 48).to(dtype)
    for indices in (None, choices(start, 2, 4096, 2048)):
        operands = [q, pages, table, start, indices]
        results = [
            check(isa, operands, form, {"parts": parts}, latent=32, scale=0.3)
            for parts in (1, 2, 7)
        ]
        assert all(torch.equal(results[0], other) for other in results)
        options = {"latent": 32, "scale": 0.3, "format": form}
        assert len(lower(LATENT, operands, options, isa=isa).steps) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("form", ["fp8_pow2:160+bf16:32", "fp8:160+bf16:32"])
def test_a_tile_of_nan_reaches_those_that_read_it(isa: str, dtype: torch.dtype, form: str) -> None:
    found = record_format(form)
    rows = torch.randn(5, 64, found.width)
    rows[2, 7, 130] = torch.inf  # of the second tile, whose numbers are values and keys
    rows[4, 1, 3] = torch.nan
    pages, table = found.encode(rows), torch.arange(5, dtype=torch.int32)[None]
    start = starts(300)
    indices = choices(start, 9, 310, 40)
    for row in (2 * 64 + 7, 4 * 64 + 1):
        indices[indices == row] = -1
    indices[0, 3, 5], indices[0, 6, 2] = 2 * 64 + 7, 4 * 64 + 1
    q = torch.randn(1, 9, 4, found.width).to(dtype)
    options = {"latent": 160, "scale": 0.1, "format": form}
    (got,) = run_rule(LATENT, [q, pages, table, start, indices], options, isa=isa)
    reads = torch.tensor([t in (3, 6) for t in range(9)])
    assert got[0, reads].isnan().all() and not got[0, ~reads].isnan().any()
    (got,) = run_rule(LATENT, [q[:, :1], pages, table, starts(2 * 64 + 6)], options, isa=isa)
    assert not got.isnan().any()
    (got,) = run_rule(LATENT, [q[:, :1], pages, table, starts(2 * 64 + 7)], options, isa=isa)
    assert got.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [5, 16])
def test_results_are_those_of_rows_decoded_before(isa: str, heads: int) -> None:
    """Powers of two, others and every code: nothing is lost that rows of the dtype would keep.
    Queries are such that their products have exact sums, in whatever order."""
    for form in ("fp8_pow2:256+bf16:32", "fp8:256+bf16:32", "mxfp8_ceil:256+bf16:32"):
        found = record_format(form)
        pages, table = cache(1, 8, 64, form)
        if form.startswith("fp8_pow2"):
            codes = torch.arange(256, dtype=torch.uint8)
            pages[..., :256] = torch.where(codes & 0x7F == 0x7F, 0, codes)
        start = starts(500)
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.bfloat16 and form.startswith("fp8:") and isa not in PAIRS:
                continue  # numbers of any scale are multiplied as floats, not rounded
            q = torch.zeros(1, 12, 16, found.width)
            for one in q.view(-1, found.width):
                columns = 128 * torch.randint(2, ()) + torch.randperm(128)[:6]
                if torch.rand(()) < 0.2:
                    columns = torch.randint(256, 288, (1,))
                one[columns] = torch.randint(2, columns.shape) * 2.0 - 1
            q = q[:, :, :heads].to(dtype)
            indices = choices(start, 12, 512, 77)
            options = {"latent": 256, "scale": 0.05}
            operands = [q, pages, table, start, indices]
            (got,) = run_rule(LATENT, operands, {**options, "format": form}, isa=isa)
            operands[1] = found.decode(pages, dtype)
            (expected,) = run_rule(LATENT, operands, options, isa=isa)
            assert torch.equal(got, expected), (form, dtype)


def test_symbolic_lengths() -> None:
    form = "fp8:32+bf16:16"
    for batch, queries, places in [(1, 1, 3), (2, 9, 7), (3, 40, 20)]:
        pages, table = cache(batch, places, 16, form)
        start = torch.randint(0, 16 * places - queries + 1, (batch,)).int()
        q = torch.randn(batch, queries, 5, 48)
        symbols = {(0, 0): "B", (2, 0): "B", (3, 0): "B", (0, 1): "T", (1, 0): "N", (2, 1): "M"}
        check(ISAS[0], [q, pages, table, start], form, {"symbols": symbols}, latent=32)


def test_refusals() -> None:
    form = "fp8:32+bf16:16"
    pages, table = cache(1, 2, 16, form)
    options = {"latent": 16, "scale": 1.0, "format": form}
    q = torch.zeros(1, 1, 2, 48)
    with pytest.raises(Refuse, match="rows of 70 uint8"):
        wide = torch.nn.functional.pad(pages, (0, 2))
        lower(LATENT, [q, wide, table, starts(0)], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="rows of uint8"):
        plain = {**options, "format": ""}
        lower(LATENT, [torch.zeros(1, 1, 2, 68), pages, table, starts(0)], plain, isa=ISAS[0])
    with pytest.raises(Refuse, match="other pages"):
        behind = torch.zeros(5, 16, 4)
        query = torch.zeros(1, 1, 2, 52)
        lower(LATENT, [query, pages, table, starts(0), None, behind], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="odd"):
        own = {**options, "format": "fp8:31"}
        odd = record_format("fp8:31").encode(torch.zeros(5, 16, 31))
        lower(LATENT, [q[..., :31].bfloat16(), odd, table, starts(0)], own, isa=ISAS[0])


@pytest.mark.skipif(not PAIRS, reason="codes are multiplied between bf16 only")
@pytest.mark.parametrize("heads", [3, 12])
def test_codes_of_several_segments(heads: int) -> None:
    """Scales of either sign and none, tiles of zeros, and scales beyond those of bf16."""
    form = "fp8_pow2:192+fp8_pow2:64+bf16:32"
    pages, table = cache(2, 6, 16, form)
    start = starts(90, 33)
    q = torch.randn(2, 3, heads, 288).bfloat16()
    for latent, scale in [(192, 0.1), (128, -0.1), (64, 0.0)]:
        for indices in (None, choices(start, 3, 96, 37)):
            check("avx512", [q, pages, table, start, indices], form, latent=latent, scale=scale)
    rows = torch.zeros(len(pages), 16, 288)
    for size, tiles in [
        (0.0, slice(0, 192)),
        (2.0**122, slice(0, 64)),
        (2.0**122, slice(192, 256)),
    ]:
        rows[:, ::3, tiles] = size
        encoded = record_format(form).encode(rows)
        options = {"latent": 192, "scale": 0.1, "format": form}
        (got,) = run_rule(LATENT, [0 * q, encoded, table, start], options, isa="avx512")
        held = exact([0 * q, record_format(form).decode(encoded, torch.float64), table, start])
        expected = torch.ops.graphc.latent_attention(*held, latent=192, scale=0.1)
        torch.testing.assert_close(got.double(), expected, atol=0.0, rtol=BOUND[torch.bfloat16])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize("kinds", [3, 6], ids=["codes", "codes and scales"])
def test_rows_that_differ_from_their_neighbours(isa: str, heads: int, kinds: int) -> None:
    """Some with numbers too small to be normal, or none, some with scales that are no powers of
    two, tiny or zero, amid plain ones, over several blocks of rows."""
    form = "fp8_pow2:256+bf16:32"
    found = record_format(form)
    pages, table = cache(2, 12, 64, form)
    spoilt = torch.randint(kinds + 2, pages.shape[:2])
    spoilt[spoilt >= kinds] = 0
    shape = (*pages.shape[:2], 256)
    # next to these, the least of the normal ones, what is too small is not lost in the sums
    pages[..., :256] = torch.randint(8, 32, shape) + 128 * torch.randint(2, shape)
    small = torch.randint(0, 8, shape) + 128 * torch.randint(2, shape)
    few = torch.rand(shape) < 0.02
    few[..., 192:] = True
    spoils = (spoilt == 1)[..., None] & few
    pages[..., :256] = torch.where(spoils, small, pages[..., :256]).to(torch.uint8)
    pages[..., :256][spoilt == 2] = 0
    scales = torch.exp2(torch.randint(7, 9, (*pages.shape[:2], 2)))
    scales[..., 1][spoilt == 3] *= 0.7
    scales[spoilt == 4] = 2.0**-120
    scales[..., 0][spoilt == 5] = 0.0
    pages[..., 256:264] = scales.view(torch.uint8)
    assert found.decode(pages, torch.float64).isfinite().all()
    q = torch.randn(2, 3, heads, 288).bfloat16()
    start = starts(90, 700)
    for indices in (None, choices(start, 3, 768, 333)):
        check(isa, [q, pages, table, start, indices], form, latent=256, scale=0.01)
