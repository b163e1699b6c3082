"""Rows written to pages and read from them, executed for real."""

from __future__ import annotations

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.context import Refuse
from graphc.lowering.templates import pages as rules  # noqa: F401
from tests.kernel_harness import available_isas, lower, run_rule

torch.set_num_threads(1)
ISAS = available_isas()
APPEND, READ = "graphc.append_pages.default", "graphc.read_pages.default"
append_pages, read_pages = torch.ops.graphc.append_pages, torch.ops.graphc.read_pages


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def tables(lengths: list[int], rows: int, spare: int = 2) -> tuple[torch.Tensor, int]:
    """Shuffled pages for sequences of these lengths, -1 behind them, and how many pages there are
    with some that nobody owns."""
    counts = [-(-length // rows) for length in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total).tolist()
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)])
    return table, total


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(-100, 100, shape).to(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_append(isa: str, dtype: torch.dtype) -> None:
    for rows, new, past in [(16, 1, [0, 5, 16]), (64, 7, [60, 128, 3]), (5, 200, [0])]:
        table, total = tables([p + new for p in past], rows)
        start = torch.tensor(past, dtype=torch.int32)
        pages = numbers(total, rows, 24 + 8 + 3, dtype=dtype)
        parts = [
            numbers(len(past), new, 24, dtype=dtype),
            numbers(len(past), new, 3, 8, dtype=dtype)[:, :, 1],  # rows further apart
            numbers(3, len(past), new, dtype=dtype).permute(1, 2, 0),
        ]
        (got,) = run_rule(APPEND, [pages, parts, table, start], isa=isa)
        assert torch.equal(got, append_pages(pages, parts, table, start))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_by_head(isa: str, dtype: torch.dtype) -> None:
    """Rows whose parts lie apart; those of an operand end within a part."""
    table, total = tables([40, 17], 16)
    start = torch.tensor([9, 15], dtype=torch.int32)
    pages = numbers(total, 6, 16, 8, dtype=dtype)
    parts = [numbers(2, 2, 20, dtype=dtype), numbers(2, 2, 28, dtype=torch.float32)]
    (got,) = run_rule(APPEND, [pages, parts, table, start], isa=isa)
    assert torch.equal(got, append_pages(pages, parts, table, start))
    for offset, width in [(0, 48), (5, 30), (8, 8)]:
        arguments = [pages, table, offset, width]
        (got,) = run_rule(READ, arguments, isa=isa)
        assert torch.equal(got, read_pages(*arguments))


@pytest.mark.parametrize("isa", ISAS)
def test_append_converts(isa: str) -> None:
    table, total = tables([33, 21], 16)
    start = torch.tensor([12, 0], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pages = numbers(total, 16, 40, dtype=dtype)
        parts = [
            numbers(2, 21, 17, dtype=torch.float32) * 100, numbers(2, 21, 16, dtype=torch.bfloat16),
            numbers(2, 21, 7, dtype=torch.float16),
        ]  # fmt: skip
        (got,) = run_rule(APPEND, [pages, parts, table, start], isa=isa)
        assert torch.equal(got, append_pages(pages, parts, table, start))


def test_append_in_place_writes_nothing_else() -> None:
    """In place the rows' Step is all there is: the content around them is the state's own."""
    table, total = tables([40, 17], 16)
    start = torch.tensor([9, 15], dtype=torch.int32)
    pages = numbers(total, 16, 24, dtype=torch.bfloat16)
    parts = [numbers(2, 2, 24, dtype=torch.bfloat16)]
    context = lower(APPEND, [pages, parts, table, start], isa=ISAS[0])
    context.steps = context.steps[-1:]
    assert context.steps[0].symbol == "gc_append_pages_b2"
    (state,) = context.results
    state.copy_(pages)
    context.execute(3)
    assert torch.equal(state, append_pages(pages, parts, table, start))
    changed = (state != pages).any(-1).nonzero().tolist()
    places = [(0, 9), (0, 10), (1, 15), (1, 16)]
    assert sorted(changed) == sorted([int(table[b, s // 16]), s % 16] for b, s in places)


def test_rows_without_a_page_are_dropped() -> None:
    pages = numbers(3, 4, 8, dtype=torch.float32)
    rows = [numbers(2, 3, 8, dtype=torch.float32)]
    table = torch.tensor([[1, -1, -1], [-1, 2, -1]], dtype=torch.int32)
    for start in (torch.tensor([2, 5], dtype=torch.int32), torch.tensor([3, 7], dtype=torch.int32)):
        (got,) = run_rule(APPEND, [pages, rows, table, start], isa=ISAS[0])
        assert torch.equal(got, append_pages(pages, rows, table, start))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_read(isa: str, dtype: torch.dtype) -> None:
    for rows, offset, width in [(16, 0, 40), (3, 8, 17), (64, 39, 1)]:
        table, total = tables([3 * rows, rows - 1, 1], rows)
        pages = numbers(total, rows, 40, dtype=dtype)
        arguments = [pages, table, offset, width]
        (got,) = run_rule(READ, arguments, isa=isa)
        assert torch.equal(got, read_pages(*arguments))


def test_symbolic_batch_and_length() -> None:
    table, total = tables([20, 30], 16)
    start = torch.tensor([15, 25], dtype=torch.int32)
    pages, rows = numbers(total, 16, 8, dtype=torch.float32), numbers(2, 5, 8, dtype=torch.float32)
    symbols = {(2, 0): "B", (3, 0): "B"}
    (got,) = run_rule(APPEND, [pages, [rows], table, start], isa=ISAS[0], symbols=symbols)
    assert torch.equal(got, append_pages(pages, [rows], table, start))


def test_refusals() -> None:
    table, start = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    pages, rows = torch.zeros(1, 4, 8), [torch.zeros(1, 2, 8)]
    with pytest.raises(Refuse, match="table of int64"):
        lower(APPEND, [pages, rows, table, start], isa=ISAS[0])
    with pytest.raises(Refuse, match="rows of float64"):
        lower(APPEND, [pages, [rows[0].double()], table.int(), start], isa=ISAS[0])
    with pytest.raises(Refuse, match="one piece"):
        lower(READ, [pages.transpose(1, 2), table.int(), 0, 4], isa=ISAS[0])
