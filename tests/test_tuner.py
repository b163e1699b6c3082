"""`--tune`: choices, what is measured and remembered, and that builds stay the same without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

import graphc.tuner
from cli.main import main
from graphc.api import Options, build_module
from graphc.frontends.capture import capture
from graphc.lowering.classify import native_operators
from graphc.lowering.lower import lower
from graphc.lowering.steps import KernelStep
from graphc.lowering.tuning import Choice, Tuning
from graphc.plan_io import read_plan
from graphc.report import BuildReport
from graphc.runtime.session import load
from graphc.toolchain.isa import Isa
from graphc.tuner import Winner, interleaved, read_table, step_plan, write_table
from tests.built import Call

ISA = Isa("avx512", "x86_64", ())
CHOICE = Choice("demo.rows", (84, 168), 84)


def test_a_choice_has_its_default_among_the_candidates() -> None:
    with pytest.raises(ValueError, match=r"demo\.rows"):
        Choice("demo.rows", (1, 2), 3)


def test_decisions() -> None:
    size = sympy.Symbol("T", integer=True, positive=True)
    plain = Tuning()
    assert plain.decide(CHOICE, (5, "f32")) == ("demo.rows 5 f32", 84)
    assert plain.asked == {"demo.rows 5 f32": CHOICE}
    tuned = Tuning({"demo.rows 5 f32": 168, "demo.rows 6 f32": 999}, {}, ({"T": 4}, {"T": 9}))
    assert tuned.decide(CHOICE, (5, "f32"))[1] == 168
    assert tuned.decide(CHOICE, (6, "f32"))[1] == 84  # a value that is no longer a candidate
    assert tuned.decide(CHOICE, (2 * size, "f32"))[0] == "demo.rows 8|18 f32"
    trial = Tuning({"demo.rows 5 f32": 84}, {"demo.rows": 168})
    assert trial.decide(CHOICE, (5, "f32"))[1] == 168


def test_remembered_for_this_cpu_and_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Winner(168, {"84": 2.0, "168": 1.0}), Winner("packed", {"packed": 1.0})
    assert read_table(tmp_path, ISA, "code") == {}
    write_table(tmp_path, ISA, "code", {"a": first})
    write_table(tmp_path, ISA, "code", {"b": second})
    assert read_table(tmp_path, ISA, "code") == {"a": first, "b": second}
    assert read_table(tmp_path, ISA, "other code") == {}
    write_table(tmp_path, ISA, "other code", {"c": first})
    assert read_table(tmp_path, ISA, "other code") == {"c": first}
    assert read_table(tmp_path, Isa("avx2", "x86_64", ()), "other code") == {}
    monkeypatch.setattr(graphc.tuner, "cpu_key", lambda: {"cpu": "another"})
    assert read_table(tmp_path, ISA, "other code") == {}
    assert read_table(None, ISA, "code") == {}
    write_table(None, ISA, "code", {"a": first})


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphc.tuner, "_SECONDS", 0.0)
    order: list[str] = []
    times = iter([5.0, 9.0, 3.0, 7.0, 4.0, 8.0, 5.0, 9.0, 5.0, 9.0])

    def call(name: str) -> Any:
        return lambda: (order.append(name), next(times))[1]

    assert interleaved({"a": call("a"), "b": call("b")}) == {"a": 3.0, "b": 7.0}
    assert order == ["a", "b"] * 5


def product_steps(dynamic: bool = False) -> tuple[list[KernelStep], Any]:
    a, b = torch.randn(8, 48), torch.randn(48, 64)
    rows = torch.export.Dim("T", min=1, max=512)
    shapes = (({0: rows}, None),) if dynamic else None
    captured = capture(Call(lambda a, b: a @ b), (a, b), {}, shapes, keep=native_operators())
    lowered = lower(captured.graph, "portable")
    steps = [s for s in lowered.steps if isinstance(s, KernelStep) and s.choices]
    return steps, lowered


def test_the_plan_of_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphc.tuner, "_REPEATS", 1)
    steps, lowered = product_steps()
    assert steps and all("product.right 1 8 64 48 portable" in step.choices for step in steps)
    plan = step_plan(steps, lowered.buffers, {}, cold=False)
    assert [step.kernel.symbol for step in plan.programs[0].steps if step.kernel] == [
        step.symbol for step in steps
    ]
    sizes = [plan.programs[0].expressions[state.tensor.shape[0]] for state in plan.states]
    assert sorted(size[0] for size in sizes)[-2:] == [8 * 64, 48 * 64]
    monkeypatch.setattr(graphc.tuner, "_REPEATS", 3)  # a short Step is repeated in place
    again = step_plan(steps, lowered.buffers, {}, cold=False)
    assert len(again.programs[0].steps) == 3 * len(steps) and len(again.states) == len(plan.states)
    # cold: repeated over copies of what outlives a run, until no cache holds them
    monkeypatch.setattr(graphc.tuner, "cache_levels", lambda: [("L1", 30_000, 1)])
    cold = step_plan(steps, lowered.buffers, {}, cold=True)
    kept = 4 * (8 * 48 + 48 * 64)
    copies = -(-2 * 30_000 // kept)
    assert copies > 1 and len(cold.programs[0].steps) == copies * len(steps)
    used = [step.kernel.pointers for step in cold.programs[0].steps if step.kernel]
    buffers = cold.programs[0].buffers
    assert len({buffer for buffer, _ in sum(used, [])}) == len(buffers)
    assert len(buffers) == len(plan.programs[0].buffers) + 2 * (copies - 1)


def test_the_plan_of_a_step_of_a_free_length() -> None:
    steps, lowered = product_steps(dynamic=True)
    assert "product.right 1 ? 64 48 portable" in steps[0].choices
    plan = step_plan(steps, lowered.buffers, {"T": 100}, cold=False)
    assert [100 * 64] in plan.programs[0].expressions
    with pytest.raises(KeyError):
        step_plan(steps, lowered.buffers, {}, cold=False)


# ---------------------------------------------------------------- builds


class Product(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


ARGUMENTS = (torch.randn(40, 48), torch.randn(48, 64))


def build(folder: Path, tune: bool) -> BuildReport:
    report, _ = build_module(
        Product(), ARGUMENTS, output=folder, options=Options(jobs=1, tune=tune)
    )
    return report


def symbols(folder: Path) -> list[str]:
    return [s.kernel.symbol for s in read_plan(folder).programs[0].steps if s.kernel]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of winners of its own, with the kernels of the usual cache; one short round."""
    monkeypatch.setattr(graphc.tuner, "FOLDER", str(tmp_path / "tuning"))
    monkeypatch.setattr(graphc.tuner, "_SECONDS", 0.0)
    monkeypatch.setattr(graphc.tuner, "_LEAST", 1)


