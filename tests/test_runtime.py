"""The runtime on plans built by hand: kernels below, one shared library for all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from graphc.errors import (
    DamagedError,
    InputRejectedError,
    InternalError,
    PlanMismatchError,
    UsageError,
)
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    Buffer,
    Expression,
    Fallback,
    Kernel,
    Machine,
    Output,
    Plan,
    Program,
    State,
    Step,
    Symbol,
    Tensor,
)
from graphc.plan_io import WeightsWriter, read_plan, write_plan
from graphc.runtime.machine import architecture
from graphc.runtime.session import Session, load

ROOT = Path(__file__).resolve().parents[1]

KERNELS = r"""
#include <string.h>
#include "abi.h"
// y[i] = a * x[i]
GC_EXPORT void tk_scale(const gc_args* g, int64_t begin, int64_t end) {
  const float* x = (const float*)g->ptr[0]; float* y = (float*)g->ptr[1];
  for (int64_t i = begin; i < end; i++) y[i] = (float)g->imm[0] * x[i];
}
// z[i] = x[i] + y[i]
GC_EXPORT void tk_add(const gc_args* g, int64_t begin, int64_t end) {
  const float* x = (const float*)g->ptr[0]; const float* y = (const float*)g->ptr[1];
  float* z = (float*)g->ptr[2];
  for (int64_t i = begin; i < end; i++) z[i] = x[i] + y[i];
}
// y[r] = sum of row r of x [rows, n], through scratch; writes its thread's whole scratch
GC_EXPORT void tk_rowsum(const gc_args* g, int64_t begin, int64_t end) {
  const float* x = (const float*)g->ptr[0]; float* y = (float*)g->ptr[1];
  int64_t n = g->imm[0]; float* row = (float*)g->scratch;
  for (int64_t r = begin; r < end; r++) {
    memcpy(row, x + r * n, n * 4);
    float s = 0;
    for (int repeat = 0; repeat < 50; repeat++) { s = 0; for (int64_t i = 0; i < n; i++) s += row[i]; }
    y[r] = s;
  }
}
// bytes
GC_EXPORT void tk_copy(const gc_args* g, int64_t begin, int64_t end) {
  memcpy((char*)g->ptr[1] + begin, (const char*)g->ptr[0] + begin, end - begin);
}
// y[i] = x[i] (int64) * 10
GC_EXPORT void tk_tens(const gc_args* g, int64_t begin, int64_t end) {
  const int64_t* x = (const int64_t*)g->ptr[0]; int64_t* y = (int64_t*)g->ptr[1];
  for (int64_t i = begin; i < end; i++) y[i] = 10 * x[i];
}
// writes the immediates as int64
GC_EXPORT void tk_immediates(const gc_args* g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) ((int64_t*)g->ptr[0])[i] = g->imm[i];
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(KERNELS)
    target = folder / "kernels.so"
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Werror",
         "-ffp-contract=fast", f"-I{ROOT / 'graphc/kernels'}", str(folder / "kernels.cpp"),
         str(ROOT / "graphc/runtime/executor.cpp"), "-o", str(target), "-lpthread", "-ldl"],
        check=True,
    )  # fmt: skip
    return target


class Table:
    """Expressions of a program under construction."""

    def __init__(self) -> None:
        self.rows: list[Expression] = []

    def __call__(self, *code: int | str) -> int:
        if list(code) not in self.rows:
            self.rows.append(list(code))
        return self.rows.index(list(code))


def leaf(i: int) -> dict[str, int]:
    return {"leaf": i}


def tensor(e: Table, name: str, *dims: int | str, dtype: str = "float32") -> Tensor:
    """dims: integers or symbol codes such as "s0"."""
    return Tensor(name, dtype, [e(d) for d in dims], [str(d).replace("s0", "T") for d in dims])


def kernel(symbol: str, e: Table, pointers: list[int], n: int, *imm: int, grain: int = 1,
           scratch: int | None = None) -> Step:  # fmt: skip
    """n, imm and scratch are expression indices."""
    return Step(kernel=Kernel(symbol, [(b, e(0)) for b in pointers], list(imm), n, grain,
                              e(0) if scratch is None else scratch, pointers, pointers))  # fmt: skip


