"""A checkpoint whose experts are stored in MXFP4: what is read, and what a plan holds of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphc import decoders
from graphc.api import Options, build, reference
from graphc.frontends.huggingface import load_model
from graphc.ops.weight_forms import nbytes
from graphc.report import BuildReport
from graphc.runtime import decoder
from graphc.runtime.session import load

transformers = pytest.importorskip("transformers")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((E2M1, -E2M1))
EXPERTS, WIDTH, HIDDEN = 4, 64, 96
MXFP4 = ("quantize_weights{form=mxfp4,projections=no,least=256}",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random blocks and scales in the layout of gpt-oss, gate and up in turns."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("mxfp4") / "checkpoint"
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS, max_position_embeddings=512, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=None,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    for name in [n for n in tensors if "experts" in n and n.endswith("_proj")]:
        count, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (count, n, k // 32, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(117, 123, (count, n, k // 32)).byte()
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((place / "config.json").read_text())
    written["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(written))
    return place


def stored(folder: Path, name: str) -> torch.Tensor:
    """[E, N, K] that blocks and scales stand for: two codes a byte, the low one first."""
    tensors = load_file(folder / "model.safetensors")
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (VALUES[codes.long()] * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_read(folder: Path, dtype: str) -> None:
    """Every number that is stored, exactly."""
    model, _ = load_model(folder, dtype)
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            assert weight.dtype == getattr(torch, dtype)
            expected = stored(folder, f"model.layers.{number}.mlp.experts.{name}")
            assert torch.equal(weight.float().transpose(1, 2), expected)


def exactly(report: BuildReport, layouts: list[Any]) -> None:
    """All experts are kept in MXFP4, without an error."""
    matches = [m for r in report.passes if r.name == "quantize_weights" for m in r.matches]
    assert len(matches) == 4
    for match in matches:
        assert match.rule == "quantized_grouped_mm"
        assert match.detail.endswith("relative rms error 0")
    sizes = {w.offset: w.nbytes for w in layouts if w.layout == "mxfp4_panels32"}
    one = EXPERTS * (nbytes("mxfp4", 2 * HIDDEN, WIDTH) + nbytes("mxfp4", WIDTH, HIDDEN))
    assert sum(sizes.values()) == 2 * one


def test_a_plan(folder: Path, tmp_path: Path) -> None:
    report = build(
        str(folder),
        tmp_path / "plan",
        buckets=["T=64"],
        dtype="float32",
        pass_options=MXFP4,
        jobs=1,
    )
    session = load(tmp_path / "plan")
    exactly(report, session.plan.weights)
    ids = torch.randint(1, 128, (1, 40))
    logits = session.run(input_ids=ids, as_torch=True)
    truth = reference(str(folder), dtype="float32")(input_ids=ids)["logits"]
    found = logits if isinstance(logits, torch.Tensor) else next(iter(logits.values()))
    assert (found - truth).norm() <= 2e-5 * truth.norm()


def test_a_decoder(folder: Path, tmp_path: Path) -> None:
    options = Options(jobs=1, buckets=("128",), pass_options=MXFP4)
    report = decoders.build(
        str(folder), tmp_path / "plan", options, dtype="float32", chunk=64, batch=2, sequences=2
    )
    plan = decoder.load(tmp_path / "plan")
    exactly(report, plan.session.plan.weights)
    ids = torch.randint(1, 128, (1, 41))
    truth = reference(str(folder), dtype="float32")(input_ids=ids)["logits"][0]
    with plan.sequence() as text:
        first = torch.from_numpy(text.prefill(ids[0, :40].numpy()))
        second = torch.from_numpy(text.decode(int(ids[0, 40])))
    assert (first - truth[39]).norm() <= 2e-5 * truth[39].norm()
    assert (second - truth[40]).norm() <= 2e-5 * truth[40].norm()
