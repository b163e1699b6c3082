"""Gated Linear Attention (arXiv:2312.06635). For each head and token:

S = diag(exp g_t) S + k_t v_t^T,  o_t = scale S^T q_t
"""

from __future__ import annotations

from typing import Any

from graphc.dsl.operator import Affine, SequenceOperator, log_decay, number, rows
from graphc.dsl.registry import define
from graphc.dsl.tiles import K, Tile, V, scores


class GatedLinearAttention(SequenceOperator):
    """query, key, decay over K; value over V."""

    name = "gated_linear_attention"
    query, key, value, decay, scale = rows(K), rows(K), rows(V), log_decay(K), number()

    def summary(self, c: Any) -> Affine:
        return Affine(c.decay.total, (c.key * c.decay.suffix).T @ c.value)

    def compose(self, first: Affine, second: Affine) -> Affine:
        return Affine(second.factor * first.factor, second.factor * first.offset + second.offset)

    def apply(self, c: Any, state: Tile) -> tuple[Tile, Tile]:
        query = c.scale * c.query
        output = (query * c.decay.prefix) @ state + scores(query, c.key, c.decay) @ c.value
        return output, c.decay.total * state + (c.key * c.decay.suffix).T @ c.value


gated_linear_attention = define(GatedLinearAttention())
