"""Decoders of transformers with their states as one graph: equal to the model itself, prefilled in
pieces and decoded in batches, before and after the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from graphc.api import pipeline
from graphc.decoders import Limits, Phases, capture_decoder
from graphc.errors import UnsupportedError, UsageError
from graphc.frontends.decoder import hooks
from graphc.frontends.decoder.families import substituted
from graphc.frontends.decoder.resolve import opened_decoder
from graphc.ir.graph import Graph
from graphc.ir.run import run
from graphc.ir.types import TensorType
from graphc.lowering.classify import native_operators
from graphc.models.hybrid import hybrid
from graphc.rewrite import run_passes
from tests.tiny_decoders import FAMILIES as NAMES
from tests.tiny_decoders import make

#: captured in every run; the others take the same way through the same hooks
ALWAYS = ("kimi_linear", "deepseek_v32")
FAMILIES = [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.heavy) for name in NAMES
]
TOP_K = 16
LENGTHS = (70, 41)
TABLE = torch.tensor([[3, 7], [5, 2]], dtype=torch.int32)
SLOTS = torch.tensor([3, 1], dtype=torch.int32)


@dataclass
class Player:
    """Two sequences over a graph, as the runtime plays them."""

    graph: Graph
    states: dict[str, torch.Tensor]

    def step(self, rows: list[int], ids: torch.Tensor, start: list[int]) -> torch.Tensor:
        given = {
            "input_ids": ids, "start": torch.tensor(start, dtype=torch.int32),
            "table": TABLE[rows], "slots": SLOTS[rows], "kept": torch.tensor([ids.shape[1] - 1]),
        }  # fmt: skip
        done = run(self.graph, [given[v.name] for v in self.graph.inputs], self.states)
        self.states.update(done.states)
        logits = done.results[0]
        assert isinstance(logits, torch.Tensor)
        return logits[:, -1]


@cache
def phases(family: str) -> Phases:
    limits = Limits(chunk=256, batch=4, context=1024, sequences=4)
    with opened_decoder(make(family), dtype=None, pages=13, slots=5) as (decoder, _):
        return capture_decoder(decoder, limits, keep=native_operators())


@cache
def passed(family: str, phase: str) -> Graph:
    graph = dict(phases(family).graphs)[phase]
    return run_passes(graph, pipeline(), phase=phase)[0]


def tokens() -> torch.Tensor:
    return torch.randint(3, 500, (2, 90), generator=torch.Generator().manual_seed(1))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def reference(family: str, count: Callable[[int], int]) -> list[torch.Tensor]:
    """The model's own logits after count(b) tokens of each sequence, without any cache."""
    model = make(family)
    with torch.no_grad():
        return [model(input_ids=tokens()[b : b + 1, : count(b)]).logits[0, -1] for b in (0, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_capture_holds_for_all_lengths(family: str) -> None:
    captured = phases(family).captured
    assert captured.notes == ()
    ranges = {s.name: (s.minimum, s.maximum) for s in captured.graph.symbols.values()}
    assert ranges == {"B": (1, 4), "T": (1, 256), "M": (1, 16), "K": (1, 2)}
    assert captured.graph.guards == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_pieces_and_decode_in_batches(family: str) -> None:
    """The first tokens are fewer than top-k, so that no tie can be broken differently."""
    ids = tokens()
    lengths = LENGTHS if family not in ("deepseek_v32", "glm_moe_dsa") else (12, 9)
    prefill = Player(passed(family, "prefill"), {})
    for b in (0, 1):
        first = lengths[b] // 3
        prefill.step([b], ids[b : b + 1, :first], [0])
        last = prefill.step([b], ids[b : b + 1, first : lengths[b]], [first])
        assert relative(last[0], reference(family, lambda b: lengths[b])[b]) < 2e-6
    decode = Player(passed(family, "decode"), prefill.states)
    for i in range(3):
        token = torch.stack([ids[b, lengths[b] + i] for b in (0, 1)])[:, None]
        made = decode.step([0, 1], token, [lengths[b] + i for b in (0, 1)])
        wanted = reference(family, lambda b: lengths[b] + i + 1)  # noqa: B023
        assert relative(made, torch.stack(wanted)) < 2e-6


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_chosen_keys_do_not_depend_on_pieces(family: str) -> None:
    """Beyond top-k: one piece, random pieces and token by token give the same results."""
    ids = tokens()[:1, :60]
    whole = Player(passed(family, "prefill"), {}).step([0], ids, [0])
    pieces = Player(passed(family, "prefill"), {})
    for begin, end in ((0, 17), (17, 18), (18, 49), (49, 60)):
        some = pieces.step([0], ids[:, begin:end], [begin])
    single = Player(passed(family, "decode"), {})
    for t in range(60):
        one = single.step([0], ids[:, t : t + 1], [t])
    assert relative(some, whole) < 2e-6
    assert relative(one, whole) < 2e-6


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_size_of_queries_times_keys(family: str, phase: str) -> None:
    graph = passed(family, phase)
    for value in (v for node in graph.nodes for v in node.outputs):
        assert isinstance(value.type, TensorType)
        names = {str(s) for d in value.type.shape if not isinstance(d, int) for s in d.free_symbols}
        if phase == "prefill":
            assert not {"T", "M"} <= names, value
        elif family not in ("kimi_linear",):
            assert "M" not in names, value


def test_bf16_states_have_the_dtype_of_what_is_kept() -> None:
    model: Any = make("kimi_linear").to(torch.bfloat16)
    with opened_decoder(model, dtype=None, pages=13, slots=5) as (decoder, _):
        kinds = {spec.name: spec.dtype for spec in decoder.specs}
    assert kinds["layers.3.rows"] == kinds["layers.0.conv"] == torch.bfloat16
    assert kinds["layers.0.recurrent"] == torch.float32


def test_weights_of_a_module_are_converted() -> None:
    model = hybrid("tiny")
    with opened_decoder(model, dtype="bf16", pages=13, slots=5) as (decoder, _):
        kinds = {spec.name: spec.dtype for spec in decoder.specs}
        assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
        assert kinds["layers.3.latent"] == torch.bfloat16
        assert kinds["layers.0.recurrent"] == torch.float32
        again = opened_decoder(decoder, dtype="float32", pages=13, slots=5)
        with pytest.raises(UsageError, match="expected no dtype"), again:
            pass


def test_pools_keep_one_row() -> None:
    with opened_decoder(make("glm5_next"), dtype=None, pages=13, slots=5) as (decoder, _):
        shapes = {spec.name: decoder.get_buffer(spec.buffer).shape for spec in decoder.specs}
    assert shapes["layers.1.indexer.pooled"] == (13, 16, 32)
    assert shapes["layers.1.indexer.ring"] == (5, 4, 64)
    assert "layers.2.indexer.pooled" not in shapes  # it shares what layer 1 chooses


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("index_kpool", 5, "a page has 64"), ("index_kpool_always_select_tail", False, "leaves out")],
)
def test_pools_that_are_refused(name: str, value: Any, why: str) -> None:
    model = make("glm5_next")
    indexer = model.model.language_model.layers[1].self_attn.indexer
    setattr(indexer, name, value)
    indexer.index_kpool_compress_ape = torch.nn.Parameter(torch.zeros(indexer.index_kpool, 32))
    with (
        pytest.raises(UnsupportedError, match=why),
        opened_decoder(model, dtype=None, pages=13, slots=5),
    ):
        pass


