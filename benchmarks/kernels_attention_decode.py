"""Attention of few queries against a cache of keys and values: bytes of the cache per second, as a
share of a pure read of the same memory in the same run.

Each case runs over as many caches as exceed the processor's, on small pages (what an ordinary
allocation gets) and on huge ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.kernels_common import DTYPES, Bench, chosen, geometric_mean, reader

#: bytes of caches in a run: twice a large last-level cache
TOTAL = 192 << 20


@dataclass(frozen=True)
class Case:
    """`queries` tokens of `heads` heads over a cache of `length` slots in `shared` heads; split:
    the newest slot lies apart, as a functional cache has it."""

    heads: int
    shared: int
    width: int
    length: int
    queries: int = 1
    split: bool = False

    @property
    def name(self) -> str:
        form = " in parts" if self.split else ""
        return f"{self.heads}/{self.shared}x{self.width} S={self.length} T={self.queries}{form}"

    def elements(self) -> int:
        return self.shared * self.length * self.width


CASES = (
    *(Case(16, 8, 128, length) for length in (128, 512, 2048, 8192)),
    Case(16, 8, 128, 2048, split=True),
    Case(32, 8, 128, 8192),
    Case(32, 32, 64, 2048),
    Case(8, 1, 256, 8192),
    Case(8, 4, 256, 8192),
    *(Case(16, 8, 128, 8192, queries) for queries in (2, 4, 8)),
)


class Layers(nn.Module):
    """One attention per cache."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, q: torch.Tensor, new: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        for k, v in zip(caches[::2], caches[1::2], strict=True):
            if self.case.split:
                k, v = torch.cat((k[:, :, 1:], new), 2), torch.cat((v[:, :, 1:], new), 2)
            q = nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=self.case.heads > self.case.shared
            )
        return q


def filled(shape: tuple[int, ...], dtype: torch.dtype, huge: bool) -> torch.Tensor:
    """Random numbers on pages of one kind."""
    values = torch.randn(shape).to(dtype)
    nbytes = values.numel() * values.element_size()
    size = (nbytes + (4 << 20)) & -(2 << 20)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # else not huge
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype, count=values.numel()).view(shape)
    return tensor.copy_(values)


def _read(read: Callable[[int, int], object], caches: list[torch.Tensor], nbytes: int) -> None:
    for cache in caches:
        read(cache.data_ptr(), nbytes)


def decode(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Rate and share of a pure read per case, dtype and kind of pages."""
    read = reader(bench.folder)
    table: list[dict[str, Any]] = []
    for dtype in dtypes:
        kind = DTYPES[dtype]
        for case in cases:
            size = case.elements() * kind.itemsize
            count = max(1, TOTAL // (2 * size))
            q = torch.randn(1, case.heads, case.queries, case.width).to(kind)
            new = torch.randn(1, case.shared, 1, case.width).to(kind)
            shape = (1, case.shared, case.length, case.width)
            session = None
            for huge in (False, True):
                caches = [filled(shape, kind, huge) for _ in range(2 * count)]
                if session is None:
                    session = bench.session(Layers(case), (q, new, *caches))
                run = partial(session.run, q, new, *caches)
                times = bench.times({"ours": run, "read": partial(_read, read, caches, size)})
                rate = 2e-9 * count * size / times["ours"]
                share = times["read"] / times["ours"]
                pages = "huge" if huge else "4K"
                table.append(
                    {"dtype": dtype, "case": case.name, "pages": pages, "gbs": rate, "share": share}
                )
                print(
                    f"{dtype}  {case.name:34s} {pages:4s} {1e3 * times['ours'] / count:8.3f} ms"
                    f" {rate:6.1f} GB/s {100 * share:5.1f} % of a read",
                    flush=True,
                )
    return table


def main() -> None:
    with chosen(__doc__, CASES) as (bench, cases, dtypes):
        rows = decode(bench, cases, dtypes)
    for pages in ("4K", "huge"):
        shares = [row["share"] for row in rows if row["pages"] == pages]
        print(f"{pages}: {100 * geometric_mean(shares):.1f} % of a read")


if __name__ == "__main__":
    main()
