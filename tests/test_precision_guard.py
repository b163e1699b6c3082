"""The mixed-precision guard: graphs that narrow a protected role are refused, naming the node, and
what a policy allows passes; before the passes and behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphc.ops  # noqa: F401
from graphc.api import pipeline
from graphc.errors import PrecisionError
from graphc.frontends.capture import capture
from graphc.ir.graph import Graph
from graphc.lowering.classify import native_operators
from graphc.precision import DEFAULT, Precision
from graphc.rewrite import run_passes
from passes.quantization.guard import check_precision, violations

ops = torch.ops.graphc
T, D = 6, 16
Narrow = Callable[[Tensor], Tensor]


def e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).to(x.dtype)


def half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def codes(x: Tensor) -> Tensor:
    """int8 codes, and back."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8).to(x.dtype) * scale


def rounded(x: Tensor) -> Tensor:
    """To 16 levels, and never another dtype."""
    return (x / 0.1).round().clamp(-8, 7) * 0.1


def same(x: Tensor) -> Tensor:
    return x


class Net(nn.Module):
    """Weights that the cases share; `narrow` stands in the place that a case is about."""

    def __init__(self, narrow: Narrow, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "a": (D, D), "b": (D, D), "c": (D, D), "router": (4, D), "window": (D, 4),
            "gate_up": (4, 2 * D, D), "down": (4, D, D),
        }  # fmt: skip
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * 0.1
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self.register_buffer("recurrent", torch.zeros(1, 2, D, D))
        self.register_buffer("brief", torch.zeros(1, 2, D, D, dtype=torch.bfloat16))
        self.register_buffer("written", torch.zeros(1, 2, D // 2, D // 2))
        self.register_buffer("unit", torch.zeros(1, 1, D))
        self.register_buffer("past", torch.zeros(1, 3, D))
        self.register_buffer("fp8_rows", torch.zeros(3, 4, D + 4, dtype=torch.uint8))
        self.register_buffer("mx_rows", torch.zeros(3, 4, D + 1, dtype=torch.uint8))
        self.lstm = nn.LSTM(D, D, batch_first=True)
        self.narrow, self.run = narrow, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).unflatten(-1, (2, D // 2)).transpose(1, 2)

    @property
    def table(self) -> Tensor:
        return torch.tensor([[1, 2]], dtype=torch.int32)

    @property
    def start(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)


def query(net: Any, x: Tensor) -> Tensor:
    q = net.narrow(F.linear(x, net.a)).unflatten(-1, (2, D // 2)).transpose(1, 2)
    q = torch.cat([q[..., D // 4 :] * 2.0, q[..., : D // 4]], -1) + 0.5  # narrow all the same
    return F.scaled_dot_product_attention(q, net.heads(x, net.b), net.heads(x, net.c))


def keys_not_kept(net: Any, x: Tensor) -> Tensor:
    k = net.narrow(net.heads(x, net.b))
    return F.scaled_dot_product_attention(net.heads(x, net.a), k, net.heads(x, net.c))


def scores(net: Any, x: Tensor) -> Tensor:
    dots = net.heads(x, net.a) @ net.heads(x, net.b).transpose(2, 3)
    return torch.softmax(net.narrow(dots * 0.25), -1) @ net.heads(x, net.c)


def weighting(net: Any, x: Tensor) -> Tensor:
    dots = net.heads(x, net.a) @ net.heads(x, net.b).transpose(2, 3)
    return net.narrow(torch.softmax(dots * 0.25, -1)) @ net.heads(x, net.c)


def activations(net: Any, x: Tensor) -> Tensor:
    return F.linear(F.silu(net.narrow(F.linear(x, net.a))), net.b)


def expert_rows(net: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index, weight = ops.route(F.linear(rows, net.router), None, 2)
    return ops.experts(net.narrow(rows), index, weight, net.gate_up, net.down)


def stream(net: Any, x: Tensor) -> Tensor:
    x = net.narrow(x + F.linear(F.rms_norm(x, (D,)), net.a))
    x = x + F.linear(F.rms_norm(x, (D,)), net.b)
    return F.rms_norm(x, (D,))


def contribution(net: Any, x: Tensor) -> Tensor:
    x = x + net.narrow(F.linear(F.layer_norm(x, (D,)), net.a))
    return F.linear(F.layer_norm(x, (D,)), net.b)


def router_logits(net: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index, weight = ops.route(net.narrow(F.linear(rows, net.router)), None, 2)
    return ops.experts(rows, index, weight, net.gate_up, net.down)


def router_scores(net: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    chances = net.narrow(torch.softmax(F.linear(rows, net.router), -1))
    weight, index = torch.topk(chances, 2)
    return ops.experts(rows, index, weight, net.gate_up, net.down)


def router_weights(net: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index, weight = ops.route(F.linear(rows, net.router), None, 2)
    return ops.experts(rows, index, net.narrow(weight), net.gate_up, net.down)


def recurrence(net: Any, x: Tensor, state: Tensor, narrow: Narrow, q: Tensor) -> Any:
    k, v = (F.linear(x, w).unflatten(-1, (2, D // 2)) for w in (net.b, net.c))
    k, v = (torch.cat([part, part], -1) for part in (k, v))
    decay = -torch.sigmoid(x[:, :, :2])
    return ops.delta_rule(narrow(state), q, k, v, decay, torch.sigmoid(x[:, :, 2:4]), scale=0.3)


def _query(net: Any, x: Tensor) -> Tensor:
    q = F.linear(x, net.a).unflatten(-1, (2, D // 2))
    return torch.cat([q, q], -1)


def state_read(net: Any, x: Tensor) -> Tensor:
    out, after = recurrence(net, x, net.recurrent, net.narrow, _query(net, x))
    net.recurrent.copy_(after)
    return out


def state_written(net: Any, x: Tensor) -> Tensor:
    out, after = recurrence(net, x, net.recurrent, same, _query(net, x))
    net.recurrent.copy_(net.narrow(after))
    return out


def state_kept_brief(net: Any, x: Tensor) -> Tensor:
    out, after = recurrence(net, x, net.brief, same, _query(net, x))
    net.brief.copy_(after)
    return out


def what_a_state_takes(net: Any, x: Tensor) -> Tensor:
    out, after = recurrence(net, x, net.recurrent, same, net.narrow(_query(net, x)))
    net.recurrent.copy_(after)
    return out


def sum_in_torch(net: Any, x: Tensor) -> Tensor:
    """A linear attention of one token, written out."""
    k, v, q = (net.heads(x[:, :1], w) for w in (net.a, net.b, net.c))
    now = net.written * 0.9 + k.transpose(2, 3) @ v
    net.written.copy_(net.narrow(now))
    return q @ now


def hidden_in_torch(net: Any, x: Tensor) -> Tensor:
    now = torch.tanh(F.linear(x[:, :1], net.a) + F.linear(net.unit, net.b))
    net.unit.copy_(net.narrow(now))
    return now


def rows_in_torch(net: Any, x: Tensor) -> Tensor:
    """Keys in a buffer: they are taken up, not computed with."""
    net.written[:, :, :T] = net.narrow(net.heads(x, net.b))
    k = net.written.clone()
    return F.scaled_dot_product_attention(net.heads(x, net.a), k, k)


def floored(x: Tensor) -> Tensor:
    return (torch.floor(x.clamp(-0.8, 0.7) / 0.1 + 0.5)).clamp(min=-8, max=7) * 0.1


def window(net: Any, x: Tensor) -> Tensor:
    out, after = ops.short_convolution(net.past, net.narrow(x), net.window, None)
    net.past.copy_(after)
    return out


def hidden(net: Any, x: Tensor) -> Tensor:
    h = net.narrow(torch.tanh(x[:1, :1]))
    return net.lstm(x, (h, torch.zeros(1, 1, D)))[0]


def kept_stream(net: Any, x: Tensor) -> Tensor:
    """The residual stream through pages: what is kept for attention is not what is added to."""
    x = x + F.linear(F.rms_norm(x, (D,)), net.a)
    pages = ops.append_records(net.fp8_rows, [x], net.table, net.start, format=f"fp8:{D}")
    net.fp8_rows.copy_(pages)
    rows = ops.read_records(pages, net.table, 0, D, dtype=x.dtype, format=f"fp8:{D}")
    x = rows[:, : x.shape[1]] + F.linear(F.rms_norm(x, (D,)), net.b)
    return F.rms_norm(x, (D,))


def _appended(net: Any, x: Tensor, kind: str) -> Tensor:
    buffer = net.fp8_rows if kind.startswith("fp8") else net.mx_rows
    rows = F.linear(x, net.b)
    pages = ops.append_records(buffer, [rows], net.table, net.start, format=f"{kind}:{D}")
    buffer.copy_(pages)
    return pages


def index_pages(kind: str) -> Callable[[Any, Tensor], Tensor]:
    def run(net: Any, x: Tensor) -> Tensor:
        return ops.paged_lightning_indexer(
            F.linear(x, net.a).unsqueeze(2), x[:, :, :1], _appended(net, x, kind), net.table,
            net.start, count=2, format=f"{kind}:{D}",
        )  # fmt: skip

    return run


def latent_pages(kind: str) -> Callable[[Any, Tensor], Tensor]:
    def run(net: Any, x: Tensor) -> Tensor:
        return ops.latent_attention(
            F.linear(x, net.a).unsqueeze(2), _appended(net, x, kind), net.table, net.start,
            latent=D, scale=0.3, format=f"{kind}:{D}",
        )  # fmt: skip

    return run


def pages_before(net: Any, x: Tensor) -> Tensor:
    """Records that another graph wrote."""
    return ops.latent_attention(
        F.linear(x, net.a).unsqueeze(2), net.mx_rows, net.table, net.start, latent=D, scale=0.3,
        format=f"mxfp8_ceil:{D}",
    )  # fmt: skip


def expanded_pages(net: Any, x: Tensor) -> Tensor:
    """Keys and values expanded from kept rows by a product, as latent attention does."""
    pages = _appended(net, x, "fp8")
    rows = ops.read_records(pages, net.table, 0, D, dtype=x.dtype, format=f"fp8:{D}")
    k, v = net.heads(rows, net.b), net.heads(rows, net.c)
    return ops.cached_attention(net.heads(x, net.a), k, v, net.start, scale=0.3)


def indexer(net: Any, x: Tensor) -> Tensor:
    q, k = net.narrow(F.linear(x, net.a)).unsqueeze(2), net.narrow(F.linear(x, net.b))
    return ops.lightning_indexer(q, x[:, :, :1], k, count=2)


def indexer_in_torch(net: Any, x: Tensor) -> Tensor:
    q, k = net.narrow(net.heads(x, net.a)), net.narrow(F.linear(x, net.b)[:, None, :, : D // 2])
    best = torch.topk((torch.relu(q @ k.transpose(2, 3)) * 0.5).sum(1), 2).indices
    mask = torch.zeros(1, T, T, dtype=torch.bool).scatter(2, best, True)
    return F.scaled_dot_product_attention(
        net.heads(x, net.a), net.heads(x, net.b), net.heads(x, net.c), mask[:, None]
    )


@dataclass(frozen=True)
class Case:
    """What is narrowed how; the role and format that the guard finds; the operator of the node that
    it names; the policy that allows it."""

    run: Callable[[Any, Tensor], Any]
    narrow: Narrow
    role: str
    found: str
    node: str
    policy: str

    def __str__(self) -> str:
        return f"{getattr(self.run, '__name__', '')}-{getattr(self.narrow, '__name__', '')}"


CAST = "aten._to_copy.default"
REJECTED = [
    Case(query, e4m3, "attention", "e4m3", CAST, "attention=fp8"),
    Case(query, codes, "attention", "int8", "aten.clamp.default", "attention=int8"),
    Case(keys_not_kept, e4m3, "attention", "e4m3", CAST, "attention=fp8"),
    Case(scores, e5m2, "attention", "fp8_e5m2", CAST, "attention=fp8"),
    Case(weighting, rounded, "attention", "int4", "aten.clamp.default", "attention=int4"),
    Case(activations, e4m3, "projections", "e4m3", CAST, "projections=fp8"),
    Case(activations, rounded, "projections", "int4", "aten.clamp.default", "projections=int4"),
    Case(expert_rows, codes, "projections", "int8", "aten.clamp.default", "projections=int8"),
    Case(stream, e4m3, "residual", "e4m3", CAST, "residual=fp8,projections=fp8"),
    Case(stream, half, "residual", "bf16", CAST, "residual=bf16"),
    Case(contribution, e5m2, "residual", "fp8_e5m2", CAST, "residual=fp8,projections=fp8"),
    Case(router_logits, half, "router", "bf16", CAST, "router=bf16"),
    Case(router_scores, e4m3, "router", "e4m3", CAST, "router=fp8"),
    Case(router_weights, half, "router", "bf16", CAST, "router=bf16"),
    Case(state_read, half, "state", "bf16", CAST, "state=bf16"),
    Case(state_written, half, "state", "bf16", CAST, "state=bf16"),
    Case(state_written, e4m3, "state", "e4m3", CAST, "state=fp8"),
    Case(state_kept_brief, same, "state", "bf16", "graphc.delta_rule.default", "state=bf16"),
    Case(what_a_state_takes, e4m3, "state", "e4m3", CAST, "state=fp8"),
    Case(sum_in_torch, half, "state", "bf16", CAST, "state=bf16"),
    Case(sum_in_torch, floored, "state", "int4", "aten.clamp.default",
         "state=int4,cache=int4"),
    Case(hidden_in_torch, e5m2, "state", "fp8_e5m2", CAST, "state=fp8"),
    Case(rows_in_torch, codes, "cache", "int8", "aten.clamp.default", "cache=int8"),
    Case(window, codes, "state", "int8", "aten.clamp.default", "state=int8"),
    Case(hidden, e5m2, "state", "fp8_e5m2", CAST, "state=fp8"),
    Case(kept_stream, same, "residual", "fp8", "graphc.append_records.default",
         "residual=fp8,projections=fp8"),
    Case(index_pages("fp8"), same, "index", "fp8", "graphc.append_records.default", "index=fp8"),
    Case(latent_pages("mxfp8_floor"), same, "cache", "mxfp8_floor",
         "graphc.append_records.default", "cache=mxfp8"),
    Case(pages_before, same, "cache", "mxfp8_ceil", "graphc.latent_attention.default",
         "cache=mxfp8"),
    Case(indexer, codes, "index", "int8", "aten.clamp.default", "index=int8"),
]  # fmt: skip
ALLOWED = [
    (indexer, e4m3),
    (indexer_in_torch, e4m3),
    (index_pages("mxfp8_ceil"), same),
    (latent_pages("fp8_pow2"), same),
    (expanded_pages, same),
    (rows_in_torch, half),
    (activations, half),  # 16 bits are the model's affair
]


def graph_of(run: Callable[[Any, Tensor], Any], narrow: Narrow, passed: bool) -> Graph:
    x = torch.randn(1, T, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        graph = capture(Net(narrow, run).eval(), (x,), keep=native_operators()).graph
    return run_passes(graph, pipeline())[0] if passed else graph


@pytest.mark.parametrize("passed", [False, True], ids=["captured", "passed"])
@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_a_narrowed_role_is_refused_and_its_twin_is_not(case: Case, passed: bool) -> None:
    graph = graph_of(case.run, case.narrow, passed)
    with pytest.raises(PrecisionError) as caught:
        check_precision(graph)
    error = caught.value
    assert (error.role, error.found) == (case.role, case.found), error
    named = next(node for node in graph.nodes if node.name == error.node)
    assert named.target == case.node, error
    assert error.node in error.what and error.node in error.where and case.role in error.what
    assert "test_precision_guard.py" in error.where, error
    assert f"--precision {case.role}=" in error.hint
    check_precision(graph, Precision.parse(case.policy).over(DEFAULT))
    if case.narrow is not same:
        check_precision(graph_of(case.run, same, passed))


@pytest.mark.parametrize("passed", [False, True], ids=["captured", "passed"])
@pytest.mark.parametrize(("run", "narrow"), ALLOWED)
def test_what_may_be_narrowed_passes(
    run: Callable[[Any, Tensor], Any], narrow: Narrow, passed: bool
) -> None:
    check_precision(graph_of(run, narrow, passed))


@pytest.mark.parametrize("run", [index_pages("mxfp8_ceil"), latent_pages("fp8"), indexer])
def test_a_policy_that_keeps_everything(run: Callable[[Any, Tensor], Any]) -> None:
    graph = graph_of(run, e4m3, False)
    with pytest.raises(PrecisionError, match="kept as it is"):
        check_precision(graph, Precision.parse("index=keep,cache=keep").over(DEFAULT))


def test_weights_that_are_narrowed_where_they_are_used() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return F.linear(x, e4m3(net.a))

    with pytest.raises(PrecisionError, match=r"projections .* e4m3"):
        check_precision(graph_of(run, same, False))


def test_what_an_author_narrowed_is_the_model() -> None:
    check_precision(graph_of(activations, codes, True), authored=True)
    with pytest.raises(PrecisionError, match="append_records"):
        check_precision(graph_of(kept_stream, same, True), authored=True)


def test_every_role_and_every_narrowing_is_counted() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return activations(net, query(net, x).transpose(1, 2).flatten(2))

    graph = graph_of(run, e4m3, False)
    assert [v.role for v in violations(graph, DEFAULT)] == ["attention", "projections"]
    with pytest.raises(PrecisionError, match="1 more like this"):
        check_precision(graph)


def test_weights_in_a_form_are_refused_unless_they_are_asked_for() -> None:
    graph = graph_of(activations, same, False)
    passes = pipeline((), ["quantize_weights{form=int8,least=16}"])
    graph = run_passes(graph, passes)[0]
    assert "graphc.quantized_linear.default" in [node.target for node in graph.nodes]
    with pytest.raises(PrecisionError, match=r"projections .* int8: quantized_linear"):
        check_precision(graph)
    check_precision(graph, DEFAULT.opened("projections", ["int8"], "--quant weights=int8"))


def test_weights_of_experts_in_a_form() -> None:
    graph = graph_of(expert_rows, same, False)
    graph = run_passes(graph, pipeline((), ["quantize_weights{form=int4_g32,least=16}"]))[0]
    with pytest.raises(PrecisionError, match=r"projections .* int4_g32: experts"):
        check_precision(graph)
    check_precision(graph, Precision.parse("projections=int4").over(DEFAULT))
