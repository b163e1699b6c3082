"""Attention over paged pasts, and rows written to pages.

    python -m benchmarks.kernels_paged [--dtypes fp32,bf16] [--only decode] [--threads 1]

Decoding: bytes of keys and values per second, as a share of a pure read of the same pages in the
same run. Prefill: arithmetic of the visible half, as a share of the machine's peak. Beside bf16, in
turn with it, how many times as fast FP8 records of the same rows are. Rows: bytes written to pages,
as a share of a plain copy of as many. Times as in benchmarks/kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.kernels_attention_decode import filled
from benchmarks.kernels_common import DTYPES, Bench, chosen, reader
from benchmarks.kernels_sparse import on_huge_pages
from graphc.ops.records import record_format

#: bytes of pages in a run of decoding: twice a large last-level cache
TOTAL = 192 << 20


@dataclass(frozen=True)
class Case:
    """`queries` new tokens of each sequence behind its `past`; rows of `shared` heads of keys and
    values in pages of `rows`, each head's together or (`whole`) whole rows."""

    kind: str
    heads: int
    shared: int
    width: int
    past: tuple[int, ...]
    queries: int = 1
    rows: int = 64
    whole: bool = False

    @property
    def name(self) -> str:
        past = f"{self.past[0]} x {len(self.past)}" if len(self.past) > 1 else str(self.past[0])
        shape = f"{self.heads}/{self.shared}x{self.width}"
        form = " whole rows" if self.whole else ""
        return f"{self.kind} {shape} S={past} T={self.queries} P={self.rows}{form}"

    def row(self) -> int:
        return 2 * self.shared * self.width

    def pages(self, count: int) -> tuple[int, ...]:
        if self.whole:
            return count, self.rows, self.row()
        return count, 2 * self.shared, self.rows, self.width

    def tables(self, layers: int) -> tuple[list[torch.Tensor], int]:
        """Shuffled tables for all layers' sequences, and how many pages each layer has."""
        counts = [-(-(n + self.queries) // self.rows) for n in self.past]
        found = []
        for _ in range(layers):
            order = torch.randperm(sum(counts)).tolist()
            table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
            for b, count in enumerate(counts):
                table[b, :count] = torch.tensor([order.pop() for _ in range(count)])
            found.append(table)
        return found, sum(counts)

    def flops(self) -> int:
        seen = sum(self.queries * n + self.queries * (self.queries + 1) // 2 for n in self.past)
        return 4 * self.heads * self.width * seen


CASES = (
    *(Case("decode", 16, 8, 128, (length,)) for length in (512, 2048, 8192, 32768)),
    Case("decode", 16, 8, 128, (8192,), rows=16),
    Case("decode", 16, 8, 128, (8192,), whole=True),
    Case("decode", 16, 8, 128, (8192, 100, 3000, 500)),
    Case("decode", 32, 8, 128, (8192,)),
    Case("decode", 32, 32, 64, (2048,)),
    Case("decode", 8, 1, 256, (8192,)),
    *(Case("decode", 16, 8, 128, (8192,), queries) for queries in (2, 4, 8)),
    Case("prefill", 16, 8, 128, (0,), 512),
    Case("prefill", 16, 8, 128, (0,), 2048),
    Case("prefill", 32, 8, 128, (0,), 2048),
    Case("prefill", 16, 8, 128, (14336,), 2048),
    Case("prefill", 16, 8, 128, (16000,), 128),
    Case("prefill", 8, 1, 128, (8192,), 512),
    Case("append", 16, 8, 128, (1000,), 2048),
    Case("append", 16, 8, 128, (1000, 20, 3000, 500), 1),
)


class Layers(nn.Module):
    """One attention per set of pages, the result of one being the queries of the next."""

    def __init__(self, case: Case, form: str = "") -> None:
        super().__init__()
        self.case = case
        self.form = form

    def forward(self, q: torch.Tensor, start: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
        case = self.case
        for held, table in zip(pages[::2], pages[1::2], strict=True):
            q = torch.ops.graphc.paged_attention(
                q, held, table, start, heads=case.shared, width=case.width,
                scale=case.width**-0.5, format=self.form,
            ).transpose(1, 2)  # fmt: skip
        return q[..., :1]  # the results stay in the arena


class Append(nn.Module):
    """Keys and values of new tokens put behind their sequences, in place."""

    def forward(
        self, key: torch.Tensor, value: torch.Tensor, start: torch.Tensor, pages: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        pages.copy_(torch.ops.graphc.append_pages(pages, [key, value], table, start))
        return start + 1


def attention(bench: Bench, case: Case, dtype: str) -> dict[str, Any]:
    kind = DTYPES[dtype]
    decode = case.kind == "decode"
    size = sum(case.past) * case.row() * kind.itemsize
    count = max(1, TOTAL // size) if decode else 1
    tables, total = case.tables(count)
    held = [filled(case.pages(total), kind, True) for _ in range(count)]
    q = torch.randn(len(case.past), case.queries, case.heads, case.width).to(kind).transpose(1, 2)
    start = torch.tensor(case.past, dtype=torch.int32)
    operands = [x for pair in zip(held, tables, strict=True) for x in pair]
    session = bench.session(Layers(case), (q, start, *operands))
    calls: dict[str, Callable[[], object]] = {"ours": partial(session.run, q, start, *operands)}
    if decode:
        read = reader(bench.folder)
        calls["read"] = lambda: [read(x.data_ptr(), x.numel() * x.element_size()) for x in held]
    if dtype == "bf16":
        form = record_format(f"fp8_pow2:{held[0].shape[-1]}")
        narrow = [on_huge_pages(form.encode(x)) for x in held]
        operands = [x for pair in zip(narrow, tables, strict=True) for x in pair]
        session = bench.session(Layers(case, str(form)), (q, start, *operands))
        calls["records"] = partial(session.run, q, start, *operands)
    times = bench.times(calls)
    seconds = times["ours"] / count
    row: dict[str, Any] = {"dtype": dtype, "case": case.name, "ms": 1e3 * seconds}
    if decode:
        row["share"] = times["read"] / times["ours"]
        row["text"] = f"{size / seconds / 1e9:6.1f} GB/s {100 * row['share']:5.1f} % of a read"
    else:
        rate = case.flops() / seconds / 1e9
        row["share"] = rate / bench.peak(dtype)
        row["text"] = f"{rate:6.1f} GFLOP/s {100 * row['share']:5.1f} % of the peak"
    if "records" in times:
        row["records"] = times["ours"] / times["records"]
        row["text"] += f", {row['records']:.2f} x in fp8_pow2"
    return row


def append(bench: Bench, case: Case, dtype: str) -> dict[str, Any]:
    kind = DTYPES[dtype]
    (table,), total = case.tables(1)
    pages = filled(case.pages(total), kind, True)
    shape = (len(case.past), case.queries, case.row() // 2)
    key, value = (torch.randn(shape).to(kind) for _ in range(2))
    start = torch.tensor(case.past, dtype=torch.int32)
    session = bench.session(Append(), (key, value, start, pages, table))
    to = torch.empty_like(key), torch.empty_like(key)
    times = bench.times(
        {
            "ours": partial(session.run, key, value, start, pages, table),
            "copy": lambda: (to[0].copy_(key), to[1].copy_(value)),
        }
    )
    share = times["copy"] / times["ours"]
    text = f"{100 * share:5.1f} % of a copy's rate"
    return {
        "dtype": dtype,
        "case": case.name,
        "ms": 1e3 * times["ours"],
        "share": share,
        "text": text,
    }


def paged(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Time and share of what is possible per case and dtype."""
    table = []
    for dtype in dtypes:
        for case in cases:
            row = (append if case.kind == "append" else attention)(bench, case, dtype)
            table.append(row)
            print(f"{dtype}  {case.name:40s} {row['ms']:9.3f} ms {row['text']}", flush=True)
    return table


def main() -> None:
    with chosen(__doc__, CASES) as (bench, cases, dtypes):
        paged(bench, cases, dtypes)


if __name__ == "__main__":
    main()