def make_plan(folder: Path, library: Path, **fields: Any) -> Path:
    """Writes a plan; `program` fields may come as keywords for a single program."""
    e: Table = fields.pop("e")
    weights = fields.pop("weight_data", [])
    inputs, outputs = fields["inputs"], fields["outputs"]
    program_fields = {
        "phase": "forward", "bucket": "all", "limits": {}, "expressions": e.rows,
        "input_shapes": [t.shape for t in inputs],
        "output_shapes": [o.tensor.shape if o.tensor else [] for o in outputs],
        "guards": [], "arena_bytes": 0, "lower_bound": 0, "naive_bytes": 0,
    }  # fmt: skip
    for key in ("buffers", "steps", "arena_bytes", "guards", "limits"):
        if key in fields:
            program_fields[key] = fields.pop(key)
    variants = fields.pop("variants", [{}])
    programs = [Program(**(program_fields | variant)) for variant in variants]
    folder.parent.mkdir(parents=True, exist_ok=True)
    binary = folder.parent / f"{folder.name}.weights"
    with WeightsWriter(binary) as writer:
        for array in weights:
            writer.add("w", str(array.dtype), array.shape, array.tobytes())
    plan = Plan(
        **{
            "format": FORMAT_VERSION, "abi": ABI_VERSION, "version": "0", "model": "hand.py:model",
            "machine": Machine(architecture(), [], "portable"), "symbols": [],
            "arguments": {"tuple": [leaf(i) for i in range(len(inputs))]},
            "keywords": {"dict": []},
            "results": {"tuple": [leaf(i) for i in range(len(outputs))]},
            "mutated_inputs": [], "states": [], "weights": writer.weights, "programs": programs,
            "files": {}, "uses_torch": False,
            "positional_names": [t.name for t in inputs],
        } | fields
    )  # fmt: skip
    write_plan(folder, plan, {"kernels.so": library, "weights.bin": binary, "report.json": "{}",
                              "sources/kernels.cpp": KERNELS})  # fmt: skip
    return folder


def out(e: Table, buffer: int, *dims: int | str, dtype: str = "float32") -> Output:
    return Output(tensor(e, "out", *dims, dtype=dtype), "buffer", buffer)


def make_scale(folder: Path, library: Path, **fields: Any) -> Path:
    """y = 3 x + w over [T, 4], T in 1..100, through one arena buffer; w is a weight [4], added
    row 0 only (so the size is plain)."""
    e = Table()
    inputs = [tensor(e, "x", "s0", 4)]
    outputs = [out(e, 1, "s0", 4)]
    n = e("s0", 4, "*")
    size = e("s0", 16, "*")
    defaults: dict[str, Any] = {
        "e": e, "inputs": inputs, "outputs": outputs,
        "symbols": [Symbol("T", 1, 100, 0, 0)],
        "buffers": [Buffer("input", 0, 0, size), Buffer("output", 0, 0, size),
                    Buffer("arena", -1, 64, size), Buffer("weight", 0, 0, e(16))],
        "arena_bytes": 64 + 1600, "limits": {"T": 100},
        "steps": [kernel("tk_scale", e, [0, 2], n, e(3)),
                  kernel("tk_copy", e, [2, 1], size),
                  kernel("tk_add", e, [2, 3, 1], e(4))],
        "weight_data": [np.array([1, 2, 3, 4], np.float32)],
    }  # fmt: skip
    return make_plan(folder, library, **(defaults | fields))


def scaled(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    y = 3 * x
    y[0] += np.array([1, 2, 3, 4], np.float32)
    return y


@pytest.fixture(scope="session")
def scale_plan(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return make_scale(tmp_path_factory.mktemp("scale") / "plan", library)


@pytest.fixture
def scale(scale_plan: Path) -> Session:
    return load(scale_plan, threads=1)


def example(rows: int) -> np.ndarray[Any, Any]:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)


# ------------------------------------------------------------------ results and boundary


def test_runs_at_several_lengths(scale: Session) -> None:
    for rows in (1, 7, 100, 7):
        (y,) = scale.run(example(rows))
        np.testing.assert_array_equal(y, scaled(example(rows)))
    assert scale.stats.choices == 3
