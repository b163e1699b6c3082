"""Attention Residuals (arXiv:2603.15031), in blocks of layers.

Candidates for the input of a sub-layer are the embedding, the sums of what each completed block
made, and the running sum of the current block. Each sub-layer has a pseudo-query of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphc.models import functional


class AttentionResidual(nn.Module):
    """Candidates [..., D] each -> their softmax-weighted sum."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(size))
        self.norm_weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, candidates: list[Tensor]) -> Tensor:
        return functional.residual_mix(candidates, self.query * self.norm_weight, self.eps)


class BlockStream:
    """What sub-layers have made so far: the completed blocks and the running sum."""

    def __init__(self, embedding: Tensor) -> None:
        self.blocks = [embedding]
        self.partial: Tensor | None = None

    @property
    def candidates(self) -> list[Tensor]:
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def input(self, mix: nn.Module | None) -> Tensor:
        """A single candidate is the input; that site has no parameters."""
        if mix is None:
            (only,) = self.candidates
            return only
        mixed: Tensor = mix(self.candidates)
        return mixed

    def add(self, made: Tensor) -> None:
        self.partial = made if self.partial is None else self.partial + made

    def end_block(self) -> None:
        if self.partial is not None:
            self.blocks.append(self.partial)
            self.partial = None


class PlainStream:
    """The usual residual stream: every input is the sum of all that was made."""

    def __init__(self, embedding: Tensor) -> None:
        self.sum = embedding

    def input(self, mix: nn.Module | None) -> Tensor:
        return self.sum

    def add(self, made: Tensor) -> None:
        self.sum = self.sum + made

    def end_block(self) -> None:
        pass
