"""The runtime on plans built by hand: kernels below, one shared library for all tests."""

from __future__ import annotations

import hashlib
import operator
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
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
from graphc.plan_io import digest, file_digest, read_plan
from graphc.plan_writer import WeightsWriter, write_plan
from graphc.runtime.machine import architecture
from graphc.runtime.session import Session, load
from tests.allocations import run_counted

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
    for (int repeat = 0; repeat < 50; repeat++) {
      s = 0;
      for (int64_t i = 0; i < n; i++) s += row[i];
    }
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
    return Step(kernel=Kernel(symbol, [(b, e(0)) for b in pointers], list(imm), n,
                              grain, e(0) if scratch is None else scratch, pointers,
                              pointers))  # fmt: skip


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
    writer = WeightsWriter()
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
    write_plan(folder, plan, {"kernels.so": library, "weights.bin": writer.write,
                              "report.json": "{}", "sources/kernels.cpp": KERNELS})  # fmt: skip
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


def test_strided_input_is_copied_once_and_right(scale: Session) -> None:
    wide = np.arange(80, dtype=np.float32).reshape(10, 8)
    (y,) = scale.run(wide[::2, ::2])
    np.testing.assert_array_equal(y, scaled(np.ascontiguousarray(wide[::2, ::2])))
    assert scale.stats.copied_inputs == 1
    unaligned = np.zeros(1 + 16 * 4, np.uint8)[1:].view(np.float32).reshape(4, 4)
    scale.run(unaligned)
    assert scale.stats.copied_inputs == 2


def test_outputs_belong_to_the_caller(scale: Session) -> None:
    results = [scale.run(np.full((64, 4), k, np.float32))[0] for k in range(5)]
    for k, y in enumerate(results):
        np.testing.assert_array_equal(y, scaled(np.full((64, 4), k, np.float32)))
        assert y.flags.writeable
        assert y.ctypes.data % 64 == 0  # a large output
    results[0][:] = 7
    np.testing.assert_array_equal(results[1], scaled(np.ones((64, 4), np.float32)))


def test_torch_and_numpy_callers(scale: Session) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    (y,) = scale.run(x)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), scaled(x.numpy()))
    (y,) = scale.run(x.t().contiguous().t())
    np.testing.assert_array_equal(y.numpy(), scaled(x.numpy()))
    (y,) = scale.run(torch.nn.Parameter(x), as_torch=False)
    assert isinstance(y, np.ndarray)
    (y,) = scale.run(x.numpy(), as_torch=True)
    assert isinstance(y, torch.Tensor)
    with pytest.raises(InputRejectedError, match="float64"):
        scale.run(x.double())
    with pytest.raises(InputRejectedError, match="meta"):
        scale.run(x.to("meta"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((3, 4)), r"expected float32\[T, 4\], found float64"),
        (np.zeros((3, 4), ">f4"), "foreign byte order"),
        (np.zeros(4, np.float32), "rank 1"),
        (np.zeros((3, 5), np.float32), r"expected shape \[T, 4\] with T = 3, found \[3, 5\]"),
        (np.zeros((0, 4), np.float32), "T from 1 to 100, found 0"),
        ([[1.0, 2.0, 3.0, 4.0]], "found list"),
        (np.ma.masked_array(np.zeros((3, 4), np.float32)), "masked"),
    ],
)
def test_rejected_inputs(scale: Session, value: Any, text: str) -> None:
    with pytest.raises(InputRejectedError, match=text) as error:
        scale.run(value)
    assert "'x'" in str(error.value)
    assert scale.stats.runs == 0


def test_length_above_the_largest_bucket(scale: Session) -> None:
    with pytest.raises(InputRejectedError) as error:
        scale.run(example(101))
    assert "T = 101" in str(error.value)
    assert "all (T <= 100)" in str(error.value)
    assert "graphc build hand.py:model --bucket T=101" in str(error.value)


def test_arguments_by_position_and_by_name(scale: Session) -> None:
    np.testing.assert_array_equal(scale.run(x=example(2))[0], scaled(example(2)))
    for args, kwargs, text in [
        ((), {}, "'x' is missing"),
        ((example(2),), {"x": example(2)}, "given twice"),
        ((example(2), 1), {}, "at most 1"),
        ((example(2),), {"y": 1}, "no argument 'y'"),
    ]:
        with pytest.raises(InputRejectedError, match=text):
            scale.run(*args, **kwargs)


