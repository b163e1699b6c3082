"""From what the user names to a decoder with state.

demo                           the embedded hybrid (`graphc.models.embedded`)
a folder with config.json      a causal language model of transformers
x.gguf                         the same, through transformers' loader
pkg.mod:factory, file.py:...   a factory that returns a StatefulDecoder, or a causal language
                               model of transformers
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphc.errors import UsageError
from graphc.frontends.decoder.stateful import StatefulDecoder, transformers_decoder
from graphc.frontends.inputs import float_dtype

#: a vocabulary of the 256 bytes and a few tokens more, the first of which begins a text
BYTES = 272
BEGIN = 256
FORMS = (
    "a decoder is demo, a checkpoint folder, a .gguf file or a factory (pkg.mod:factory, "
    "file.py:factory)"
)


@contextmanager
def opened_decoder(
    model: str | torch.nn.Module, *, dtype: str | None, pages: int, slots: int
) -> Iterator[tuple[StatefulDecoder, int]]:
    """The decoder, and the most positions it knows; while inside, names of its modules stand for
    operators of graphc.

    Raises:
        UsageError: no such model, or it is no causal language model.
    """
    found, longest = _found(model, dtype)
    if isinstance(found, StatefulDecoder):
        yield found.eval(), longest
        return
    from graphc.models.hybrid import Hybrid

    if isinstance(found, Hybrid):
        from graphc.frontends.decoder import hybrid

        with hybrid.substituted():
            options: dict[str, Any] = {}
            if 256 < found.config.vocab_size <= BYTES:
                options = {"bytes_are_tokens": True, "begin": [BEGIN], "stop": [BEGIN]}
            yield hybrid.hybrid_decoder(found, pages=pages, slots=slots, **options).eval(), longest
        return
    from graphc.frontends.decoder.families import substituted

    with substituted(found):
        decoder = transformers_decoder(found, pages=pages, slots=slots).eval()
        yield decoder, longest


def _found(model: str | torch.nn.Module, dtype: str | None) -> tuple[Any, int]:
    from graphc.frontends.huggingface import LONGEST, load_gguf, load_model, longest
    from graphc.models import embedded
    from graphc.models.hybrid import Hybrid

    module: Any
    if isinstance(model, torch.nn.Module):
        module = model
    elif model == "demo":
        module = embedded.load()
    elif Path(model).is_dir():
        module, _ = load_model(Path(model), dtype)
        dtype = None  # that was the loader's
    elif Path(model).suffix == ".gguf":
        module, _ = load_gguf(Path(model), dtype)
        dtype = None
    elif ":" in model:
        from graphc.frontends.torch_module import load_factory

        module, _, _, _ = load_factory(model)
    else:
        raise UsageError(f"expected a decoder, found {model!r}", hint=FORMS)
    if dtype is not None:
        _convert(module, dtype)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if isinstance(module, StatefulDecoder | Hybrid):
        return module, LONGEST
    if not hasattr(module, "config") or not hasattr(module, "prepare_inputs_for_generation"):
        raise UsageError(
            f"expected a causal language model, found {type(module).__name__}", hint=FORMS
        )
    return module, longest(module, module.config.get_text_config())


def _convert(module: torch.nn.Module, dtype: str) -> None:
    """Weights, in place."""
    if isinstance(module, StatefulDecoder):
        raise UsageError(
            f"expected no dtype for a decoder with states of its own, found {dtype}",
            hint="convert the model before the decoder is made of it",
        )
    module.to(float_dtype(dtype))
