"""Plans for several CPUs: the best target is picked, the others neither read nor needed; what a CPU
lacks is named, and the command that mends it works. GRAPHC_CPU stands for the other machines."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
import graphc.target_build
from cli.main import main
from graphc.cpu import LEVELS, V3, V4, architecture, features
from graphc.errors import DamagedError, PlanMismatchError
from graphc.plan_io import open_plan, read_plan
from graphc.report import BuildReport
from graphc.runtime.calibration import cpu_key

pytestmark = pytest.mark.skipif(architecture() != "x86_64", reason="targets of x86-64")

NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 40))
    return net.eval(), (torch.randn(5, 48),)
"""
BOTH = "x86-64-v4,x86-64-v3"
#: what this machine really is: where tests run code of that level
HERE = [name for name, needs in LEVELS.items() if (features() or frozenset()).issuperset(needs)]


def reference() -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Input, and the answer in float64."""
    space: dict[str, Any] = {}
    exec(NET, space)
    net, (x,) = space["make"]()
    exact: np.ndarray[Any, Any] = net.double()(x.double()).detach().numpy()
    return x, exact


def right(plan: Path, target: str) -> None:
    """The plan runs here, for this target, and is right."""
    x, exact = reference()
    session = graphc.load(plan, threads=1)
    assert session.plan.target == target
    np.testing.assert_allclose(session.run(x.numpy()), exact, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET)
    return f"{path}:make"


@pytest.fixture(scope="module")
def both(net: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for x86-64-v3 and v4; building for what this CPU lacks is allowed."""
    plan = tmp_path_factory.mktemp("both") / "plan"
    assert main(["build", net, "-o", str(plan), "--target", "x86-64-v3,x86-64-v4"]) == 0
    return plan


