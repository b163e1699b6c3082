"""late_heads: elementwise work on a product that is seen as heads is done on the product itself.

f(view(x)) is view(f(x)) where the view only cuts the last dimension. Then f stands right behind the
product and becomes its epilogue: gates of linear attention (-exp(A) softplus(z), L sigmoid(exp(A)
z)) are neither written without their activation nor read again for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.rewrite import Facts, Log, Refused, Rule, apply_until_stable
from graphc.rewrite.facts import operand, packet_of, rank
from passes.fusion.forms import same_sizes

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    f"aten.{n}"
    for n in ("add", "sub", "mul", "div", "neg", "exp", "log", "log1p", "sigmoid", "softplus",
              "silu", "tanh", "relu", "where", "gt", "ge", "lt", "le", "minimum", "maximum",
              "clamp", "_to_copy")
)  # fmt: skip
_PRODUCTS = frozenset(("aten.linear", "aten.addmm", "aten.mm"))
_VIEWS = frozenset(("aten.view", "aten._unsafe_view", "aten.reshape"))
#: operators between a product and what is moved, and how many walks move a chain of them
_DEPTH = 12


@dataclass(frozen=True)
class LateHeads:
    """Other operands are numbers, constants by head or channel, or the same product."""

    name: ClassVar[str] = "late_heads"

    def run(self, graph: Graph, log: Log) -> Graph:
        return apply_until_stable(graph, [_LateHeads()], log, limit=_DEPTH)


@dataclass(frozen=True)
class _Moved:
    #: by position: the value before the view, or a constant [H, K] of as many elements
    plain: dict[int, Value]
    constants: dict[int, torch.Tensor]
    width: int


class _LateHeads(Rule[_Moved]):
    name = "late_heads"
    roots = _ELEMENTWISE

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Moved | Refused]:
        out = node.outputs[0]
        plain: dict[int, Value] = {}
        constants: dict[int, torch.Tensor] = {}
        for position, item in enumerate(node.args):
            if not isinstance(item, Value):
                continue
            x = _before_cut(item)
            if x is not None and same_sizes(item.type.shape, out.type.shape):
                plain[position] = x
                continue
            tensor = facts.weight(item)
            if tensor is None:
                return
            if tensor.dim():
                constants[position] = tensor
        if not plain or not any(_of_product(x, _DEPTH) for x in plain.values()):
            return
        cut = tuple(out.type.shape[-2:])
        wide = [_spread(tensor, cut) for tensor in constants.values()]
        if any(tensor is None for tensor in wide):
            return
        flat = {k: t for k, t in zip(constants, wide, strict=True) if t is not None}
        yield _Moved(plain, flat, int(cut[0]) * int(cut[1]))

    def rewrite(self, builder: Builder, found: _Moved, node: Node) -> Sequence[Value]:
        arguments = list(node.args)
        for position, value in found.plain.items():
            arguments[position] = value
        for position, tensor in found.constants.items():
            arguments[position] = builder.weight("by_channel", tensor.reshape(found.width))
        made = builder.call1(node.op, *arguments, **node.kwargs)
        return builder.call(aten.view.default, made, tuple(node.outputs[0].type.shape))


def _before_cut(value: Value) -> Value | None:
    """x [.., N] of its view [.., H, K]."""
    if packet_of(value) not in _VIEWS:
        return None
    x: Value = operand(value)
    shape, cut = x.type.shape, value.type.shape
    if rank(x) < 1 or rank(x) + 1 != rank(value) or not same_sizes(shape[:-1], cut[:-2]):
        return None
    return x if isinstance(cut[-1], int) and isinstance(cut[-2], int) else None


def _of_product(value: Any, depth: int) -> bool:
    """Whether it is a product, or computed elementwise from one."""
    name = packet_of(value)
    if name in _PRODUCTS:
        return True
    if depth == 0 or name not in _ELEMENTWISE:
        return False
    return any(_of_product(v, depth - 1) for v in value.producer.args if isinstance(v, Value))


def _spread(tensor: torch.Tensor, cut: tuple[Any, ...]) -> torch.Tensor | None:
    """A constant [H, K], [H, 1] or [K] for every channel of every head."""
    if any(size != 1 for size in tensor.shape[:-2]):
        return None
    return tensor.reshape(tensor.shape[-2:]).expand(cut).contiguous()
