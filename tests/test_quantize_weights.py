"""Weights of 8 and 4 bits from the pass to plans: what is narrowed, what is not and why, and
results equal to eager torch with the decoded weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from graphc import decoders
from graphc.api import Options
from graphc.errors import UsageError
from graphc.ir.parse import parse_graph
from graphc.ops.weight_forms import FORMS, decode, encode, nbytes
from graphc.report import BuildReport, PassRecord
from graphc.rewrite import run_passes
from graphc.runtime import decoder
from passes.quantization.quantize_weights import QuantizeWeights
from tests.built import Built
from tests.test_kernels_quantized import BUDGET
from tests.tiny_decoders import make

GRAPH = """\
symbol T in 1..64
%0: bf16[T,96] = input("x")
%1: bf16[64,96] = weight("up")
%2: bf16[64] = weight("up_bias")
%3: bf16[96,64] = weight("down")
%4: bf16[16,96] = weight("router")
%5: bf16[100,96] = weight("head")
%6: bf16[8,96] = weight("small")
%7: bf16[T,64] = aten.linear.default(%0, %1, %2)
%8: bf16[T,96] = aten.linear.default(%7, %3)
%9: bf16[T,96] = aten.relu.default(%8)
%10: bf16[T,64] = aten.linear.default(%9, %1)
%11: bf16[T,64] = aten.relu.default(%10)
%12: bf16[T,16] = aten.linear.default(%9, %4)
%13: bf16[T,16] = aten.sigmoid.default(%12)
%14: bf16[T,2], %15: i64[T,2] = aten.topk.default(%13, 2)
%16: bf16[T,8] = aten.linear.default(%9, %6)
%17: bf16[T,8] = aten.relu.default(%16)
%18: bf16[T,100] = aten.linear.default(%9, %5)
%19: f32[T,100] = aten._to_copy.default(%18, dtype=torch.float32)
return (%11, %14, %15, %17, %19)
"""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights() -> dict[str, torch.Tensor]:
    sizes = {"up": (64, 96), "up_bias": (64,), "down": (96, 64), "router": (16, 96),
             "head": (100, 96), "small": (8, 96)}  # fmt: skip
    return {name: torch.randn(size).bfloat16() for name, size in sizes.items()}


def record_of(report: BuildReport, phase: str = "") -> PassRecord:
    (record,) = [
        r for r in report.passes
        if r.name == "quantize_weights" and phase in ("", r.phase) and (r.matches or phase)
    ]  # fmt: skip
    return record


@pytest.mark.parametrize("form", FORMS)
def test_what_is_narrowed_and_what_is_not(form: str) -> None:
    """Each weight once, with its error; routers, heads and small ones stay, with the reason."""
    known = weights()
    graph = parse_graph(GRAPH, known)
    assert run_passes(graph, [QuantizeWeights()])[0] is graph
    after, (record,) = run_passes(graph, [QuantizeWeights(form=form, least=1000)], verify=True)
    kinds = [n.target.split(".")[1] for n in after.nodes if "linear" in n.target]
    assert kinds == ["quantized_linear"] * 3 + ["linear"] * 3
    assert len(after.weights) == len(graph.weights)
    assert [r.reason for r in record.refusals] == [
        "it is a router",
        "its weight has fewer than 1000 elements",
        "it is the head: head=yes narrows it too",
    ]
    for match, name in zip(record.matches, ("up", "down", "up"), strict=True):
        n, k = known[name].shape
        start = f"{name}: {form}, {nbytes(form, n, k)} of {2 * n * k} bytes, relative rms error "
        assert match.detail.startswith(start)
        assert 0.8 * BUDGET[form] < float(match.detail.removeprefix(start)) < 1.1 * BUDGET[form]
    assert record.max_rel is not None and record.max_rel > 0
    asked = QuantizeWeights(form=form, least=1000, head=True)
    after, (record,) = run_passes(graph, [asked])
    assert [m.detail.split(":")[0] for m in record.matches] == ["up", "down", "up", "head"]


def test_refusals() -> None:
    for bad in (float("nan"), float("inf")):
        known = weights()
        known["up"][3, 4] = bad
        _, (record,) = run_passes(
            parse_graph(GRAPH, known), [QuantizeWeights(form="int8", least=1000)]
        )
        assert "its weight holds NaN or infinity" in [r.reason for r in record.refusals]
    mixed = GRAPH.replace("bf16", "f32") + ""
    wide = parse_graph(mixed, {name: w.float() for name, w in weights().items()})
    after, (record,) = run_passes(wide, [QuantizeWeights(form="int8", least=1000)])
    assert len(record.matches) == 3
    text = """\
