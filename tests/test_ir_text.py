"""The text form of graphs: print, parse, print; types refused; digests; run and to_fx agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphc.errors import InputRejectedError, UsageError
from graphc.frontends.capture import capture
from graphc.ir.fx import to_fx
from graphc.ir.graph import Graph
from graphc.ir.parse import parse_dim, parse_graph, parse_type
from graphc.ir.run import run
from graphc.ir.text import digest, dim_text, print_graph, type_text
from graphc.ir.verify import verify
from graphc.lowering.classify import native_operators


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(ids))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean((2, 3))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


class Several(nn.Module):
    """Multi-result operators, symbolic arguments, numbers of every kind."""

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[1]
        values, places = x.topk(2, dim=-1)
        left, right = x.split([3, 5], dim=-1)
        folded = x.reshape(1, length // 2 if length % 2 == 0 else length, -1)
        filled = x.masked_fill(x > 0.5, -math.inf).clamp(min=-1e30)
        return values, places, left * right[..., :3], folded, filled, x.new_ones(length + 1), length


class Selected(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].sum(0)


T = torch.export.Dim("T", min=2, max=64)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, Any]] = {
    "encoder": (Encoder, torch.arange(12)[None] % 32, ({1: T},)),
    "convolutions": (Convolutions, torch.randn(2, 3, 8, 8), None),
    "counter": (Counter, torch.randn(3, 4), ({0: T},)),
    "several": (Several, torch.randn(1, 12, 8), None),
    "several_symbolic": (
        Several,
        torch.randn(1, 12, 8),
        ({1: 2 * torch.export.Dim("_T", max=64)},),
    ),
    "selected": (Selected, torch.randn(6, 4), None),
}


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> tuple[Graph, torch.Tensor, nn.Module]:
    make, example, shapes = MODELS[request.param]
    torch.manual_seed(0)
    module = make().eval()
    graph = capture(module, (example,), {}, shapes, keep=native_operators()).graph
    return graph, example, module


def contents(graph: Graph) -> dict[str, torch.Tensor]:
    return {v.name: t for v, t in (*graph.weights.items(), *graph.states.items())}


Captured = tuple[Graph, torch.Tensor, nn.Module]


def test_round_trip(captured: Captured) -> None:
    graph = captured[0]
    text = print_graph(graph)
    again = parse_graph(text, contents(graph))
    assert print_graph(again) == text and digest(again) == digest(graph)
    verify(again, deep=True)


def test_no_paths_in_the_text(captured: Captured) -> None:
    text = print_graph(captured[0])
    assert ".py" not in text and str(Path(__file__).parent) not in text


def test_run_is_the_module(captured: Captured) -> None:
    graph, example, module = captured
    before = {name: t.clone() for name, t in module.named_buffers()}
    outcome = run(graph, [example])
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), "the graph's states are values, not changed"
    again = run(parse_graph(print_graph(graph), contents(graph)), [example])
    through_fx = to_fx(graph)(example)
    expected = module(example)
    flat = list(expected) if isinstance(expected, tuple) else [expected]
    for number, want in enumerate(flat):
        for found in (outcome.results, again.results, through_fx):
            torch.testing.assert_close(found[number], want)
    for name, state in outcome.states.items():
        torch.testing.assert_close(state, dict(module.named_buffers())[name])


def test_digest_sees_weights_and_operators() -> None:
    text = '%0: f32[2] = input("x")\n%1: f32[2] = weight("w")\n'
    text += "%2: f32[2] = aten.add.Tensor(%0, %1)\nreturn (%2,)\n"
    zeros, ones = parse_graph(text), parse_graph(text, {"w": torch.ones(2)})
    assert len({digest(zeros), digest(ones), digest(parse_graph(text.replace("add", "mul")))}) == 3
    assert digest(zeros) == digest(parse_graph(text))


@pytest.mark.parametrize(
    "text",
    ["T", "T + 1", "2*T + 2", "((T + 63)//64)", "Mod(T, 2)", "Max(4, P + T)", "Min(5, T)", "T**2",
     "-T*(Mod(T, 3)) + ((T//2))**2", "64*(((T + 63)//64))", "Eq(Mod(T, 2), 0)", "T >= 2", "17"],
)  # fmt: skip
def test_dimensions(text: str) -> None:
    assert dim_text(parse_dim(text)) == text


@pytest.mark.parametrize(
    "text",
    ["f32[1,T,384]", "bf16[]", "i64[T+P,((T+63)//64)]@[1,T]", "b1[Max(4,T),2]", "int", "float"],
)
def test_types(text: str) -> None:
    assert type_text(parse_type(text)).replace("P+T", "T+P") == text


def test_numbers_keep_their_kind() -> None:
    text = '%0: f32[2] = input("a \\"quoted\\" %1 name")\n'
    for number, item in enumerate(("1", "1.0", "True", "-0.0", "1e-30", "inf", "-inf", "nan")):
        text += f"%{number + 1}: f32[2] = aten.add.Tensor(%0, {item})\n"
    text += "return (%1, None, (2, T), 0.5)\n"
    assert print_graph(parse_graph(text)) == text


LINEAR = """\
symbol T in 2..64
%0: f32[1,T,4] = input("x")
%1: f32[3,4] = weight("w")
%2: f32[1,T,3] = aten.linear.default(%0, %1)
return (%2,)
"""


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("%2: f32[1,T,3]", "%2: f32[1,T,4]",
         "line 4: written f32[1,T,4], inferred f32[1,T,3]"),
        ("%2: f32[1,T,3]", "%2: f32[1,2*T,3]",
         "line 4: written f32[1,2*T,3], inferred f32[1,T,3]"),
        ("%2: f32", "%2: bf16", "line 4: written bf16[1,T,3], inferred f32[1,T,3]"),
        ("%2: f32[1,T,3] =", "%2: f32[1,T,3], %3: f32[1] =",
         "line 4: written 2 results, inferred 1"),
        ("linear.default", "linnear.default",
         "line 4: expected a torch operator, found aten.linnear.default"),
        ("aten.linear.default", "os.system.default",
         "line 4: expected a torch operator, found os.system.default"),
        ("(%0, %1)", "(%0, %7)", "line 4: expected a value defined above, found %7"),
        ("(%0, %1)", "(%0, __import__('os'))", "line 4: expected one of"),
        ("(%0, %1)", "(%0, %1, x.y)", "line 4: expected an argument, found x.y"),
        ("(%0, %1)", "(%0, torch.load)", "line 4: expected a dtype, layout or memory format"),
        ("%1: f32", "%3: f32", "line 3: expected %1 as the next number, found %3"),
        ("f32[3,4]", "q32[3,4]", "line 3: expected a dtype such as f32, found q32"),
        ("2..64", "2-64", "line 1: expected `symbol NAME in MIN..MAX`"),
        ("return (%2,)\n", "", "expected a last line `return (...)`, found none"),
        ("(%0, %1)", "(%0, %1", "line 4: expected `%N: type = operator(arguments)`"),
    ],
)  # fmt: skip
def test_refused(old: str, new: str, error: str) -> None:
    assert old in LINEAR
    with pytest.raises(UsageError) as caught:
        parse_graph(LINEAR.replace(old, new))
    assert caught.value.what.startswith(error)


def test_inputs_are_bound_to_symbols() -> None:
    graph = parse_graph(LINEAR)
    assert run(graph, [torch.zeros(1, 5, 4)]).results[0].shape == (1, 5, 3)
    with pytest.raises(InputRejectedError, match="expected 1 inputs, found 0"):
        run(graph, [])
    with pytest.raises(InputRejectedError, match="expected size 4"):
        run(graph, [torch.zeros(1, 5, 3)])
    with pytest.raises(InputRejectedError, match="found"):
        run(graph, [torch.zeros(5, 4)])