def measured(default: float, other: float) -> Any:
    """Stands in for the clock: seconds of "packed" (the default here) and "in place"."""
    return lambda calls: {name: default if name == "packed" else other for name in calls}


def test_measures_and_is_right(tmp_path: Path, quick: None) -> None:
    report = build(tmp_path / "plan", tune=True)
    (record,) = report.tuning
    assert record.choice == "product.right" and record.sizes.startswith("1 40 64 48")
    assert set(record.seconds) == {"in place", "packed"}
    assert all(seconds > 0 for seconds in record.seconds.values())
    result = load(tmp_path / "plan", threads=1).run(*ARGUMENTS)
    torch.testing.assert_close(result, ARGUMENTS[0] @ ARGUMENTS[1])
    assert any(stage.name == "tuning" for stage in report.stages)


def test_a_clear_winner_is_taken_and_kept(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tmp_path / "before", tune=False)
    monkeypatch.setattr(graphc.tuner, "interleaved", measured(1.0, 0.9))
    report = build(tmp_path / "tuned", tune=True)
    assert [(r.winner, r.default, r.cached) for r in report.tuning] == [
        ("in place", "packed", False)
    ]
    assert len(symbols(tmp_path / "tuned")) == len(symbols(tmp_path / "before")) - 1
    monkeypatch.delattr(graphc.tuner, "interleaved")  # the second time measures nothing
    again = build(tmp_path / "again", tune=True)
    assert [(r.winner, r.cached) for r in again.tuning] == [("in place", True)]
    assert again.compile.compiled == 0
    assert symbols(tmp_path / "again") == symbols(tmp_path / "tuned")
    # without --tune, winners change nothing
    after = build(tmp_path / "after", tune=False)
    assert plain.tuning == after.tuning == []
    assert symbols(tmp_path / "after") == symbols(tmp_path / "before")
    result = load(tmp_path / "again", threads=1).run(*ARGUMENTS)
    torch.testing.assert_close(result, ARGUMENTS[0] @ ARGUMENTS[1])


@pytest.mark.parametrize("other", [0.98, 1.0, 1.5])
def test_a_small_gain_does_not_win(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, other: float
) -> None:
    monkeypatch.setattr(graphc.tuner, "interleaved", measured(1.0, other))
    (record,) = build(tmp_path / "plan", tune=True).tuning
    assert record.winner == record.default == "packed"
    assert symbols(tmp_path / "plan") == symbols(tmp_path / "plan")


class Verify(torch.nn.Module):
    """A few queries over grouped keys, as when drafted tokens are verified."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("queries", [2, 12])
@pytest.mark.parametrize("fast", ["in place", "panels"])
def test_every_candidate_is_right(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, queries: int, fast: str
) -> None:
    def measured(calls: Any) -> Any:
        return {name: 1.0 if name == fast else 2.0 for name in calls}

    monkeypatch.setattr(graphc.tuner, "interleaved", measured)
    q, k = torch.randn(1, 4, queries, 32), torch.randn(1, 2, 70, 32)
    options = Options(jobs=1, tune=True)
    report, _ = build_module(Verify(), (q, k, k), output=tmp_path / "plan", options=options)
    (record,) = report.tuning
    assert (record.choice, record.winner) == ("attention.keys", fast)
    assert record.default == ("in place" if queries <= 8 else "panels")
    result = load(tmp_path / "plan", threads=1).run(q, k, k)
    torch.testing.assert_close(result, Verify()(q, k, k), rtol=1e-5, atol=1e-5)


def test_views(
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(graphc.tuner, "interleaved", measured(2e-3, 1e-3))
    build(tmp_path / "plan", tune=True)
    build(tmp_path / "plain", tune=False)
    assert main(["inspect", str(tmp_path / "plan")]) == 0
    assert "1 choice, 1 unlike the default, 0 from cache" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "plan"), "tuning"]) == 0
    text = capsys.readouterr().out
    assert "packed 2 ms" in text and "in place 1 ms" in text and "50%" in text
    assert main(["inspect", str(tmp_path / "plan"), "tuning", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tuning"][0]["winner"] == "in place"
    assert main(["inspect", str(tmp_path / "plain"), "tuning"]) == 0
    assert "graphc build --tune" in capsys.readouterr().out
