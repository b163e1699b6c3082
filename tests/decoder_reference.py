"""What a decoder should say: transformers (or the reference hybrid) in eager torch, token for
token, in float64 throughout or as it is, with ties of top-k broken as graphc breaks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from graphc.models.states import TensorStates
from graphc.runtime.decoder import Decoder
from graphc.runtime.decoder import Sequence as Text
from tests.decoder_plans import Tiny

Array = np.ndarray[Any, np.dtype[Any]]
States = dict[str, Array]


class Ties(TorchFunctionMode):
    """torch.topk with ties by position, while inside; `flips` counts the rows for which torch's own
    choice is another one of equal scores."""

    def __init__(self) -> None:
        super().__init__()
        self.flips = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | (kwargs or {})
        if func not in (torch.topk, torch.Tensor.topk) or not given.get("largest", True):
            return func(*args, **(kwargs or {}))
        scores, count = given["input"], given["k"]
        assert given.get("dim", -1) in (-1, scores.dim() - 1)
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        values, chosen = values[..., :count], order[..., :count]
        plain = scores.topk(count, -1).indices
        other = (plain.sort(-1).values != chosen.sort(-1).values).any(-1)
        hidden = values[..., -1] < -1e30  # keys that are masked out: none of them counts
        self.flips += int((other & ~hidden).sum())
        return torch.return_types.topk((values, chosen))


class Float64(Ties):
    """Besides, every conversion to float32 is one to float64: models ask for it where bfloat16
    would not do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_wide(a) for a in args)
        kwargs = {name: _wide(a) for name, a in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


class Reference:
    """A model in eager torch. exact: the same weights, computed with in float64."""

    def __init__(self, tiny: Tiny, *, exact: bool) -> None:
        self.family, self.exact = tiny.family, exact
        self.model = tiny.model()
        if exact:
            self.model = self.model.double()
            if hasattr(self.model, "set_experts_implementation"):
                self.model.set_experts_implementation("eager")  # grouped products are for floats

    def scores(self, ids: Array, prompt: int) -> tuple[Array, States, int]:
        """(float64 [1 + len(ids) - prompt, V]: what follows the first `prompt` tokens and each
        further one; what is remembered in the end, by the names of a plan's states; how many
        choices torch.topk would have made differently: none in the hybrid, which does not leave
        ties to it)."""
        given = [torch.from_numpy(ids[None, :prompt]), *torch.from_numpy(ids[prompt:, None, None])]
        with torch.no_grad(), Float64() if self.exact else Ties() as mode:
            made, states = self._hybrid(given) if self.family == "hybrid" else self._cached(given)
        flips = 0 if self.family == "hybrid" else mode.flips
        return torch.stack(made).double().numpy(), states, flips

    def _hybrid(self, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], States]:
        states = TensorStates()
        made = [self.model(ids, states)[0, -1] for ids in given]
        return made, {
            f"state_layers_{layer}_{kind}": content[0].double().numpy()
            for (layer, kind), content in (states.rows | states.held).items()
        }

    def _cached(self, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], States]:
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=self.model.config)
        made = [
            self.model(input_ids=ids, use_cache=True, cache=cache).logits[0, -1] for ids in given
        ]
        found: dict[str, torch.Tensor] = {}
        for layer, kept in enumerate(cache.layers):
            if hasattr(kept, "recurrent_states"):
                found[f"{layer}_recurrent"] = kept.recurrent_states[0][0]
                found[f"{layer}_conv"] = kept.conv_states[0][0].T[1:]  # the first is not read again
                continue
            parts = [part[0].transpose(0, 1).flatten(1) for part in (kept.keys, kept.values)]
            found[f"{layer}_rows"] = torch.cat(parts, 1)
            keys = getattr(kept, "indexer_keys", None)
            if keys is not None and keys.numel():
                self._indexer(found, layer, keys)
        return made, {f"state_layers_{k}": v.double().numpy() for k, v in found.items()}

    def _indexer(self, found: dict[str, torch.Tensor], layer: int, keys: torch.Tensor) -> None:
        if self.family != "glm5_next":
            found[f"{layer}_indexer"] = keys[0]
            return
        indexer = self.model.model.language_model.layers[layer].self_attn.indexer
        pools = indexer.get_pooled_states(packed_states=keys)[0][0]
        found[f"{layer}_indexer_pooled"] = pools[: keys.shape[1] // indexer.index_kpool]


def remembered(decoder: Decoder, text: Text) -> States:
    """What a sequence over a plan remembers, as `Reference.scores` gives it."""
    found: States = {}
    for position, (name, state) in enumerate(decoder.session.states.items()):
        if position in decoder.facts.fixed:
            found[name] = _floats(state[text.slot])
            continue
        pages = _floats(state[text.pages])
        if pages.ndim == 4:  # the rows of a head together
            pages = pages.transpose(0, 2, 1, 3)
        per_page = pages.shape[1]
        rows = pages.reshape(-1, int(np.prod(pages.shape[2:])))
        found[name] = rows[: text.length * per_page // decoder.facts.page]
    return found


def _floats(state: Array) -> Array:
    """As float64; bfloat16 comes as its bits or as a type of ml_dtypes."""
    if state.dtype == np.uint16:
        state = (state.astype(np.uint32) << 16).view(np.float32)
    return state.astype(np.float64)
