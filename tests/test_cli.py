"""The command line without a build: help, exit codes, inputs, views of a plan."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest
from msgspec.structs import replace

from cli.compare import check, compare, read_expected, save
from cli.inputs import evaluate, flatten, make_inputs
from cli.main import COMMANDS, main
from cli.options import check_model
from cli.render import duration, lifetime_chart, places_text, range_text, size
from cli.verify import failing
from graphc.errors import (
    CacheMissError,
    CaptureError,
    CompileError,
    DamagedError,
    GraphcError,
    InputRejectedError,
    InternalError,
    NumericsError,
    PlanMismatchError,
    PrecisionError,
    UsageError,
)
from graphc.ir.types import UNBOUNDED
from graphc.plan import (
    ABI_VERSION,
    FORMAT_VERSION,
    Kernel,
    Machine,
    Output,
    Plan,
    Program,
    Step,
    Symbol,
    Tensor,
)
from graphc.plan_writer import write_plan
from graphc.report import (
    BisectRecord,
    BucketRecord,
    BuildReport,
    CompileRecord,
    FallbackRecord,
    Interval,
    KernelRecord,
    LayerRecord,
    Match,
    MemoryRecord,
    PassRecord,
    Refusal,
    StageRecord,
    SymbolRecord,
    TargetRecord,
)

ROOT = Path(__file__).resolve().parents[1]

MEMORY = MemoryRecord(
    "prefill",
    "2K",
    3072,
    3072,
    5120,
    4,
    [
        Interval("a", 0, 1, 0, 2048),
        Interval("b", 1, 2, 2048, 1024),
        Interval("c", 2, 3, 0, 2048),
    ],
)

REPORT = BuildReport(
    model="demo",
    source="python",
    version="0.1.0",
    symbols=[SymbolRecord("T", 1, 2048)],
    stages=[StageRecord("capture", 1.0), StageRecord("compile", 0.5)],
    passes=[
        PassRecord(
            "fuse-norm",
            "prefill",
            0.01,
            12,
            9,
            matches=[Match("layer_norm", "%3", "model.py:7"), Match("layer_norm", "%9")],
            refusals=[Refusal("rms_norm", "%11", "epsilon is no number", "model.py:9")],
            launches_removed=3,
            bytes_removed=4096,
        )
    ],
    buckets=[BucketRecord("prefill", "2K", {"T": 2048}, 4, 3, 1)],
    memory=[MEMORY],
    kernels=[KernelRecord("k0", "sources/k0.cpp", 3, True, "linear", ["%4"], ["model.py:8"])],
    fallbacks=[FallbackRecord("aten.nonzero.default", "%5", "its size depends on data")],
    compile=CompileRecord(3, 1, 2, 0.5, "g++ 12", "avx2"),
    layers=[LayerRecord("Attn", "prefill", "2K", 2, 40, 3, 4096, 512, 1024, 256)],
    targets=[TargetRecord("host", "avx2", ["avx2"], 3, 1, 2, 0.5, 0, 0)],
)


def plan() -> Plan:
    """x: float32 [1, T, 4], n: int64 [T + 1], flag: bool [] -> y."""
    program = Program(
        phase="prefill",
        bucket="2K",
        limits={"T": 2048},
        expressions=[[1], ["s0"], [4], ["s0", 1, "+"], [0]],
        input_shapes=[[0, 1, 2], [3], []],
        output_shapes=[[0, 1, 2]],
        guards=[],
        buffers=[],
        steps=[Step(kernel=Kernel("k0", [], [], 1, 1, 4, [], [], "linear", "sources/k0.cpp"))],
        arena_bytes=3072,
        lower_bound=3072,
        naive_bytes=5120,
    )
    return Plan(
        format=FORMAT_VERSION,
        abi=ABI_VERSION,
        version="0.1.0",
        model="demo",
        machine=Machine("x86_64", [], "portable"),
        symbols=[Symbol("T", 1, 2048, 0, 1)],
        inputs=[
            Tensor("x", "float32", [0, 1, 2], ["1", "T", "4"]),
            Tensor("n", "int64", [3], ["T + 1"]),
            Tensor("flag", "bool", [], []),
        ],
        outputs=[Output(Tensor("y", "float32", [0, 1, 2], ["1", "T", "4"]), "buffer", 0)],
        arguments={"tuple": [{"leaf": 0}, {"leaf": 1}, {"leaf": 2}]},
        keywords={"dict": []},
        results={"tuple": [{"leaf": 0}, None]},
        mutated_inputs=[],
        states=[],
        weights=[],
        programs=[program],
        files={},
        uses_torch=False,
        positional_names=["x", "n", "flag"],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "plan"
    write_plan(
        path,
        plan(),
        {
            "kernels.so": b"not loaded by inspect",
            "weights.bin": b"",
            "report.json": REPORT.to_json(),
            "graph.txt": "%0: f32[1,T,4] = input x\n",
            "sources/k0.cpp": "void k0() {}\n",
        },
    )
    return path


# ---------------------------------------------------------------- the group


def run_process(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
        timeout=120,
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"graphc {name}" in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from cli.main import main, COMMANDS\n"
        "for name in COMMANDS: main([name, '--help'])\n"
        "bad = {'torch', 'sympy', 'onnx', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = run_process("-c", code)
    assert done.returncode == 0, done.stderr


def test_python_m_graphc_from_another_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphc", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and "Commands:" in done.stdout


def test_unknown_command_offers_a_close_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["biuld"]) == 2
    assert "Did you mean 'build'?" in capsys.readouterr().err


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("broken"), 1),
        (UsageError("x"), 2),
        (CaptureError("x"), 3),
        (CompileError("x"), 4),
        (NumericsError("x"), 5),
        (PlanMismatchError("x"), 6),
        (DamagedError("x"), 7),
        (InputRejectedError("x"), 8),
        (CacheMissError("x"), 9),
        (PrecisionError("x"), 10),
        (RuntimeError("unforeseen"), 1),
        (KeyboardInterrupt(), 130),
        (click.UsageError("x"), 2),
        (click.FileError("x"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "plan/weights.bin"), 2),
        (OSError(errno.EROFS, "Read-only file system", "plan"), 2),
        (OSError(errno.EIO, "Input/output error"), 1),
        (MemoryError(), 2),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    @click.command()
    def build() -> None:
        raise error

    monkeypatch.setattr("cli.build.build", build)
    assert main(["build"]) == code
    text = capsys.readouterr().err
    assert "Traceback" not in text
    if isinstance(error, GraphcError):
        assert error.what in text
    if code == 1:
        assert "this is a bug in graphc" in text
    if isinstance(error, RuntimeError):
        written = list(tmp_path.glob("graphc-traceback-*.txt"))
        assert len(written) == 1 and "unforeseen" in written[0].read_text()


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def build() -> None:
        raise UsageError("wrong")

    monkeypatch.setattr("cli.build.build", build)
    assert main(["--debug", "build"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_closed_pipe_is_silent(folder: Path) -> None:
    command = f"{sys.executable} -m graphc inspect {folder} graph; echo code=$?"
    done = subprocess.run(
        ["bash", "-c", f"({command} >&3) 3>&1 | true"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


# ---------------------------------------------------------------- MODEL


@pytest.mark.parametrize("model", ["demo", "torch.nn:Identity", "package.module:factory"])
def test_model_forms_without_a_file(model: str) -> None:
    check_model(model)


def test_model_forms_with_a_file(tmp_path: Path) -> None:
    for name in ("net.onnx", "net.pt2", "net.py"):
        (tmp_path / name).touch()
    check_model(str(tmp_path / "net.onnx"))
    check_model(str(tmp_path / "net.pt2"))
    check_model(f"{tmp_path}/net.py:make")
    check_model(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        check_model(str(tmp_path / "net.py"))
    assert "net.py:FACTORY" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        check_model(str(tmp_path / "nt.onnx"))
    assert str(tmp_path / "net.onnx") in caught.value.hint
    with pytest.raises(UsageError):
        check_model(f"{tmp_path}/absent.py:make")
    with pytest.raises(UsageError):
        check_model("dmo")


# ---------------------------------------------------------------- inputs


def test_expressions() -> None:
    cases: list[tuple[list[int | str], int]] = [
        (["s0", 1, "+"], 8),
        (["s0", 2, "//", "neg"], -3),
        ([-7, 2, "//"], -4),
        ([-7, 2, "%"], 1),
        (["s0", "s1", "max"], 9),
        (["s0", 7, "==", 10, 20, "select"], 10),
        (["s0", 3, "<", "not", "s1", 9, "<=", "and"], 1),
        ([2, "s0", "pow", "abs"], 128),
    ]
    for expression, value in cases:
        assert evaluate(expression, [7, 9]) == value


def made(*given: str, lengths: tuple[str, ...] = ()) -> tuple[list[np.ndarray], dict[str, int]]:
    arrays, symbols, _ = make_inputs(plan(), given, lengths, None)
    return arrays, symbols


def test_made_up_inputs_have_the_default_length() -> None:
    arrays, symbols, names = make_inputs(plan(), (), (), None)
    assert symbols == {"T": 128} and names == ["x", "n", "flag"]
    assert [a.shape for a in arrays] == [(1, 128, 4), (129,), ()]
    assert [a.dtype.name for a in arrays] == ["float32", "int64", "bool"]
    again, _, _ = make_inputs(plan(), (), (), None)
    assert np.array_equal(arrays[0], again[0])


def test_given_inputs_bind_symbols(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.full((1, 7, 4), 2, np.float32))
    arrays, symbols = made(f"x=@{path}", "n=randint:5:6", "flag=true")
    assert symbols == {"T": 7}
    assert arrays[0][0, 0, 0] == 2
    assert np.array_equal(arrays[1], np.full(8, 5))
    assert arrays[2] == np.bool_(True)
    np.savez(tmp_path / "all.npz", a=arrays[0], b=arrays[1])
    assert np.array_equal(made(f"n=@{tmp_path}/all.npz:b")[0][1], arrays[1])
    arrays, symbols = made("x=zeros:1x9x4")
    assert symbols == {"T": 9} and not arrays[0].any()
    assert made(lengths=("T=3",))[0][1].shape == (4,)


def test_large_integers_are_exact() -> None:
    one = Tensor("n", "int64", [], [])
    small = replace(
        plan(),
        inputs=[one],
        programs=[replace(plan().programs[0], input_shapes=[[]])],
    )
    arrays, _, _ = make_inputs(small, (f"n={2**62 + 1}",), (), None)
    assert int(arrays[0]) == 2**62 + 1


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("y=3", UsageError, "expected an input of the plan, found 'y'"),
        ("x", UsageError, "expected --input NAME=VALUE"),
        ("x=@missing.npy", UsageError, "No such file"),
        ("x=random:1xTx4", UsageError, "expected an integer, found 'T'"),
        ("x=hello", UsageError, "expected a value for x"),
        ("n=random:4", UsageError, "expected randint:LO:HI for int64"),
        ("n=randint:5:5", UsageError, "LO below HI"),
        ("n=1.5", UsageError, "expected a int64"),
        ("x=random:1x4", InputRejectedError, "expected x of 3 dimensions"),
    ],
)
def test_bad_inputs(given: str, error: type[GraphcError], text: str) -> None:
    with pytest.raises(error, match=text):
        made(given)


def test_input_twice() -> None:
    with pytest.raises(UsageError, match="once"):
        made("x=random", "x=zeros")


def test_never_unpickles(tmp_path: Path) -> None:
    path = tmp_path / "evil.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="expected a .npy or .npz"):
        made(f"x=@{path}")


def test_results_by_output() -> None:
    tree = {"tuple": [{"leaf": 1}, None, {"dict": [["a", {"leaf": 0}]]}, {"const": 3}]}
    assert flatten(tree, ("one", None, {"a": "zero"}, 3)) == {1: "one", 0: "zero"}


# ---------------------------------------------------------------- --expect


def test_compare_by_dtype() -> None:
    x = np.linspace(0, 1, 5, dtype=np.float32)
    assert compare({"y": x}, {"y": x + 1e-6}, None, None)[0].ok
    assert not compare({"y": x}, {"y": x + 1e-3}, None, None)[0].ok
    assert compare({"y": x}, {"y": x + 1e-3}, None, 1e-2)[0].ok
    i = np.arange(3)
    assert not compare({"y": i}, {"y": i + 1}, None, None)[0].ok
    special = np.array([np.nan, np.inf, -np.inf])
    assert compare({"y": special}, {"y": special}, None, None)[0].ok
    assert not compare({"y": special}, {"y": np.zeros(3)}, None, None)[0].ok
    assert not compare({"y": np.zeros(3)}, {"y": special}, None, None)[0].ok
    found = compare({"y": x}, {"y": x[:3]}, None, None)
    with pytest.raises(NumericsError, match=r"expected y of shape \[3\], found \[5\]"):
        check(found, "ref.npz")


def test_expected_by_name_or_order(tmp_path: Path) -> None:
    path = tmp_path / "ref.npz"
    save(path, {"y": np.ones(2), "z": np.zeros(2)})
    assert set(read_expected(path, ["y", "z", "w"])) == {"y", "z"}
    assert list(read_expected(path, ["a", "b"])) == ["a", "b"]
    with pytest.raises(UsageError, match="expected references for a"):
        read_expected(path, ["a"])
    path.write_bytes(b"no zip")
    with pytest.raises(UsageError, match="expected a"):
        read_expected(path, ["a"])


# ---------------------------------------------------------------- verify, views


def test_failing_pass_is_found() -> None:
    good = PassRecord("a", "p", 0, 1, 1, max_abs=1e-7, max_rel=1e-3)
    bad = PassRecord("b", "p", 0, 1, 1, max_abs=1.0, max_rel=0.1)
    nan = PassRecord("c", "p", 0, 1, 1, max_abs=float("nan"), max_rel=float("nan"))
    unverified = PassRecord("d", "p", 0, 1, 1)
    assert failing([good, unverified], 1e-4, 1e-5) is None
    assert failing([good, bad], 1e-4, 1e-5) is bad
    assert failing([nan], 1e-4, 1e-5) is nan


def test_report_survives_json() -> None:
    assert BuildReport.from_json(REPORT.to_json()) == REPORT
    with pytest.raises(DamagedError):
        BuildReport.from_json(b'{"model": 3}')


def test_lifetime_chart() -> None:
    lines = [line.strip() for line in lifetime_chart(MEMORY)]
    assert lines == [
        "in use    3.0 KiB |▆██▆|",
        "a    2.0 KiB |██  |",
        "c    2.0 KiB |  ██|",
        "b    1.0 KiB | ██ |",
        "step             0  3",
    ]


def test_sizes_and_times() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 20)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB"]
    assert [duration(t) for t in (1.2e-5, 0.0123, 1.5)] == ["12 µs", "12.3 ms", "1.50 s"]


def test_places_and_ranges() -> None:
    assert places_text([]) == ""
    assert places_text(["a:1", "b:2", "a:1"]) == "a:1 (2 times), b:2"
    assert places_text([f"a:{line}" for line in range(5)]) == "a:0, a:1, a:2, and 2 more"
    assert range_text(1, 2048) == "1 to 2048" and range_text(2, UNBOUNDED) == "2 and above"


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("summary", ["demo", "T: 1 to 2048", "x: float32[1, T, 4]", "T <= 2048", "aten.nonzero"]),
        ("passes", ["fuse-norm", "12 -> 9", "model.py:7", "epsilon is no number", "model.py:9"]),
        ("fusion", ["fuse-norm", "2 layer_norm", "epsilon is no number", "Attn", "40 -> 3"]),
        ("graph", ["%0: f32[1,T,4] = input x"]),
        ("memory", ["arena", "lower bound", "no reuse", "5.0 KiB", "█"]),
        ("kernels", ["k0", "linear", "model.py:8"]),
        ("buckets", ["prefill", "2K", "T <= 2048"]),
        ("fallbacks", ["aten.nonzero.default", "its size depends on data"]),
    ],
)
def test_inspect_views(
    folder: Path, view: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder), view]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words), text
    assert main(["inspect", str(folder), view, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_inspect_shows_a_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--kernel", "k0"]) == 0
    assert capsys.readouterr().out == "void k0() {}\n"
    assert main(["inspect", str(folder), "--kernel", "k"]) == 0  # no other begins so
    assert capsys.readouterr().out == "void k0() {}\n"
    assert main(["inspect", str(folder), "--kernel", "k0.cp"]) == 2
    assert "did you mean: k0" in capsys.readouterr().err


# ---------------------------------------------------------------- the calls of the library


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for graphc.api: records each call; `build` gives `REPORT`."""
    made: list[dict[str, Any]] = []

    def build(model: str, output: Path, **options: Any) -> BuildReport:
        made.append({"model": model, "output": output, **options})
        return REPORT

    def bisect(model: str, **options: Any) -> BisectRecord:
        made.append({"model": model, **options})
        return BisectRecord("fuse-norm", "%3", "model.py:7", "y", 0.5, 0.1, 1.0, 1.5)

    api = ModuleType("graphc.api")
    api.__dict__.update(build=build, bisect=bisect)
    monkeypatch.setitem(sys.modules, "graphc.api", api)
    monkeypatch.setattr("graphc.api", api, raising=False)
    return made


