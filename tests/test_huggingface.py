"""Checkpoint folders: what is loaded, what is made of it, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphc.errors import UnsupportedError, UsageError
from graphc.frontends.resolve import Source, capture_source, resolve

transformers = pytest.importorskip("transformers")

KEEP = frozenset({"aten.linear.default", "aten.scaled_dot_product_attention.default"})
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], tuple[Any, str]]] = {
    "bert": lambda: (transformers.BertConfig(**SMALL), "BertModel"),
    "roberta": lambda: (transformers.RobertaConfig(**SMALL), "RobertaForMaskedLM"),
    "llama": lambda: (transformers.LlamaConfig(**SMALL), "LlamaForCausalLM"),
    "qwen3_moe": lambda: (
        transformers.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8
        ),
        "Qwen3MoeForCausalLM",
    ),
    "vit": lambda: (
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            image_size=16, patch_size=8,
        ),
        "ViTModel",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config, architecture = CONFIGS[name]()
            torch.manual_seed(0)
            model = getattr(transformers, architecture)(config).eval()
            for parameter in model.parameters():  # some classes leave experts empty
                torch.nn.init.normal_(parameter, std=0.05)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders("bert"), tmp_path / "bert"))


def call(source: Source) -> dict[str, Any]:
    with torch.no_grad():
        results: dict[str, Any] = source.module(**source.kwargs)
    return results


def test_an_encoder(folders: Callable[[str], Path]) -> None:
    source = resolve(str(folders("bert")))
    assert source.kind == "huggingface"
    captured = capture_source(source, KEEP)
    assert [(v.name, str(v.type)) for v in captured.graph.inputs] == [
        ("input_ids", "i64[1,T]"),
        ("attention_mask", "i64[1,T]"),
    ]
    symbol = captured.graph.symbols["T"]
    assert (symbol.minimum, symbol.maximum) == (1, 40)
    assert captured.notes == ()
    names = [name for name, _ in captured.results["dict"]]
    assert names == ["last_hidden_state", "pooler_output"]
    config = transformers.AutoConfig.from_pretrained(folders("bert"))
    reference = transformers.BertModel.from_pretrained(folders("bert"), config=config).eval()
    with torch.no_grad():
        expected = reference(**source.kwargs)
    torch.testing.assert_close(call(source)["pooler_output"], expected.pooler_output)


def test_the_positions_of_roberta_start_late(folders: Callable[[str], Path]) -> None:
    source = resolve(str(folders("roberta")))
    assert source.dynamic_shapes["input_ids"][1].max == 38


def test_a_decoder_takes_tokens_alone(folders: Callable[[str], Path]) -> None:
    source = resolve(str(folders("llama")), dynamic=["T=1:16"])
    captured = capture_source(source, KEEP)
    assert [str(v.type) for v in captured.graph.inputs] == ["i64[1,T]"]
    assert captured.graph.symbols["T"].maximum == 16
    assert list(call(source)) == ["logits"]


def test_experts_are_one_grouped_operator(folders: Callable[[str], Path]) -> None:
    captured = capture_source(resolve(str(folders("qwen3_moe"))), KEEP)
    grouped = [n.target for n in captured.graph.nodes if "grouped_mm" in n.target]
    assert len(grouped) == 2


def test_a_vision_model(folders: Callable[[str], Path]) -> None:
    source = resolve(str(folders("vit")), dtype="bfloat16")
    assert source.kwargs["pixel_values"].shape == (1, 3, 16, 16)
    assert source.kwargs["pixel_values"].dtype is torch.bfloat16
    assert call(source)["last_hidden_state"].dtype is torch.bfloat16


def test_sharded_weights(folders: Callable[[str], Path], copied: Path) -> None:
    model = transformers.BertModel.from_pretrained(copied)
    (copied / "model.safetensors").unlink()
    model.save_pretrained(copied, max_shard_size="8KB")
    shards = sorted(copied.glob("model-*.safetensors"))
    assert len(shards) > 1
    found, expected = call(resolve(str(copied))), call(resolve(str(folders("bert"))))
    torch.testing.assert_close(found["pooler_output"], expected["pooler_output"])
    shards[0].unlink()
    with pytest.raises(UsageError, match=shards[0].name):
        resolve(str(copied))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_code_beside_the_weights_is_never_run(copied: Path) -> None:
    trap = copied / "modeling_trap.py"
    trap.write_text(f"open({str(copied / 'ran')!r}, 'w')\n")
    edit(copied, auto_map={"AutoModel": "modeling_trap.Trap", "AutoConfig": "modeling_trap.Trap"})
    with pytest.raises(UnsupportedError, match="auto_map"):
        resolve(str(copied))
    assert not (copied / "ran").exists()


def test_pickled_weights_are_never_read(copied: Path) -> None:
    os.rename(copied / "model.safetensors", copied / "pytorch_model.bin")
    with pytest.raises(UsageError, match="pytorch_model.bin") as caught:
        resolve(str(copied))
    assert "safe_serialization" in caught.value.hint


def test_missing_weights_are_named(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"encoder\.layer\.0\.output\.dense\.weight"):
        resolve(str(copied))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel"),
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"hidden_size": 8}, "another shape|cannot be loaded"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_other_refusals(copied: Path, changes: dict[str, Any], text: str) -> None:
    edit(copied, **changes)
    with pytest.raises((UsageError, UnsupportedError), match=text):
        resolve(str(copied))


def test_damaged_files(copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="damaged"):
        resolve(str(copied))
    (copied / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="found none"):
        resolve(str(copied))
    (copied / "config.json").write_text("{")
    with pytest.raises(UsageError, match="expected JSON"):
        resolve(str(copied))
    (copied / "config.json").unlink()
    with pytest.raises(UsageError, match="no config.json"):
        resolve(str(copied))
