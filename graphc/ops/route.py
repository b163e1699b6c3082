"""Routing of tokens to experts: which experts a token chooses, and how much each of them counts."""

from __future__ import annotations

import torch

from graphc.ops.library import define


def _meta(
    logits: torch.Tensor, bias: torch.Tensor | None, count: int, groups: int = 1, kept: int = 1,
    score: str = "sigmoid", eps: float | None = None, scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


@define(
    "route(Tensor logits, Tensor? bias, int count, int groups=1, int kept=1, "
    'str score="sigmoid", float? eps=None, float scale=1.0) -> (Tensor, Tensor)',
    _meta,
)
def route(
    logits: torch.Tensor, bias: torch.Tensor | None, count: int, groups: int = 1, kept: int = 1,
    score: str = "sigmoid", eps: float | None = None, scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(experts int64 [T, count], their weights float32 [T, count]) of each token.

    Args:
        logits: [T, E].
        bias: [E], added to the scores for the choice only (DeepSeek-V3, arXiv:2412.19437), or None.
        groups: neighbouring experts in as many groups; those of the `kept` groups whose two best
            experts score highest together compete.
        score: sigmoid or softmax of the logits, in float32.
        eps: weights are divided by their sum + eps; None: they are not.
        scale: of the weights.

    Experts come by falling biased score, equal ones by number; so do groups of equal value.
    """
    wide = logits.float()
    scores = torch.sigmoid(wide) if score == "sigmoid" else torch.softmax(wide, -1)
    choice = scores if bias is None else scores + bias.float()
    if groups > 1:
        by_group = choice.unflatten(1, [groups, -1])
        value = by_group.topk(2, -1).values.sum(-1)
        best = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, :kept]
        allowed = torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True)
        choice = by_group.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
    index = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :count]
    weight = scores.gather(1, index)
    if eps is not None:
        weight = weight / (weight.sum(-1, keepdim=True) + eps)
    return index.contiguous(), weight * scale
