"""A Hugging Face checkpoint folder: config.json and *.safetensors, nothing from the network, and
never code that comes with the weights."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphc.errors import UnsupportedError, UsageError

#: models without a bound on positions (relative or rotary ones) get this one
LONGEST = 131_072
#: how experts are computed: one grouped operator. The loop over experts cannot be captured, and
#: the batched form copies one weight per token.
EXPERTS = "grouped_mm"
EXAMPLE_LENGTH = 24
#: a method of quantized checkpoints: experts as blocks of E2M1 codes with E8M0 scales. They are
#: read as what they stand for, exactly; the pass quantize_weights writes them in MXFP4 again.
MXFP4 = "mxfp4"


def load_checkpoint(
    folder: Path, dtype: str | None = None
) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Any] | None]:
    """The model of a folder, its example keyword inputs and dynamic_shapes.

    Encoders take input_ids and attention_mask int64 [1, T], decoders input_ids [1, T] (prefill
    without a cache), encoder-decoders decoder_input_ids [1, S] too, vision models pixel_values
    float [1, channels, height, width]. Results are a dict by transformers' names.

    Raises: as `load_model`.
    """
    import transformers

    model, config = load_model(folder, dtype)
    with contextlib.suppress(ValueError, AttributeError):  # raised by models without experts
        model.set_experts_implementation(EXPERTS)
    return _wrapped(transformers, model, config)


def load_model(folder: Path, dtype: str | None = None) -> tuple[Any, Any]:
    """transformers' model of a folder, and its configuration.

    Raises:
        UsageError: a file is missing or damaged, or weights are missing.
        UnsupportedError: the checkpoint needs code of its own, or is of an unknown architecture.
    """
    config_dict = _read_config(folder)
    _check_weights(folder)
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a checkpoint folder needs the package transformers, which is not installed",
            hint="pip install 'graphc[hf]'",
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise UnsupportedError(
            f"this configuration is not one of transformers {transformers.__version__}: "
            f"{_first_line(error)}",
            where=str(folder / "config.json"),
            hint="install the transformers version that has the model type "
            f"{config_dict.get('model_type')!r}",
        ) from error
    model = _load_model(transformers, folder, config, dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, config


def load_gguf(file: Path, dtype: str | None = None) -> tuple[Any, Any]:
    """transformers' model of a GGUF file, its weights in a floating-point type [float32], and its
    configuration.

    Raises:
        UsageError: a package is missing, or the file is damaged.
        UnsupportedError: transformers does not read this architecture from GGUF.
    """
    try:
        import gguf  # noqa: F401  transformers reads with it
        import transformers
    except ImportError as error:
        raise UsageError(
            f"a GGUF file needs the package {error.name}, which is not installed",
            hint="pip install 'graphc[hf]'",
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    place = {"gguf_file": file.name, "local_files_only": True}
    try:
        with _quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=dtype or "float32", trust_remote_code=False, **place
            )
    except Exception as error:
        kind = UnsupportedError if "not supported" in str(error) else UsageError
        raise kind(
            f"the GGUF file cannot be loaded: {type(error).__name__}: {_first_line(error)}",
            where=str(file),
            hint="use the checkpoint in its original form, a folder with config.json",
        ) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval(), model.config


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Without the progress bars that libraries draw on their own; what went wrong is raised."""
    return contextlib.redirect_stderr(io.StringIO())


