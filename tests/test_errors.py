"""Bad input, one test a row of docs/errors.md (tests/test_docs.py checks the names)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cli.main import main
from graphc.cpu import architecture
from graphc.plan import Machine
from graphc.plan_io import read_plan
from graphc.plan_writer import write_plan

ROOT = Path(__file__).resolve().parents[1]
X86 = architecture() == "x86_64"

NET = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, ids):
        return torch.tanh(self.linear(self.embedding(ids)))


class Branch(Net):
    def forward(self, ids):
        if ids.sum() > 3:
            return super().forward(ids)
        return self.embedding(ids)


def example(module):
    length = torch.export.Dim("T", min=1, max=4096)
    return module, (torch.zeros(1, 4, dtype=torch.int64),), {}, {"ids": {1: length}}


def make():
    torch.manual_seed(0)
    return example(Net().eval())


def branch():
    return example(Branch().eval())


class Factor(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x)


def factor():
    return Factor(), (torch.eye(4),)


def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET)
    return f"{path}:make"


@pytest.fixture(scope="module")
def built(net: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for lengths up to 64; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("built") / "plan"
    assert main(["build", net, "-o", str(folder), "--bucket", "64"]) == 0
    return folder


def fails(capsys: pytest.CaptureFixture[str], code: int, *args: object) -> str:
    """Runs a command, checks its exit code, and gives what it said on stderr."""
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == code
    text = capsys.readouterr().err
    assert "Traceback" not in text and text.startswith("error: ")
    return text


def copy_of(plan: Path, folder: Path, **changes: Any) -> Path:
    """The same plan elsewhere, with other fields in its manifest."""
    made = read_plan(plan)
    files = {name: plan / name for name in made.files}
    write_plan(folder, msgspec.structs.replace(made, **changes), files)
    return folder


def small_onnx() -> Any:
    from onnx import TensorProto, helper

    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.5] * 16)
    return helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "small",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
            [weight],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )


# ---------------------------------------------------------------- the model


def test_unknown_model_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").touch()
    text = fails(capsys, 2, "build", tmp_path / "modle.onnx", "-o", tmp_path / "plan")
    assert "modle.onnx" in text and f"did you mean: {tmp_path}/model.onnx" in text
    assert "package.absent" in fails(capsys, 2, "build", "package.absent:make")


def test_corrupt_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corrupt.onnx"
    data = small_onnx().SerializeToString()
    for damaged in (data[: len(data) // 2], b"<html>not found</html>", b""):
        path.write_bytes(damaged)
        assert "corrupt.onnx" in fails(capsys, 2, "build", path, "-o", tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_onnx_external_data_outside_the_models_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnx import TensorProto

    (tmp_path / "secret.bin").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin"):
        model = small_onnx()
        weight = model.graph.initializer[0]
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        (folder / "escape.onnx").write_bytes(model.SerializeToString())
        text = fails(capsys, 2, "build", folder / "escape.onnx", "-o", tmp_path / "plan")
        assert location in text


def test_missing_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    text = fails(capsys, 2, "build", folder, "-o", tmp_path / "plan")
    assert "config.json" in text
    (folder / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, '
        '"vocab_size": 32}'
    )
    text = fails(capsys, 2, "build", folder, "-o", tmp_path / "plan")
    assert "safetensors" in text


def test_factory_raises(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net.partition(":")[0]
    text = fails(capsys, 3, "build", f"{path}:broken", "-o", tmp_path / "plan")
    assert f"net.py:{line_of('raise KeyError')}" in text and "no such layer" in text
    text = fails(capsys, 3, "build", f"{path}:branch", "-o", tmp_path / "plan")
    assert f"net.py:{line_of('if ids.sum()')}" in text
    text = fails(capsys, 2, "build", f"{path}:mak", "-o", tmp_path / "plan")
    assert "make" in text


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(NET.splitlines(), 1) if text in line)


# ---------------------------------------------------------------- the inputs


def test_wrong_dtype(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "float.npy", np.zeros((1, 4), np.float32))
    text = fails(capsys, 8, "run", built, "--input", f"ids=@{tmp_path}/float.npy")
    assert "ids" in text and "int64" in text and "float32" in text


def test_wrong_rank(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, 8, "run", built, "--input", "ids=zeros:4")
    assert "expected ids of 2 dimensions" in text


def test_wrong_fixed_length(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, 8, "run", built, "--input", "ids=zeros:3x4")
    assert "ids" in text and "3" in text


def test_length_above_the_largest_bucket(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(built), "--input", "ids=zeros:1x64", "--iters", "0"]) == 0
    text = fails(capsys, 8, "run", built, "--input", "ids=zeros:1x65")
    assert "64" in text and "graphc build" in text and "--bucket" in text


def test_index_out_of_range(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a crash and not silent garbage."""
    text = fails(capsys, 8, "run", built, "--input", "ids=randint:16:17:1x4")
    assert "'ids'" in text and "expected values from 0 to 15" in text and "found 16" in text
    text = fails(capsys, 8, "run", built, "--input", "ids=randint:-1:0:1x4")
    assert "found -1 at [0, 0]" in text and f"net.py:{line_of('return torch.tanh')}" in text


