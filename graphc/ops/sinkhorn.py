"""Sinkhorn-Knopp: square matrices made doubly stochastic, as manifold-constrained hyper-connections
do with the weights that mix residual streams (arXiv:2512.24880)."""

from __future__ import annotations

import torch

from graphc.ops.library import define


def _meta(x: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@define("sinkhorn(Tensor x, int rounds, float eps) -> Tensor", _meta)
def sinkhorn(x: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """x [..., N, N], columns divided by their sums + eps `rounds` times, and rows in between."""
    for i in range(rounds):
        if i:
            x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x
