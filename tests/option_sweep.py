"""Every option of `graphc build`, by what it decides, with values to try; and pairs of them.

A new option makes `tests/test_cache_keys.py` fail until it has its place here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

Row = dict[str, Any]

WIDTH = 256
FREE = (f"x=f32[2,T,{WIDTH}]",)
SHAPES = """version: 1
symbols:
  T: {min: 1, max: 40, default: 8}
buckets:
  short: {T: 24}
defaults:
  phase: prefill
  buckets: [short]
  max: 40
  default: 8
models:
  - match: "*"
    phases:
      prefill: {buckets: [short]}
      decode: {buckets: [short]}
"""


class Small(nn.Module):
    """Attention over normalised rows: few kernels, of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        return x + torch.softmax(q @ k.transpose(1, 2) / 16, -1) @ v


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model that is swept, and example inputs; the same weights at every call."""
    torch.manual_seed(0)
    return Small().eval(), (torch.randn(2, 16, WIDTH),)


def decoder() -> nn.Module:
    """The causal language model that is swept."""
    from tests.tiny_decoders import make

    model: nn.Module = make("llama")
    return model


@dataclass(frozen=True)
class Option:
    """An option by the name of its parameter.

    decides: "code": kernels differ for some value; "plan": what is planned, or may be, and no
    kernel; "work": how the build goes about it. values: the first is the default. flag: as it is
    given on the command line; `alone`: without a value.
    """

    flag: str
    decides: str
    values: tuple[Any, ...]
    alone: bool = False

    def words(self, value: Any) -> list[str]:
        """The option on the command line; nothing for the default."""
        if value == self.values[0]:
            return []
        if self.alone:
            return [self.flag]
        several = value if isinstance(value, tuple) else (value,)
        return [word for one in several for word in (self.flag, str(one))]


def model_options(folder: Path) -> dict[str, Option]:
    """The options of a build of any model. folder: holds what files they name."""
    shapes = folder / "shapes.yaml"
    shapes.write_text(SHAPES)
    dump = folder / "dump"
    return {
        "inputs": Option("--input", "code", ((), FREE, (f"x=f32[1,1,{WIDTH}]",))),
        "dynamic": Option("--dynamic", "plan", ((), ("T=1:48",))),
        "buckets": Option("--bucket", "plan", ((), ("T=32",))),
        "phase": Option("--phase", "plan", (None, "decode")),
        "dtype": Option("--dtype", "code", (None, "bfloat16")),
        "shapes": Option("--shapes", "plan", (None, shapes)),
        "disable_pass": Option("--disable-pass", "code", ((), ("attention",))),
        "pass_options": Option("--pass", "code", ((), ("merged_linear{enabled=no}",))),
        "quant": Option("--quant", "code", ((), ("weights=int8",), ("weights=int4_g32",))),
        "precision": Option("--precision", "plan", ("", "projections=int8+int4")),
        "target": Option("--target", "code", ("host", "x86-64-v3", "portable")),
        "tune": Option("--tune", "code", (False, True), alone=True),
        "generate": Option("--generate", "code", (False,), alone=True),
        "fresh": Option("--fresh", "work", (False, True), alone=True),
        "jobs": Option("--jobs", "work", (None, 1)),
        "require_cached": Option("--require-cached", "work", (False, True), alone=True),
        "verify": Option("--verify", "work", (False, True), alone=True),
        "dump_passes": Option("--dump-passes", "work", (None, dump)),
        "as_json": Option("--json", "work", (False, True), alone=True),
        "output": Option("--output", "work", (Path("plan"), folder / "plan")),
    }


def decoder_options(folder: Path) -> dict[str, Option]:
    """The same of a build with --generate."""
    none = {name: Option("", "none", (value,)) for name, value in
            {"inputs": (), "dynamic": (), "phase": None}.items()}  # fmt: skip
    return {
        **model_options(folder),
        **none,
        "generate": Option("--generate", "code", (True,), alone=True),
        "buckets": Option("--bucket", "plan", ((), ("128",), ("64", "256"))),
        "quant": Option("--quant", "code", ((), ("kv=fp8",))),
        "precision": Option("--precision", "plan", ("", "cache=fp8")),
        "disable_pass": Option("--disable-pass", "code", ((), ("rms_norm",))),
        "shapes": Option("--shapes", "plan", (None,)),
        "target": Option("--target", "code", ("host", "x86-64-v3")),
        "tune": Option("--tune", "code", (False,), alone=True),
        "chunk": Option("--chunk", "plan", (None, 48)),
        "batch": Option("--batch", "code", (None, 1)),
        "drafts": Option("--drafts", "code", (None, 4)),
    }


def allowed(row: Row) -> bool:
    """Whether the options go together; those of a decoder do."""
    if "inputs" not in row:
        return True
    free = row["inputs"] == FREE
    known = row["phase"] is None or row["shapes"] is not None  # only our file has a second phase
    return known and (free or not (row["dynamic"] or row["buckets"]))


def fitted(row: Row) -> Row:
    """The row with inputs of the type that weights have."""
    if not row["dtype"] or "inputs" not in row:
        return row
    return {**row, "inputs": tuple(text.replace("f32", "bf16") for text in row["inputs"])}


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows in which every two values of two options that go together do so; the first row has the
    first value of each. Always the same rows."""
    names = list(options)
    base = {name: options[name][0] for name in names}
    open_ = {
        frozenset({(a, i), (b, j)})
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    rows = [base]
    open_ -= _pairs(base, options)
    for pair in sorted(open_, key=lambda pair: sorted(pair)):
        if pair not in open_:
            continue
        row = _row(dict(pair), options, allowed, open_)
        if row is not None:
            rows.append(row)
            open_ -= _pairs(row, options)
    return rows


def _row(
    fixed: dict[str, int],
    options: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    open_: set[frozenset[tuple[str, int]]],
) -> Row | None:
    """The row with the values `fixed` that has the most open pairs, found one option at a time."""
    chosen = {name: fixed.get(name, 0) for name in options}

    def made() -> Row:
        return {name: options[name][index] for name, index in chosen.items()}

    others = [name for name in options if name not in fixed]
    for name in others:  # where the first values do not go together, one of them gives way
        if allowed(made()):
            break
        start = chosen[name]
        for index in range(len(options[name])):
            chosen[name] = index
            if allowed(made()):
                break
        else:
            chosen[name] = start
    if not allowed(made()):
        return None
    for name in others:
        gains: dict[int, int] = {}
        start = chosen[name]
        for index in range(len(options[name])):
            chosen[name] = index
            if allowed(made()):
                gains[index] = len(_pairs(made(), options) & open_)
        chosen[name] = max(gains, key=lambda index: (gains[index], index == start), default=start)
    return made()


def _pairs(row: Row, options: Mapping[str, Sequence[Any]]) -> set[frozenset[tuple[str, int]]]:
    places = [(name, list(options[name]).index(value)) for name, value in row.items()]
    return {frozenset(pair) for pair in itertools.combinations(places, 2)}
