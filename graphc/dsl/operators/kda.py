"""Kimi Delta Attention (arXiv:2510.26692). For each head and token:

S' = diag(exp g_t) S,  u_t = beta_t (v_t - S'^T k_t),  S = S' + k_t u_t^T,  o_t = scale S^T q_t
"""

from __future__ import annotations

from typing import Any

from graphc.dsl.operator import Affine, SequenceOperator, column, flag, log_decay, number, rows
from graphc.dsl.registry import define
from graphc.dsl.tiles import K, Tile, V, normalized, scores, solve


class KimiDeltaAttention(SequenceOperator):
    """query, key, decay over K; value over V; beta. normalize: query and key get length one."""

    name = "kda"
    query, key, value = rows(K), rows(K), rows(V)
    decay, beta = log_decay(K), column()
    scale, normalize = number(), flag()

    def rows_of(self, c: Any) -> tuple[Tile, Tile, Tile]:
        """Queries, keys, and how much each token is told by those before it."""
        query, key = (normalized(x) if c.normalize else x for x in (c.query, c.key))
        return c.scale * query, key, c.beta * scores(key, key, c.decay, strict=True)

    def summary(self, c: Any) -> Affine:
        _, key, told = self.rows_of(c)
        tail = (key * c.decay.suffix).T
        taken = solve(told, c.beta * (key * c.decay.prefix))
        return Affine(
            c.decay.total * c.identity - tail @ taken, tail @ solve(told, c.beta * c.value)
        )

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor @ first.factor, second.factor @ first.offset + second.offset)

    def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
        query, key, told = self.rows_of(c)
        known = (key * c.decay.prefix) @ state
        written = solve(told, c.beta * (c.value - known))
        output = (query * c.decay.prefix) @ state + scores(query, key, c.decay) @ written
        return output, c.decay.total * state + (key * c.decay.suffix).T @ written


kda = define(KimiDeltaAttention())
