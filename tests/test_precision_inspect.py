"""`graphc inspect PLAN precision`: the classes of a plan's tensors account for all of its bytes and
name the rules that let narrow ones pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cli.main import main
from graphc import decoders
from graphc.api import Options, build
from graphc.errors import PrecisionError
from graphc.frontends.capture import capture
from graphc.ir.graph import Graph
from graphc.ir.types import itemsize
from graphc.lowering.classify import native_operators
from graphc.models.hybrid import hybrid
from graphc.plan_io import read_plan
from graphc.precision import DEFAULT, Precision
from graphc.report import BuildReport, PrecisionReport, TensorClassRecord
from passes.quantization.tensor_classes import Arena, Sequences, StoredWeight, precision_report

ROWS = "bf16 -> fp8_pow2:32+bf16:16 -> bf16 operands, f32 sums"
KEYS = "bf16 -> mxfp8_ceil:32 -> bf16 operands, f32 sums"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with index keys, cache and projections narrowed."""
    folder = tmp_path_factory.mktemp("precision") / "plan"
    options = Options(
        buckets=["256"], quant=["index=mxfp8_ceil", "kv=fp8", "weights=int8"],
        pass_options=["quantize_weights{least=4096}"],
    )  # fmt: skip
    decoders.build(hybrid("tiny"), folder, options, dtype="bf16", chunk=64, batch=2)
    return folder


def report(folder: Path) -> PrecisionReport:
    found = BuildReport.load(folder / "report.json").precision
    assert found is not None
    return found


def of_kind(folder: Path, kind: str) -> list[TensorClassRecord]:
    return [one for one in report(folder).classes if one.kind == kind]


def test_weights_and_states_are_all_counted(plan: Path) -> None:
    classes = report(plan).classes
    weights = sum(one.nbytes for one in classes if one.place == "weights")
    assert weights == BuildReport.load(plan / "report.json").weights_bytes
    facts = read_plan(plan)
    held = sum(one.nbytes for one in classes if one.place == "states")
    shapes = [(state.tensor.dtype, list(map(int, state.tensor.text))) for state in facts.states]
    assert held == sum(itemsize(dtype) * int(torch.tensor(shape).prod()) for dtype, shape in shapes)
    arenas = {m.phase: m.arena_bytes for m in BuildReport.load(plan / "report.json").memory}
    shown = {one.phase: one.nbytes for one in of_kind(plan, "activations between steps")}
    assert shown == arenas


def test_narrow_classes_name_their_rules(plan: Path) -> None:
    narrow = {one.kind: one for one in report(plan).classes if one.narrowed}
    assert set(narrow) == {
        "KV cache pages", "index key pages", "projection weights", "expert weights",
    }  # fmt: skip
    cache, keys = narrow["KV cache pages"], narrow["index key pages"]
    assert (cache.path, cache.narrowed, cache.token_nbytes) == (ROWS, ["fp8_pow2"], 32 + 4 + 32)
    assert (keys.path, keys.narrowed, keys.token_nbytes) == (KEYS, ["mxfp8_ceil"], 32 + 1)
    assert cache.bucket_nbytes == 256 * 68
    assert cache.allowed.startswith("cache=fp8 (shapes.yaml:")
    for kind in ("projection weights", "expert weights"):
        assert narrow[kind].narrowed == ["int8"]
        assert narrow[kind].allowed == "projections=int8 (quantize_weights{form=int8})"


def test_what_decides_is_wide(plan: Path) -> None:
    (state,) = of_kind(plan, "recurrent states")
    assert state.path == "f32 -> f32 sums -> f32"
    assert state.bucket_nbytes == state.nbytes // 2  # room for two sequences
    assert {one.path for one in of_kind(plan, "router weights")} == {
        "f32 -> f32 operands, f32 sums -> f32"
    }
    assert {one.path for one in of_kind(plan, "router")} == {"f32 logits -> f32 scores and weights"}
    assert {one.path for one in of_kind(plan, "attention accumulation")} == {
        "bf16 operands -> f32 scores, weights and sums -> bf16"
    }
    stream = of_kind(plan, "residual stream")
    assert "bf16 + f32 -> f32 sums" in {one.path for one in stream}
    assert max(one.nbytes for one in stream) == 64 * 64 * 4  # tokens, width


