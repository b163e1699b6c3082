"""Attention Residuals (arXiv:2603.15031): the input of a sub-layer is a softmax-weighted sum of
what earlier (blocks of) layers made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define


def _meta(
    candidates: Sequence[torch.Tensor], query: torch.Tensor, eps: float,
    norm_eps: float | None = None, gain: torch.Tensor | None = None, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    first = candidates[0]
    return first.new_empty(first.shape, dtype=dtype or first.dtype)


@define(
    "residual_mix(Tensor[] candidates, Tensor query, float eps, float? norm_eps=None, "
    "Tensor? gain=None, *, ScalarType? dtype=None) -> Tensor",
    _meta,
)
def residual_mix(
    candidates: Sequence[torch.Tensor], query: torch.Tensor, eps: float,
    norm_eps: float | None = None, gain: torch.Tensor | None = None, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x = sum_j softmax_j(query . z_j / sqrt(mean(z_j^2) + eps)) z_j over the candidates
    z_j [..., D], token by token, in float32; with `norm_eps` what the sub-layer reads of it,
    x / sqrt(mean(x^2) + norm_eps) * gain.

    query [D]: the pseudo-query times the gain of the keys' norm. gain [D]. dtype: of the result,
    else the first candidate's.
    """
    kind = torch.promote_types(candidates[0].dtype, torch.float32)
    z = torch.stack([c.to(kind) for c in candidates])
    scores = (z * query.to(kind)).sum(-1) * torch.rsqrt(z.square().mean(-1) + eps)
    mixed = (torch.softmax(scores, 0).unsqueeze(-1) * z).sum(0)
    if norm_eps is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps)
        if gain is not None:
            mixed = mixed * gain.to(kind)
    return mixed.to(dtype or candidates[0].dtype)
