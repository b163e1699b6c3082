"""What tiles mean, in torch: the truth that the kernels are compared with.

Values are [..., rows, columns] with any leading dimensions; an axis ONE has size 1. Works in the
dtype of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from graphc.dsl.tiles import Tile, inside

#: under the root of the sum of squares, as in fla and transformers
NORM_EPS = 1e-6

_SIMPLE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "neg": torch.neg, "exp": torch.exp,
    "sigmoid": torch.sigmoid, "matmul": torch.matmul,
    "transpose": lambda x: x.transpose(-1, -2),
    "inverse_norm": lambda x: (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt(),
    "solve": lambda n, x: torch.linalg.solve_triangular(
        n, x, upper=False, unitriangular=True
    ),
}  # fmt: skip


def evaluate(
    roots: tuple[Tile, ...], operands: Mapping[str, torch.Tensor], channels: int
) -> tuple[torch.Tensor, ...]:
    """The values of expressions. operands: rows, columns [..., T, 1], decays [..., T, K or 1],
    numbers [1, 1], "state" and given summaries by name. channels: K."""
    values: dict[Tile, torch.Tensor] = {}
    for node in inside(roots):
        args = [values[arg] for arg in node.args]
        if node.op in _SIMPLE:
            values[node] = _SIMPLE[node.op](*args)
        elif node.op == "scores":
            decay, _, strict = node.data
            g = None if decay is None else operands[decay]
            values[node] = _scores(args[0], args[1], g, strict)
        elif node.op == "constant":
            values[node] = torch.tensor([[node.data]], dtype=_kind(operands))
        elif node.op == "identity":
            values[node] = torch.eye(channels, dtype=_kind(operands))
        elif node.op in ("prefix", "suffix", "total"):
            values[node] = _decay(node.op, operands[node.data])
        else:
            values[node] = operands["state" if node.op == "state" else node.data]
    return tuple(values[root] for root in roots)


def _kind(operands: Mapping[str, torch.Tensor]) -> torch.dtype:
    return next(iter(operands.values())).dtype


def _decay(which: str, g: torch.Tensor) -> torch.Tensor:
    if which == "prefix":
        return g.cumsum(-2).exp()
    if which == "total":
        return g.sum(-2, keepdim=True).exp().transpose(-1, -2)
    behind = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return behind.flip(-2).cumsum(-2).flip(-2).exp()


def _scores(a: torch.Tensor, b: torch.Tensor, g: torch.Tensor | None, strict: bool) -> torch.Tensor:
    """The sums of decays between two tokens are made without differences of longer ones."""
    if g is None:
        return (a @ b.transpose(-1, -2)).tril(-1 if strict else 0)
    tokens = g.shape[-2]
    order = torch.arange(tokens)
    behind = order[:, None] > order[None, :]  # i > j
    steps = torch.where(behind[..., None], g.unsqueeze(-2), torch.zeros((), dtype=g.dtype))
    fade = steps.cumsum(-3).exp()  # [..., i, j, K or 1]
    if g.shape[-1] == 1:
        found = a @ b.transpose(-1, -2) * fade.squeeze(-1)
    else:
        found = torch.einsum("...ic,...jc,...ijc->...ij", a, b, fade)
    return found.tril(-1 if strict else 0)
