"""Attention over pasts in records, executed for real against float64 over what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import cached_attention as rules  # noqa: F401
from graphc.ops.records import record_format
from tests.kernel_harness import available_isas, lower, run_rule
from tests.test_kernels_cached_attention import BOUND, PAGED, Case, by_head, compare, exact

torch.set_num_threads(1)
ISAS = available_isas()
KINDS = ("fp8_pow2", "fp8", "mxfp8_floor")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(14)


def forms(case: Case, kind: str) -> list[str]:
    """Whole rows as one record each and, where keys are as wide as values, a record a head."""
    whole = f"{kind}:{case.heads * (case.size + case.width)}"
    return [whole, f"{kind}:{case.size}"] if case.size == case.width else [whole]


def in_records(pages: torch.Tensor, case: Case, form: str) -> torch.Tensor:
    """The pages as records, by head if the format is that of a head."""
    found = record_format(form)
    return found.encode(pages if found.width == pages.shape[2] else by_head(pages, case))


def check(isa: str, case: Case, dtype: torch.dtype, kind: str, **options: Any) -> None:
    options = {"scale": case.size**-0.5, "heads": case.heads, "width": case.width, **options}
    wide = dict(zip(options, exact(options.values()), strict=True))
    query, pages, table, start = case.paged(dtype)
    for form in forms(case, kind):
        records = in_records(pages, case, form)
        (got,) = run_rule(
            PAGED, [query, records, table, start], {**options, "format": form}, isa=isa
        )
        held = [query.double(), records, table, start]
        compare(got, torch.ops.graphc.paged_attention(*held, **wide, format=form), dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_and_head_sizes(isa: str, dtype: torch.dtype, kind: str) -> None:
    for queries in (1, 7, 65):
        check(isa, Case([0, 16, 39], queries), dtype, kind)
        check(isa, Case([700], queries, rows=64, size=128, width=128), dtype, kind)
    check(isa, Case([5000, 1, 257], 1, rows=128), dtype, kind)  # several pieces, and one
    for size, width in [
        (64, 64),
        (96, 64),
        (130, 130),
        (17, 33),
        (192, 192),
        (64, 256),
        (448, 320),
    ]:
        for queries in (1, 2, 50):
            check(isa, Case([0, 300], queries, size=size, width=width), dtype, kind)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_heads_that_share_keys(isa: str, dtype: torch.dtype) -> None:
    for heads, group in [(5, 3), (2, 8), (1, 48)]:
        for queries in (1, 5, 33):
            check(isa, Case([290, 3], queries, heads, group, 64, 64), dtype, "fp8_pow2")
    check(isa, Case([500, 7], 2, 20, 2, 128, 128), dtype, "fp8_pow2")  # heads of several units


@pytest.mark.parametrize("isa", ISAS)
def test_windows_sinks_and_capped_scores(isa: str) -> None:
    for queries in (1, 70):
        case = Case([0, 400, 900], queries, 2, 3, 32, 32)
        for options in (
            {"back": 20}, {"back": 333, "sinks": torch.randn(6, 1, 1)}, {"soft_cap": 2.0},
            {"scale": -0.4},
        ):  # fmt: skip
            check(isa, case, torch.bfloat16, "fp8_pow2", **options)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_without_a_page_count_as_zeros(isa: str) -> None:
    for queries in (1, 40):
        case = Case([300, 100], queries, heads=3)
        for dtype in BOUND:
            query, pages, table, start = case.paged(dtype)
            table[0, 3] = table[0, 4] = table[1, 0] = -1
            for form in forms(case, "fp8"):
                operands = [query, in_records(pages, case, form), table, start]
                options = {"scale": 0.2, "heads": 3, "width": 32, "format": form}
                (got,) = run_rule(PAGED, operands, options, isa=isa)
                reference = torch.ops.graphc.paged_attention(
                    query.double(), *operands[1:], **options
                )
                compare(got, reference, dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_however_the_range_is_cut(isa: str) -> None:
    for queries in (1, 150):
        case = Case([3000, 100, 700], queries, 4, 2, 64, 64)
        query, pages, table, start = case.paged(torch.bfloat16)
        for form in forms(case, "fp8_pow2"):
            operands = [query, in_records(pages, case, form), table, start]
            options = {"scale": 0.1, "heads": 4, "width": 64, "format": form}
            first, *others = (
                run_rule(PAGED, operands, options, isa=isa, parts=n)[0] for n in (1, 2, 7)
            )
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_a_tile_of_nan_reaches_its_head_alone(isa: str, dtype: torch.dtype) -> None:
    case = Case([299, 150], 1, 2, 2, 128, 128, 64)
    query, pages, table, start = case.paged(dtype)
    pages[table[0, 2], 5, 130] = torch.inf  # the second head's key in row 133
    pages[table[1, 2], 40, 0] = torch.nan  # behind what the second sequence has: row 168
    for form in forms(case, "fp8_pow2"):
        operands = [query, in_records(pages, case, form), table, start]
        options = {"scale": 0.1, "heads": 2, "width": 128, "format": form}
        (got,) = run_rule(PAGED, operands, options, isa=isa)
        hurt = got.isnan().all(-1)[:, 0]
        assert hurt.tolist() == [[False, False, True, True], [False] * 4]
        assert int(got.isnan().sum()) == 2 * 128


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [64, 128])
def test_zeros_and_scales_far_from_one(isa: str, size: int) -> None:
    for group in (1, 2, 3, 4):
        case = Case([299, 7], 1, 2, group, size, size, 64)
        query, pages, table, start = case.paged(torch.bfloat16)
        pages[:, ::3] *= torch.rand(pages[:, ::3].shape) < 0.9
        pages[:, 1] = 0.0
        pages[:, 2] *= 2.0**-40
        pages[:, 4, 1::2] *= 2.0**-13  # codes that are subnormal, or zeros
        pages[:, 5] *= 16.0
        options = {"scale": size**-0.5, "heads": 2, "width": size}
        for form in forms(case, "fp8_pow2") + forms(case, "fp8"):
            operands = [query, in_records(pages, case, form), table, start]
            (got,) = run_rule(PAGED, operands, {**options, "format": form}, isa=isa)
            expected = torch.ops.graphc.paged_attention(
                query.double(), *operands[1:], **options, format=form
            )
            compare(got, expected, torch.bfloat16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("kind", ["fp8_pow2", "fp8"])
def test_every_code(isa: str, dtype: torch.dtype, kind: str) -> None:
    """The values of a sequence's only row are the result, bit by bit: each code's number times the
    scale, and no other column is hurt by a NaN."""
    for size in (64, 128, 256):
        form = record_format(f"{kind}:{size}")
        heads, tiles = 256 // size, (size + 127) // 128
        codes = torch.arange(256, dtype=torch.uint8).view(heads, size)
        scales = (2.0 ** torch.arange(-3, heads * tiles - 3)).view(torch.uint8)
        pages = form.encode(torch.zeros(1, 2 * heads, 16, size))
        pages[0, heads:, 0] = torch.cat([codes, scales.view(heads, 4 * tiles)], -1)
        numbers = form.decode(pages, torch.float64)[0, heads:, 0]
        assert int(numbers.isnan().sum()) == 2
        start, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        for group in (1, 2, 4, 7):
            query = torch.randn(1, heads * group, 1, size).to(dtype)
            options = {"scale": 0.1, "heads": heads, "width": size, "format": str(form)}
            (got,) = run_rule(PAGED, [query, pages, table, start], options, isa=isa)
            expected = numbers.repeat_interleave(group, 0).to(dtype)
            assert torch.equal(got[0, 0].nan_to_num(7.0), expected.nan_to_num(7.0))


def test_symbolic_batch_and_length() -> None:
    for queries in (1, 90):
        case = Case([3000, 100], queries)
        query, pages, table, start = case.paged(torch.float32)
        operands = [query, in_records(pages, case, "fp8:32"), table, start]
        options = {"scale": 0.1, "heads": 2, "width": 32, "format": "fp8:32"}
        symbols = {(i, 0): "B" for i in (0, 2, 3)} | {(0, 2): "T"}
        (got,) = run_rule(PAGED, operands, options, isa=ISAS[0], symbols=symbols)
        reference = torch.ops.graphc.paged_attention(query.double(), *operands[1:], **options)
        compare(got, reference, torch.float32)


def test_refusals() -> None:
    case = Case([5], 2)
    query, pages, table, start = case.paged(torch.float32)
    options = {"scale": 1.0, "heads": 2, "width": 32, "format": "fp8:128"}
    records = in_records(pages, case, "fp8:128")
    with pytest.raises(Refuse, match="in rows of 136 uint8"):
        wide = torch.nn.functional.pad(records, (0, 4))
        lower(PAGED, [query, wide, table, start], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="uint8"):
        plain = {**options, "width": 34, "format": ""}
        lower(PAGED, [query, records, table, start], plain, isa=ISAS[0])
