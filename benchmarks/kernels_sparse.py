"""The Lightning Indexer and attention over latent rows: arithmetic as a share of the core's peak
where it is what takes time, bytes as a share of a pure read in the same run where few queries meet
many rows.

Cases with records also run over the same rows in FP8, in turn with the others; the figure is how
many times as fast that is.

Rows lie in shuffled pages of 64. Cases of some queries stand for the mean position of a prefill of
twice that length: they are at `start`, over a cache of twice as many rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.kernels_common import DTYPES, Bench, chosen, reader
from graphc.ops.records import record_format

PAGE = 64
#: bytes of rows in a run of a cold case: several times a large last-level cache
TOTAL = 192 << 20


@dataclass(frozen=True)
class Case:
    """`queries` at position `start` of heads x width; `count` rows are chosen. latent: columns that
    are values; 0: an indexer. dense: attention over all rows. cold: over as many rows as exceed
    the processor's caches."""

    heads: int
    width: int
    start: int
    queries: int
    count: int = 2048
    latent: int = 0
    dense: bool = False
    cold: bool = False
    whole: bool = False  # a prefill from position 0
    records: str = ""  # kind of the latent part in records whose other part stays bf16

    @property
    def name(self) -> str:
        kind = f"latent {self.latent}+{self.width - self.latent}" if self.latent else "indexer"
        rows = "all" if self.dense else f"{self.count} of"
        heads = f"{self.heads}" if self.latent else f"{self.heads}x{self.width}"
        place = "prefill" if self.whole else "decode" if self.cold else f"T={self.queries} in"
        return f"{kind} {heads} heads, {rows} {self.start} rows, {place}"

    @property
    def rows(self) -> int:
        held = (
            self.start + self.queries if self.cold else self.start if self.whole else 2 * self.start
        )
        return -(-held // PAGE) * PAGE

    @property
    def first(self) -> int:
        return 0 if self.whole else self.start

    def operations(self) -> int:
        """Multiply-adds, twice."""
        seen = range(self.first + 1, self.first + self.queries + 1)
        if not self.latent:
            return 2 * self.heads * self.width * sum(n for n in seen if n > self.count)
        met = sum(n if self.dense else min(n, self.count) for n in seen)
        return 2 * self.heads * (self.width + self.latent) * met

    @property
    def chooses(self) -> bool:
        return bool(self.latent) and not self.dense

    def read(self) -> int:
        """Rows that are read."""
        return self.count if self.chooses else self.start + self.queries


CASES = (
    Case(8, 64, 8192, 8192, 512, whole=True),
    Case(16, 128, 8192, 8192, whole=True),
    Case(8, 64, 1024, 64, 512),
    Case(16, 128, 4096, 64),
    Case(32, 128, 4096, 64),
    Case(64, 128, 4096, 64),
    Case(16, 128, 16384, 64),
    *(Case(*size, length, 1, cold=True) for size in ((8, 64), (16, 128), (64, 128))
      for length in (8191, 32767, 131071)),
    *(Case(heads, width + 64, 4096, 64, latent=width, records=kind)
      for heads, width in ((16, 512), (8, 512), (16, 256)) for kind in ("fp8_pow2", "fp8")),
    Case(16, 576, 16384, 64, latent=512, records="fp8_pow2"),
    Case(8, 576, 16384, 64, latent=512, records="fp8_pow2"),
    Case(16, 192, 4096, 64, latent=128),
    Case(128, 576, 4096, 8, latent=512),
    Case(16, 576, 65536, 64, latent=512),
    Case(8, 576, 131071, 1, latent=512, cold=True, records="fp8_pow2"),
    *(Case(16, 576, 131071, 1, latent=512, cold=True, records=kind)
      for kind in ("fp8_pow2", "fp8")),
    *(Case(heads, 576, length, 1, latent=512, dense=True, cold=True, records="fp8_pow2")
      for heads in (8, 16) for length in (8191, 32767)),
    Case(16, 576, 8191, 4, latent=512, dense=True, cold=True),
)  # fmt: skip


class Calls(nn.Module):
    """One operator per cache, or per choice of rows of one cache."""

    def __init__(self, case: Case, form: str = "") -> None:
        super().__init__()
        self.case = case
        self.form = form

    def forward(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        query, weights, table, start, pages, *others = operands
        case, ops = self.case, torch.ops.graphc
        if not case.latent:
            return [
                ops.paged_lightning_indexer(query, weights, cache, table, start, count=case.count)
                for cache in (pages, *others)
            ]
        options = {"latent": case.latent, "scale": case.width**-0.5, "format": self.form}
        if case.dense:
            return [
                ops.latent_attention(query, cache, table, start, **options)
                for cache in (pages, *others)
            ]
        return [ops.latent_attention(query, pages, table, start, i, **options) for i in others]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers on huge pages, as the states of a session have them."""
    return on_huge_pages(torch.randn(shape).to(dtype))


def on_huge_pages(values: torch.Tensor) -> torch.Tensor:
    """A copy."""
    nbytes = values.numel() * values.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, (nbytes + (4 << 20)) & -(2 << 20), flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=values.dtype, count=values.numel())
    return tensor.view(values.shape).copy_(values)


def is_cache(case: Case, operand: torch.Tensor) -> bool:
    """Whether it is pages, not a query of as many positions as a page has rows."""
    return operand.dim() == 3 and operand.shape[1:] == (PAGE, case.width)


def in_records(
    bench: Bench, case: Case, inputs: Sequence[torch.Tensor]
) -> tuple[str, Callable[[], object]]:
    """What runs over the same rows in records, and its name."""
    form = record_format(f"{case.records}:{case.latent}+bf16:{case.width - case.latent}")
    narrow = tuple(on_huge_pages(form.encode(x)) if is_cache(case, x) else x for x in inputs)
    session = bench.session(Calls(case, str(form)), narrow)
    return case.records, partial(session.run, *narrow)


def choice(case: Case) -> torch.Tensor:
    """Random rows for every query."""
    indices = torch.full((1, case.queries, case.count), -1, dtype=torch.int32)
    for t in range(case.queries):
        rows = torch.randperm(case.first + t + 1)[: case.count].sort().values
        indices[0, t, : len(rows)] = rows
    return indices


def operands(case: Case, kind: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    """query, weights, table, start, then `count` caches, or one and `count` choices."""
    shape = (1, case.queries, case.heads, case.width)
    query, weights = torch.randn(shape).to(kind), torch.randn(shape[:3])
    table = torch.randperm(case.rows // PAGE).view(1, -1).int()
    start = torch.tensor([case.first], dtype=torch.int32)
    pages = (case.rows // PAGE, PAGE, case.width)
    caches = [filled(pages, kind) for _ in range(1 if case.chooses else count)]
    choices = [choice(case) for _ in range(count if case.chooses else 0)]
    return query, weights, table, start, *caches, *choices


def _read(read: Callable[[int, int], object], caches: Sequence[torch.Tensor], nbytes: int) -> None:
    for cache in caches:
        read(cache.data_ptr(), nbytes)


def measure(bench: Bench, cases: Sequence[Case], dtypes: Sequence[str]) -> None:
    """One line per dtype and case."""
    read = reader(bench.folder)
    for dtype in dtypes:
        kind = DTYPES[dtype]
        for case in cases:
            nbytes = case.read() * case.width * kind.itemsize
            count = max(1, TOTAL // nbytes) if case.cold else 1
            inputs = operands(case, kind, count)
            run = partial(bench.session(Calls(case), inputs).run, *inputs)
            caches = [x for x in inputs if is_cache(case, x)]
            size = case.rows * case.width * kind.itemsize if case.chooses else nbytes
            calls: dict[str, Callable[[], object]] = {
                "ours": run,
                "read": partial(_read, read, caches, size),
            }
            if case.records and dtype == "bf16":
                name, in_fp8 = in_records(bench, case, inputs)
                calls[name] = in_fp8
            times = bench.times(calls)
            rate = 1e-9 * count * case.operations() / times["ours"]
            text = f"{rate:6.1f} GFLOP/s {100 * rate / bench.peak(dtype):5.1f} % of the peak"
            if case.cold:
                rate = 1e-9 * count * nbytes / times["ours"]
                share = 100 * rate / (1e-9 * len(caches) * size / times["read"])
                text += f", {rate:5.1f} GB/s {share:5.1f} % of a read"
            if case.records in times:
                text += f", {times['ours'] / times[case.records]:.2f} x in {case.records}"
            each = 1e6 * times["ours"] / count / case.queries
            print(f"{dtype}  {case.name:58s} {each:9.1f} us a query {text}", flush=True)


if __name__ == "__main__":
    with chosen(__doc__, CASES) as asked:
        measure(*asked)
