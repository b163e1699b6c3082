"""Attention over sequences with a past of their own, in pages and in one buffer per sequence,
executed for real against the operators in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import cached_attention as rules  # noqa: F401
from tests.kernel_harness import available_isas, lower, run_rule
from tests.test_kernels_pages import tables

torch.set_num_threads(1)
ISAS = available_isas()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
PAGED, CACHED = "graphc.paged_attention.default", "graphc.cached_attention.default"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(13)


@dataclass(frozen=True)
class Case:
    """`queries` new tokens of `heads` x `group` heads behind `past` rows of each sequence."""

    past: Sequence[int]
    queries: int
    heads: int = 2
    group: int = 1
    size: int = 32
    width: int = 32
    rows: int = 16

    def query(self, dtype: torch.dtype) -> torch.Tensor:
        """A transposed view, as projections give it."""
        shape = (len(self.past), self.queries, self.heads * self.group, self.size)
        return torch.randn(shape).to(dtype).transpose(1, 2)

    def start(self) -> torch.Tensor:
        return torch.tensor(self.past, dtype=torch.int32)

    def paged(self, dtype: torch.dtype) -> list[torch.Tensor]:
        table, total = tables([n + self.queries for n in self.past], self.rows)
        row = self.heads * (self.size + self.width)
        pages = torch.randn(total, self.rows, row).to(dtype)
        return [self.query(dtype), pages, table, self.start()]

    def cached(self, dtype: torch.dtype, turned: bool) -> list[torch.Tensor]:
        """Buffers longer than the longest sequence; turned: heads of a row are neighbours."""
        length = max(self.past) + self.queries + 5
        found = [self.query(dtype)]
        for width in (self.size, self.width):
            shape = (len(self.past), self.heads, length, width)
            if turned:
                shape = (len(self.past), length, self.heads, width)
            buffer = torch.randn(shape).to(dtype)
            found.append(buffer.transpose(1, 2) if turned else buffer)
        return [*found, self.start()]


def by_head(pages: torch.Tensor, case: Case) -> torch.Tensor:
    """The same pages with the rows of each head together."""
    parts = pages.view(*pages.shape[:2], 2 * case.heads, case.size)
    return parts.transpose(1, 2).contiguous()


def exact(values: Any) -> Any:
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    ]


def compare(got: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == reference.shape
    scale = max(1.0, float(reference.abs().max()))
    assert float((got.double() - reference).abs().max()) / scale < BOUND[dtype]


def check(isa: str, case: Case, dtype: torch.dtype, **options: Any) -> None:
    """All forms of the past."""
    options = {"scale": case.size**-0.5, **options}
    wide = dict(zip(options, exact(options.values()), strict=True))
    operands = case.paged(dtype)
    own = {"heads": case.heads, "width": case.width}
    reference = torch.ops.graphc.paged_attention(*exact(operands), **wide, **own)
    (got,) = run_rule(PAGED, operands, {**options, **own}, isa=isa)
    compare(got, reference, dtype)
    if case.size == case.width:
        operands[1] = by_head(operands[1], case)
        (got,) = run_rule(PAGED, operands, {**options, **own}, isa=isa)
        compare(got, reference, dtype)
    for turned in (False, True):
        operands = case.cached(dtype, turned)
        (got,) = run_rule(CACHED, operands, options, isa=isa)
        compare(got, torch.ops.graphc.cached_attention(*exact(operands), **wide), dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_starts_and_lengths(isa: str, dtype: torch.dtype) -> None:
    for queries in (1, 2, 7, 16, 65, 200):
        check(isa, Case([0, 16, 39], queries), dtype)
        check(isa, Case([700], queries, rows=64), dtype)
    check(isa, Case([5000, 1, 257], 1, rows=128), dtype)  # several pieces, and one
    check(isa, Case([4095, 64, 63], 3, rows=64), dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_head_sizes(isa: str, dtype: torch.dtype) -> None:
    for size, width in [(64, 64), (80, 80), (96, 64), (128, 128), (40, 72), (17, 33), (1, 1)]:
        for queries in (1, 4, 50):
            check(isa, Case([0, 300], queries, size=size, width=width), dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_heads_that_share_keys(isa: str, dtype: torch.dtype) -> None:
    for heads, group in [(1, 1), (5, 3), (2, 8), (1, 48)]:
        for queries in (1, 5, 33):
            check(isa, Case([290, 3], queries, heads, group, 64, 64), dtype)
    check(isa, Case([500, 7], 2, 20, 2, 128, 128), dtype)  # heads of several units


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(BOUND))
def test_windows_sinks_and_capped_scores(isa: str, dtype: torch.dtype) -> None:
    for queries in (1, 3, 70):
        case = Case([0, 400, 900], queries, 2, 3, 32, 32)
        sinks = torch.randn(6, 1, 1)
        for options in (
            {"back": 20}, {"back": 0}, {"back": 333, "sinks": sinks.to(dtype)},
            {"soft_cap": 2.0}, {"sinks": sinks}, {"sinks": sinks[:1], "soft_cap": 3.0, "back": 64},
        ):  # fmt: skip
            check(isa, case, dtype, **options)
        check(isa, case, dtype, scale=-0.4)
        check(isa, case, dtype, scale=0.0)


def test_rows_without_a_page_count_as_zeros() -> None:
    for queries in (1, 40):
        case = Case([300, 100], queries, heads=3)
        for dtype in BOUND:
            operands = case.paged(dtype)
            operands[2][0, 3] = operands[2][0, 4] = operands[2][1, 0] = -1
            options = {"scale": 0.2, "heads": 3, "width": 32}
            reference = torch.ops.graphc.paged_attention(*exact(operands), **options)
            for pages in (operands[1], by_head(operands[1], case)):
                operands[1] = pages
                (got,) = run_rule(PAGED, operands, options, isa=ISAS[0])
                compare(got, reference, dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_however_the_range_is_cut(isa: str) -> None:
    for queries in (1, 4, 150):
        case = Case([3000, 100, 700], queries, 4, 2, 64, 64)
        operands = case.paged(torch.bfloat16)
        operands[1] = by_head(operands[1], case)
        options = {"scale": 0.1, "heads": 4, "width": 64}
        first, *others = (
            run_rule(PAGED, operands, options, isa=isa, parts=n)[0] for n in (1, 2, 7)
        )
        assert all(torch.equal(first, other) for other in others)


def test_symbolic_batch_and_length() -> None:
    for queries in (1, 90):
        operands = Case([3000, 100], queries).paged(torch.float32)
        options = {"scale": 0.1, "heads": 2, "width": 32}
        symbols = {(i, 0): "B" for i in (0, 2, 3)} | {(0, 2): "T"}
        (got,) = run_rule(PAGED, operands, options, isa=ISAS[0], symbols=symbols)
        compare(got, torch.ops.graphc.paged_attention(*exact(operands), **options), torch.float32)


def test_nan_stays_in_its_row() -> None:
    for queries in (2, 40):
        operands = Case([200], queries).cached(torch.float32, False)
        operands[0][0, 1, 1, 0] = float("nan")
        (got,) = run_rule(CACHED, operands, {"scale": 0.1}, isa=ISAS[0])
        reference = torch.ops.graphc.cached_attention(*operands, scale=0.1)
        assert torch.equal(got.isnan(), reference.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_not_above_torch(dtype: torch.dtype) -> None:
    for queries in (1, 100):
        operands = Case([2000], queries, 4, 2, 64, 64).cached(dtype, False)
        reference = torch.ops.graphc.cached_attention(*exact(operands), scale=0.125)
        (got,) = run_rule(CACHED, operands, {"scale": 0.125}, isa=ISAS[0])
        mask = torch.arange(2000 + queries + 5) <= 2000 + torch.arange(queries)[:, None]
        torchs = torch.nn.functional.scaled_dot_product_attention(
            *operands[:3], attn_mask=mask, scale=0.125, enable_gqa=True
        ).transpose(1, 2)
        ours, theirs = ((x.double() - reference).square().mean().sqrt() for x in (got, torchs))
        assert ours <= 1.1 * theirs, f"{ours:.3e} against {theirs:.3e}"


def test_refusals() -> None:
    q, pages, table, start = Case([5], 2).paged(torch.float32)
    options = {"scale": 1.0, "heads": 2, "width": 32}
    with pytest.raises(Refuse, match="float64"):
        lower(PAGED, [q.double(), pages.double(), table, start], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="start of int64"):
        lower(PAGED, [q, pages, table, start.long()], options, isa=ISAS[0])
    with pytest.raises(Refuse, match="not keys and values"):
        lower(PAGED, [q, pages, table, start], options, isa=ISAS[0], symbols={(1, 2): "W"})
    with pytest.raises(Refuse, match="sinks other"):
        sinks = torch.zeros(1, 2, 2, 1)
        lower(PAGED, [q, pages, table, start], {**options, "sinks": sinks}, isa=ISAS[0])