def test_values_an_operator_rejects(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator that runs through torch and raises for some values, as in eager torch."""
    path = net.partition(":")[0]
    assert main(["build", f"{path}:factor", "-o", str(tmp_path / "plan")]) == 0
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    run = ["run", str(tmp_path / "plan"), "--iters", "0", "--input"]
    assert main([*run, f"x=@{tmp_path}/x.npy"]) == 0
    text = fails(capsys, 8, *run, "x=zeros:4x4")
    assert "aten.linalg_cholesky" in text and "positive-definite" in text


def test_expectation_not_met(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", str(built), "--input", "ids=zeros:1x4", "--iters", "0"]
    saved = tmp_path / "out.npz"
    assert main([*run, "--save", str(saved)]) == 0
    assert main([*run, "--expect", str(saved)]) == 0
    arrays = {name: array + 1 for name, array in np.load(saved).items()}
    np.savez(tmp_path / "other.npz", **arrays)
    assert "max abs 1" in fails(capsys, 5, *run, "--expect", tmp_path / "other.npz")


# ---------------------------------------------------------------- the plan


def test_damaged_plan(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = copy_of(built, tmp_path / "plan")
    library = plan / "kernels.so"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    assert "kernels.so" in fails(capsys, 7, "run", plan)
    plan = copy_of(built, tmp_path / "other")
    (plan / "weights.bin").unlink()
    assert "weights.bin" in fails(capsys, 7, "run", plan)
    manifest = plan / "plan.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert "plan.json" in fails(capsys, 7, "inspect", plan)
    assert "plan" in fails(capsys, 2, "inspect", tmp_path / "nothing")


def test_damaged_bundle(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "model.graphc", tmp_path / "plan"
    assert main(["bundle", str(built), "-o", str(file)]) == 0
    with zipfile.ZipFile(file) as archive:
        place = archive.getinfo("weights.bin").header_offset
    data = bytearray(file.read_bytes())
    data[place + 100] ^= 1
    file.write_bytes(data)
    text = fails(capsys, 7, "bundle", "--extract", file, "-o", plan)
    assert "weights.bin" in text and str(file) in text and not plan.exists()


def test_plan_of_another_machine(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine("riscv64", [], "portable")
    plan = copy_of(built, tmp_path / "plan", machine=machine)
    assert "riscv64" in fails(capsys, 6, "run", plan)
    here = read_plan(built).machine
    machine = msgspec.structs.replace(here, features=[*here.features, "avx1024"])
    plan = copy_of(built, tmp_path / "other", machine=machine)
    assert "avx1024" in fails(capsys, 6, "run", plan)
    assert main(["inspect", str(plan)]) == 0


def test_unknown_target(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = "host, x86-64-v4, x86-64-v3, x86-64-v2, portable" if X86 else "host, portable"
    for words in ("avx2", "portable,avx2", "x86-64-v9", "host,"):
        text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", "--target", words)
        assert f"expected a target out of {known}, found '{words.rpartition(',')[2]}'" in text
    assert not (tmp_path / "plan").exists()


@pytest.mark.skipif(not X86, reason="targets of x86-64")
def test_tuning_for_a_cpu_above_this_one(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CPU", "portable")
    target = ("--target", "portable,x86-64-v4", "--tune")
    for more in ((), ("--generate",)):
        text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", *target, *more)
        assert "runs here with --tune" in text and "found 'x86-64-v4'" in text
        assert "lacks" in text and "avx512f" in text and "leave out --tune" in text


def test_malformed_graphc_cpu(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CPU", "x86-64-v9")
    text = fails(capsys, 2, "run", built)
    assert "environment variable GRAPHC_CPU" in text and "found 'x86-64-v9'" in text
    assert "levels: host, x86-64-v4" in text and "avx512_bf16" in text


# ---------------------------------------------------------------- the surroundings


def graphc(code: str, *args: object, **environ: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, after running `code` in it."""
    # a shell's background job (`make test &`) ignores Ctrl-C, and so would its children
    heed = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heed}\n{code}\nfrom cli.main import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
    )


