"""The reference hybrid: its layers are transformers' layers, its residuals the paper's, and however
the tokens come, the result is one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphc.ops  # registers the operators that take the functions' places
from graphc.models import functional
from graphc.models.alignment import Alignment, align
from graphc.models.hybrid import Hybrid, hybrid
from graphc.models.hybrid_config import K31_MINI, PRESETS, TINY, HybridConfig
from graphc.models.latent import LatentAttention
from graphc.models.layers import rotary
from graphc.models.long_alignment import LongAlignment, best_keys
from graphc.models.residuals import AttentionResidual
from graphc.models.states import NoStates, States, TensorStates

transformers = pytest.importorskip("transformers")
OPS = torch.ops.graphc
assert graphc.ops

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "qk_nope_head_dim": 32, "num_experts_per_tok": 2,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OURS = HybridConfig(
    vocab_size=96, hidden_size=64, layers=("kda", "mla"), intermediate_size=96, kda_heads=2,
    kda_head_dim=32, heads=4, nope_dim=32, rope_dim=16, value_dim=24, latent_dim=32,
    index_heads=4, index_dim=32, index_topk=16, experts=8, experts_per_token=2, expert_size=32,
)  # fmt: skip


def close(ours: Tensor, theirs: Tensor, bound: float = 1e-5) -> None:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert ours.shape == theirs.shape and error < bound, error


def scatter(module: nn.Module) -> None:
    """Weights that make every term matter: also biases, gains, and the routers' corrections."""
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            size = tensor.shape[-1] if tensor.dim() > 1 else 4
            tensor.normal_(std=size**-0.5)
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1.0)


def copied(module: nn.Module, theirs: nn.Module) -> None:
    """Their weights, by their names; convolutions and the gate's rates have other shapes."""
    weights = {}
    for name, tensor in theirs.state_dict().items():
        name = name.removeprefix("model.")
        if name.endswith("conv1d.weight"):
            name, tensor = name.replace("conv1d.weight", "conv_weight"), tensor.squeeze(1)
        weights[name] = tensor.flatten() if name.endswith("A_log") else tensor
    module.load_state_dict(weights)


def kimi(**more: Any) -> Any:
    return transformers.KimiLinearConfig(**{
        **SIZES, "num_hidden_layers": 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "num_local_experts": 8, "linear_head_dim": 32, "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"], "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5, **more,
    })  # fmt: skip


@pytest.mark.parametrize("length", [1, 40, 130])
def test_a_whole_kimi_linear(length: int) -> None:
    """KDA with the softplus gate, latent attention without positions, experts, norms and head:
    with plain residuals the hybrid is transformers' model, prefill and decode."""
    theirs = transformers.KimiLinearForCausalLM(kimi()).eval()
    scatter(theirs)
    config = dataclasses.replace(OURS, rope="none", residual_block=0, routed_scale=2.446)
    ours = Hybrid(config).eval()
    copied(ours, theirs)
    ids = torch.randint(3, 96, (2, length + 3))
    states = TensorStates(2)
    with torch.no_grad():
        close(ours(ids), theirs(ids).logits)
        want = theirs(ids[:, :length], use_cache=True)
        close(ours(ids[:, :length], states), want.logits)
        for t in range(length, length + 3):
            want = theirs(ids[:, t : t + 1], cache=want.past_key_values, use_cache=True)
            close(ours(ids[:, t : t + 1], states), want.logits)


def test_kda_with_a_lower_bound() -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    settings = SimpleNamespace(
        linear_num_heads=2, linear_head_dim=32, hidden_size=64, linear_conv_kernel_dim=4,
        hidden_act="silu", rms_norm_eps=1e-5, layer_types=["linear_attention"],
        linear_lower_bound=-5.0,
    )  # fmt: skip
    theirs = modeling.Glm5NextTextLinearAttention(settings, 0)
    scatter(theirs)
    ours = Hybrid(dataclasses.replace(OURS, gate_lower_bound=-5.0)).layers[0].self_attn
    copied(ours, theirs)
    x = torch.randn(2, 100, 64)
    with torch.no_grad():
        close(ours(x, NoStates()), theirs(x))


