"""causal_attention: the part of a mask that compares positions becomes an argument of attention.

A triangle is is_causal; a window, another diagonal, or a triangle beside other masks (padding,
ALiBi) makes graphc.attention with what is left of the mask. Products outside the window are never
computed, and no T x S mask is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import same
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import rank
from passes.fusion.positional_mask import Window, is_bias, joined, read_mask
from passes.simplify.positions import Positions

_PLAIN = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True)
class CausalAttention:
    """Boolean masks and additive ones; masks that keep everything are dropped."""

    name: ClassVar[str] = "causal_attention"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_rules(graph, [_Mask(Positions(Facts(graph)))], log)


@dataclass(frozen=True)
class _Mask(Rule[Window]):
    positions: Positions

    name = "causal_mask"
    roots = frozenset(("aten.scaled_dot_product_attention", "graphc.attention"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[Window | Refused]:
        mask = node.argument("attn_mask")
        plain = node.target == _PLAIN
        if mask is None or (plain and node.argument("is_causal")):
            return
        number = facts.number(mask)
        if number is not None and number == (1 if mask.type.dtype == "bool" else 0):
            yield Window()
            return
        found = read_mask(mask, self.positions, facts)
        if not found.rest and not found.bounded():
            yield found
        if not found.bounded():
            return
        queries, keys = node.args[0].type.shape[-2], node.args[1].type.shape[-2]
        if same(queries, 1):
            return  # one row of a mask costs nothing
        if not plain and (node.argument("back") is not None or node.argument("ahead") is not None):
            return
        if plain and _causal(found):
            yield found
        elif found.soft and not found.sees_a_key(queries, keys):
            yield Refused("a query may see no key, and the low scores of the hidden ones count")
        elif found.soft and not all(is_bias(r, self.positions, facts) for r in found.rest):
            yield Refused("another mask may hide all keys that are near enough")
        elif node.args[0].type.dtype not in ("float32", "bfloat16", "float16"):
            yield Refused(f"the mask is no triangle, and queries are {node.args[0].type.dtype}")
        elif plain and (node.argument("dropout_p") != 0 or _scale(node) is None):
            yield Refused("the mask is no triangle, and the attention drops or scales out of reach")
        elif rank(node.args[0]) > 4:
            yield Refused("the mask is no triangle, and there are more than two batch dimensions")
        else:
            yield found

    def rewrite(self, builder: Builder, found: Window, node: Node) -> Sequence[Value]:
        keywords = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        plain = node.target == _PLAIN
        if plain and not found.bounded():
            return builder.call(node.op, *node.args[:3], **keywords)
        if plain and _causal(found):
            return builder.call(node.op, *node.args[:3], is_causal=True, **keywords)
        keywords.pop("dropout_p", None)
        if plain:
            keywords["scale"] = _scale(node)
        rest = joined(builder, found.rest)
        for name, bound in (("back", found.back), ("ahead", found.ahead)):
            if bound is not None:
                keywords[name] = bound
        args = [*node.args[:3], *([] if rest is None else [rest])]
        return builder.call(torch.ops.graphc.attention.default, *args, **keywords)


def _causal(found: Window) -> bool:
    """Whether torch's is_causal says it all."""
    return not found.rest and found.back is None and found.ahead is not None and same(
        found.ahead, 0
    )  # fmt: skip


def _scale(node: Node) -> float | None:
    scale: Any = node.argument("scale")
    if scale is None:
        width = node.args[0].type.shape[-1]
        scale = 1 / math.sqrt(width) if isinstance(width, int) and width else None
    return float(scale) if isinstance(scale, int | float) else None
