"""Latent rows that lie in plain tensors, as the one page that each sequence has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphc.ir.graph import Builder, Node, Value
from graphc.ir.types import Dim, same
from graphc.rewrite.facts import operand, packet_of

aten = torch.ops.aten
Places = tuple[Value, Value, Value, Value | None, Value | None]


@dataclass(frozen=True)
class DenseRows:
    """Rows [latent | rope] in two tensors."""

    latent: Value  # [B, S, L], or with dimensions of one
    rope: Value | None  # [B, 1, S, R]
    batch: int
    length: Dim
    width: int

    def places(self, builder: Builder, start: Value, indices: Value | None) -> Places:
        """Pages, table, start, indices and rope of graphc.latent_attention."""
        pages, rope = (
            None if x is None
            else builder.call1(
                aten.reshape.default, x, (self.batch, self.length, x.type.shape[-1])
            )
            for x in (self.latent, self.rope)
        )  # fmt: skip
        assert pages is not None
        table = torch.arange(self.batch, dtype=torch.int32)[:, None]
        return pages, builder.weight("table", table), start, indices, rope


def dense_rows(latent: Value, rope: Value | None, node: Node) -> DenseRows | None:
    """The rows of a sparse attention whose keys are made of `latent`, and `rope` behind them."""
    batch, keys = node.args[1].type.shape[0], node.args[1].type.shape[2]
    if rope is not None and packet_of(rope) == "aten.expand":
        rope = operand(rope)
    if rope is not None and not all(map(same, rope.type.shape[:3], (batch, 1, keys))):
        return None
    width = latent.type.shape[-1]
    outer = [d for d in latent.type.shape[:-1] if not same(d, 1)]
    wanted = [d for d in (batch, keys) if not same(d, 1)]
    if not isinstance(batch, int) or not isinstance(width, int):
        return None
    if len(outer) != len(wanted) or not all(map(same, outer, wanted)):
        return None
    return DenseRows(latent, rope, batch, keys, width)