def test_names_are_given_back() -> None:
    import transformers.models.glm5_next.modeling_glm5_next as family

    before = family.Glm5NextTextIndexer.forward, family.Glm5NextTextExperts.forward
    with substituted(make("glm5_next")):
        assert family.Glm5NextTextIndexer.forward is not before[0]
    assert (family.Glm5NextTextIndexer.forward, family.Glm5NextTextExperts.forward) == before


def test_experts_with_a_gate_of_their_own_are_not_taken_for_plain_ones() -> None:
    from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

    config = configuration_deepseek_v4.DeepseekV4Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=4, swiglu_limit=0.1
    )
    experts = modeling_deepseek_v4.DeepseekV4Experts(config).eval()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, index, weight = torch.randn(6, 32), torch.arange(12).reshape(6, 2) % 4, torch.rand(6, 2)
    config._experts_implementation = "eager"
    with torch.no_grad():
        wanted = experts(x, index, weight)
        assert relative(hooks.experts(experts, x, index, weight), wanted) < 1e-5


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_the_passes_find_in_hyper_connections_and_pools(phase: str) -> None:
    targets = [node.target for node in passed("glm5_next", phase).nodes]
    assert targets.count("graphc.sinkhorn.default") == 8  # two a layer
    assert "aten.div.Tensor" not in targets
    assert targets.count("graphc.latent_attention.default") == 2
    assert targets.count("graphc.pooled_indexer.default") == 1  # the second layer shares its choice
