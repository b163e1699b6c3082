"""What `graphc inspect PLAN fusion` shows: fusions with counts, launches and intermediate bytes by
kind of layer; on the tiny hybrid."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cli.fusion import captured, fusion, passes_per_site
from graphc.api import pipeline
from graphc.decoders import Limits, Phases, capture_decoder
from graphc.frontends.decoder.resolve import opened_decoder
from graphc.frontends.locations import module_of
from graphc.ir.graph import Graph, Node
from graphc.ir.parse import parse_graph
from graphc.lowering.classify import native_operators
from graphc.lowering.layers import Layers
from graphc.lowering.lower import lower
from graphc.models.hybrid import hybrid
from graphc.ops.library import REFERENCES
from graphc.ops.written_out import written_out
from graphc.report import LayerRecord, PassRecord
from graphc.rewrite import run_passes

PREFILL = {"B": 1, "T": 256, "M": 16}
DECODE = {"B": 4, "T": 1, "M": 16}


@cache
def phases() -> tuple[Phases, list[PassRecord]]:
    limits = Limits(chunk=256, batch=4, context=1024, sequences=4)
    records: list[PassRecord] = []

    def prepare(graph: Graph) -> Graph:
        made, found = run_passes(graph, pipeline(), phase="all")
        records.extend(found)
        return made

    with opened_decoder(hybrid("tiny"), dtype=None, pages=13, slots=5) as (decoder, _):
        return capture_decoder(decoder, limits, keep=native_operators(), prepare=prepare), records


def _prepared() -> list[PassRecord]:
    """Records of the passes over the last captured graph, which all its phases share."""
    records = phases()[1]
    return records[len(records) - len(pipeline()) :]


@cache
def built(phase: str) -> tuple[Graph, list[PassRecord]]:
    graphs = phases()[0].graphs
    place = max(k for k, (name, _) in enumerate(graphs) if name == phase)
    return run_passes(graphs[place][1], pipeline(), phase=phase)


@cache
def layers(phase: str) -> dict[str, LayerRecord]:
    lowered = lower(built(phase)[0], "avx2")
    limits = PREFILL if phase == "prefill" else DECODE
    found = Layers(phases()[0].origins[-1], lowered).records(phase, "1024", limits)
    assert sum(record.launches_after for record in found) == len(lowered.steps)
    return {record.kind: record for record in found}


def test_kinds_are_the_classes_of_what_layers_consist_of() -> None:
    found = layers("prefill")
    count = {kind: record.modules for kind, record in found.items()}
    assert count["KimiDeltaAttention"] == 3 and count["LatentAttention"] == 1
    assert count["AttentionResidual"] == 8 and count["MixtureOfExperts"] == 3
    assert count["MLP"] == 1 and count["RMSNorm"] == 9


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_kind_has_fewer_launches_and_bytes(phase: str) -> None:
    for kind in ("KimiDeltaAttention", "LatentAttention", "AttentionResidual", "MixtureOfExperts"):
        record = layers(phase)[kind]
        assert 0 < record.launches_after < record.launches_before / 2, kind
        assert 0 < record.bytes_after < record.bytes_before / 2, kind


def test_the_indexer_keeps_nothing_of_the_size_of_queries_times_keys() -> None:
    record = layers("prefill")["LatentAttention"]
    square = 4 * PREFILL["T"] * PREFILL["M"] * 64
    assert record.largest_before >= square > record.largest_after
    assert record.tensor_before.startswith("f32[") and "256" in record.tensor_before
    assert record.captured["lightning_indexer"] == 1
    assert record.operators["paged_lightning_indexer"] == 1


def test_operators_of_each_kind() -> None:
    found = layers("decode")
    assert found["KimiDeltaAttention"].operators == {"short_convolution": 3, "delta_rule": 3}
    assert found["MixtureOfExperts"].operators == {"route": 3, "experts": 3}


def test_the_fusion_of_residuals_saves_two_passes_a_site() -> None:
    """A site's mix is neither written nor read again to be normalised: on the graph, and between
    Steps."""
    record = next(r for r in _prepared() if r.name == "residual_norm" and r.matches)
    assert len(record.matches) == 8 and record.launches_removed == 8 and not record.refusals
    assert passes_per_site(record) == 2.0
    found = layers("prefill")
    sites, row = found["AttentionResidual"], PREFILL["T"] * 64 * 4
    assert sites.operators == {"residual_mix": 8} and sites.launches_after == 8
    assert found["RMSNorm"].launches_after == 1  # of the embedding: nothing is mixed there
    mixed = next(r for r in _prepared() if r.name == "attention_residuals" and r.matches)
    assert len(mixed.matches) == 8 and mixed.launches_removed > 8 * 8
    # the candidates of each site are read, what follows is written
    assert sites.bytes_after == row * (8 + sum(_counts()))


def test_a_layer_of_linear_attention_is_seven_steps() -> None:
    for phase in ("prefill", "decode"):
        assert layers(phase)["KimiDeltaAttention"].launches_after == 3 * 7
    passed = {r.name: len(r.matches) for r in _prepared() if r.matches}
    assert passed["delta_rule"] == 3 and passed["late_heads"] >= 6


def _counts() -> list[int]:
    return [
        len(node.argument("candidates"))
        for node in built("prefill")[0].nodes
        if node.target == "graphc.residual_mix.default"
    ]


def test_programs_of_one_bucket_stand_apart() -> None:
    """A bucket has a program for few pages, where all keys are chosen, and one for more."""
    found = [
        LayerRecord(
            "Attn", "prefill", "2K", 1, 9, 2, 64, 8, 8, 8, captured={"delta_rule": 3}, limits=limits
        )
        for limits in ({"T": 2048, "M": 8}, {"T": 2048, "M": 32})
    ]
    assert [(row["captured"], row["limits"]["M"]) for row in captured(found)] == [(3, 8), (3, 32)]


def test_json_has_passes_with_rules_and_refusals() -> None:
    from tests.test_cli import REPORT

    data = fusion(REPORT)
    (one,) = data["passes"]
    assert one["rules"] == {"layer_norm": 2} and one["launches_removed"] == 3
    assert one["refusals"][0]["reason"] == "epsilon is no number"


def test_a_tensor_neither_written_nor_read_again_is_two_passes() -> None:
    text = """symbol T in 1..64
