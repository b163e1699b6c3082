"""Attention Residuals (arXiv:2603.15031): the input of a sub-layer is a softmax-weighted sum of
what earlier (blocks of) layers made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphc.ops.library import define


def _meta(candidates: Sequence[torch.Tensor], query: torch.Tensor, eps: float) -> torch.Tensor:
    return candidates[0].new_empty(candidates[0].shape)


@define("residual_mix(Tensor[] candidates, Tensor query, float eps) -> Tensor", _meta)
def residual_mix(
    candidates: Sequence[torch.Tensor], query: torch.Tensor, eps: float
) -> torch.Tensor:
    """sum_j softmax_j(query . z_j / sqrt(mean(z_j^2) + eps)) z_j over the candidates z_j [..., D],
    token by token, in float32.

    query [D]: the pseudo-query times the gain of the keys' norm.
    """
    kind = torch.promote_types(candidates[0].dtype, torch.float32)
    z = torch.stack([c.to(kind) for c in candidates])
    scores = (z * query.to(kind)).sum(-1) * torch.rsqrt(z.square().mean(-1) + eps)
    return (torch.softmax(scores, 0).unsqueeze(-1) * z).sum(0).to(candidates[0].dtype)