def test_no_compiler(net: str, tmp_path: Path) -> None:
    hide = "import graphc.toolchain.compiler as c; c._zig_command = lambda: None"
    process = graphc(
        hide, "build", net, "-o", tmp_path / "plan", PATH="/nonexistent", CXX="",
        GRAPHC_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    _, text = process.communicate(timeout=120)
    assert process.returncode == 4, text
    assert "g++" in text and "graphc[toolchain]" in text and "Traceback" not in text
    assert not (tmp_path / "plan").exists()


def test_no_compiler_and_a_kernel_that_the_cache_lacks(
    net: str,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("graphc.toolchain.compiler._zig_command", lambda: None)
    plan = tmp_path / "plan"
    assert main(["build", net, "-o", str(plan), "--bucket", "64"]) == 0
    text = fails(capsys, 4, "build", net, "-o", plan, "--bucket", "64", "--dtype", "bfloat16")
    for part in ("g++: not found", "the cache lacks", "nearest", "graphc cache import"):
        assert part in text


def test_full_disk(
    net: str,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = copy_of(built, tmp_path / "out" / "plan")
    before = {path: path.stat().st_mtime_ns for path in plan.rglob("*")}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.is_relative_to(tmp_path / "out"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    text = fails(capsys, 2, "build", net, "-o", plan, "--bucket", "64", "--fresh")
    assert "No space left on device" in text and str(tmp_path) in text
    assert {path: path.stat().st_mtime_ns for path in plan.rglob("*")} == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan"]


def test_read_only_cache(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", "/proc/graphc")  # not even root can make it
    assert main(["build", net, "-o", str(tmp_path / "plan"), "--bucket", "64"]) == 0
    assert "/proc/graphc" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "plan"), "--input", "ids=zeros:1x4"]) == 0


def test_required_kernels_not_cached(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "empty"))
    fails(capsys, 9, "build", net, "-o", tmp_path / "plan", "--require-cached")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_ctrl_c_during_a_build(net: str, tmp_path: Path, number: signal.Signals) -> None:
    """With a compiler that never ends, so that the signal always meets a build at work."""
    compiler = tmp_path / "slow-g++"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) touch {tmp_path}/started; sleep 100;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    process = graphc(
        "", "build", net, "-o", out / "plan", CXX=str(compiler),
        GRAPHC_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline and process.poll() is None, process.stderr
        time.sleep(0.05)
    process.send_signal(number)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert "interrupted" in text and "Traceback" not in text
    assert list(out.iterdir()) == []


# ---------------------------------------------------------------- the configuration


def test_unknown_pass(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graphc import api

    name = str(api.passes()[0][0])
    wrong = name[:-1] + "x"
    for option in (["--disable-pass", wrong], ["--pass", wrong + "{a=1}"]):
        text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", *option)
        assert wrong in text and f"did you mean {name}?" in text
    text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", "--pass", name + "{nothing=1}")
    assert "nothing" in text


def test_malformed_shapes_file(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text((ROOT / "shapes.yaml").read_text().replace("max: 64,", "max: many,", 1))
    text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", "--shapes", path)
    assert "bad.yaml:13:20: expected a maximum of at least 1, found 'many'" in text


def test_protected_role_narrowed(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(net.partition(":")[0])
    line = path.read_text().count("\n") + 4
    path.write_text(
        path.read_text() + "\n\nclass Narrowed(Net):\n    def forward(self, ids):\n"
        "        x = self.embedding(ids).to(torch.float8_e4m3fn)\n"
        "        return self.linear(x.float())\n\n\n"
        "def narrowed():\n    return example(Narrowed().eval())\n"
    )
    text = fails(capsys, 10, "build", f"{path}:narrowed", "-o", tmp_path / "plan")
    assert "expected projections kept as it is" in text and "found e4m3" in text
    assert "aten._to_copy.default narrows what" in text and "aten.linear.default reads" in text
    assert f"{path.name}:{line + 1}" in text and "--precision projections=fp8" in text
    assert not (tmp_path / "plan").exists()


def test_malformed_precision_policy(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text((ROOT / "shapes.yaml").read_text().replace("cache: fp8", "cache: fp9"))
    text = fails(capsys, 2, "build", net, "-o", tmp_path / "plan", "--shapes", path)
    assert "bad.yaml:50:10: expected keep or one of" in text and "found 'fp9'" in text
