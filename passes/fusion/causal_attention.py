"""causal_attention: a mask that is a triangle over positions becomes is_causal.

Half of the products are never computed, and the mask is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of, rank
from passes.simplify.positions import Affine, Positions, is_causal

#: an additive mask at least this low leaves no weight to what it masks
_LOW = -1e30


@dataclass(frozen=True)
class CausalAttention:
    """Boolean masks and additive ones; masks that keep everything are dropped."""

    name: ClassVar[str] = "causal_attention"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Mask(Positions(Facts(graph)))], log)


@dataclass(frozen=True)
class _Mask(Rule[bool]):
    """What was found: whether the attention is causal, or unmasked."""

    positions: Positions

    name = "causal_mask"
    roots = frozenset(("aten.scaled_dot_product_attention",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[bool | Refused]:
        mask = node.argument("attn_mask")
        if mask is None or node.argument("is_causal"):
            return
        number = facts.number(mask)
        if number is not None and number == (1 if mask.type.dtype == "bool" else 0):
            yield False
            return
        kept = self._kept(mask, facts)
        if is_causal(kept):
            yield True
        elif kept is not None:
            yield Refused("the mask depends on position, but is no lower triangle")

    def _kept(self, mask: Value, facts: Facts) -> Affine | None:
        """Where the mask keeps a score, as a condition on positions."""
        if mask.type.dtype == "bool":
            return self.positions.condition(mask)
        while packet_of(mask) in ("aten.expand", "aten.unsqueeze", "aten._to_copy"):
            mask = operand(mask)
        if rank(mask) < 2 or packet_of(mask) not in ("aten.where", "aten.masked_fill"):
            return None
        arguments: tuple[Any, ...] = mask.producer.args  # type: ignore[union-attr]
        if packet_of(mask) == "aten.masked_fill":
            kept, fill, negate = arguments[0], arguments[2], True
            condition = arguments[1]
        elif len(arguments) == 3 and facts.number(arguments[1]) == 0:
            condition, kept, fill, negate = (*arguments, False)
        elif len(arguments) == 3:
            condition, fill, kept, negate = (*arguments, True)
        else:
            return None
        low = facts.number(fill)
        if facts.number(kept) != 0 or low is None or low > _LOW:
            return None
        found = self.positions.condition(condition)
        if found is None or not negate:
            return found
        return Affine(-found.constant - 1, tuple(-s for s in found.steps))

    def rewrite(self, builder: Builder, found: bool, node: Node) -> Sequence[Value]:
        keywords = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        if found:
            keywords["is_causal"] = True
        return builder.call(node.op, *node.args[:3], **keywords)
