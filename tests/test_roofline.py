"""The work of Steps, their bounds, and the views of both."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import cli.profile
import cli.roofline
import graphc.kernels
from cli.main import main
from graphc.api import Options, build_module
from graphc.errors import DamagedError
from graphc.frontends.capture import capture
from graphc.lowering.classify import native_operators
from graphc.lowering.lower import lower
from graphc.lowering.steps import FallbackStep, KernelStep
from graphc.lowering.work import FUNCTIONS, causal_pairs, operations, side_work
from graphc.plan import PlanWork, StepWork
from graphc.plan_io import read_plan, read_work
from graphc.runtime.calibration import Level, Peaks, Rates
from graphc.runtime.expressions import evaluate, known
from graphc.runtime.roofline import least_time
from tests.built import Call

F = torch.nn.functional
Row = tuple[str, int | None, int, int, int, str]


def work(function: Any, *args: torch.Tensor, dynamic: Any = None, **sizes: int) -> list[Row]:
    """(label, flops, kept, read, written, arithmetic) of each Step at the given lengths."""
    module = function if isinstance(function, torch.nn.Module) else Call(function)
    if dynamic is not None and isinstance(module, Call):
        dynamic = (dynamic,)
    captured = capture(module, args, {}, dynamic, keep=native_operators())
    lowered = lower(captured.graph, "avx2")
    names = list(captured.graph.symbols)
    side = side_work(lowered, names, {})
    values = [known(e, [sizes.get(name) for name in names]) for e in side.expressions]

    def value(index: int) -> int | None:
        return values[index] if index >= 0 else None

    rows = []
    for step, one in zip(lowered.steps, side.steps, strict=True):
        label = step.label if isinstance(step, KernelStep) else step.node.target
        if isinstance(step, FallbackStep):
            assert one.flops == one.kept == one.read == one.written == -1
        moved = (value(i) for i in (one.kept, one.read, one.written))
        rows.append((label, value(one.flops), *moved, one.arithmetic))
    return rows  # type: ignore[return-value]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def test_product_with_its_epilogue() -> None:
    """2MNK; the left operand, packed weights, bias and residual are read once."""
    layer = torch.nn.Linear(48, 64).requires_grad_(False)
    (row,) = work(lambda x, r: F.gelu(layer(x)) + r, floats(6, 48), floats(6, 64))
    assert row[1:] == (2 * 6 * 48 * 64, 4 * (6 * 48 + 64 * 48 + 64 + 6 * 64), 0, 4 * 6 * 64, "fp32")
    layer = layer.bfloat16()
    (row,) = work(lambda x: layer(x), floats(6, 48).bfloat16())
    assert row[1] == 2 * 6 * 48 * 64 and row[5] == "bf16"


def test_chain_of_products_reads_what_the_run_made() -> None:
    a, b = (torch.nn.Linear(32, 32, bias=False).requires_grad_(False) for _ in range(2))
    first, second = work(lambda x: b(a(x)), floats(4, 32))
    assert first[2:5] == (4 * (4 * 32 + 32 * 32), 0, 4 * 4 * 32)
    assert second[2:5] == (4 * 32 * 32, 4 * 4 * 32, 4 * 4 * 32)


@pytest.mark.parametrize(("causal", "pairs"), [(False, 64 * 64), (True, 64 * 65 // 2)])
def test_attention(causal: bool, pairs: int) -> None:
    q = floats(2, 3, 64, 16)
    rows = work(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, q, q)
    assert sum(row[1] or 0 for row in rows) == 2 * 2 * 3 * pairs * (16 + 16)


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (5, 5), (5, 12), (12, 12), (12, 5), (3, 1)])
def test_pairs_of_queries_and_keys(queries: int, keys: int) -> None:
    assert causal_pairs(queries, keys) == sum(j <= i for i in range(queries) for j in range(keys))


def test_attention_of_a_free_length() -> None:
    q = floats(1, 2, 64, 16)
    length = torch.export.Dim("T", min=2, max=512)
    shape = {2: length}
    rows = work(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        q, q, q, dynamic=(shape, shape, shape), T=100,
    )  # fmt: skip
    assert sum(row[1] or 0 for row in rows) == 2 * 2 * (100 * 101 // 2) * (16 + 16)


def test_convolution() -> None:
    layer = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False).requires_grad_(False)
    rows = work(layer, floats(1, 8, 10, 12))  # the input may be rearranged before
    (row,) = (row for row in rows if row[1])
    assert row[1] == 2 * 16 * 10 * 12 * 8 * 9
    assert row[2] + row[3] >= 4 * (8 * 10 * 12 + 16 * 8 * 9) and row[4] == 4 * 16 * 10 * 12


def test_loops() -> None:
    x, row = floats(8, 16), floats(16)
    (made,) = work(lambda x, row: (x + row) * 2.0 - x / 3.0, x, row)
    assert made[1:] == (4 * 8 * 16, 4 * (8 * 16 + 16), 0, 4 * 8 * 16, "fp32")
    (made,) = work(lambda x: x.sum(1), x)  # one addition a point
    assert made[1:5] == (8 * 16, 4 * 8 * 16, 0, 4 * 8)
    (made,) = work(lambda x: x.sum(1) * 2.0, x)  # the factor once a row
    assert made[1] == 8 * 16 + 8
    (made,) = work(lambda x: x.double() + 1.0, x)
    assert made[5] == "fp32" and made[4] == 8 * 8 * 16  # reads floats


def test_loop_of_a_free_length() -> None:
    length = torch.export.Dim("T", min=1, max=512)
    (made,) = work(lambda x: x + 1.0, floats(7, 16), dynamic=({0: length},), T=50)
    assert made[1:5] == (50 * 16, 4 * 50 * 16, 0, 4 * 50 * 16)


def test_gather_reads_only_what_it_takes() -> None:
    table = torch.nn.Embedding(1000, 32).requires_grad_(False)
    (made,) = work(table, torch.tensor([[1, 2, 3]]))
    assert made[2:5] == (4 * 3 * 32 + 8 * 3, 0, 4 * 3 * 32)
    small = torch.nn.Embedding(2, 32).requires_grad_(False)
    (made,) = work(small, torch.tensor([[0, 1, 1, 0]]))
    assert made[2] == 4 * 2 * 32 + 8 * 4  # never more than the table


def test_scatter_touches_only_named_places() -> None:
    rows = work(
        lambda x, i, v: torch.index_copy(x, 0, i, v),
        floats(100, 32), torch.tensor([3, 7]), floats(2, 32),
    )  # fmt: skip
    *_, scatter = rows
    assert scatter[4] == 4 * 2 * 32
    *_, adding = work(
        lambda x, i, v: torch.index_add(x, 0, i, v),
        floats(100, 32), torch.tensor([3, 7]), floats(2, 32),
    )  # fmt: skip
    assert adding[4] == 4 * 2 * 32


def test_concatenation_moves_each_part_once() -> None:
    rows = work(lambda a, b: torch.cat([a, b], 1), floats(4, 3), floats(4, 5))
    assert sum(row[2] + row[3] for row in rows) == 4 * 4 * 8
    assert sum(row[4] for row in rows) == 4 * 4 * 8


def test_windows_count_no_more_than_their_memory() -> None:
    rows = work(lambda x: x.unfold(0, 8, 1) * 2.0, floats(64))
    assert sum(row[2] for row in rows) <= 4 * 64


def test_fallback_is_unknown() -> None:
    rows = work(lambda x: torch.linalg.inv(x) + 1.0, floats(4, 4))
    fallbacks = [row for row in rows if row[0].startswith("aten.")]
    assert fallbacks and all(row[1:5] == (None,) * 4 for row in fallbacks)


@pytest.mark.parametrize(
    ("text", "count"),
    [("({0} + {1})", 1), ("({0} * (float)0.5f - 1e-05f)", 2), ("-{0}", 1), ("gc::vmax({0}, 0)", 1),
     ("gc::vexp(-{0})", 15), ("({0} < {1} ? {0} : {1})", 2), ("gc::to_int<int64_t>({0})", 1),
     ("(float)({0})", 0), ("(1.0f / sqrt({0}))", 2)],
)  # fmt: skip
def test_operations_of_an_expression(text: str, count: int) -> None:
    assert operations(text) == count


def test_every_function_of_the_kernels_has_its_operations() -> None:
    text = (Path(graphc.kernels.__path__[0]) / "vmath.h").read_text()
    names = set(re.findall(r"^template <class V> GC_INLINE V (v\w+)\(", text, re.MULTILINE))
    assert len(names) > 8 and names <= set(FUNCTIONS)


def test_expressions() -> None:
    assert evaluate(["s0", 3, "*", 1, "+", 2, "//"], [5]) == 8
    assert evaluate(["s0", 4, "<", 10, 20, "select"], [3]) == 10
    assert known(["s1", 2, "*"], [1, None]) is None
    assert known([1, 0, "//"], []) is None
    assert known([7], [None]) == 7


# ---------------------------------------------------------------- bounds


def peaks() -> Peaks:
    levels = [
        Level("L1", 32 << 10, 1, 16 << 10, 200.0, 100.0, 220.0),
        Level("L2", 1 << 20, 1, 512 << 10, 100.0, 100.0, 100.0),
        Level("DRAM", 0, 1, 1 << 28, 20.0, 10.0, 30.0),
    ]
    rates = Rates(1, 100.0, 200.0, 0.0, levels)
    return Peaks("some CPU", {}, rates, rates)


def test_the_larger_of_arithmetic_and_memory() -> None:
    at = peaks()
    small = 1 << 19
    assert least_time("fp32", 10**9, 0, small, 0, small, at, 1) == (0.01, "fp32")
    assert least_time("bf16", 10**9, 0, small, 0, small, at, 1) == (0.005, "bf16")
    assert least_time("fp64", 10**9, 0, small, 0, small, at, 1) == (0.02, "fp64")


def memory(kept: int, read: int, written: int, touched: int) -> tuple[float, str]:
    seconds, limit = least_time("fp32", 10, kept, read, written, touched, peaks(), 1)
    return pytest.approx(seconds * 1e9), limit


def test_memory_is_the_level_that_holds_it() -> None:
    big, small = 1 << 24, 1 << 19
    assert memory(0, small, 0, small) == (small / 100, "L2")
    assert memory(0, big, 0, big) == (big / 20, "DRAM")
    # reading and writing at once is bounded by either, and by what a copy reaches
    assert memory(0, big, big, 2 * big) == (big / 10, "DRAM")
    assert memory(0, 4 * big, big, 5 * big) == (4 * big / 20, "DRAM")
    # a small weight of a big model comes from far away, its activations don't
    assert memory(small, 4096, 4096, big) == (small / 20, "DRAM")
    assert memory(0, 0, 0, 0)[1] == "fp32"


# ---------------------------------------------------------------- views of a real plan


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(16, 32)
        self.b = torch.nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.a(x).transpose(0, 1) @ self.b(x), -1)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roofline") / "plan"
    module = Net().requires_grad_(False)
    rows = torch.export.Dim("T", min=2, max=64)
    build_module(module, (floats(8, 16),), None, ({0: rows},), output=folder,
                 options=Options(jobs=1, buckets=("T=64",)))  # fmt: skip
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, args), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cli.profile, cli.roofline):
        monkeypatch.setattr(module, "measured", lambda folder: peaks())


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cli.profile, cli.roofline):
        monkeypatch.setattr(module, "measured", lambda folder: None)


def test_work_of_a_plan(plan: Path) -> None:
    manifest = read_plan(plan)
    made = read_work(plan, manifest)
    assert made.programs == [0] and len(made.sides) == 1
    assert len(made.sides[0].steps) == len(manifest.programs[0].steps)
    assert any("test_roofline.py:" in place for place in made.places)
    with pytest.raises(DamagedError, match="does not say"):
        read_work(plan, replace(manifest, files={}))


def test_inspect(plan: Path, capsys: pytest.CaptureFixture[str], calibrated: None) -> None:
    data = as_json(capsys, "inspect", plan, "--roofline", "--length", "T=10", "--threads", "1")
    assert data["symbols"] == {"T": 10} and data["threads"] == 1 and data["bucket"]
    assert sum(s["flops"] or 0 for s in data["steps"]) >= 2 * (2 * 10 * 16 * 32 + 32 * 32 * 10)
    assert data["least_s"] == pytest.approx(sum(s["least_s"] for s in data["steps"]))
    assert all(step["least_s"] > 0 and step["limit"] for step in data["steps"])
    longer = as_json(capsys, "inspect", plan, "roofline", "--length", "T=60", "--threads", "1")
    assert longer["least_s"] > data["least_s"]
    assert main(["inspect", str(plan), "--roofline"]) == 0
    text = capsys.readouterr().out
    assert "least time" in text and "test_roofline.py:" in text
    assert main(["inspect", str(plan), "--roofline", "--length", "T=65"]) != 0


def test_inspect_without_calibration(
    plan: Path, capsys: pytest.CaptureFixture[str], unmeasured: None
) -> None:
    data = as_json(capsys, "inspect", plan, "--roofline")
    assert data["peaks"] is None and data["least_s"] is None
    assert all(step["least_s"] is None for step in data["steps"])
    assert main(["inspect", str(plan), "--roofline"]) == 0
    assert "graphc doctor --calibrate" in capsys.readouterr().out


def test_profile(plan: Path, capsys: pytest.CaptureFixture[str], calibrated: None) -> None:
    args = ("run", plan, "--profile", "--iters", "3", "--length", "T=10", "--threads", "1")
    data = as_json(capsys, *args)
    steps, fixes = data["steps"], data["fixes"]
    assert data["roofline"] and len(steps) == len(read_plan(plan).programs[0].steps)
    assert sum(step["share"] for step in steps) == pytest.approx(1)
    for step in steps:
        assert step["fraction"] == pytest.approx(step["least_s"] * 1e9 / step["ns"])
        assert step["lost_ns"] == max(0, step["ns"] - round(step["least_s"] * 1e9))
        if step["flops"]:
            assert step["gflops"] == pytest.approx(step["flops"] / step["ns"])
    assert sum(fix["ns"] for fix in fixes) == sum(step["ns"] for step in steps)
    lost = [fix["lost_ns"] for fix in fixes]
    assert lost == sorted(lost, reverse=True)
    assert any(".pack" in fix["labels"][0] and "rearranges" in fix["hint"] for fix in fixes)
    assert main(list(map(str, args))) == 0
    text = capsys.readouterr().out
    assert "what to fix, by the time lost" in text and "at the machine's peaks" in text


def test_profile_without_calibration(
    plan: Path, capsys: pytest.CaptureFixture[str], unmeasured: None
) -> None:
    data = as_json(capsys, "run", plan, "--profile", "--iters", "0", "--threads", "1")
    assert not data["roofline"]
    assert all(step["ns"] > 0 and step["fraction"] is None for step in data["steps"])
    assert data["fixes"] and all(fix["lost_ns"] is None for fix in data["fixes"])
    assert main(["run", str(plan), "--profile"]) == 0
    assert "graphc doctor --calibrate" in capsys.readouterr().out


def test_json_keys_are_documented(
    plan: Path, capsys: pytest.CaptureFixture[str], calibrated: None
) -> None:
    text = (Path(__file__).parents[1] / "docs/json.md").read_text()
    data = as_json(capsys, "inspect", plan, "--roofline")
    run = as_json(capsys, "run", plan, "--profile")
    keys: Sequence[str] = [*data, *data["steps"][0], *run["steps"][0], *run["fixes"][0]]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_hints() -> None:
    step = {"label": "x", "kernel": "k", "place": "", "hint": "", "limit": "DRAM", "share": 1.0}
    fast = {**step, "ns": 100, "least_s": 95e-9, "lost_ns": 5}
    (fix,) = cli.profile.fixes([fast, fast])
    assert fix["steps"] == 2 and fix["ns"] == 200 and fix["lost_ns"] == 10
    assert fix["hint"] == "at the speed of DRAM: only fewer bytes would help"
    (fix,) = cli.profile.fixes([{**fast, "limit": "bf16"}])
    assert fix["hint"] == "near the peak"
    slow = {**fast, "ns": 1000, "lost_ns": 905}
    (fix,) = cli.profile.fixes([slow])
    assert fix["hint"] == "" and fix["fraction"] == pytest.approx(0.095)
    unknown = {**fast, "kernel": "other", "ns": 500, "least_s": None, "lost_ns": None}
    assert [f["kernel"] for f in cli.profile.fixes([fast, unknown])] == ["other", "k"]


def test_steps_of_unknown_work_have_defaults() -> None:
    assert StepWork() == StepWork(-1, -1, -1, -1, "fp32", -1)
    assert PlanWork([], [], []).programs == []
