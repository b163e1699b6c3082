"""Kernels and plans carried in one file: a cache's bundle on a machine without a compiler."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import graphc
from cache.bundle import export_bundle, import_bundle
from cache.store import Store
from cli.main import main
from graphc.api import Options, build_module
from graphc.errors import CompileError, DamagedError
from graphc.plan_bundle import extract, write_bundle
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


def build(module: torch.nn.Module, folder: Path) -> BuildReport:
    options = Options(jobs=1)
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
    assert import_bundle(Store(), bundle).entries == counts.entries
    module = Net()
    report = build(module, bare / "plan")
    assert (report.compile.compiled, report.compile.hits) == (0, report.compile.units)
    notes = [note for note in report.notes if "no C++ compiler" in note]
    assert len(notes) == 1 and report.compile.compiler in notes[0]
    right(module, bare / "plan")
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


# -- a plan in one file -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(filled: tuple[Path, Path]) -> Path:
    """The bundle of the first model's plan."""
    file = filled[1].parent / "net.graphc"
    assert main(["bundle", str(filled[1]), "-o", str(file)]) == 0
    return file


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_bundle_is_the_plan_and_always_the_same(
    filled: tuple[Path, Path], packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(filled[1], moved)
    again = tmp_path / "again.graphc"
    assert main(["bundle", str(moved), "-o", str(again), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert again.read_bytes() == packed.read_bytes()
    assert main(["bundle", "--extract", str(packed), "-o", str(tmp_path / "plan")]) == 0
    assert tree(tmp_path / "plan") == tree(filled[1])
    assert told["files"] == len(tree(filled[1]))
    assert told["nbytes"] == sum(map(len, tree(filled[1]).values()))
    assert main(["bundle", "--verify", str(packed)]) == 0
    right(Net(), tmp_path / "plan")


def test_a_bundle_runs_as_it_is(packed: Path, bare: Path) -> None:
    """Without a compiler, with an empty cache; unpacked once."""
    right(Net(), packed)
    (folder,) = (bare / "cache" / "plans-v1").iterdir()
    before = (folder / "kernels.so").stat().st_mtime_ns
    assert main(["run", str(packed), "--input", "x=ones:5x24"]) == 0
    assert main(["inspect", str(packed)]) == 0
    assert (folder / "kernels.so").stat().st_mtime_ns == before
    os.truncate(folder / "weights.bin", 10)  # what is not whole any more is unpacked again
    right(Net(), packed)
    assert [path.name for path in (bare / "cache" / "plans-v1").iterdir()] == [folder.name]


def test_a_bundle_runs_where_the_cache_cannot_be_written(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "file" / "below"))
    right(Net(), packed)


HARM: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "manifest": lambda data: data.replace(b'"graphc_plan"', b'"graphc_plum"', 1),
    "digest": lambda data: data.replace(b'"sha256": "', b'"sha256": "0', 1),
    "a kernel": lambda data: _flip(data, _place(data, "kernels.so") + 5000),
    "a weight": lambda data: _flip(data, _place(data, "weights.bin") + 100),
    "another name": lambda data: data.replace(b"graph.txt", b"gr/ph.txt"),
    "outside": lambda data: data.replace(b"graph.txt", b"../ph.txt"),
    "only the end": lambda data: data[:60] + data[-200:],
}


def _place(data: bytes, name: str) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.getinfo(name).header_offset


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("how", HARM)
def test_a_damaged_bundle_gives_nothing(
    how: str, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.graphc"
    data = HARM[how](packed.read_bytes())
    assert data != packed.read_bytes()
    bad.write_bytes(data)
    assert main(["bundle", "--extract", str(bad), "-o", str(tmp_path / "plan")]) == 7
    assert main(["bundle", "--verify", str(bad)]) == 7
    text = capsys.readouterr().err
    assert str(bad) in text and "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["bad.graphc"]


def rezipped(source: Path, target: Path, changes: dict[str, bytes]) -> None:
    """The same archive, sound in itself, with other or more files."""
    with zipfile.ZipFile(source) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(target, "w") as made:
        for name, data in {**files, **changes}.items():
            made.writestr(name, data)


def test_another_content_is_refused_by_its_digest(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name in ("kernels.so", "weights.bin", "graph.txt"):
        rezipped(packed, tmp_path / "bad", {name: _flip(files[name], len(files[name]) // 2)})
        with pytest.raises(DamagedError, match=f"SHA-256 of {name}"):
            extract(tmp_path / "bad", tmp_path / "plan")
        assert not (tmp_path / "plan").exists()


def test_a_file_that_the_manifest_does_not_list_is_refused(packed: Path, tmp_path: Path) -> None:
    for name in ("more.txt", "../outside", "/tmp/outside"):
        bad = tmp_path / "bad.graphc"
        rezipped(packed, bad, {name: b"x"})
        with pytest.raises(DamagedError):
            extract(bad, tmp_path / "plan")
    assert not (tmp_path.parent / "outside").exists()


def test_a_damaged_plan_is_not_bundled(filled: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(filled[1], tmp_path / "plan")
    path = tmp_path / "plan" / "weights.bin"
    path.write_bytes(_flip(path.read_bytes(), 7))
    with pytest.raises(DamagedError, match="SHA-256"):
        write_bundle(tmp_path / "plan", tmp_path / "out.graphc")
    path.unlink()
    with pytest.raises(DamagedError, match="cannot be read"):
        write_bundle(tmp_path / "plan", tmp_path / "out.graphc")
    assert not (tmp_path / "out.graphc").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing", "-o", "x"], "no plan found"),
        (["nothing"], "expected -o"),
        (["nothing", "--extract", "-o", "x"], "no such file"),
        (["nothing", "--extract", "--verify"], "found both"),
        (["nothing", "--verify", "-o", "x"], "no -o with --verify"),
        (["text", "--extract", "-o", "x"], "found another file"),
        (["text", "-o", "x"], "no plan found"),
        (["PACKED", "--extract", "-o", "full"], "found something there"),
        (["PACKED", "-o", "x"], "no plan found"),
        (["PLAN", "-o", "absent/x"], "cannot write the bundle"),
        (["PLAN", "-o", "full"], "found a folder"),
    ],
)
def test_what_cannot_be_bundled(
    arguments: list[str], told: str, filled: tuple[Path, Path], packed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text that is no bundle, and longer than a header")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    names = {"PACKED": str(packed), "PLAN": str(filled[1])}
    assert main(["bundle", *(names.get(word, word) for word in arguments)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