def test_the_view(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(plan), "precision"]) == 0
    text = capsys.readouterr().out
    assert "projections  int8                quantize_weights{form=int8}" in text
    assert "KV cache pages" in text and "68 B" in text
    assert main(["inspect", str(plan), "precision", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["precision"]
    assert [one["role"] for one in data["policy"]] == [
        "index", "cache", "projections", "attention", "residual", "router", "state",
    ]  # fmt: skip
    assert main(["inspect", str(plan), "--json"]) == 0
    assert "precision" not in json.loads(capsys.readouterr().out)


class Net(torch.nn.Module):
    """A product, and a softmax whose shares are narrowed before they weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 16)
        self.one = torch.nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(self.one(self.tokens(ids)), (16,))
        shares = torch.softmax(x @ x.transpose(1, 2), -1)
        x = shares.to(torch.float8_e4m3fn).to(x.dtype) @ x
        return F.linear(F.layer_norm(x, (16,)), self.tokens.weight)


def _graph() -> Graph:
    ids = torch.zeros(1, 5, dtype=torch.int64)
    with torch.no_grad():
        return capture(Net().eval(), (ids,), keep=native_operators()).graph


def test_classes_of_a_plain_graph() -> None:
    stored = [
        StoredWeight("tokens.weight", "float32", 0, 2048),
        StoredWeight("one.weight", "float32", 2048, 1024),
        StoredWeight("one.weight", "float32", 2048, 1024),  # another graph reads it
        StoredWeight("one.bias", "float32", 3072, 64),
        StoredWeight("made_up", "int32", 3136, 4),
    ]
    policy = Precision.parse("attention=fp8").over(DEFAULT)
    arenas = [
        Arena("prefill", "a", {}, 100, [("float32", 300), ("int64", 100)]),
        Arena("prefill", "b", {}, 50, []),
    ]
    made = precision_report([("prefill", _graph())], stored, arenas, Sequences(), policy=policy)
    rows = {one.kind: one for one in made.classes}
    assert [(one.kind, one.nbytes, one.tensors) for one in made.classes[:4]] == [
        ("projection weights", 1024, 1),
        ("norms and small weights", 64, 1),
        ("norms and small weights", 4, 1),
        ("embedding and output head", 2048, 1),
    ]
    assert rows["activations between steps"].path == "f32 75%, i64 25%"
    weighting = rows["attention accumulation"]
    assert weighting.path == "f32 scores -> f32 softmax -> f32 weights"
    assert (weighting.narrowed, weighting.allowed) == (["e4m3"], "attention=fp8 (--precision)")
    kept = precision_report([("prefill", _graph())], [], arenas, Sequences(), policy=DEFAULT)
    assert "the model's own" in {one.allowed for one in kept.classes}


@pytest.mark.parametrize(
    ("quant", "keep", "node"),
    [
        ("kv=fp8", "cache", "append_records"),
        ("index=mxfp8", "index", "append_records"),
        ("weights=int8", "projections", "quantized_linear"),
    ],
)
def test_a_decoder_that_narrows_what_its_policy_keeps(
    tmp_path: Path, quant: str, keep: str, node: str
) -> None:
    options = Options(
        buckets=["256"], quant=[quant], pass_options=["quantize_weights{least=4096}"],
        precision=f"{keep}=keep",
    )  # fmt: skip
    with pytest.raises(PrecisionError, match=rf"{keep} kept as it is \(--precision\).*{node}"):
        decoders.build(hybrid("tiny"), tmp_path / "plan", options, dtype="bf16", chunk=64)


def test_the_demo_keeps_all(tmp_path: Path) -> None:
    build("demo", tmp_path / "plan", buckets=["2K"])
    classes = report(tmp_path / "plan").classes
    assert not any(one.narrowed for one in classes)
    assert {one.path for one in classes if one.kind == "projection weights"} == {
        "f32 -> f32 operands, f32 sums -> f32"
    }
