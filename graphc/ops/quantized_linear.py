"""Products with weights of 8 or 4 bits that were rounded when the plan was built."""

from __future__ import annotations

import torch

from graphc.ops.library import define
from graphc.ops.weight_forms import decode


def _meta(
    input: torch.Tensor, weight: torch.Tensor, form: str, features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    shape = [*input.shape[:-1], features]
    return torch.empty(shape, dtype=input.dtype, device=input.device)


@define(
    "quantized_linear(Tensor input, Tensor weight, str form, int features, Tensor? bias=None)"
    " -> Tensor",
    _meta,
)
def quantized_linear(
    input: torch.Tensor, weight: torch.Tensor, form: str, features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """aten.linear with a weight as `graphc.ops.weight_forms.encode` makes it, summed in float32.

    input floating-point [*, K], weight uint8 [bytes] that stands for [features, K] in `form`, bias
    [features] or None -> [*, features] of the input's dtype.

    Raises KeyError for an unknown form.
    """
    kind = torch.promote_types(input.dtype, torch.float32)
    plain = decode(weight, form, features, int(input.shape[-1])).to(kind)
    sums = torch.nn.functional.linear(input.to(kind), plain)
    return (sums if bias is None else sums + bias.to(kind)).to(input.dtype)
