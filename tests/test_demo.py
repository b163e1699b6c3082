"""The built-in model through every command, as a user would type them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.main import main
from graphc.models.demo import encoder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "plan"
    assert main(["build", "demo", "-o", str(folder)]) == 0
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, args), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.heavy
def test_second_demo_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["demo", "-o", str(tmp_path / "demo-plan")]) == 0
        text = capsys.readouterr().out
    assert "Nothing was compiled: every kernel came from the cache." in text
    assert "none: the plan runs without torch" in text


@pytest.mark.parametrize("length", [1, 7, 128, 2048])
def test_agrees_with_eager(plan: Path, tmp_path: Path, length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 1024, (1, length))
    np.save(tmp_path / "ids.npy", ids)
    module = encoder()[0]
    with torch.no_grad():
        np.savez(tmp_path / "expected.npz", module(torch.from_numpy(ids)).numpy())
    run = ["run", plan, "--input", f"ids=@{tmp_path}/ids.npy", "--iters", "0", "--warmup", "0"]
    assert main([*map(str, run), "--expect", str(tmp_path / "expected.npz")]) == 0


def test_run_needs_no_torch(plan: Path) -> None:
    code = (
        "import sys; from cli.main import main\n"
        f"code = main(['run', {str(plan)!r}, '--iters', '1'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_run_builds_a_model_from_the_cache(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, "run", "demo", "--require-cached", "--length", "T=5", "--profile")
    assert result["compiled"] == 0 and result["fallback_steps"] == 0
    assert result["symbols"] == {"T": 5} and result["made_up"] == ["ids"]
    assert result["bucket"] == "2K" and result["latency_s"] > 0 and result["steps"]
    document = (ROOT / "docs/json.md").read_text()
    assert all(f"`{key}`" in document for key in result)


def test_inspect_of_a_real_plan(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = as_json(capsys, "inspect", plan, "passes")["passes"]
    matched = [match for record in passes for match in record["matches"]]
    assert any("demo.py:" in match["where"] for match in matched)
    (memory,) = as_json(capsys, "inspect", plan, "memory")["memory"]
    assert memory["lower_bound"] <= memory["arena_bytes"] <= 1.02 * memory["lower_bound"] + 64
    assert memory["arena_bytes"] < memory["naive_bytes"]
    kernels = as_json(capsys, "inspect", plan, "kernels")["kernels"]
    source = as_json(capsys, "inspect", plan, "--kernel", kernels[0]["symbol"])
    assert kernels[0]["symbol"] in source["source"]


@pytest.mark.heavy
def test_verify_and_bench(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "verify", "demo")["ok"] is True
    result = as_json(
        capsys, "bench", "demo", "--vs", "eager", "--rounds", "2", "--seconds", "0.02",
        "--length", "T=16",
    )  # fmt: skip
    runtimes = result["runtimes"]
    assert set(runtimes) == {"graphc", "eager"} and not result["skipped"]
    for item in runtimes.values():  # float32 against float64
        assert 0 < item["error"] < 1e-5 and item["cpu_s"] > 0 and item["samples"] >= 2


def test_generate_continues_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and tokens are two spellings of one prompt; the same seed says the same."""
    chat = tmp_path / "chat"
    build = ["build", "demo", "--generate", "--bucket", "512", "--batch", "2", "-o", str(chat)]
    assert main(build) == 0
    words = ["generate", chat, "--prompt", "import os\n", "--max-new-tokens", "12"]
    first = as_json(capsys, *words, "--temperature", "0.9", "--seed", "3")
    assert first["prompt"][:2] == [256, ord("i")] and len(first["tokens"]) <= 12
    assert first["text"].encode() == bytes(first["tokens"]) and first["decode_tokens_per_s"] > 0
    ids = ",".join(map(str, first["prompt"]))
    again = as_json(
        capsys, "generate", chat, "--ids", ids, "--max-new-tokens", "12", "--temperature", "0.9",
        "--seed", "3",
    )  # fmt: skip
    assert again["tokens"] == first["tokens"]
    greedy = as_json(capsys, *words)
    assert greedy["tokens"] == as_json(capsys, *words)["tokens"]
    assert main(["generate", str(chat)]) == 2
    assert "either --prompt or --ids" in capsys.readouterr().err
    document = (ROOT / "docs/json.md").read_text()
    assert all(f"`{key}`" in document for key in first)