def tokenizer_text(place: Path) -> str | None:
    """tokenizer.json of a checkpoint folder or GGUF file, None if it has none that is fast."""
    if place.is_dir():
        file = place / "tokenizer.json"
        return file.read_text(encoding="utf-8") if file.is_file() else None
    if place.suffix != ".gguf":
        return None
    import transformers

    try:
        with _quiet():
            found = transformers.AutoTokenizer.from_pretrained(
                str(place.parent), gguf_file=place.name, local_files_only=True
            )
    except Exception:  # a vocabulary that transformers cannot read: tokens are given as numbers
        return None
    backend = getattr(found, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"expected a checkpoint folder, found no config.json in {str(folder)!r}",
            hint="name the folder that holds config.json and *.safetensors",
        )
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"expected JSON: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise UsageError("expected a JSON object", where=str(path))
    if config.get("auto_map"):
        raise UnsupportedError(
            "this checkpoint brings code of its own (auto_map), which is never run",
            where=str(path),
            hint="use a checkpoint whose architecture is part of transformers, or write a Python "
            "factory that builds the model from code you trust: file.py:factory",
        )
    method = _stored(config)
    if method not in ("", MXFP4):
        raise UnsupportedError(
            f"quantized checkpoints ({method}) are not supported",
            where=str(path),
            hint="use the checkpoint in its original floating-point type",
        )
    return config


def _stored(config: Mapping[str, Any]) -> str:
    """How the weights of a checkpoint are quantized; "" if they are not."""
    quantization = config.get("quantization_config")
    return str(quantization.get("quant_method", "unknown")) if quantization else ""


def _check_weights(folder: Path) -> None:
    """Refuses a folder whose weights are missing, damaged or pickled."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({folder / str(name) for name in table.values()})
        except (UnicodeDecodeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"expected an index of weights: {error}", where=str(index)) from error
        outside = [p.name for p in files if p.resolve().parent != folder.resolve()]
        if outside:
            raise UsageError(
                f"expected weights inside the folder, found {', '.join(outside)} outside",
                where=str(index),
            )
        missing = [p.name for p in files if not p.is_file()]
        if missing:
            raise UsageError(
                f"expected the weight files {', '.join(missing)}, found none",
                where=str(index),
                hint="download the checkpoint again; a part of it is missing",
            )
    else:
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        hint = "put model.safetensors beside config.json"
        if pickled:
            hint = (
                f"{', '.join(pickled)} holds pickled weights, which can run code when read; save "
                "them again with model.save_pretrained(folder, safe_serialization=True)"
            )
        raise UsageError("expected model.safetensors, found none", where=str(folder), hint=hint)
    for path in files:
        _check_header(path)


def _check_header(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(
            f"expected a safetensors file, found a damaged one: {error}",
            where=str(path),
            hint="download the file again",
        ) from error


def _load_model(transformers: Any, folder: Path, config: Any, dtype: str | None) -> Any:
    names = list(getattr(config, "architectures", None) or ())
    cls = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if cls is None:
        if names:
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {', '.join(names)}",
                where=str(folder / "config.json"),
                hint="install the transformers version that has it",
            )
        cls = transformers.AutoModel
    stored: dict[str, Any] = {}
    if getattr(config, "quantization_config", None):
        stored["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    try:
        model, info = cls.from_pretrained(
            str(folder),
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            dtype=dtype or "auto",
            **stored,
        )
    except Exception as error:
        raise UsageError(
            f"the checkpoint cannot be loaded: {type(error).__name__}: {_first_line(error)}",
            where=str(folder),
            hint="config.json and the weights must belong together",
        ) from error
    missing = sorted(str(key) for key in info.get("missing_keys", ()))
    wrong = sorted(str(key[0]) for key in info.get("mismatched_keys", ()))
    if missing or wrong:
        what = "missing" if missing else "of another shape"
        keys = missing or wrong
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        raise UsageError(
            f"expected weights for all of {type(model).__name__}, found {what}: "
            f"{', '.join(keys[:8])}{more}",
            where=str(folder),
            hint="config.json names an architecture that these weights do not belong to, or the "
            "checkpoint is incomplete",
        )
    return model.eval()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


class Checkpoint(torch.nn.Module):
    """A transformers model with tensors in and a dict of tensors out."""

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._options = dict(options)

    def results(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """What the model answers, by name, without empty fields and caches."""
        answer = self.model(**inputs, **self._options, return_dict=True)
        return {name: value for name, value in answer.items() if _is_plain(value)}


class Encoder(Checkpoint):
    """input_ids, attention_mask int64 [B, T]."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """Results by name."""
        return self.results(input_ids=input_ids, attention_mask=attention_mask)


class Decoder(Checkpoint):
    """input_ids int64 [B, T], no cache."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Results by name."""
        return self.results(input_ids=input_ids)


