"""Traces of runs: valid for the viewers, every Step in order, a track per thread."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.main import main
from graphc.errors import UsageError
from graphc.plan import Buffer, Fallback, Output, Step, Symbol, Tensor
from graphc.runtime import trace
from graphc.runtime.session import load
from tests.test_runtime import (
    ROOT,
    Table,
    kernel,
    library,  # noqa: F401  (a fixture)
    make_plan,
    make_scale,
    out,
    tensor,
)


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The slices and the names of a trace file, checked for what the format requires."""
    data = json.loads(path.read_text())
    slices, names = [], []
    for event in data["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices.append(event)
        else:
            names.append(event)
    return slices, names


def test_steps_in_order_within_their_run(tmp_path: Path, library: Path) -> None:  # noqa: F811
    session = load(make_scale(tmp_path / "plan", library), threads=1)
    x = np.ones((5, 4), np.float32)
    session.run(x)
    with session.trace(tmp_path / "trace.json") as trace:
        wanted = session.run(x)[0]
        session.run(np.ones((9, 4), np.float32))
    np.testing.assert_array_equal(session.run(x)[0], wanted)
    slices, names = read(tmp_path / "trace.json")
    assert trace.dropped == 0
    assert {n["args"].get("name") for n in names} >= {"graphc hand.py:model", "caller"}
    runs = [s for s in slices if s["cat"] == "run"]
    steps = [s for s in slices if s["cat"] == "step"]
    assert [r["args"]["run"] for r in runs] == [0, 1]
    assert [s["args"]["step"] for s in steps] == [0, 1, 2, 0, 1, 2]
    assert [s["args"]["kernel"] for s in steps[:3]] == ["tk_scale", "tk_copy", "tk_add"]
    assert [s["args"]["range"] for s in steps[::3]] == [[0, 20], [0, 36]]
    for k, step in enumerate(steps):
        run = runs[k // 3]
        assert run["ts"] <= step["ts"]
        assert step["ts"] + step["dur"] <= run["ts"] + run["dur"] + 1e-3
        assert k % 3 == 0 or steps[k - 1]["ts"] + steps[k - 1]["dur"] <= step["ts"] + 1e-3


def test_chunks_of_each_thread(tmp_path: Path, library: Path) -> None:  # noqa: F811
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", 4000, 300)],
        outputs=[out(e, 1, 4000)],
        buffers=[Buffer("input", 0, 0, e(4800000)), Buffer("output", 0, 0, e(16000))],
        steps=[kernel("tk_rowsum", e, [0, 1], e(4000), e(300), grain=3, scratch=e(1200))],
    )  # fmt: skip
    session = load(plan, threads=2)
    x = np.ones((4000, 300), np.float32)
    for _ in range(20):  # until both threads took part: the machine may be busy
        with session.trace() as trace:
            session.run(x)
        trace.write(tmp_path / "trace.json")
        slices, names = read(tmp_path / "trace.json")
        if {s["tid"] for s in slices} == {0, 1}:
            break
    assert {s["tid"] for s in slices} == {0, 1}
    tracks = {n["tid"]: n["args"]["name"] for n in names if n["name"] == "thread_name"}
    assert tracks == {0: "caller", 1: "worker 1"}
    (step,) = [s for s in slices if s["cat"] == "step"]
    chunks = sorted((s for s in slices if s["cat"] == "chunk"), key=lambda s: s["args"]["range"])
    parts = [s["args"]["range"] for s in chunks]
    assert parts[0][0] == 0
    assert parts[-1][1] == 4000
    assert all(a[1] == b[0] and b[0] % 3 == 0 for a, b in zip(parts, parts[1:], strict=False))
    for chunk in chunks:
        assert chunk["name"] == step["name"]
        assert step["ts"] <= chunk["ts"]
        assert chunk["ts"] + chunk["dur"] <= step["ts"] + step["dur"] + 1e-3
    for thread in (0, 1):  # one thing at a time
        own = sorted((s for s in chunks if s["tid"] == thread), key=lambda s: s["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(own, own[1:], strict=False))


def test_room_for_the_chunks_of_a_long_step() -> None:
    source = (ROOT / "graphc" / "runtime" / "executor.cpp").read_text()
    most = re.search(r"constexpr int64_t MOST_CHUNKS = (\d+);", source)
    assert most is not None and int(most[1]) == trace._CHUNKS


def test_fallback_steps(tmp_path: Path, library: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    e = Table()
    view = {"buffer": 0, "dtype": "float32", "shape": [e(4)], "strides": [e(1)], "offset": e(0)}
    fallback = Fallback("aten.flip.default", [view, [0]], {}, [1], ["float32"], [[e(4)]], [[e(1)]])
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", 4)], outputs=[out(e, 2, 4)],
        buffers=[Buffer("input", 0, 0, e(16)), Buffer("external", -1, 0, e(16)),
                 Buffer("output", 0, 0, e(16))],
        steps=[Step(fallback=fallback), kernel("tk_scale", e, [1, 2], e(4), e(2))],
        uses_torch=True,
    )  # fmt: skip
    session = load(plan, threads=1)
    with session.trace(tmp_path / "trace.json"):
        (y,) = session.run(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(y, [6, 4, 2, 0])
    steps = [s for s in read(tmp_path / "trace.json")[0] if s["cat"] == "step"]
    assert [s["name"] for s in steps] == ["aten.flip.default", "tk_scale"]
    assert steps[0]["args"]["op"] == "aten.flip.default"


def test_one_trace_at_a_time_and_none_after_an_error(
    tmp_path: Path, library: Path  # noqa: F811
) -> None:  # fmt: skip
    e = Table()
    plan = make_plan(
        tmp_path / "plan", library, e=e, inputs=[tensor(e, "x", "s0")],
        outputs=[Output(Tensor("y", "float32", [e("s0")], ["T"]), "buffer", 1)],
        symbols=[Symbol("T", 1, 8, 0, 0)], limits={"T": 8},
        buffers=[Buffer("input", 0, 0, e("s0", 4, "*")), Buffer("output", 0, 0, e("s0", 4, "*"))],
        steps=[kernel("tk_scale", e, [0, 1], e("s0"), e(2))],
    )  # fmt: skip
    session = load(plan, threads=1)
    with pytest.raises(UsageError, match="traced already"), session.trace(), session.trace():
        pass
    with pytest.raises(ZeroDivisionError), session.trace(tmp_path / "trace.json"):
        session.run(np.ones(3, np.float32))
        raise ZeroDivisionError
    assert len(read(tmp_path / "trace.json")[0]) == 2  # what there was: a run and its Step
    with session.trace() as trace:
        pass
    assert [event["ph"] for event in trace.chrome()["traceEvents"]] == ["M"] * 3


def test_run_command_writes_a_trace(
    tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    plan = make_scale(tmp_path / "plan", library)
    place = tmp_path / "trace.json"
    assert main(["run", str(plan), "--length", "T=5", "--threads", "2", "--trace", str(place)]) == 0
    assert "trace         " in capsys.readouterr().out
    slices, names = read(place)
    assert [s["cat"] for s in slices] == ["run", "step", "step", "step"]
    assert sum(n["name"] == "thread_name" for n in names) == 2


def test_tracing_is_imported_on_use(tmp_path: Path, library: Path) -> None:  # noqa: F811
    plan = make_scale(tmp_path / "plan", library)
    code = f"""
import sys, numpy as np, graphc
graphc.load({str(plan)!r}, threads=1).run(np.ones((3, 4), np.float32))
assert "graphc.runtime.trace" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=20)