def deepseek() -> tuple[nn.Module, LatentAttention, Callable[[Tensor], tuple[Any, ...]]]:
    """Their layer, ours with its weights, and how theirs is called."""
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = transformers.DeepseekV32Config(
        **SIZES, num_hidden_layers=1, q_lora_rank=48, n_routed_experts=8, n_group=2, topk_group=1,
        index_topk=16, index_head_dim=32, index_n_heads=4, attn_implementation="eager",
    )  # fmt: skip
    theirs = modeling.DeepseekV32Attention(config, 0)
    scatter(theirs)
    angles = modeling.DeepseekV32RotaryEmbedding(config)
    ours = Hybrid(dataclasses.replace(OURS, query_rank=48, layers=("dsa",))).layers[0].self_attn
    copied(ours, theirs)

    def call(x: Tensor) -> tuple[Any, ...]:
        length = x.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        places = torch.arange(length)[None]
        called: tuple[Any, ...] = theirs(
            x, angles(x, places), mask.expand(x.shape[0], 1, -1, -1), position_ids=places
        )
        return called

    return theirs, ours, call


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_dsa_with_equal_choices(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated queries and keys, the latent, the choice: DeepSeek-V3.2's layer, for the keys that
    its own indexer chose; then ours chooses the same ones wherever scores leave no tie."""
    theirs, ours, call = deepseek()
    chosen: list[Tensor] = []
    theirs.indexer.register_forward_hook(lambda _m, _a, out: chosen.append(out))
    x = torch.randn(2, length, 64)
    with torch.no_grad():
        want, _ = call(x)
        place = torch.arange(length)[:, None]
        # theirs fills rows that see fewer than 16 keys with later ones, which its mask takes away
        given = torch.where(chosen[0] <= place, chosen[0], -1)
        own: list[Tensor] = []

        def indexer(query: Tensor, weights: Tensor, key: Tensor, start: None, *, count: int) -> Any:
            found = functional_indexer(query, weights, key, start, count=count)
            sets = (part.sort(-1, descending=True).values for part in (given, found))
            equal = torch.eq(*(part[..., : given.shape[2]] for part in sets)).all(-1)
            if length > count:
                scores = functional.index_scores(query, weights, key, 0, start)
                last, next_one = scores.topk(count + 1, -1).values[..., -2:].unbind(-1)
                equal |= (last == next_one) & (last > -torch.inf)
            own.append(equal)
            return given

        functional_indexer = functional.lightning_indexer
        monkeypatch.setattr(functional, "lightning_indexer", indexer)
        close(ours(x, NoStates()), want)
    assert own[0].all()


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_and_their_router(groups: int) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    theirs = modeling.DeepseekV32MoE(transformers.DeepseekV32Config(
        **SIZES, num_hidden_layers=1, n_routed_experts=8, n_group=groups, topk_group=1,
        routed_scaling_factor=2.5,
    )).eval()  # fmt: skip
    scatter(theirs)
    config = dataclasses.replace(OURS, groups=groups, routed_scale=2.5, first_dense=0)
    ours = Hybrid(config).layers[0].mlp
    copied(ours, theirs)
    x = torch.randn(2, 50, 64)
    with torch.no_grad():
        close(ours(x), theirs(x))


def test_attention_residuals_are_the_definition() -> None:
    """Every sub-layer's input, from the outputs of the sub-layers before it, in float64."""
    config = dataclasses.replace(TINY, layers=("kda", "dsa") * 3, residual_block=2, first_dense=6)
    model = Hybrid(config).eval().double()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    mixes: list[AttentionResidual | None] = []
    for layer in model.layers:
        for norm, part in ((layer.input_layernorm, layer.self_attn),
                           (layer.post_attention_layernorm, layer.mlp)):  # fmt: skip
            norm.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
            part.register_forward_hook(lambda _m, _a, out: outputs.append(out))
        mixes += [layer.attention_residual, layer.mlp_residual]
    model.norm.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    mixes.append(model.final_residual)
    assert mixes[0] is None
    for mix in mixes[1:]:
        assert mix is not None
        nn.init.normal_(mix.query)
        nn.init.normal_(mix.norm_weight)
    ids = torch.randint(0, 96, (1, 20))
    with torch.no_grad():
        model(ids)
        for site, mix in enumerate(mixes):
            ends = range(4, site + 1, 4)  # of blocks of two layers, four sub-layers
            starts = [0, *ends]
            z = [model.embed_tokens(ids)]
            z += [sum(outputs[end - 4 : end]) for end in ends]  # type: ignore[misc]
            z += [sum(outputs[starts[-1] : site])] if site > starts[-1] else []  # type: ignore[list-item]
            h = z[0]
            if mix is not None:
                logits = torch.stack([
                    (mix.query * (mix.norm_weight * c / (c.square().mean(-1, keepdim=True)
                                                         + config.norm_eps).sqrt())).sum(-1)
                    for c in z
                ])  # fmt: skip
                h = (torch.softmax(logits, 0).unsqueeze(-1) * torch.stack(z)).sum(0)
            close(inputs[site], h, 1e-12)


def run(model: Hybrid, ids: Tensor, lengths: list[int]) -> tuple[Tensor, TensorStates]:
    states = TensorStates(ids.shape[0])
    assert isinstance(states.start, Tensor)
    parts, first = [], 0
    with torch.no_grad():
        for length in lengths:
            parts.append(model(ids[:, first : first + length], states))
            first += length
    assert states.start.tolist() == [ids.shape[1]] * ids.shape[0]
    return torch.cat(parts, 1), states


@pytest.mark.parametrize("rope", ["interleaved", "none"])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_prefill_chunks_and_decode_agree(rope: Any, bound: float | None) -> None:
    model = Hybrid(dataclasses.replace(TINY, rope=rope, gate_lower_bound=bound)).eval()
    scatter_residuals(model)
    ids = torch.randint(0, 96, (2, 150))
    for kind, most in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        model.to(kind)
        with torch.no_grad():
            whole = model(ids)
        _, other = run(model, ids, [150])
        for lengths in ([150], [70, 7, 43, 30], [90, *[1] * 60]):
            found, states = run(model, ids, lengths)
            close(found, whole, most)
            for key, state in states.held.items():
                close(state, other.held[key], most)
            for key, rows in states.rows.items():
                close(rows, other.rows[key], most)


def scatter_residuals(model: Hybrid) -> None:
    for module in model.modules():
        if isinstance(module, AttentionResidual):
            nn.init.normal_(module.query)


def test_logits_of_the_last_tokens_only() -> None:
    model = hybrid("tiny")
    ids = torch.randint(0, 96, (1, 20))
    with torch.no_grad():
        close(model(ids, logits_to_keep=3), model(ids)[:, -3:], 1e-6)


class Paged(TensorStates):
    """Rows in pages, handles of one's own: what a capture does."""

    def append(self, layer: int, kind: str, *rows: Tensor) -> Any:
        whole = super().append(layer, kind, *rows)
        pages = nn.functional.pad(whole, [0, 0, 0, -whole.shape[1] % 8]).unflatten(1, [-1, 8])
        table = torch.arange(pages.shape[0] * pages.shape[1], dtype=torch.int32)
        return pages.flatten(0, 1), table.view(pages.shape[:2])


def test_operators_take_the_functions_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("tiny")
    ids = torch.randint(0, 96, (2, 60))
    with torch.no_grad():
        whole = model(ids)
    for name in ("delta_rule", "short_convolution", "experts", "residual_mix", "route"):
        monkeypatch.setattr(functional, name, getattr(OPS, name))

    def indexer(query: Tensor, weights: Tensor, rows: Any, start: Tensor, *, count: int) -> Tensor:
        found: Tensor = OPS.paged_lightning_indexer(query, weights, *rows, start, count=count)
        return found

    def attention(
        query: Tensor, rows: Any, start: Tensor, indices: Tensor, *, latent: int, scale: float
    ) -> Tensor:
        found: Tensor = OPS.latent_attention(
            query, *rows, start, indices, latent=latent, scale=scale
        )
        return found

    monkeypatch.setattr(functional, "lightning_indexer", indexer)
    monkeypatch.setattr(functional, "latent_attention", attention)
    states: States = Paged(2)
    with torch.no_grad():
        parts = [model(ids[:, a:b], states) for a, b in ((0, 40), (40, 41), (41, 60))]
    close(torch.cat(parts, 1), whole)


def test_export_of_any_batch_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators in place nothing in the model binds a length."""
    model = hybrid("tiny")
    names = ("delta_rule", "short_convolution", "experts", "residual_mix", "route")
    for name in (*names, "lightning_indexer"):
        monkeypatch.setattr(functional, name, getattr(OPS, name))

    def attention(
        query: Tensor, rows: Tensor, start: Tensor, indices: Tensor, *, latent: int, scale: float
    ) -> Tensor:
        key = rows[:, None].expand(-1, query.shape[2], -1, -1)
        found: Tensor = OPS.sparse_attention(
            query.transpose(1, 2), key, key[..., :latent], indices, start, scale=scale
        )
        return found

    monkeypatch.setattr(functional, "latent_attention", attention)
    batch, length = torch.export.Dim("B", min=1, max=8), torch.export.Dim("T", min=1, max=4096)
    ids = torch.randint(0, 96, (2, 60))
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: batch, 1: length},))
    ranges = [(int(r.lower), int(r.upper)) for r in program.range_constraints.values()]
    assert sorted(ranges) == [(1, 8), (1, 4096)]
    for shape in ((1, 1), (3, 17), (2, 133)):
        ids = torch.randint(0, 96, shape)
        with torch.no_grad():
            assert torch.equal(program.module()(ids), model(ids))


def test_bfloat16_stays_near() -> None:
    """States of KDA stay in float32; the error is the rounding's."""
    model, rounded = hybrid("tiny"), hybrid("tiny").bfloat16()
    ids, states = torch.randint(0, 96, (1, 60)), TensorStates(1)
    with torch.no_grad():
        parts = [rounded(ids[:, :50], states), rounded(ids[:, 50:], states)]
        close(torch.cat(parts, 1), model(ids), 0.3)
    assert all((kind == "recurrent") == (state.dtype == torch.float32)
               for (_, kind), state in states.held.items())  # fmt: skip


def sparse_layer() -> tuple[LatentAttention, Alignment, Tensor]:
    layer = Hybrid(dataclasses.replace(OURS, query_rank=48, layers=("dsa",))).layers[0].self_attn
    assert isinstance(layer, LatentAttention)
    scatter(layer)
    return layer, Alignment(layer, sample=20), torch.randn(2, 150, 64)


def test_training_form_of_sparse_attention() -> None:
    """Expanded and masked it is the absorbed layer, sparse or dense."""
    layer, alignment, x = sparse_layer()
    with torch.no_grad():
        alignment.sparse = True
        close(alignment(x, NoStates()), layer(x, NoStates()))
        alignment.sparse, layer.count = False, 150
        close(alignment(x, NoStates()), layer(x, NoStates()))


def test_only_the_indexer_learns_from_its_loss() -> None:
    """And it learns: the divergence falls, and vanishes where it can."""
    layer, alignment, x = sparse_layer()
    for sparse in (False, True):
        alignment.sparse = sparse
        layer.zero_grad()
        alignment(x.requires_grad_(), NoStates())
        alignment.loss.backward()
        assert x.grad is None
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is not None) == name.startswith("indexer."), name
    assert layer.indexer is not None
    optimizer = torch.optim.Adam(layer.indexer.parameters(), 3e-3)
    found = []
    for _ in range(60):
        alignment(x.detach(), NoStates())
        found.append(alignment.loss.item())
        optimizer.zero_grad()
        alignment.loss.backward()
        optimizer.step()
    assert sum(found[-5:]) < 0.7 * sum(found[:5])


