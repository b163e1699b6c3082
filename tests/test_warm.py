"""Warm builds: what is unchanged is neither captured nor compiled, what changed is."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from cache.store import Store
from graphc import api
from graphc.options import Options, decisive
from graphc.report import BuildReport
from graphc.runtime.session import load
from graphc.store import BUILDS, GRAPHS, OBSERVED
from graphc.warm.identity import CAPTURE_ROOMS, FileDigests, sources
from graphc.warm.watch import watching
from tests.test_layers import ALLOWED

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
MODEL = """
import os
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(np.load(HERE / "weight.npy")))
        self.scale = float(os.environ.get("AFFINE_SCALE", "1"))

    def forward(self, x):
        return torch.relu(x @ self.weight) * self.scale


def affine():
    return Affine(), (torch.zeros(3, 4),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A factory that reads a file and a variable, in a folder of its own; an empty cache."""
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(MODEL)
    np.save(tmp_path / "weight.npy", np.eye(4, dtype=np.float32))
    return f"{tmp_path / 'model.py'}:affine"


def stages(report: BuildReport) -> list[str]:
    return [stage.name for stage in report.stages]


def result(plan: Path, x: np.ndarray = X) -> np.ndarray:
    found: np.ndarray = load(plan).run(x)
    return np.asarray(found).reshape(len(x), -1)


def forget(bucket: str) -> None:
    """Removes the entries of one kind."""
    import shutil

    shutil.rmtree(Store().root / bucket)


def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: object, **kwargs: object) -> object:
        raise AssertionError("traced")

    monkeypatch.setattr(torch.export, "export", export)


def test_an_unchanged_model_is_neither_captured_nor_compiled(model: str, tmp_path: Path) -> None:
    first = api.build(model, tmp_path / "plan")
    assert "capture" in stages(first) and first.compile.compiled > 0
    again = api.build(model, tmp_path / "plan")
    assert stages(again) == ["unchanged"]
    assert again.compile.compiled == 0 and again.compile.hits == first.compile.units
    elsewhere = api.build(model, tmp_path / "deep" / "copy")
    assert stages(elsewhere) == ["unchanged"]
    np.testing.assert_array_equal(result(tmp_path / "deep" / "copy"), np.maximum(X, 0))


def test_a_new_process_imports_no_torch(model: str, tmp_path: Path) -> None:
    api.build(model, tmp_path / "plan")
    text = (
        "import sys\nfrom cli.main import main\n"
        f"code = main(['build', {model!r}, '-o', {str(tmp_path / 'plan')!r}, '--json'])\n"
        "print('torch' in sys.modules, 'sympy' in sys.modules, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    # the path of imports is part of what a model is made of
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", text], env=environment, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stderr.split() == ["False", "False"]
    assert [s["name"] for s in json.loads(done.stdout)["report"]["stages"]] == ["unchanged"]


def _new_weights(folder: Path, _: pytest.MonkeyPatch) -> np.ndarray:
    np.save(folder / "weight.npy", 2 * np.eye(4, dtype=np.float32))
    return np.maximum(2 * X, 0)


def _new_code(folder: Path, _: pytest.MonkeyPatch) -> np.ndarray:
    (folder / "model.py").write_text(MODEL.replace("relu", "tanh"))
    return np.tanh(X)


def _new_variable(_: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setenv("AFFINE_SCALE", "3")
    return 3 * np.maximum(X, 0)


@pytest.mark.parametrize("change", [_new_weights, _new_code, _new_variable])
def test_whatever_changes_is_captured_anew(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], np.ndarray],
) -> None:  # fmt: skip
    api.build(model, tmp_path / "plan")
    wanted = change(tmp_path, monkeypatch)
    assert "capture" in stages(api.build(model, tmp_path / "plan"))
    np.testing.assert_allclose(result(tmp_path / "plan"), wanted, rtol=1e-6)
    assert stages(api.build(model, tmp_path / "plan")) == ["unchanged"]


def test_other_options_share_the_captured_graph(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.build(model, tmp_path / "one")
    with monkeypatch.context() as patch:
        no_tracing(patch)
        other = api.build(model, tmp_path / "two", disable_pass=["activation"])
    assert "capture" in stages(other)
    np.testing.assert_array_equal(result(tmp_path / "two"), np.maximum(X, 0))
    # of the frontend: another graph
    assert "capture" in stages(api.build(model, tmp_path / "two", inputs=["x=f32[N,4]"]))
    np.testing.assert_array_equal(result(tmp_path / "two", X[:2]), np.maximum(X[:2], 0))


def test_a_kept_graph_gives_the_same_plan(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.build(model, tmp_path / "one", inputs=["x=f32[N,4]"])
    forget(BUILDS)
    no_tracing(monkeypatch)
    api.build(model, tmp_path / "two", inputs=["x=f32[N,4]"])
    for name in ("kernels.so", "weights.bin", "graph.txt", "work.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    plans = [json.loads((tmp_path / p / "plan.json").read_text())["payload"]["plan"]
             for p in ("one", "two")]  # fmt: skip
    for plan in plans:
        del plan["files"]  # of the report, which has times in it
    assert plans[0] == plans[1]


def test_fresh_captures_anew(model: str, tmp_path: Path) -> None:
    api.build(model, tmp_path / "plan")
    assert "capture" in stages(api.build(model, tmp_path / "plan", fresh=True))


@pytest.mark.parametrize("file", ["weights.bin", "kernels.so", "report.json", "plan.json"])
def test_a_damaged_plan_is_not_taken(model: str, tmp_path: Path, file: str) -> None:
    api.build(model, tmp_path / "plan")
    path = tmp_path / "plan" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "capture" in stages(api.build(model, tmp_path / "plan"))
    np.testing.assert_array_equal(result(tmp_path / "plan"), np.maximum(X, 0))


def test_a_plan_of_something_else_is_not_taken(model: str, tmp_path: Path) -> None:
    api.build(model, tmp_path / "plan")
    api.build(model, tmp_path / "plan", inputs=["x=f32[N,4]"])  # over it
    assert "capture" in stages(api.build(model, tmp_path / "plan"))
    np.testing.assert_array_equal(result(tmp_path / "plan"), np.maximum(X, 0))


UNKNOWN = {
    "opens a network connection": (
        "import socket\nwith socket.socket() as s:\n    s.connect_ex(('127.0.0.1', 1))\n"
    ),
    "runs another program": "import subprocess\nsubprocess.run(['true'])\n",
    "lists a folder": "HERE = Path(__file__).parent; list(HERE.iterdir())\n",
    "draws random numbers": "import random\nrandom.random()\n",
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_cannot_be_known_is_captured_each_time_and_said(
    model: str, tmp_path: Path, reason: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL + UNKNOWN[reason])
    report = api.build(model, tmp_path / "plan")
    assert any(reason in note and "captured anew" in note for note in report.notes)
    assert not any((Store().root / bucket).exists() for bucket in (OBSERVED, GRAPHS, BUILDS))


def test_onnx_files_and_their_external_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "scale.onnx"

    def save(factor: float) -> None:
        weight = onnx.numpy_helper.from_array(np.full((4, 4), factor, np.float32), "w")
        info = [onnx.helper.make_tensor_value_info(n, 1, [3, 4]) for n in "xy"]
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight]
        )
        made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
        onnx.save_model(made, path, save_as_external_data=True, location="w.bin", size_threshold=0)

    save(1.0)
    api.build(str(path), tmp_path / "plan")
    assert stages(api.build(str(path), tmp_path / "plan")) == ["unchanged"]
    before = path.read_bytes()
    (tmp_path / "w.bin").unlink()
    save(2.0)
    assert path.read_bytes() == before  # only the other file changed
    assert "capture" in stages(api.build(str(path), tmp_path / "plan"))
    np.testing.assert_allclose(result(tmp_path / "plan"), X @ np.full((4, 4), 2.0), rtol=1e-6)


def test_watching_tells_the_users_reads_from_those_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    kept, scratch = tmp_path / "kept.txt", tmp_path / "scratch.txt"
    kept.write_text("x")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    monkeypatch.setenv("USERS_OWN", "1")
    with watching() as watch:
        kept.read_text()
        scratch.write_text("mine")
        scratch.read_text()
        load_file(tmp_path / "a.safetensors")
        os.environ.get("USERS_OWN")
        os.environ.get("NOT_THERE")
        np.random.seed(0)
        np.random.rand()
        import colorsys  # noqa: F401 - a module that nothing else loads: Python lists folders
    assert not watch.unknown
    assert watch.read() == sorted([str(kept), str(tmp_path / "a.safetensors")])
    assert watch.environment == {"USERS_OWN": "1", "NOT_THERE": None}
    with watching() as watch:
        random.random()
    assert "random" in watch.unknown


def test_digests_are_remembered_only_while_a_file_stays(tmp_path: Path) -> None:
    file, memory = tmp_path / "large", tmp_path / "memory.json"
    file.write_bytes(bytes(2 << 20))
    os.utime(file, (1, 1))
    digests = FileDigests(memory)
    first = digests.of(file)
    digests.save()
    assert not memory.exists()  # changed a moment ago: it may change again within its clock's tick
    file.write_bytes(b"\1" * (2 << 20))
    os.utime(file, (1, 1))  # size and time as before
    assert FileDigests(memory).of(file) != first
    memory.write_bytes(b"no json")
    assert FileDigests(memory).of(file) == digests.of(file)


def test_every_option_of_a_build_is_decisive_or_known_not_to_be() -> None:
    from dataclasses import fields

    from graphc.options import NOT_DECISIVE

    assert {field.name for field in fields(Options)} >= NOT_DECISIVE
    assert set(decisive(Options())) == {
        *({field.name for field in fields(Options)} - NOT_DECISIVE), "shapes",
    }  # fmt: skip


def test_what_a_capture_depends_on_is_in_its_key() -> None:
    rooms = {room.removesuffix(".py").replace("/", ".") for room in CAPTURE_ROOMS}
    needed = {"graphc.frontends"}
    while more := {room for name in needed for room in ALLOWED.get(name, set())} - needed:
        needed |= more
    # the ground floor decides nothing
    assert needed - rooms <= {"graphc.cpu", "graphc.distinct", "graphc.errors", "graphc.files"}
    assert sources(CAPTURE_ROOMS) != sources(("graphc/ir",))