def make_nested(folder: Path, library: Path) -> Path:
    """(a, {"p": b, "q": [c, 2.5]}, *, flag=True, mode=None) -> {"sum": [a + b], "c": (c, 2.5)}"""
    e = Table()
    inputs = [tensor(e, name, 3) for name in ("a", "b", "c")]
    return make_plan(
        folder, library, e=e, inputs=inputs,
        outputs=[out(e, 3, 3), Output(None, "input", 2), Output(None, "constant", value=2.5)],
        buffers=[Buffer("input", i, 0, e(12)) for i in range(3)] + [Buffer("output", 0, 0, e(12))],
        steps=[kernel("tk_add", e, [0, 1, 3], e(3))],
        arguments={"tuple": [
            leaf(0), {"dict": [["p", leaf(1)], ["q", {"list": [leaf(2), {"const": 2.5}]}]]}]},
        keywords={"dict": [["flag", {"const": True}], ["mode", None]]},
        results={"dict": [["sum", {"list": [leaf(0)]}], ["c", {"tuple": [leaf(1), leaf(2)]}]]},
        positional_names=["a", "tree", "flag"],
    )  # fmt: skip


def test_nested_containers_scalars_and_none(tmp_path: Path, library: Path) -> None:
    session = load(make_nested(tmp_path / "plan", library), threads=1)
    a, b, c = (np.full(3, k, np.float32) for k in (1, 2, 3))
    tree = {"q": [c, 2.5], "p": b}
    for result in (
        session.run(a, tree, flag=True, mode=None),
        session.run(a, tree),
        session.run(a, tree, True),
        session.run(tree=tree, a=a),
    ):
        assert list(result) == ["sum", "c"]
        assert isinstance(result["sum"], list)
        assert isinstance(result["c"], tuple)
        np.testing.assert_array_equal(result["sum"][0], [3, 3, 3])
        assert result["c"][0] is c
        assert result["c"][1] == 2.5
    for args, kwargs, text in [
        ((a, {"q": [c, 2.0], "p": b}), {}, r"expected 2.5, found 2.0\n  at: tree\['q'\]\[1\]"),
        ((a, tree), {"flag": 1}, "expected True, found 1"),
        ((a, tree), {"flag": False}, "expected True, found False"),
        ((a, tree), {"mode": "x"}, "expected None, found 'x'"),
        ((a, {"p": b}), {}, "expected the keys"),
        ((a, {"p": b, "q": [c]}), {}, "expected a list of 2"),
        ((a, [b, c]), {}, "expected a dict"),
        ((a, tree, True, None), {}, "at most 3 positional"),
    ]:
        with pytest.raises(InputRejectedError, match=text):
            session.run(*args, **kwargs)


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
     "complex128", "bfloat16"],
)  # fmt: skip
def test_every_dtype_passes_through(tmp_path: Path, library: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    e = Table()
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    size = e(6 * element.itemsize)
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", 2, 3, dtype=dtype)],
        outputs=[out(e, 1, 2, 3, dtype=dtype)],
        buffers=[Buffer("input", 0, 0, size), Buffer("output", 0, 0, size)],
        steps=[kernel("tk_copy", e, [0, 1], size)],
    )  # fmt: skip
    session = load(plan, threads=1)
    x = (np.arange(6) % 2 if dtype == "bool" else np.arange(6)).astype(element).reshape(2, 3)
    (y,) = session.run(x)
    assert y.dtype == element
    np.testing.assert_array_equal(y, x)
    t = torch.from_numpy(x.astype(np.float32)).bfloat16() if dtype == "bfloat16" else (
        torch.from_numpy(x))  # fmt: skip
    (y,) = session.run(t)
    assert y.dtype == t.dtype
    assert torch.equal(y, t)
    if dtype.startswith("complex"):
        (y,) = session.run((t * 1j).conj())
        assert torch.equal(y, (t * 1j).conj().resolve_conj())


def test_zero_size_and_zero_rank(tmp_path: Path, library: Path) -> None:
    torch = pytest.importorskip("torch")
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", "s0"), tensor(e, "k")],
        outputs=[out(e, 2, "s0"), out(e, 3)], symbols=[Symbol("T", 0, 8, 0, 0)],
        buffers=[Buffer("input", 0, 0, e("s0", 4, "*")), Buffer("input", 1, 0, e(4)),
                 Buffer("output", 0, 0, e("s0", 4, "*")), Buffer("output", 1, 0, e(4))],
        steps=[kernel("tk_scale", e, [0, 2], e("s0"), e(2)),
               kernel("tk_scale", e, [1, 3], e(1), e(5))],
    )  # fmt: skip
    session = load(plan, threads=2)
    for k in (np.array(2, np.float32), np.float32(2)):
        y, z = session.run(np.empty(0, np.float32), k)
        assert y.shape == (0,)
        assert z.shape == ()
        assert z == 10
    y, z = session.run(torch.empty(0), torch.tensor(2.0))
    assert y.shape == (0,)
    assert z.item() == 10


