"""The state space of Mamba-2 (SSD, arXiv:2405.21060). For each head and token, with
g_t = A step_t <= 0 as `decay`:

    S = exp(g_t) S + B_t (step_t x_t)^T,  y_t = S^T C_t
"""

from __future__ import annotations

from typing import Any

from graphc.dsl.operator import Affine, SequenceOperator, column, log_decay, rows
from graphc.dsl.registry import define
from graphc.dsl.tiles import K, Tile, V, scores


class Mamba2SSD(SequenceOperator):
    """c, b over K (the size of the state; one of them may serve a group of heads); x over V."""

    name = "mamba2_ssd"
    c, b, x, decay, step = rows(K), rows(K), rows(V), log_decay(), column()

    def summary(self, c: Any) -> Affine:
        return Affine(c.decay.total, (c.b * c.decay.suffix).T @ (c.step * c.x))

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor * first.factor, second.factor * first.offset + second.offset)

    def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
        x = c.step * c.x
        output = (c.c * c.decay.prefix) @ state + scores(c.c, c.b, c.decay) @ x
        return output, c.decay.total * state + (c.b * c.decay.suffix).T @ x


mamba2_ssd = define(Mamba2SSD())
