"""Records in pages, written and read for real: bit for bit those of the reference."""

from __future__ import annotations

import pytest
import torch

import graphc.ops  # noqa: F401
from graphc.lowering.templates import records as rules  # noqa: F401
from graphc.ops.records import record_format
from tests.kernel_harness import available_isas, lower, run_rule
from tests.test_kernels_pages import tables

torch.set_num_threads(1)
ISAS = available_isas()
APPEND, READ = "graphc.append_records.default", "graphc.read_records.default"
append_records, read_records = torch.ops.graphc.append_records, torch.ops.graphc.read_records
FORMATS = (
    "mxfp8_floor:128", "mxfp8_ceil:72", "mxfp8_even:33", "fp8:512+bf16:64", "fp8_pow2:512+bf16:64",
    "fp8:576", "fp8_pow2:130+f32:3", "f16:5+mxfp8_floor:7+f32:2", "mxfp8_floor:128@16",
    "mxfp8_ceil:64@16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def wild(*shape: int) -> torch.Tensor:
    """Numbers over all of float32, some of them zeros, infinities and no numbers."""
    numbers = torch.randn(shape) * torch.exp2(torch.randint(-160, 128, shape).float())
    numbers = torch.where(torch.rand(shape) < 0.2, torch.randn(shape), numbers)
    numbers[torch.rand(shape) < 0.1] = 0.0
    numbers[torch.rand(shape) < 0.001] = torch.inf
    numbers[torch.rand(shape) < 0.001] = torch.nan
    return numbers


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMATS)
def test_append(isa: str, form: str) -> None:
    found = record_format(form)
    first = found.width - 3
    for rows, new, past in [(16, 1, [0, 5, 16]), (64, 7, [60, 128, 3])]:
        table, total = tables([p + new for p in past], rows)
        start = torch.tensor(past, dtype=torch.int32)
        pages = torch.randint(0, 256, (total, rows, found.bytes), dtype=torch.uint8)
        parts = [
            wild(len(past), new, first),
            torch.randn(3, len(past), new).bfloat16().permute(1, 2, 0),
        ]
        arguments = [pages, parts, table, start]
        (got,) = run_rule(APPEND, arguments, {"format": form}, isa=isa)
        assert torch.equal(got, append_records(*arguments, format=form))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read(isa: str, dtype: torch.dtype) -> None:
    for form in FORMATS:
        found = record_format(form)
        table, total = tables([40, 17], 16)
        rows = (torch.randn(total, 16, found.width) * 3).to(dtype)
        pages = found.spread(found.encode(rows))
        for offset, width in [(0, found.width), (2, found.width - 5), (found.width - 1, 1)]:
            arguments = [pages, table, offset, width]
            keywords = {"dtype": dtype, "format": form}
            (got,) = run_rule(READ, arguments, keywords, isa=isa)
            assert torch.equal(got, read_records(*arguments, **keywords)), (form, offset)


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_and_scale(isa: str) -> None:
    """All 256 codes at all 256 scales of MXFP8 read as the reference reads them."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 8, 32).expand(256, 8, 32)
    scales = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1).expand(256, 8, 1)
    pages = torch.cat([codes, scales], -1).contiguous()
    table = torch.arange(256, dtype=torch.int32).reshape(1, 256)
    keywords = {"dtype": torch.float32, "format": "mxfp8_floor:32"}
    (got,) = run_rule(READ, [pages, table, 0, 32], keywords, isa=isa)
    expected = read_records(pages, table, 0, 32, **keywords)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["mxfp8_floor:32", "fp8:128"])
def test_parts_apart(isa: str, form: str) -> None:
    """Heads whose records lie apart in a page."""
    found = record_format(form)
    table, total = tables([40, 17], 16)
    start = torch.tensor([9, 15], dtype=torch.int32)
    pages = found.encode(torch.randn(total, 4, 16, found.width))
    parts = [torch.randn(2, 2, 2 * found.width).bfloat16(), torch.randn(2, 2, 2 * found.width)]
    (got,) = run_rule(APPEND, [pages, parts, table, start], {"format": form}, isa=isa)
    assert torch.equal(got, append_records(pages, parts, table, start, format=form))
    for offset, width in [(0, 4 * found.width), (5, found.width), (found.width, found.width)]:
        keywords = {"dtype": torch.bfloat16, "format": form}
        (got,) = run_rule(READ, [pages, table, offset, width], keywords, isa=isa)
        assert torch.equal(got, read_records(pages, table, offset, width, **keywords))


def test_append_in_place_writes_nothing_else() -> None:
    form = "fp8_pow2:64+bf16:16"
    found = record_format(form)
    table, total = tables([40, 17], 16)
    start = torch.tensor([9, 15], dtype=torch.int32)
    pages = torch.randint(0, 256, (total, 16, found.bytes), dtype=torch.uint8)
    parts = [torch.randn(2, 2, 80)]
    context = lower(APPEND, [pages, parts, table, start], {"format": form}, isa=ISAS[0])
    context.steps = context.steps[-1:]
    assert context.steps[0].symbol == "gc_append_records"
    (state,) = context.results
    state.copy_(pages)
    context.execute(3)
    assert torch.equal(state, append_records(pages, parts, table, start, format=form))
    changed = (state != pages).any(-1).nonzero().tolist()
    places = [(0, 9), (0, 10), (1, 15), (1, 16)]
    assert sorted(changed) == sorted([int(table[b, s // 16]), s % 16] for b, s in places)


@pytest.mark.heavy
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_a_million_blocks(isa: str, rule: str) -> None:
    """Each of another size, bit for bit."""
    form, rows = record_format(f"mxfp8_{rule}:128"), 62_500
    table = torch.arange(-(-rows // 64), dtype=torch.int32).reshape(1, -1)
    pages = torch.zeros(table.shape[1], 64, form.bytes, dtype=torch.uint8)
    start = torch.zeros(1, dtype=torch.int32)
    for _ in range(4):
        sizes = torch.exp2(torch.randint(-120, 120, (1, rows, 4, 1)).float())
        numbers = (torch.randn(1, rows, 4, 32) * sizes).flatten(2)
        arguments = [pages, [numbers], table, start]
        (got,) = run_rule(APPEND, arguments, {"format": str(form)}, isa=isa)
        assert torch.equal(got.flatten(0, 1)[:rows], form.encode(numbers)[0])