def test_buckets_and_guards(tmp_path: Path, library: Path) -> None:
    e = Table()
    guard = (e("s0", 8, "%", 7, "!="), "T % 8 != 7")
    fast = [kernel("tk_immediates", e, [1], e(2), e(1), e("s0"))]
    slow = [kernel("tk_immediates", e, [1], e(2), e(2), e("s0"))]
    one = [kernel("tk_immediates", e, [1], e(2), e(3), e("s0"))]
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", "s0", 4)],
        outputs=[out(e, 1, 2, dtype="int64")], symbols=[Symbol("T", 1, 64, 0, 0)],
        buffers=[Buffer("input", 0, 0, e("s0", 16, "*")), Buffer("output", 0, 0, e(16))],
        guards=[guard],
        variants=[
            {"bucket": "64", "limits": {"T": 64}, "steps": slow},
            {"bucket": "16", "limits": {"T": 16}, "steps": fast},
            {"phase": "decode", "bucket": "1", "limits": {"T": 1}, "steps": one,
             "input_shapes": [[e(1), e(4)]]},
        ],
    )  # fmt: skip
    session = load(plan, threads=1)
    for rows, which in [(1, 3), (2, 1), (16, 1), (17, 2), (64, 2), (3, 1)]:
        np.testing.assert_array_equal(session.run(example(rows))[0], [which, rows])
        assert session.describe()["bucket"] == {1: "16", 2: "64", 3: "1"}[which]
    with pytest.raises(InputRejectedError, match=r"T % 8 != 7.*T = 15"):
        session.run(example(15))
    with pytest.raises(InputRejectedError, match=r"16 \(T <= 16\); 64 \(T <= 64\)"):
        session.run(example(65))


def test_undefined_guard_rejects(tmp_path: Path, library: Path) -> None:
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", "s0")], outputs=[],
        symbols=[Symbol("T", 1, 64, 0, 0), Symbol("N", 0, 9)], steps=[],
        buffers=[Buffer("input", 0, 0, e("s0", 4, "*"))],
        guards=[(e(60, "s0", 5, "-", "%", 0, "=="), "60 % (T - 5) == 0"),
                (e("s1", 3, "<"), "N < 3")],  # N: nothing binds it any more
    )  # fmt: skip
    session = load(plan, threads=1)
    session.run(np.zeros(15, np.float32))
    for length in (5, 12):
        with pytest.raises(InputRejectedError, match=r"60 % \(T - 5\) == 0"):
            session.run(np.zeros(length, np.float32))


def test_symbol_behind_a_linear_dimension(tmp_path: Path, library: Path) -> None:
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e,
        inputs=[Tensor("x", "float32", [e("s0", 2, "*", 1, "+")], ["2*T+1"])],
        outputs=[out(e, 1, 1, dtype="int64"), Output(None, "expression", e("s0", 100, "*"))],
        symbols=[Symbol("T", 1, 9, 0, 0)],
        buffers=[Buffer("input", 0, 0, e(0)), Buffer("output", 0, 0, e(8))],
        steps=[kernel("tk_immediates", e, [1], e(1), e("s0"))],
    )  # fmt: skip
    session = load(plan, threads=1)
    y, n = session.run(np.zeros(9, np.float32))
    assert y[0] == 4
    assert n == 400
    with pytest.raises(InputRejectedError, match=r"2\*T\+1"):
        session.run(np.zeros(8, np.float32))


# ------------------------------------------------------------------ expressions


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
    "%": operator.mod, "min": min, "max": max, "pow": operator.pow,
    "==": lambda x, y: int(x == y), "!=": lambda x, y: int(x != y),
    "<": lambda x, y: int(x < y), "<=": lambda x, y: int(x <= y),
}  # fmt: skip


def evaluate(code: Expression, *symbols: int) -> int | None:
    """The meaning of an expression, written independently in Python; None if undefined."""
    stack: list[int | None] = []
    for item in code:
        if isinstance(item, int):
            stack.append(item)
            continue
        if item[0] == "s" and item[1:].isdigit():
            stack.append(symbols[int(item[1:])])
            continue
        if item == "select":
            b, a = stack.pop(), stack.pop()
            condition = stack.pop()
            stack.append(None if condition is None else a if condition else b)
            continue
        if item in ("not", "neg", "abs"):
            x = stack.pop()
            f = {"not": lambda v: int(not v), "neg": lambda v: -v, "abs": abs}[item]
            stack.append(None if x is None else f(x))
            continue
        y, x = stack.pop(), stack.pop()
        if item in ("and", "or"):
            decisive = item == "or"
            if any(v is not None and bool(v) == decisive for v in (x, y)):
                stack.append(int(decisive))
            else:
                stack.append(None if x is None or y is None else int(not decisive))
            continue
        if x is None or y is None or (item in ("//", "%") and y == 0) or (item == "pow" and y < 0):
            stack.append(None)
            continue
        if item == "pow" and abs(x) > 1 and y > 63:
            stack.append(None)
            continue
        value = BINARY[item](x, y)
        stack.append(value if -(2**63) <= value < 2**63 else None)
    (result,) = stack
    return result