%0: f32[T,32] = input("x")
%1: f32[T,32] = aten.mul.Tensor(%0, 1.0)
%2: f32[T,32] = aten.relu.default(%1)
return (%2,)
"""
    graph, records = run_passes(parse_graph(text), pipeline(), limits={"T": 64})
    record = next(r for r in records if r.name == "arithmetic" and r.matches)
    assert len(graph.nodes) == 1 and record.kind == "simplify"
    assert (record.bytes_removed, record.reads_removed) == (64 * 128, 64 * 128)
    assert passes_per_site(record) == 2.0


def test_modules_of_layers_and_of_what_stands_alone() -> None:
    def stack(*paths: tuple[str, str]) -> str:
        return module_of({"nn_module_stack": {str(k): p for k, p in enumerate(paths)}})

    root = ("", "a.Root")
    layer = ("model.layers.3", "a.Layer")
    part = ("model.layers.3.mlp", "a.Experts")
    inner = ("model.layers.3.mlp.gates.1", "b.Linear")
    assert stack(root, layer, part, inner) == "model.layers.3.mlp Experts"
    assert stack(root, layer) == "model.layers.3 Layer"
    assert stack(root, ("model", "a.Model"), ("model.norm", "a.Norm")) == "model.norm Norm"
    assert stack(root) == "" and module_of({}) == ""


class _Counted(TorchDispatchMode):
    """Launches and bytes of results of what eager torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if isinstance(out, torch.Tensor) and not any(r.alias_info for r in returns):
            self.made.append(tuple(out.shape))
        return out


def _node(text: str) -> Node:
    return parse_graph(text).nodes[-1]


def test_what_an_operator_is_written_out_as_is_what_torch_does() -> None:
    """Attention Residuals: the same launches, of the same sizes, as its definition in torch."""
    node = _node("""%0: f32[2,5,32] = input("a")
%1: f32[2,5,32] = input("b")
%2: f32[32] = input("q")
%3: f32[2,5,32] = graphc.residual_mix.default((%0, %1), %2, 1e-06)
return (%3,)
""")
    a, b, q = torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.randn(32)
    with _Counted() as counted:
        REFERENCES["residual_mix"]([a, b], q, 1e-6)
    form = written_out(node, int)
    assert form is not None
    sizes = sorted(torch.Size(made.shape).numel() for made in form)
    assert sizes == sorted(torch.Size(shape).numel() for shape in counted.made)
