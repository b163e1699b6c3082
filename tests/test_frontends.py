"""What `resolve` makes of what a user names, and what it refuses."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim

from graphc.errors import CaptureError, UsageError
from graphc.frontends.inputs import parse_input, parse_lengths
from graphc.frontends.resolve import Source, capture_source, resolve
from graphc.ir.types import UNBOUNDED

KEEP = frozenset({"aten.linear.default"})

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, *, scale=1.0):
        return self.inner(x) * scale

def bare():
    return Net()

def with_args():
    return Net(), (torch.ones(2, 5, 4),)

def with_all():
    length = torch.export.Dim("T", min=1, max=99)
    return Net(), (torch.ones(2, 5, 4),), {"scale": 0.5}, {"x": {1: length}, "scale": None}

def broken():
    raise ValueError("no such checkpoint")

def needs(width):
    return Net()

def wrong():
    return 3

number = 3
model = Net()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def types(source: Source) -> dict[str, str]:
    graph = capture_source(source, KEEP).graph
    return {value.name: str(value.type) for value in graph.inputs}


# -- python ----------------------------------------------------------------------------------------


def test_factory_with_everything(file: Path) -> None:
    source = resolve(f"{file}:with_all")
    assert (source.kind, source.name) == ("python", "with_all")
    captured = capture_source(source, KEEP)
    assert [str(v.type) for v in captured.graph.inputs] == ["f32[2,T,4]"]
    assert captured.positional_names == ("x",)
    assert captured.keywords == {"dict": [["scale", {"const": 0.5}]]}
    symbol = captured.graph.symbols["T"]
    assert (symbol.minimum, symbol.maximum) == (1, 99)


@pytest.mark.parametrize("name", ["with_args", "model", "Net"])
def test_other_forms(file: Path, name: str) -> None:
    source = resolve(f"{file}:{name}", inputs=["x=f32[2,T,4]"], dynamic=["T=1:64"])
    assert types(source) == {"x": "f32[2,T,4]"}
    assert capture_source(source, KEEP).requested == {"T": (1, 64)}


def test_module_by_dotted_name() -> None:
    source = resolve("torch.nn:Identity", inputs=["input=f32[3,N]"])
    assert types(source) == {"input": "f32[3,N]"}


def test_module_object_and_numbers() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float, shift: Tensor) -> Tensor:
            return x * scale + shift

    texts = ["x=f32[T,2]", "scale=0.5", "shift=f64[]"]
    captured = capture_source(resolve(Scaled(), inputs=texts), KEEP)
    assert captured.arguments == {"tuple": [{"leaf": 0}, {"const": 0.5}, {"leaf": 1}]}
    assert [str(v.type) for v in captured.graph.inputs] == ["f32[T,2]", "f64[]"]


def test_names_and_ranges_of_a_factorys_own_dims(file: Path) -> None:
    narrowed = resolve(f"{file}:with_all", dynamic=["T=2:32"])
    assert capture_source(narrowed, KEEP).graph.symbols["T"].maximum == 32
    named = resolve(f"{file}:with_args", dynamic=["x.1=L", "x.0=B", "L=1:7"])
    assert types(named) == {"x": "f32[B,L,4]"}


def test_examples_fit_the_range(file: Path) -> None:
    source = resolve(f"{file}:with_all", dynamic=["T=40:64"])
    assert source.args[0].shape == (2, 40, 4)


def test_dtype(file: Path) -> None:
    assert types(resolve(f"{file}:with_args", dtype="bf16")) == {"x": "bf16[2,5,4]"}
    with pytest.raises(UsageError, match="expected one of float32"):
        resolve(f"{file}:with_args", dtype="int8")


@pytest.mark.parametrize(
    ("reference", "options", "text"),
    [
        ("net.py:broke", {}, "broken"),
        ("net.py:needs", {}, "width"),
        ("net.py:wrong", {}, "expected a module, found (int)"),
        ("net.py:number", {}, "expected a factory, found int"),
        ("net.py:bare", {}, "expected example inputs for x"),
        ("none.py:f", {}, "found no"),
        ("no_such_package.mod:f", {}, "found no"),
        ("net.txt", {}, "expected a model"),
        ("net.py:with_all", {"inputs": ["y=f32[1]"]}, "expected the name of an input, found 'y'"),
        ("net.py:with_all", {"inputs": ["x=f33[1]"]}, "expected a dtype"),
        ("net.py:with_all", {"dynamic": ["S=1:8"]}, "known: T"),
        ("net.py:with_all", {"dynamic": ["x.3=S"]}, "expected a dimension of x"),
        ("net.py:with_all", {"dynamic": ["y.3=S"]}, "expected the name of a tensor input"),
        ("net.py:with_all", {"dynamic": ["T=8:8"]}, "at least two lengths"),
    ],
)
def test_refusals(
    file: Path, monkeypatch: pytest.MonkeyPatch, reference: str, options: dict[str, Any],
    text: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(file.parent)
    with pytest.raises(UsageError) as caught:
        resolve(reference, **options)
    assert text in str(caught.value)


def test_an_error_of_the_factory_names_its_line(file: Path) -> None:
    with pytest.raises(CaptureError, match="no such checkpoint") as caught:
        resolve(f"{file}:broken")
    line = MODEL.splitlines().index('    raise ValueError("no such checkpoint")') + 1
    assert caught.value.where == f"{file}:{line}"


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch\ndef f(:\n")
    with pytest.raises(UsageError, match="not valid Python") as caught:
        resolve(f"{path}:f")
    assert caught.value.where == f"{path}:2"


# -- saved programs --------------------------------------------------------------------------------


class Guarded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if (x.shape[1] + 7) // 8 == 2 else x - 1


@pytest.fixture
def program(tmp_path: Path) -> Path:
    shapes = ({1: Dim.DYNAMIC},)
    made = torch.export.export(Guarded(), (torch.ones(2, 12),), dynamic_shapes=shapes, strict=False)
    torch.export.save(made, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def test_a_saved_program_keeps_its_guards(program: Path) -> None:
    captured = capture_source(resolve(str(program)), KEEP)
    (name,) = captured.graph.symbols
    assert name == "x_1"
    symbol = captured.graph.symbols[name]
    assert (symbol.minimum, symbol.maximum) == (9, 16)


def test_lengths_of_a_saved_program_have_names_and_ranges(program: Path) -> None:
    named = resolve(str(program), dynamic=["x.1=T", "T=1:14"])
    symbol = capture_source(named, KEEP).graph.symbols["T"]
    assert (symbol.minimum, symbol.maximum) == (9, 14)
    narrowed = resolve(str(program), dynamic=["x_1=:14"])
    assert capture_source(narrowed, KEEP).graph.symbols["x_1"].maximum == 14
    with pytest.raises(UsageError, match="known|did you mean"):
        resolve(str(program), dynamic=["y.1=T"])
    with pytest.raises(UsageError, match="part of the file"):
        resolve(str(program), inputs=["x=f32[1]"])
    with pytest.raises(UsageError, match="part of the file"):
        resolve(str(program), dtype="bfloat16")


def test_a_damaged_program(program: Path) -> None:
    program.write_bytes(program.read_bytes()[:200])
    with pytest.raises(UsageError, match="cannot be read"):
        resolve(str(program))


# -- onnx ------------------------------------------------------------------------------------------


def test_an_onnx_file_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    ids = helper.make_tensor_value_info("in.a", TensorProto.FLOAT, ["T", 3])
    other = helper.make_tensor_value_info("b", TensorProto.FLOAT, [None, 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("Concat", ["in.a", "b"], ["y"], axis=0)
    graph = helper.make_graph([node], "g", [ids, other], [result])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    source = resolve(str(path), dynamic=["T=1:40"])
    captured = capture_source(source, KEEP)
    assert captured.positional_names == ("in.a", "b")
    assert [(v.name, str(v.type)) for v in captured.graph.inputs] == [
        ("in_a", "f32[T,3]"),
        ("b", "f32[b_0,3]"),
    ]
    assert captured.graph.symbols["T"].maximum == 40
    renamed = resolve(str(path), dynamic=["b.0=S"])
    assert [str(v.type) for v in capture_source(renamed, KEEP).graph.inputs][1] == "f32[S,3]"


# -- texts -----------------------------------------------------------------------------------------


def test_input_texts() -> None:
    assert parse_input("x = bf16[1, T]").dims == (1, "T")
    assert parse_input("x=float32[]").dtype is torch.float32
    assert parse_input("flag=true").value is True
    assert parse_input("n=3").value == 3
    assert parse_input("serving_default_x:0=f32[1]").name == "serving_default_x:0"  # as ONNX has it
    assert parse_input("input.1=f32[1]").name == "input.1"
    for text in ("x", "=f32[1]", "x=f32", "x=f32[1;2]", "x=f32[-1]", "a b=f32[1]"):
        with pytest.raises(UsageError):
            parse_input(text)


def test_length_texts() -> None:
    found = parse_lengths(["T=1:8", "S=64", "U=2:", "x.1=T"])
    assert found.ranges == {"T": (1, 8), "S": (1, 64), "U": (2, UNBOUNDED)}
    assert found.places == {("x", 1): "T"}
    assert parse_lengths(["input.1.2=T"]).places == {("input.1", 2): "T"}
    for text in ("T", "T=a:b", "T=9:3", "T="):
        with pytest.raises(UsageError):
            parse_lengths([text])


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda x: x + 1, ("output0",)),
        (lambda x: (x + 1, [x * 2, x * 3]), ("output0", "1.0", "1.1")),
        (lambda x: {"a": x + 1, "b": (x * 2, x * 3)}, ("a", "b.0", "b.1")),
        (lambda x: ({"a": x + 1}, {"a": x * 2}), ("0.a", "1.a")),
    ],
)
def test_results_have_names(result: Any, names: tuple[str, ...]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return result(x)

    source = Source(Net(), (torch.zeros(2),), {}, None, "module", "net")
    assert capture_source(source, frozenset()).result_names == names


def test_results_of_an_onnx_model_have_its_names(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["positive"]), helper.make_node("Neg", ["x"], ["turned"])],
        "two",
        [info("x", TensorProto.FLOAT, [2])],
        [info("positive", TensorProto.FLOAT, [2]), info("turned", TensorProto.FLOAT, [2])],
    )
    path = tmp_path / "two.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    captured = capture_source(resolve(str(path)), frozenset())
    assert captured.result_names == ("positive", "turned")
    assert [node.location for node in captured.graph.nodes] == ["Relu of positive", "Neg of turned"]