class EncoderDecoder(Checkpoint):
    """input_ids, attention_mask int64 [B, T], decoder_input_ids int64 [B, S], no cache."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
    ) -> dict[str, Any]:
        """Results by name."""
        return self.results(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
        )


class Vision(Checkpoint):
    """pixel_values float [B, channels, height, width]."""

    def forward(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """Results by name."""
        return self.results(pixel_values=pixel_values)


class VisionText(Checkpoint):
    """pixel_values float [B, channels, height, width], input_ids and attention_mask [C, T]."""

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, Any]:
        """Results by name."""
        return self.results(
            input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, torch.Tensor)


def _wrapped(
    transformers: Any, model: Any, config: Any
) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Any] | None]:
    text = getattr(config, "text_config", None) or config
    inputs = model.main_input_name
    takes = set(inspect.signature(model.forward).parameters)
    if inputs == "pixel_values":
        return Vision(model, {}).eval(), {"pixel_values": _pixels(model, config)}, None
    if inputs != "input_ids":
        raise UnsupportedError(
            f"checkpoints that take {inputs} are not supported",
            hint="write a Python factory with example inputs: file.py:factory",
        )
    highest = longest(model, text)
    length = torch.export.Dim("T", min=1, max=highest)
    size = min(EXAMPLE_LENGTH, highest)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(text, "vocab_size", 0) or 2)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (1, count), generator=generator)

    kwargs: dict[str, Any] = {"input_ids": tokens(size)}
    shapes: dict[str, Any] = {"input_ids": {1: length}}
    masked = {"attention_mask": torch.ones(1, size, dtype=torch.int64)}
    if "pixel_values" in takes and getattr(config, "vision_config", None) is not None:
        kwargs |= {"pixel_values": _pixels(model, config.vision_config), **masked}
        shapes |= {"pixel_values": None, "attention_mask": {1: length}}
        return VisionText(model, {}).eval(), kwargs, shapes
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        other = torch.export.Dim("S", min=1, max=highest)
        kwargs |= {**masked, "decoder_input_ids": tokens(size // 2 + 1)}
        shapes |= {"attention_mask": {1: length}, "decoder_input_ids": {1: other}}
        return EncoderDecoder(model, {"use_cache": False}).eval(), kwargs, shapes
    if _is_decoder(transformers, model, config):
        return Decoder(model, {"use_cache": False}).eval(), kwargs, shapes
    kwargs |= masked
    shapes |= {"attention_mask": {1: length}}
    return Encoder(model, {}).eval(), kwargs, shapes


def _is_decoder(transformers: Any, model: Any, config: Any) -> bool:
    """Whether a text model is causal, by transformers' own tables of architectures."""
    auto = transformers.models.auto.modeling_auto
    if getattr(config, "is_decoder", False):
        return True
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if type(model).__name__ in causal.values():
        return True
    return config.model_type in causal and config.model_type not in masked


def longest(model: Any, config: Any) -> int:
    """The most tokens the positions of a model hold."""
    highest = LONGEST
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            highest = value
            break
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(padding, int):
            highest -= padding + 1  # RoBERTa counts positions from padding_idx + 1
            break
    return highest


def _pixels(model: Any, config: Any) -> torch.Tensor:
    """An example image of the size a vision configuration states."""
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    channels = int(getattr(config, "num_channels", 3) or 3)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, channels, height, width, generator=generator)
    return pixels.to(next(model.parameters()).dtype)