def test_build_passes_its_options_on(
    calls: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "build demo -o out --input x=f32[1,T,4] --dynamic T=1:9 --bucket 2K --bucket 64"
        " --phase prefill --dtype bfloat16 --shapes s.yaml --disable-pass a --pass b{k=v}"
        " --verify --dump-passes dump --require-cached --jobs 3 --target x86-64-v3 --tune"
        " --quant index=mxfp8 --precision cache=keep --fresh"
    )
    assert main(arguments.split()) == 0
    assert calls == [
        {
            "model": "demo",
            "output": Path("out"),
            "inputs": ["x=f32[1,T,4]"],
            "dynamic": ["T=1:9"],
            "buckets": ["2K", "64"],
            "phase": "prefill",
            "dtype": "bfloat16",
            "shapes": Path("s.yaml"),
            "disable_pass": ["a"],
            "pass_options": ["b{k=v}"],
            "quant": ("index=mxfp8",),
            "precision": "cache=keep",
            "verify": True,
            "dump_passes": Path("dump"),
            "require_cached": True,
            "jobs": 3,
            "target": "x86-64-v3",
            "tune": True,
            "fresh": True,
            "lookups_only": False,
            "progress": None,
        }
    ]
    text = capsys.readouterr().out
    assert "compiled 2 of 3 units, 1 from cache" in text and "aten.nonzero.default x1" in text
    assert main(["build", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["compile"]["compiled"] == 2
    assert calls[1]["output"] == Path("plan") and calls[1]["target"] == "host"


def test_verify_judges_the_passes(
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "demo"]) == 0
    assert calls[0]["verify"] is True
    assert "every pass is within" in capsys.readouterr().out
    bad = replace(REPORT.passes[0], max_abs=0.5, max_rel=0.1)
    monkeypatch.setattr(sys.modules[__name__], "REPORT", replace(REPORT, passes=[bad]))
    assert main(["verify", "demo"]) == 5
    captured = capsys.readouterr()
    assert "0.5" in captured.out and "--disable-pass fuse-norm" in captured.err
    assert main(["verify", "demo", "--atol", "1"]) == 0


def test_bisect_names_pass_node_and_line(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "demo", "--bisect", "--rtol", "1e-3"]) == 5
    assert calls[0]["rtol"] == 1e-3
    text = capsys.readouterr().out
    assert all(word in text for word in ("fuse-norm", "%3", "model.py:7", "found 1.5"))