def test_long_training_form_of_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the layer, but for which of equal scores are chosen; what it says is covered is what
    the chosen keys have of the weights."""
    layer, _, x = sparse_layer()
    x = x[:1]
    long = LongAlignment(layer, sample=150)
    assert layer.indexer is not None

    def indexer(*asked: Any, count: int) -> Tensor:
        query, weights, key, start = asked
        assert start is None
        found = best_keys(query[0], weights[0], key[0], count)
        scores = functional.index_scores(query, weights, key, 0, None)[0]
        read = found.long().where(found >= 0, 150)
        chosen = torch.zeros(150, 151, dtype=torch.bool).scatter(1, read, True)[:, :150]
        best = functional.select(scores, count)
        for ours, theirs, row in zip(chosen, best, scores, strict=True):
            assert torch.equal(row[ours].sort().values, row[theirs].sort().values)
        picked.append(chosen)
        return found.unsqueeze(0)

    picked: list[Tensor] = []
    monkeypatch.setattr(functional, "lightning_indexer", indexer)
    with torch.no_grad():
        close(long(x, NoStates()), layer(x, NoStates()))
        cos, sin = rotary(150, None, layer.rope, layer.theta)
        _, nope, turned = layer.queries(x, cos, sin)
        latent, shared = layer.rows(x, cos, sin)
        key_up, _ = layer.expansions()
        dots = torch.einsum("thd,hdl,sl->ths", nope[0], key_up, latent[0])
        dots = (dots + torch.einsum("thd,sd->ths", turned[0], shared[0])) * layer.scale
        later = torch.ones(150, 150, dtype=torch.bool).triu(1).unsqueeze(1)
        weight = torch.softmax(dots.masked_fill(later, -torch.inf), -1)
        covered = (weight * picked[0].unsqueeze(1)).sum(-1)
    assert long.covered == pytest.approx(float(covered.log().mean().exp()), rel=1e-4)
    assert covered.min() < 0.9
    with pytest.raises(ValueError, match="one sequence"):
        long(torch.cat([x, x]), NoStates())


def test_long_training_covers_more_and_its_indexer_follows() -> None:
    """Each loss reaches what it is for: coverage attention, the divergence the indexer."""
    layer, _, x = sparse_layer()
    long = LongAlignment(layer, sample=100)
    assert layer.indexer is not None
    long(x[:1].requires_grad_(), NoStates())
    long.loss.backward()
    assert x.grad is None
    for name, parameter in layer.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns == name.startswith("indexer."), name
    long.coverage, long.noise = 1.0, 0.1
    optimizer = torch.optim.Adam(layer.parameters(), 2e-3)
    covered, apart = [], []
    for _ in range(30):
        long(x[:1].detach(), NoStates())
        covered.append(long.covered)
        optimizer.zero_grad()
        long.loss.backward()
        optimizer.step()
    assert covered[-1] > covered[0] + 0.1
    for _ in range(60):
        optimizer.zero_grad()
        again = long.again()
        again.backward()
        assert all(p.grad is None for n, p in layer.named_parameters() if "indexer" not in n)
        optimizer.step()
        apart.append(again.item())
    assert sum(apart[-10:]) < 0.8 * sum(apart[:10])


def test_every_sparse_layer_is_aligned() -> None:
    model = hybrid("embedded")
    assert [a.layer.layer for a in align(model)] == [3, 7]


def test_presets() -> None:
    sizes = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in Hybrid(config).parameters()) / 1e6
        assert HybridConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert sizes["tiny"] < 1 and 3 < sizes["embedded"] < 6 and 180 < sizes["k31_mini"] < 240
    assert K31_MINI.layers.count("kda") == 3 * K31_MINI.layers.count("dsa")


def test_same_weights_on_every_machine() -> None:
    first, again, other = hybrid("tiny"), hybrid("tiny"), hybrid("tiny", seed=1)
    ids = torch.randint(0, 96, (1, 30))
    with torch.no_grad():
        assert torch.equal(first(ids), again(ids)) and not torch.equal(first(ids), other(ids))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layers": ("kda", "rwkv")}, "kda, dsa or mla"),
        ({"rope_dim": 15}, "even"),
        ({"rope_dim": 64}, "at most index_dim"),
        ({"groups": 3}, "divide"),
        ({"groups": 4}, "two experts"),
        ({"gate_lower_bound": 5.0}, "negative"),
    ],
)
def test_configurations_that_make_no_sense(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(TINY, **changed)


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ValueError, match="head_count"):
        HybridConfig.from_dict({**TINY.to_dict(), "head_count": 3})
