"""Products of quantized rows with quantized weights, as dynamic int8 models have them."""

from __future__ import annotations

import torch

from graphc.ops.library import define


def _meta(input: torch.Tensor, zero: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    shape = [*input.shape[:-1], weight.shape[0]]
    return torch.empty(shape, dtype=torch.float32, device=input.device)


@define("integer_linear(Tensor input, Tensor? zero, Tensor weight) -> Tensor", _meta)
def integer_linear(
    input: torch.Tensor, zero: torch.Tensor | None, weight: torch.Tensor
) -> torch.Tensor:
    """(input - zero) x weight^T with int32 sums, converted to float32.

    input uint8 or int8 [*, K], zero an integer of one element or None, weight int8 [N, K] (its own
    zero point already taken off) -> float32 [*, N]. ONNX: MatMulInteger and the Cast behind it.
    """
    rows = input.to(torch.int32)
    if zero is not None:
        rows = rows - zero.to(torch.int32).reshape(())
    return torch.matmul(rows, weight.to(torch.int32).t()).to(torch.float32)
