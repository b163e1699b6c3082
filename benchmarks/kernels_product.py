"""Matrix products: share of the machine's peak, of a pure read of the weights, cost of fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.kernels_common import DTYPES, Bench, geometric_mean, reader
from graphc.plan_io import WEIGHTS
from graphc.runtime.pool import MappedFile

Shape = tuple[int, int]
#: (K, N): projections of transformers of width 1024 and 4096
SHAPES: tuple[Shape, ...] = (
    (1024, 1024), (1024, 3072), (1024, 4096), (3072, 1024), (4096, 1024), (2048, 1024),
    (4096, 4096),
)  # fmt: skip
COLD_BYTES = 192 << 20  # weights far larger than any cache, as those of a model are


@dataclass(frozen=True)
class Row:
    """One measurement. `share` is a part of 1: of the peak or of a pure read; for fusion, the time
    of the fused product over that of the plain one. `rate`: GFLOP/s or GB/s."""

    what: str
    dtype: str
    rows: int
    k: int
    n: int
    rate: float
    share: float


class Linears(nn.Module):
    """`count` products [M, K] x [K, N] of separate inputs. One weight for all, or one each."""

    def __init__(self, k: int, n: int, count: int, *, shared: bool) -> None:
        super().__init__()
        self.count = count
        self.layers = nn.ModuleList(
            nn.Linear(k, n, bias=False) for _ in range(1 if shared else count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [self.layers[i % len(self.layers)](x[i]) for i in range(self.count)]
        return torch.stack([y[..., :1] for y in results])  # the results stay in the arena


def calls_in_a_run(m: int) -> int:
    return max(1, min(32, 1024 // m))


def gemm(
    bench: Bench, shapes: Sequence[Shape], rows: Sequence[int], dtypes: Sequence[str]
) -> list[Row]:
    """Weights at hand in the caches, as far as they fit: share of peak arithmetic."""
    table: list[Row] = []
    for dtype in dtypes:
        for m in rows:
            part: list[Row] = []
            for k, n in shapes:
                count = calls_in_a_run(m)
                x = torch.randn(count, m, k).to(DTYPES[dtype])
                session = bench.session(Linears(k, n, count, shared=True).to(x.dtype), (x,))
                seconds = bench.times({"": partial(session.run, x)})[""] / count
                rate = 2e-9 * m * n * k / seconds
                part.append(Row("gemm", dtype, m, k, n, rate, rate / bench.peak(dtype)))
            show(f"gemm {dtype} M={m}, % of peak", part)
            table += part
    return table


def gemv(
    bench: Bench, shapes: Sequence[Shape], rows: Sequence[int], dtypes: Sequence[str]
) -> list[Row]:
    """Weights in memory: GB/s against a pure read of the same mapped file, in turns, and GFLOP/s
    against the peak, which is nearer for the most rows. Weights that are stored in fewer bits count
    as what they stand for."""
    table: list[Row] = []
    read = reader(bench.folder)
    for dtype in dtypes:
        part: list[Row] = []
        for k, n in shapes:
            nbytes = k * n * DTYPES[dtype].itemsize
            count = max(1, COLD_BYTES // nbytes)
            inputs = {m: torch.randn(count, m, k).to(DTYPES[dtype]) for m in rows}
            session = bench.session(
                Linears(k, n, count, shared=False).to(DTYPES[dtype]),
                (torch.randn(count, 3, k).to(DTYPES[dtype]),),
                ({1: torch.export.Dim("M", min=1, max=max(max(rows), 4))},),
            )
            weights = MappedFile(Path(session.folder) / WEIGHTS)
            calls: dict[str, Callable[[], object]] = {
                str(m): partial(session.run, inputs[m]) for m in rows
            }
            calls["read"] = partial(read, weights.address, weights.nbytes)
            found = bench.times(calls)
            pure = weights.nbytes / found["read"]
            for m in rows:
                rate = count * nbytes / found[str(m)]
                part.append(Row("gemv", dtype, m, k, n, 1e-9 * rate, rate / pure))
                flops = 2e-9 * m * n * k * count / found[str(m)]
                part.append(Row("arithmetic", dtype, m, k, n, flops, flops / bench.peak(dtype)))
        for what, shown in (("gemv", "a read"), ("arithmetic", "peak")):
            for m in rows:
                chosen = [r for r in part if (r.what, r.rows) == (what, m)]
                if what == "gemv" or max(r.share for r in chosen) > 0.5:
                    show(f"gemv {dtype} M={m}, % of {shown}", chosen)
        table += part
    return table


class Fused(nn.Module):
    """`count` products with what models put around them. `form` is a key of FORMS."""

    def __init__(self, form: str, k: int, n: int, count: int) -> None:
        super().__init__()
        self.form = form
        self.count = count
        self.linear = nn.Linear(k, 2 * n if form == "twice" else n, bias=form in WITH_BIAS)
        self.up = nn.Linear(k, n, bias=False) if form == "gated" else None
        self.gain = nn.Parameter(torch.rand(k))
        self.shift = nn.Parameter(torch.rand(k))

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        results = [self.one(x[i], r[i]) for i in range(self.count)]
        return torch.stack([y[..., :1] for y in results])

    def one(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        width = (x.shape[-1],)
        if self.form == "rms norm before":
            x = F.rms_norm(x, width, self.gain, 1e-6)
        elif self.form == "layer norm before":
            x = F.layer_norm(x, width, self.gain, self.shift)
        elif self.form == "silu before":
            x = F.silu(x)
        elif self.form == "cast before":
            x = x.to(self.gain.dtype)
        y: torch.Tensor = self.linear(x)
        if self.form == "bias, gelu":
            y = F.gelu(y)
        elif self.form == "residual":
            y = y + r
        elif self.up is not None:
            y = F.silu(y) * self.up(x)
        return y


#: what is fused, and the product it is compared with
FORMS = {
    "bias": "plain", "bias, gelu": "plain", "residual": "plain", "gated": "twice",
    "rms norm before": "plain", "layer norm before": "plain", "silu before": "plain",
    "cast before": "plain",
}  # fmt: skip
WITH_BIAS = ("bias", "bias, gelu")


def fusion(
    bench: Bench, shapes: Sequence[Shape], rows: Sequence[int], dtypes: Sequence[str]
) -> list[Row]:
    """Time of products with their surroundings over that of the plain product, in turns."""
    table: list[Row] = []
    for dtype in dtypes:
        for m in rows:
            part: list[Row] = []
            for k, n in shapes:
                found = fused_times(bench, dtype, m, k, n)
                for form, base in FORMS.items():
                    if form in found:
                        rate = 2e-9 * m * n * k / found[form]
                        ratio = found[form] / found[base]
                        part.append(Row(form, dtype, m, k, n, rate, ratio))
            for form in FORMS:
                chosen = [r for r in part if r.what == form]
                if chosen:
                    show(f"{form} {dtype} M={m}, % of plain", chosen, worst=max)
            table += part
    return table


def fused_times(bench: Bench, dtype: str, m: int, k: int, n: int) -> dict[str, float]:
    """Seconds of one product in each form."""
    count = calls_in_a_run(m)
    calls: dict[str, Callable[[], object]] = {}
    for form in ("plain", "twice", *FORMS):
        if form == "cast before" and dtype == "fp32":
            continue
        kept = torch.float32 if form == "cast before" else DTYPES[dtype]
        x = torch.randn(count, m, k).to(kept)
        r = torch.randn(count, m, n).to(DTYPES[dtype])
        session = bench.session(Fused(form, k, n, count).to(DTYPES[dtype]), (x, r))
        calls[form] = partial(session.run, x, r)
    return {form: t / count for form, t in bench.times(calls).items()}


def show(title: str, rows: Sequence[Row], worst: Callable[[list[float]], float] = min) -> None:
    """One line: a percentage for each shape, their geometric mean and the worst."""
    shares = [100 * r.share for r in rows]
    cells = "".join(f"  {r.k}x{r.n} {s:5.1f}" for r, s in zip(rows, shares, strict=True))
    mean = geometric_mean(shares)
    print(f"{title:<38}{cells}   mean {mean:5.1f}  worst {worst(shares):5.1f}", flush=True)


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in table]
