"""The embedded default: a small hybrid over bytes, trained by `examples/train_tiny_hybrid.py`.

README.md beside this file is its card: data, recipe, what it has learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphc.models.hybrid import Hybrid
from graphc.models.hybrid_config import HybridConfig

FOLDER = Path(__file__).parent
#: tokens 0 .. 255 are bytes; this one stands in front of a text
BEGIN = 256


def encode(text: str, begin: bool = True) -> Tensor:
    """int64 [1, T]: the bytes of a text in UTF-8, BEGIN in front of them."""
    return torch.tensor([[BEGIN] * begin + list(text.encode())])


def decode(tokens: Iterable[int]) -> str:
    """Bytes to text; what isn't UTF-8 becomes U+FFFD, tokens that are no bytes are left out."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


def load(folder: Path = FOLDER) -> Hybrid:
    """The model in float32, in evaluation mode. folder: config.json and model.safetensors."""
    config = HybridConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = Hybrid(config)
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def save(model: Hybrid, folder: Path) -> None:
    """config.json and model.safetensors: matrices in bfloat16, all else and routers in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model.config.to_dict(), indent=2)
    (folder / "config.json").write_text(text + "\n")
    tensors = {}
    for name, tensor in model.state_dict().items():
        short = tensor.dim() < 2 or ".gate.weight" in name
        tensors[name] = tensor.detach().to(torch.float32 if short else torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