def test_expressions_match_python(tmp_path: Path, library: Path) -> None:
    rng = np.random.default_rng(0)
    binary = ["+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", "and", "or", "pow"]
    codes: list[Expression] = [["s0", op] if op in ("not", "neg", "abs") else ["s0", "s1", op]
                               for op in [*binary, "not", "neg", "abs"]]  # fmt: skip
    for _ in range(300):
        code: Expression = []
        depth = 0
        while len(code) < 25 or depth != 1:
            if depth < 2 or (len(code) < 25 and rng.random() < 0.5):
                code.append(["s0", "s1", int(rng.integers(-9, 10))][rng.integers(3)])
                depth += 1
            elif depth >= 3 and rng.random() < 0.1:
                code.append("select")
                depth -= 2
            elif rng.random() < 0.2:
                code.append(["not", "neg", "abs"][rng.integers(3)])
            else:
                code.append(binary[rng.integers(len(binary))])
                depth -= 1
        codes.append(code)
    e = Table()
    base = [e(0), e(1)]
    rows = [*e.rows, *codes]
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[], outputs=[],
        symbols=[Symbol("a", -50, 50), Symbol("b", -50, 50)], buffers=[], steps=[],
        variants=[{"expressions": rows}],
    )  # fmt: skip
    session = load(plan, threads=1)
    native = session._chooser._natives[0]
    assert base == [0, 1]
    undefined = 0
    for a, b in [(7, 3), (-7, 3), (7, -3), (-7, -3), (0, 5), (5, 0), (0, 0), (50, 49), (1, -1)]:
        native.symbols[:] = (a, b)
        native.evaluate()
        for i, code in enumerate(codes):
            wanted = evaluate(code, a, b)
            undefined += wanted is None
            found = int(native.values[2 + i]) if native.defined[2 + i] else None
            assert found == wanted, (code, a, b)
    assert undefined  # the cases reach undefined values too


@pytest.mark.parametrize("code", [[], ["+"], [1, 2], ["s5"], [1, 2, "select"]])
def test_inconsistent_expressions_are_refused(
    tmp_path: Path, library: Path, code: Expression
) -> None:
    e = Table()
    e(0)
    plan = make_plan(tmp_path / "plan", library, e=e, inputs=[], outputs=[], buffers=[], steps=[],
                     variants=[{"expressions": [[0], code]}])  # fmt: skip
    with pytest.raises(InternalError, match="inconsistent"):
        load(plan, threads=1)


# ------------------------------------------------------------------ threads


def make_rowsum(folder: Path, library: Path) -> Path:
    e = Table()
    return make_plan(
        folder, library, e=e, inputs=[tensor(e, "x", "s0", 300)], outputs=[out(e, 1, "s0")],
        symbols=[Symbol("T", 1, 500, 0, 0)], limits={"T": 500},
        buffers=[Buffer("input", 0, 0, e("s0", 1200, "*")), Buffer("output", 0, 0, e("s0", 4, "*")),
                 Buffer("arena", -1, 0, e("s0", 4, "*"))],
        arena_bytes=2048,
        steps=[kernel("tk_rowsum", e, [0, 2], e("s0"), e(300), grain=3, scratch=e(1200)),
               kernel("tk_scale", e, [2, 1], e("s0"), e(2), grain=16)],
    )  # fmt: skip


def test_thread_counts_give_the_same_bits(tmp_path: Path, library: Path) -> None:
    plan = make_rowsum(tmp_path / "plan", library)
    rng = np.random.default_rng(1)
    sessions = [load(plan, threads=n) for n in (1, 2, 3)]
    for rows in (1, 2, 3, 4, 7, 47, 48, 49, 500):
        x = rng.standard_normal((rows, 300)).astype(np.float32)
        results = [s.run(x)[0] for s in sessions for _ in range(20)]
        np.testing.assert_allclose(results[0], 2 * x.sum(1), rtol=1e-4, atol=1e-4)
        assert len({y.tobytes() for y in results}) == 1


