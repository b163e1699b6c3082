"""Gated DeltaNet (arXiv:2412.06464): Kimi Delta Attention whose state forgets by head."""

from __future__ import annotations

from graphc.dsl.operator import log_decay
from graphc.dsl.operators.kda import KimiDeltaAttention
from graphc.dsl.registry import define


class GatedDeltaNet(KimiDeltaAttention):
    """decay [B, T, H]; the rest is that of KimiDeltaAttention."""

    name = "gated_delta_net"
    decay = log_decay()


gated_delta_net = define(GatedDeltaNet())
