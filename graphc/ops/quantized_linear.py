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


def _grouped_meta(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, form: str, features: int
) -> torch.Tensor:
    return input.new_empty([input.shape[0], features])


@define(
    "quantized_grouped_mm(Tensor input, Tensor weight, Tensor offs, str form, int features)"
    " -> Tensor",
    _grouped_meta,
)
def quantized_grouped_mm(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, form: str, features: int
) -> torch.Tensor:
    """aten._grouped_mm with weights as `graphc.ops.weight_forms.encode` makes them, summed in
    float32.

    input floating-point [S, K], weight uint8 [E, bytes] that stands for [E, features, K] in
    `form`, offs int32 or int64 [E], where the rows of each group end -> [S, features] of the
    input's dtype. Rows after the last group are zero.

    Raises KeyError for an unknown form.
    """
    made = input.new_zeros([input.shape[0], features])
    start = 0
    for one, stop in zip(weight, offs.tolist(), strict=True):
        made[start:stop] = quantized_linear(input[start:stop], one, form, features)
        start = stop
    return made