def test_sessions_in_several_threads_share_one_pool(tmp_path: Path, library: Path) -> None:
    plan = make_rowsum(tmp_path / "plan", library)
    sessions = [load(plan, threads=3) for _ in range(3)]
    before = len(os.listdir("/proc/self/task"))
    x = np.random.default_rng(2).standard_normal((200, 300)).astype(np.float32)
    wanted = sessions[0].run(x)[0].tobytes()
    errors: list[str] = []

    def work(k: int) -> None:
        for _ in range(100):
            if sessions[k % 3].run(x)[0].tobytes() != wanted:
                errors.append("differs")

    workers = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert sum(s.stats.runs for s in sessions) == 601
    assert len(os.listdir("/proc/self/task")) <= before + 2


def test_runs_after_a_fork(tmp_path: Path, library: Path) -> None:
    plan = make_rowsum(tmp_path / "plan", library)
    code = f"""
import os, numpy as np
from graphc.runtime.session import load
session = load({str(plan)!r}, threads=2)
x = np.ones((400, 300), np.float32)
session.run(x)
child = os.fork()
if child == 0:
    os._exit(0 if (session.run(x)[0] == 600).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=20)


# ------------------------------------------------------------------ states and mutated inputs


def make_counter(folder: Path, library: Path) -> Path:
    """total += x; returns a copy of total, which starts as [10, 20, 30]."""
    e = Table()
    return make_plan(
        folder, library, e=e, inputs=[tensor(e, "x", 3)], outputs=[out(e, 1, 3)],
        states=[State(tensor(e, "total", 3), 0), State(tensor(e, "spare", 2, 2), -1)],
        buffers=[Buffer("input", 0, 0, e(12)), Buffer("output", 0, 0, e(12)),
                 Buffer("state", 0, 0, e(12))],
        steps=[kernel("tk_add", e, [2, 0, 2], e(3)), kernel("tk_copy", e, [2, 1], e(12))],
        weight_data=[np.array([10, 20, 30], np.float32)],
    )  # fmt: skip


def test_states(tmp_path: Path, library: Path) -> None:
    plan = make_counter(tmp_path / "plan", library)
    first, second = load(plan, threads=1), load(plan, threads=1)
    one = np.ones(3, np.float32)
    np.testing.assert_array_equal(first.run(one)[0], [11, 21, 31])
    np.testing.assert_array_equal(first.run(one)[0], [12, 22, 32])
    np.testing.assert_array_equal(second.run(one)[0], [11, 21, 31])  # shares nothing
    np.testing.assert_array_equal(first.states["total"], [12, 22, 32])
    assert first.states["spare"].shape == (2, 2)
    assert not first.states["spare"].any()
    first.save_states(tmp_path / "states.npz")
    first.reset()
    np.testing.assert_array_equal(first.run(one)[0], [11, 21, 31])
    second.load_states(tmp_path / "states.npz")
    np.testing.assert_array_equal(second.run(one)[0], [13, 23, 33])
    with pytest.raises(UsageError, match="expected the states"):
        np.savez(tmp_path / "other.npz", a=one)
        first.load_states(tmp_path / "other.npz")
    with pytest.raises(DamagedError, match="states"):
        (tmp_path / "broken.npz").write_bytes(b"PK no")
        first.load_states(tmp_path / "broken.npz")


def test_mutated_input_is_written_back(tmp_path: Path, library: Path) -> None:
    torch = pytest.importorskip("torch")
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", 4), tensor(e, "y", 4)],
        outputs=[Output(None, "input", 0), out(e, 2, 4)], mutated_inputs=[0],
        buffers=[Buffer("input", 0, 0, e(16)), Buffer("input", 1, 0, e(16)),
                 Buffer("output", 1, 0, e(16))],
        steps=[kernel("tk_scale", e, [0, 0], e(4), e(3)), kernel("tk_copy", e, [1, 2], e(16))],
    )  # fmt: skip
    session = load(plan, threads=1)
    other = np.zeros(4, np.float32)
    x = np.arange(4, dtype=np.float32)
    assert session.run(x, other)[0] is x
    np.testing.assert_array_equal(x, [0, 3, 6, 9])
    base = np.arange(8, dtype=np.float32)
    session.run(base[::2], other)
    np.testing.assert_array_equal(base, [0, 1, 6, 3, 12, 5, 18, 7])
    t = torch.arange(8.0)
    session.run(t[1::2], torch.zeros(4))
    assert t.tolist() == [0, 3, 2, 9, 4, 15, 6, 21]
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InputRejectedError, match="read-only"):
        session.run(frozen, other)
    x = np.arange(4, dtype=np.float32)  # the same tensor twice: y is read as it was
    _, y = session.run(x, x)
    np.testing.assert_array_equal(y, [0, 1, 2, 3])
    np.testing.assert_array_equal(x, [0, 3, 6, 9])


# ------------------------------------------------------------------ fallbacks


def make_nonzero(folder: Path, library: Path) -> Path:
    """Indices of the non-zero values of x [T] (data-dependent count N), times ten; and the raw
    indices [N, 1]."""
    e = Table()
    view = {"buffer": 0, "dtype": "float32", "shape": [e("s0")], "strides": [e(1)], "offset": e(0)}
    fallback = Fallback(
        "aten.nonzero.default", [view], {}, outputs=[1], output_dtypes=["int64"],
        output_shapes=[[e("s1"), e(1)]], output_strides=[[e(1), e(1)]], binds=[(1, 0, 0)],
    )  # fmt: skip
    size = e("s1", 8, "*")
    return make_plan(
        folder, library, e=e, inputs=[tensor(e, "x", "s0")],
        outputs=[Output(Tensor("y", "int64", [e("s1")], ["N"]), "buffer", 3),
                 Output(Tensor("i", "int64", [e("s1"), e(1)], ["N", "1"]), "buffer", 1)],
        symbols=[Symbol("T", 1, 100, 0, 0), Symbol("N", 0, 100)], uses_torch=True,
        limits={"T": 100, "N": 90}, guards=[(e("s1", 13, "!="), "N != 13")],
        buffers=[Buffer("input", 0, 0, e("s0", 4, "*")), Buffer("external", -1, 0, size),
                 Buffer("dynamic", -1, 0, size), Buffer("output", 0, 0, size)],
        steps=[Step(fallback=fallback), kernel("tk_tens", e, [1, 2], e("s1")),
               kernel("tk_copy", e, [2, 3], size)],
    )  # fmt: skip


def test_fallback_with_data_dependent_size(tmp_path: Path, library: Path) -> None:
    pytest.importorskip("torch")
    session = load(make_nonzero(tmp_path / "plan", library), threads=2)
    kept = []
    for count in (3, 0, 60, 5):
        x = np.zeros(100, np.float32)
        x[:count] = 1
        y, i = session.run(x[::-1])
        kept.append((count, y, i))
    for count, y, i in kept:
        np.testing.assert_array_equal(i[:, 0], np.arange(100 - count, 100))
        np.testing.assert_array_equal(y, 10 * np.arange(100 - count, 100))
    with pytest.raises(InputRejectedError, match="N from 0 to 90, found 95"):
        session.run(np.ones(95, np.float32))
    with pytest.raises(InputRejectedError, match="N != 13"):
        session.run(np.ones(13, np.float32))
    assert session.describe()["fallback_steps"] == 1


def test_fallback_arguments_and_aliasing_results(tmp_path: Path, library: Path) -> None:
    torch = pytest.importorskip("torch")
    e = Table()

    def view(buffer: int, dtype: str, shape: list[int], strides: list[int]) -> dict[str, Any]:
        return {"buffer": buffer, "dtype": dtype, "shape": [e(d) for d in shape],
                "strides": [e(s) for s in strides], "offset": e(0)}  # fmt: skip

    steps = [
        # a view of the arena must not be handed on as a window on reused memory
        kernel("tk_copy", e, [0, 4], e(24)),
        Step(fallback=Fallback("aten.t.default", [view(4, "float32", [2, 3], [3, 1])], {}, [1],
                               ["float32"], [[e(3), e(2)]], [[e(2), e(1)]])),
        kernel("tk_scale", e, [4, 4], e(6), e(0)),
        # a list of tensors in and out, literals, a dtype
        Step(fallback=Fallback("aten.split.Tensor", [view(0, "float32", [3, 2], [1, 3]), 2], {},
                               [2, 3], ["float32"] * 2, [[e(2), e(2)], [e(1), e(2)]],
                               [[e(2), e(1)]] * 2)),
        Step(fallback=Fallback("aten.cat.default", [[view(2, "float32", [2, 2], [2, 1]),
                                                     view(3, "float32", [1, 2], [2, 1])]], {}, [5],
                               ["float32"], [[e(3), e(2)]], [[e(2), e(1)]])),
        Step(fallback=Fallback("aten.full.default", [[2, {"expr": e(1)}], {"float": "-inf"}],
                               {"dtype": {"dtype": "bfloat16"}, "device": {"device": "cpu"}}, [6],
                               ["bfloat16"], [[e(2), e(1)]], [[e(1), e(1)]])),
    ]  # fmt: skip
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", 2, 3)], steps=steps,
        outputs=[out(e, 1, 3, 2), out(e, 5, 3, 2), out(e, 6, 2, 1, dtype="bfloat16")],
        buffers=[Buffer("input", 0, 0, e(24))] + [Buffer("external", -1, 0, e(24))] * 3
        + [Buffer("arena", -1, 0, e(24))] + [Buffer("external", -1, 0, e(24))] * 2,
        arena_bytes=64, uses_torch=True,
    )  # fmt: skip
    session = load(plan, threads=1)
    x = torch.arange(6.0).reshape(2, 3)
    a, b, c = session.run(x)
    assert torch.equal(a, x.t())
    assert torch.equal(b, x.t())
    assert c.dtype == torch.bfloat16
    assert c.flatten().tolist() == [-np.inf, -np.inf]
    pytest.importorskip("ml_dtypes")
    a, b, c = session.run(x.numpy())
    np.testing.assert_array_equal(a, x.numpy().T)
    assert c.dtype.name == "bfloat16"


def test_unknown_fallback_operator(tmp_path: Path, library: Path) -> None:
    pytest.importorskip("torch")
    e = Table()
    step = Step(fallback=Fallback("nowhere.nothing.default", [], {}, [], [], [], []))
    plan = make_plan(tmp_path / "plan", library, e=e, inputs=[], outputs=[], buffers=[],
                     steps=[step], uses_torch=True, variants=[{"expressions": [[0]]}])  # fmt: skip
    with pytest.raises(PlanMismatchError, match="nowhere"):
        load(plan, threads=1).run()


# ------------------------------------------------------------------ plans on disk


@pytest.mark.parametrize("name", ["plan.json", "kernels.so", "weights.bin", "report.json"])
def test_damaged_files(scale_plan: Path, tmp_path: Path, name: str) -> None:
    whole = tmp_path / "plan"
    shutil.copytree(scale_plan, whole)
    load(whole, threads=1, verify=True)
    content = (whole / name).read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    (whole / name).write_bytes(flipped)
    with pytest.raises(DamagedError, match=name):
        load(whole, threads=1, verify=True)
    if name in ("plan.json", "kernels.so"):
        with pytest.raises(DamagedError, match=name):
            load(whole, threads=1)
    (whole / name).write_bytes(content[:-1])
    with pytest.raises(DamagedError, match=name):
        load(whole, threads=1)
    (whole / name).unlink()
    with pytest.raises(UsageError if name == "plan.json" else DamagedError):
        load(whole, threads=1)


def test_wrong_machine_and_versions(tmp_path: Path, library: Path) -> None:
    e = Table()
    for fields, text in [
        ({"machine": Machine(architecture(), ["imaginary9"], "avx9")}, "lacks imaginary9"),
        ({"machine": Machine("vax", [], "portable")}, "one for vax"),
        ({"format": 99}, f"format {FORMAT_VERSION}, found 99"),
        ({"abi": 777}, f"ABI {ABI_VERSION}, found 777"),
    ]:
        plan = make_plan(tmp_path / "plan", library, e=e, inputs=[], outputs=[], buffers=[],
                         steps=[], variants=[{"expressions": [[0]]}], **fields)  # fmt: skip
        with pytest.raises(PlanMismatchError, match=text):
            load(plan)
    with pytest.raises(UsageError, match="no plan found"):
        load(tmp_path / "nothing")


def test_write_plan_replaces_only_plans(scale_plan: Path, tmp_path: Path) -> None:
    plan = read_plan(scale_plan)
    files = {name: scale_plan / name for name in plan.files}
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="not a plan"):
        write_plan(target, plan, files)
    assert (target / "thesis.txt").read_text() == "precious"
    (target / "thesis.txt").unlink()
    for model in ("first", "second"):
        write_plan(target, msgspec.structs.replace(plan, model=model), files)
        assert read_plan(target).model == model
        assert [p.name for p in tmp_path.iterdir()] == ["target"]
    with pytest.raises(UsageError, match="cannot be a file"):
        write_plan(tmp_path / "other", plan, {"../escape": b""})
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_other_kernels_at_the_same_path(tmp_path: Path, library: Path) -> None:
    """A plan rebuilt in place runs its new kernels, in one process."""
    plan = make_scale(tmp_path / "plan", library)
    np.testing.assert_array_equal(load(plan).run(example(2))[0], scaled(example(2)))
    source = tmp_path / "kernels.cpp"
    source.write_text(KERNELS.replace("(float)g->imm[0] * x[i]", "(float)g->imm[0] * x[i] + 1000"))
    other = tmp_path / "other.so"
    subprocess.run(["g++", "-std=c++17", "-O1", "-fPIC", "-shared", str(source),
                    f"-I{ROOT / 'graphc/kernels'}", str(ROOT / "graphc/runtime/executor.cpp"),
                    "-o", str(other)], check=True)  # fmt: skip
    make_scale(tmp_path / "plan", other)
    np.testing.assert_array_equal(load(plan).run(example(2))[0], scaled(example(2)) + 1000)


def test_missing_kernel_symbol(tmp_path: Path, library: Path) -> None:
    e = Table()
    plan = make_plan(tmp_path / "plan", library, e=e, inputs=[], outputs=[], buffers=[],
                     steps=[kernel("tk_absent", e, [], e(1))])  # fmt: skip
    with pytest.raises(DamagedError, match="tk_absent"):
        load(plan, threads=1)


@pytest.mark.parametrize("size", [0, 1, 1000, (2 << 20) + 1])
def test_digests_are_sha256(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    (tmp_path / "file").write_bytes(data)
    wanted = hashlib.sha256(data).hexdigest()
    assert digest(data) == digest(memoryview(data)) == file_digest(tmp_path / "file") == wanted


def test_weights_are_aligned_and_stored_once(tmp_path: Path) -> None:
    writer = WeightsWriter()
    a = writer.add("a", "float32", [3], np.arange(3, dtype=np.float32).tobytes())
    b = writer.add("b", "float32", [1, 3], np.arange(3, dtype=np.float32).data, origin="m.b")
    c = writer.add("c", "int8", [1], b"\5")
    writer.write(tmp_path / "w")
    weights = writer.weights
    assert (a, b, c) == (0, 1, 2)
    assert weights[0].offset == weights[1].offset == 0
    assert weights[2].offset == 4096
    assert (tmp_path / "w").stat().st_size == 4097


def test_empty_weights(tmp_path: Path, library: Path) -> None:
    e = Table()
    fields: dict[str, Any] = {
        "e": e, "inputs": [], "outputs": [out(e, 1, 2)],
        "buffers": [Buffer("weight", 0, 0, e(0)), Buffer("output", 0, 0, e(8))],
        "steps": [kernel("tk_scale", e, [1, 1], e(2), e(0)),
                  kernel("tk_copy", e, [0, 1], e(0)), kernel("tk_scale", e, [0, 1], e(0))],
    }  # fmt: skip
    empty = np.empty((0, 4), np.float32)
    for k, data in enumerate([[empty], [empty, np.ones(3, np.float32), empty]]):
        plan = make_plan(tmp_path / f"plan{k}", library, **fields, weight_data=data)
        fields["e"] = e
        assert load(plan, threads=1).run()[0].shape == (2,)


def test_threads_from_the_environment(scale_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_THREADS", "3")
    assert load(scale_plan).threads == 3
    monkeypatch.setenv("GRAPHC_THREADS", "many")
    with pytest.raises(UsageError, match="GRAPHC_THREADS"):
        load(scale_plan)
    monkeypatch.delenv("GRAPHC_THREADS")
    assert 1 <= load(scale_plan).threads <= (os.cpu_count() or 1)
    with pytest.raises(UsageError, match="at least one thread"):
        load(scale_plan, threads=0)


# ------------------------------------------------------------------ cost


def test_imports_neither_torch_nor_the_compiler(scale_plan: Path) -> None:
    code = f"""
