"""Kernels and plans carried in one file: a cache's bundle on a machine without a compiler."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import graphc
from cache.bundle import export_bundle, import_bundle
from cache.store import Store
from cli.main import main
from graphc.api import Options, build_module
from graphc.errors import CacheMissError, CompileError
from graphc.report import BuildReport
from graphc.store import KERNELS, LINKS
from graphc.toolchain import compiler as compiler_module
from graphc.toolchain.recorded import recorded


class Net(torch.nn.Module):
    """A few kernels of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(24, 40), torch.nn.Linear(40, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.nn.functional.gelu(self.first(x))), -1)


class Wider(Net):
    """One kernel more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).cumsum(-1)


def build(module: torch.nn.Module, folder: Path, require_cached: bool = False) -> BuildReport:
    options = Options(jobs=1, require_cached=require_cached)
    return build_module(module, (torch.ones(5, 24),), output=folder, options=options)[0]


def right(module: torch.nn.Module, plan: Path) -> None:
    x = torch.randn(5, 24)
    with torch.no_grad():
        expected = module(x).numpy()
    np.testing.assert_allclose(graphc.load(plan).run(x.numpy()), expected, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A cache with the kernels of two models, and the plan of the first."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHC_CACHE_DIR", str(folder / "cache"))
        build(Net(), folder / "plan")
        build(Wider(), folder / "wider")
        yield folder / "cache", folder / "plan"


def without_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    empty = folder / "bin"
    empty.mkdir()
    patch.delenv("CXX", raising=False)
    patch.setenv("PATH", str(empty))
    patch.setattr(compiler_module, "_zig_command", lambda: None)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler and with an empty cache."""
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    without_compiler(monkeypatch, tmp_path)
    return tmp_path


# -- kernels ----------------------------------------------------------------------------------


def test_import_and_build_without_a_compiler(filled: tuple[Path, Path], bare: Path) -> None:
    bundle = bare / "kernels.zip"
    counts = export_bundle(Store(filled[0]), bundle)
    with pytest.raises(CompileError, match=r"no C\+\+ compiler found; tried g\+\+: not found"):
        build(Net(), bare / "plan")
    assert import_bundle(Store(), bundle).entries == counts.entries
    module = Net()
    report = build(module, bare / "plan")
    assert (report.compile.compiled, report.compile.hits) == (0, report.compile.units)
    notes = [note for note in report.notes if "no C++ compiler" in note]
    assert len(notes) == 1 and report.compile.compiler in notes[0]
    right(module, bare / "plan")
    assert build(Wider(), bare / "wider", require_cached=True).compile.compiled == 0
    assert main(["doctor"]) == 0


def test_a_plan_s_kernels_alone(filled: tuple[Path, Path], bare: Path) -> None:
    cache, plan = filled
    os.environ["GRAPHC_CACHE_DIR"], bundle = str(cache), bare / "kernels.zip"
    assert main(["cache", "export", str(bundle), "--plan", str(plan), "--json"]) == 0
    os.environ["GRAPHC_CACHE_DIR"] = str(bare / "cache")
    assert main(["cache", "import", str(bundle)]) == 0
    module = Net()
    assert build(module, bare / "plan").compile.compiled == 0
    right(module, bare / "plan")
    made = json.loads((plan / "report.json").read_bytes())["compile"]["keys"]
    found = [f"{b}/{p.name}" for b in (KERNELS, LINKS) for p in Store().root.glob(f"{b}/*/*")]
    assert sorted(found) == sorted(made)
    with pytest.raises(CompileError) as caught:
        build(Wider(), bare / "wider")
    message = caught.value.message()
    assert caught.value.exit_code == 4
    for part in ("no C++ compiler found", "the cache lacks 1 of", ": nearest ", "cache import"):
        assert part in message
    with pytest.raises(CacheMissError):
        build(Wider(), bare / "wider", require_cached=True)


def test_a_library_that_is_not_there(filled: tuple[Path, Path], bare: Path) -> None:
    """All kernels of the smaller model, and another model's library."""
    shutil.copytree(filled[0], bare / "cache")
    keys = json.loads((filled[1] / "report.json").read_bytes())["compile"]["keys"]
    digest = next(key for key in keys if key.startswith(LINKS)).partition("/")[2]
    shutil.rmtree(bare / "cache" / LINKS / digest[:2] / digest)
    with pytest.raises(CompileError, match="the cache lacks the library of these"):
        build(Net(), bare / "plan")
    assert not (bare / "plan").exists()


def test_what_the_plan_needs_must_be_there(filled: tuple[Path, Path], bare: Path) -> None:
    assert main(["cache", "export", str(bare / "k.zip"), "--plan", str(filled[1])]) == 2
    assert not (bare / "k.zip").exists()


@pytest.mark.parametrize(
    ("identity", "major"),
    [
        ("gcc 12.2.0 (Debian 12.2.0-14+deb12u1)", 12),
        ("clang Debian clang version 14.0.6", 14),
        ("zig 0.13.0 clang version 18.1.6", 18),
    ],
)
def test_a_recorded_compiler_gives_the_same_keys(identity: str, major: int) -> None:
    found = recorded(identity, "x86_64-linux-gnu")
    assert found is not None and found.command == ()
    assert (found.identity, found.major, found.target) == (identity, major, "x86_64-linux-gnu")


def test_an_unknown_compiler_is_passed_over() -> None:
    assert recorded("tcc 0.9", "x") is None and recorded("gcc trunk", "x") is None
