"""Latent rows that lie in plain tensors, as the one page that each sequence has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphc.ir.graph import Builder, Node, Value
from graphc.ir.types import Dim, same
from graphc.rewrite import Facts
from graphc.rewrite.facts import operand, packet_of

aten = torch.ops.aten
Places = tuple[Value, Value, Value, Value | None]


@dataclass(frozen=True)
class DenseRows:
    """Rows [latent | rope] in two tensors.

    gathered: one query that certainly sees as many rows as it chooses: those are brought together
    instead of all rows.
    """

    latent: Value  # [B, S, L], or with dimensions of one
    rope: Value | None  # [B, 1, S, R]
    batch: int
    length: Dim
    width: int
    gathered: bool

    def places(self, builder: Builder, start: Value, indices: Value | None) -> Places:
        """Pages, table, start and indices of graphc.latent_attention."""
        parts = [x for x in (self.latent, self.rope) if x is not None]
        sizes = (self.batch, self.length)
        if self.gathered and indices is not None:
            count = int(indices.type.shape[2])
            chosen = builder.call1(aten.view.default, indices, (count,))
            flat = [
                builder.call1(aten.reshape.default, x, (self.length, x.type.shape[-1]))
                for x in parts
            ]
            parts = [builder.call1(aten.index_select.default, x, 0, chosen) for x in flat]
            sizes = (1, count)
            start = builder.weight("start", torch.full((1,), count - 1, dtype=torch.int32))
            indices = None
        rows = [
            builder.call1(aten.reshape.default, x, (*sizes, builder.of(x).type.shape[-1]))
            for x in parts
        ]
        pages = builder.call1(aten.cat.default, tuple(rows), -1) if len(rows) > 1 else rows[0]
        table = torch.arange(self.batch, dtype=torch.int32)[:, None]
        return pages, builder.weight("table", table), start, indices


def dense_rows(latent: Value, rope: Value | None, node: Node, facts: Facts) -> DenseRows | None:
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
    indices, start = node.argument("indices"), facts.weight(node.argument("start"))
    queries, count = indices.type.shape[1:]
    enough = start is not None and isinstance(count, int) and bool((start >= count - 1).all())
    gathered = batch == 1 and same(queries, 1) and enough
    return DenseRows(latent, rope, batch, keys, width, gathered)