import sys, numpy as np
from graphc.runtime.session import load
session = load({str(scale_plan)!r})
session.run(np.ones((3, 4), np.float32))
session.describe()
bad = {{"torch", "sympy", "ml_dtypes", "click", "rich", "onnx", "passes", "cache", "cli",
        "graphc.ir", "graphc.lowering", "graphc.toolchain"}} & set(sys.modules)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=20)


def test_native_run_allocates_nothing(tmp_path: Path, library: Path) -> None:
    plan = make_rowsum(tmp_path / "plan", library)
    code = f"""
import numpy as np
from graphc.runtime.session import load
from graphc.runtime.trace import Trace
for threads in (1, 2):
    session = load({str(plan)!r}, threads=threads)
    x = [np.ones((n, 300), np.float32) for n in (100, 400)]
    y = [session.run(v)[0] for v in x]
    execution, native = session._execution, session._chooser._natives[0]
    for traced in (False, True):
        if traced:
            trace = Trace(session.plan, session.folder, threads)
            execution._frame.trace = trace.begin(0, native)
        for n in (100, 400, 100, 400):  # a changed length, too
            native.symbols[0] = n
            for _ in range(5):
                hook.counter_start()
                native.run(execution._frame_address, 0, 2)
                count = hook.counter_stop()
                assert count == 0, (threads, n, count)
"""
    run_counted(code, tmp_path)


def test_profile(scale: Session) -> None:
    assert scale.step_times() == []
    scale.profiling = True
    for _ in range(3):
        scale.run(example(5))
    times = scale.step_times()
    assert [t.kernel for t in times] == ["tk_scale", "tk_copy", "tk_add"]
    assert all(t.nanoseconds > 0 for t in times)
    facts = scale.describe()
    assert facts["bucket"] == "all"
    assert facts["runs"] == 3
    assert facts["native_steps"] == 3
    assert facts["first_output_seconds"] >= facts["load_seconds"] > 0