%0: bf16[4,96] = input("x")
%1: bf16[64,96] = weight("up")
%2: f32[64,64] = weight("wide")
%3: bf16[64,96] = weight("tied")
%4: bf16[4,64] = aten.linear.default(%0, %1)
%5: f32[4,64] = aten._to_copy.default(%4, dtype=torch.float32)
%6: f32[4,64] = aten.linear.default(%5, %2)
%7: f32[4,64] = aten.relu.default(%6)
%8: bf16[4,64] = aten.linear.default(%0, %3)
%9: bf16[4,64] = aten.relu.default(%8)
%10: bf16[64,96] = aten.relu.default(%3)
return (%7, %9, %10)
"""
    after, (record,) = run_passes(parse_graph(text), [QuantizeWeights(form="int8", least=1000)])
    assert len(record.matches) == 1
    assert [r.reason for r in record.refusals] == [
        "it is computed in float32 among narrower products",
        "its weight is also read otherwise",
    ]
    with pytest.raises(UsageError, match="expected a form of weights, found 'int3'"):
        QuantizeWeights(form="int3")


# ---------------------------------------------------------------- plans


class Gated(torch.nn.Module):
    """Products with epilogues, [*, 160] -> [*, 160]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(160, 300)
        self.down = torch.nn.Linear(300, 160, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def rounded(model: torch.nn.Module, form: str, skip: tuple[str, ...] = ()) -> Any:
    """The model with decoded weights in its linear layers and experts."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        if name.endswith(skip) or "norm" in name or "embed" in name or parameter.ndim < 2:
            continue
        flat = parameter.data.view(-1, *parameter.shape[-2:])
        for matrix in flat:
            matrix.copy_(decode(encode(matrix, form), form, *matrix.shape))
    return made


def options(form: str, **more: Any) -> Options:
    return Options(jobs=1, pass_options=(f"quantize_weights{{form={form},least=256}}",), **more)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_ordinary_plan(form: str, dtype: torch.dtype) -> None:
    module = Gated().to(dtype).eval()
    rows = {0: torch.export.Dim("T", min=1, max=100)}
    built = Built(module, (torch.randn(3, 160).to(dtype),), dynamic=(rows,), options=options(form))
    try:
        assert not built.fallbacks
        layouts = [w.layout for w in built.session.plan.weights]
        assert layouts.count(f"{form}_panels32") == 2
        assert len(record_of(built.report).matches) == 2
        exact = rounded(module, form).double()
        for count in (1, 5, 33, 64):
            x = torch.randn(count, 160).to(dtype)
            truth, eager = exact(x.double()), rounded(module, form)(x)
            error = (built(x).double() - truth).norm() / truth.norm()
            assert error <= 1.05 * (eager.double() - truth).norm() / truth.norm() + 3e-7
    finally:
        built.close()


_KEPT = (
    "lm_head.weight", "mlp.gate.weight", "kv_b_proj.weight", "f_b_proj.weight", "conv1d.weight",
    "A_log",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form"),
    [*((f, form) for f in ("llama", "qwen3_moe") for form in FORMS), ("kimi_linear", "int4_g32")],
)
def test_decoders(family: str, form: str, tmp_path: Path) -> None:
    """Prefill and decode as transformers' model with the decoded weights; each weight is encoded
    and stored once for all phases."""
    model = make(family, settled=True)
    report = decoders.build(
        make(family, settled=True),
        tmp_path / "plan",
        options(form, buckets=("128",)),
        chunk=64,
        batch=2,
        sequences=2,
    )
    record = record_of(report, "all")
    assert not any(r.matches for r in report.passes if r.name == record.name and r != record)
    count = sum(2 if "gate_up" in m.detail else 1 for m in record.matches)
    plan = decoder.load(tmp_path / "plan")
    stored = plan.session.plan.weights
    assert len({w.offset for w in stored if w.layout == f"{form}_panels32"}) == count
    reasons = {r.reason for r in record.refusals}
    assert "it is the head: head=yes narrows it too" in reasons
    assert ("it is a router" in reasons) == (family != "llama")
    if family == "kimi_linear":
        assert "it sets how a recurrent state decays" in reasons
        assert "attention absorbs it where it reads the rows of its cache" in reasons
    exact = rounded(model, form, _KEPT)
    ids = torch.randint(3, 500, (1, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), plan.sequence() as text:
        truth = exact(ids).logits[0]
        for at, logits in (
            (39, text.prefill(ids[0, :40].numpy())),
            (40, text.decode(int(ids[0, 40]))),
        ):
            found = torch.from_numpy(logits).float()
            assert (found - truth[at]).norm() <= 1e-4 * truth[at].norm()
    plain = model(ids).logits[0]
    assert (plain - truth).norm() > 1e-3 * truth.norm()  # it is not the model as it was