@pytest.mark.parametrize("level", [name for name in HERE if name >= "x86-64-v3"])
def test_the_best_target_runs(both: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CPU", level)
    right(both, level)


def test_features_beyond_a_target_do_not_matter(both: Path) -> None:
    """Two-sided: needs that are a subset of what the host has are met, whatever else it has."""
    right(both, "x86-64-v4" if "x86-64-v4" in HERE else "x86-64-v3")


def test_equal_weights_are_stored_once(both: Path) -> None:
    file = open_plan(both)
    plans = [read_plan(both, name) for name in BOTH.split(",")]
    assert plans[0].weights == plans[1].weights
    used = sum(w.nbytes for w in plans[0].weights)
    assert used <= file.sizes["weights.bin"] < used + 4096 * len(plans[0].weights)
    report = BuildReport.load(both / "x86-64-v3" / "report.json")
    assert [t.name for t in report.targets] == ["x86-64-v4", "x86-64-v3"]
    for record in report.targets:
        assert record.features == sorted(LEVELS[record.name])
        assert record.units == record.hits + record.compiled and record.own_weights_bytes == 0
        assert (record.seconds > 0) == bool(record.units)


def test_a_second_build_makes_nothing(
    net: str, both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan")
    assert main(["build", net, "-o", plan, "--target", "x86-64-v3,x86-64-v4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert [(t["name"], t["compiled"]) for t in report["targets"]] == [
        ("x86-64-v4", 0), ("x86-64-v3", 0),
    ]  # fmt: skip
    assert all(t["hits"] == t["units"] > 0 and t["seconds"] < 1 for t in report["targets"])
    assert main(["build", net, "-o", plan, "--target", "x86-64-v3,x86-64-v4"]) == 0
    assert capsys.readouterr().out.count("nothing compiled") == 2


def test_inspect_shows_targets(
    both: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "x86-64-v3" in HERE:
        monkeypatch.setenv("GRAPHC_CPU", "x86-64-v3")
    assert main(["inspect", str(both), "--json"]) == 0
    shown = {t["name"]: t for t in json.loads(capsys.readouterr().out)["targets"]}
    assert list(shown) == ["x86-64-v4", "x86-64-v3"]
    assert "avx512f" in shown["x86-64-v4"]["lacking"] and not shown["x86-64-v4"]["shown"]
    assert shown["x86-64-v3"]["shown"]
    assert main(["inspect", str(both), "--target", "x86-64-v4", "kernels"]) == 0
    assert main(["inspect", str(both), "--target", "x86-64-v4"]) == 0
    assert "x86_64, avx512," in capsys.readouterr().out
    assert main(["inspect", str(both), "--target", "host"]) == 2
    assert "out of x86-64-v4, x86-64-v3, found 'host'" in capsys.readouterr().err


@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
def test_refused_with_the_command_that_mends_it(
    net: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = tmp_path / "a plan"
    options = ["--dtype", "float32", "--disable-pass", "coded_linear"]
    assert main(["build", net, "-o", str(plan), *options, "--target", "x86-64-v4"]) == 0
    monkeypatch.setenv("GRAPHC_CPU", "x86-64-v3")
    capsys.readouterr()
    assert main(["run", str(plan)]) == 6
    told = capsys.readouterr().err
    assert "x86-64-v4 (avx512); this CPU (as GRAPHC_CPU=x86-64-v3 narrows it) lacks " in told
    lacks = sorted(set(V4) - set(V3))
    assert f"lacks {', '.join(lacks)}\n" in told
    command = re.search(r"(graphc build .*)", told)
    assert command is not None
    words = shlex.split(command[1])
    assert words == ["graphc", "build", net, *options, "-o", str(plan), "--target", "x86-64-v3"]
    assert main(words[1:]) == 0
    assert main(["run", str(plan), "--iters", "1"]) == 0
    right(plan, "x86-64-v3")


@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
def test_what_is_to_run_here_is_refused_before_it_is_built(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(*args: Any, **keywords: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setenv("GRAPHC_CPU", "x86-64-v3")
    monkeypatch.setattr("cli.options.BuildOptions.build", built)
    for command in ("run", "bench"):
        assert main([command, net, "--target", "x86-64-v4"]) == 2
        told = capsys.readouterr().err
        assert "expected a target that runs here, found 'x86-64-v4'" in told and "avx512f" in told


@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
def test_a_bundle_carries_all_targets(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "both.graphc"
    assert main(["bundle", str(both), "-o", str(file)]) == 0
    for level in [name for name in HERE if name >= "x86-64-v3"]:
        monkeypatch.setenv("GRAPHC_CPU", level)
        right(file, level)


def test_no_target_fits(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CPU", "host,-fma,-avx2")
    with pytest.raises(PlanMismatchError) as caught:
        graphc.load(both)
    assert caught.value.exit_code == 6
    assert re.search(r"for x86-64-v4 \(avx512\) it lacks .*avx2.*fma", caught.value.what)
    assert "for x86-64-v3 (avx2) it lacks avx2, fma" in caught.value.what
    assert caught.value.hint.endswith("--target x86-64-v4,x86-64-v3,x86-64-v2")


@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
@pytest.mark.parametrize("name", ["kernels.so", "program.json", "work.json"])
def test_damage_matters_to_the_target_that_has_it(
    both: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan"
    shutil.copytree(both, plan)
    (plan / "x86-64-v4" / name).unlink()
    monkeypatch.setenv("GRAPHC_CPU", "x86-64-v3")
    right(plan, "x86-64-v3")
    damaged = plan / "x86-64-v3" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 8
    damaged.unlink()  # this process has the library of before mapped
    damaged.write_bytes(content if name != "work.json" else content[:-1])
    with pytest.raises(DamagedError, match=f"x86-64-v3/{name}") as caught:
        graphc.load(plan)
    assert caught.value.exit_code == 7
    assert f"net.py:make -o {plan} --target x86-64-v4,x86-64-v3" in caught.value.hint


def test_an_interrupted_build_leaves_the_plan(
    net: str, both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan"
    shutil.copytree(both, plan)
    before = {p: p.read_bytes() for p in plan.rglob("*") if p.is_file()}
    compiled = graphc.target_build.compile_units
    calls: list[str] = []

    def interrupted(units: Any, isa: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(isa.level)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compiled(units, isa, *args, **keywords)

    monkeypatch.setattr(graphc.target_build, "compile_units", interrupted)
    assert main(["build", net, "-o", str(plan), "--target", BOTH]) == 130
    assert calls == ["avx512", "avx2"]
    assert {p: p.read_bytes() for p in plan.rglob("*") if p.is_file()} == before
    assert list(tmp_path.iterdir()) == [plan]


@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
def test_one_cache_for_machines_of_several_kinds(
    net: str, both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, libraries and tables of one CPU are never another's, whoever came first."""
    made: dict[str, tuple[set[str], str]] = {}
    levels = HERE[1:]
    for level in levels:
        monkeypatch.setenv("GRAPHC_CPU", level)
        plan = tmp_path / level
        assert main(["build", net, "-o", str(plan)]) == 0
        right(plan, "host")
        report = BuildReport.load(plan / "report.json")
        assert report.targets[0].features == sorted(LEVELS[level])
        made[level] = set(report.compile.keys), str(cpu_key())
    for a, b in combinations(levels, 2):
        assert not made[a][0] & made[b][0] and made[a][1] != made[b][1]
    for name in ("x86-64-v3", "x86-64-v4"):  # the same kernels by name, from whatever machine
        if name in HERE:
            keys = set(BuildReport.load(both / name / "report.json").compile.keys)
            assert keys == made[name][0]


@pytest.mark.skipif("x86-64-v4" not in HERE, reason="this CPU has no AVX-512")
def test_compiled_models_are_kept_by_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {}
    exec(NET, space)
    module, (x,) = space["make"]()
    found: list[str] = []
    for level in ("x86-64-v4", "x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv("GRAPHC_CPU", level)
        compiled = graphc.compile(module, threads=1)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
        (session,) = compiled.sessions.values()
        found.append(session.plan.machine.isa)
    assert found == ["avx512", "avx2", "avx512"]


@pytest.mark.heavy
@pytest.mark.skipif("x86-64-v3" not in HERE, reason="this CPU has no AVX2")
def test_a_decoder_for_several_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from graphc import decoders
    from graphc.api import Options
    from graphc.runtime.decoder import load
    from tests.tiny_decoders import make

    plan, prompt = tmp_path / "plan", [3, 141, 59, 26, 5]
    exact = make("llama").double()(torch.tensor([prompt])).logits[0].detach().numpy()
    options = Options(buckets=("64",), target=BOTH)
    report = decoders.build(make("llama"), plan, options, chunk=32, batch=1)
    assert [record.own_weights_bytes for record in report.targets] == [0, 0]
    for level in [name for name in HERE if name >= "x86-64-v3"]:
        monkeypatch.setenv("GRAPHC_CPU", level)
        with load(plan, threads=1).sequence() as sequence:
            assert sequence.decoder.session.plan.target == level
            np.testing.assert_allclose(sequence.prefill(prompt[:-1]), exact[-2], 1e-4, 1e-4)
            np.testing.assert_allclose(sequence.decode(prompt[-1]), exact[-1], 1e-4, 1e-4)
        capsys.readouterr()
        words = ["--ids", "3,141,59", "--max-new-tokens", "2", "--json"]
        assert main(["generate", str(plan), *words]) == 0
        assert json.loads(capsys.readouterr().out)["target"] == level
    monkeypatch.setenv("GRAPHC_CPU", "x86-64-v2")
    assert main(["generate", str(plan), "--ids", "3"]) == 6
