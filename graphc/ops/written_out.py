"""What graphc's operators are where a model writes them out in torch: the tensors that each launch
makes, in order, the operator's own result last.

It is what a report of launches and traffic compares with. Forms are those of transformers (chunks
of 64 tokens for the delta rule, grouped products for experts); of a loop each turn counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphc.ir.graph import Node, Value
from graphc.ir.types import Dim, itemsize


class Made(NamedTuple):
    """The tensor that a launch makes; `times` launches of a loop make one each."""

    shape: tuple[int, ...]
    dtype: str
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Of one of the tensors."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Call:
    """A node at given lengths: `size` evaluates a dimension."""

    node: Node
    size: Callable[[Dim], int]

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of an argument."""
        return self.own(self.argument(name)).shape

    def argument(self, name: str) -> Any:
        """Of the node."""
        return self.node.argument(name)

    def own(self, value: Value) -> Made:
        """A value as it is."""
        shape = tuple(self.size(dim) for dim in value.type.shape)
        return Made(shape, value.type.dtype)

    def result(self, position: int = 0) -> Made:
        """What the operator gives."""
        return self.own(self.node.outputs[position])


_CHUNK = 64

_Form = Callable[[Call], list[Made]]
_FORMS: dict[str, _Form] = {}


def written_out(node: Node, size: Callable[[Dim], int]) -> list[Made] | None:
    """The tensors that the launches for this call make; None: it is a launch by itself."""
    form = _FORMS.get(node.target)
    return None if form is None else form(Call(node, size))


def _wide(*shapes: tuple[int, ...]) -> list[Made]:
    """Tensors in which statistics, scores and recurrences are."""
    return [Made(shape, "float32") for shape in shapes]


def _form(*targets: str) -> Callable[[_Form], _Form]:
    def register(function: _Form) -> _Form:
        _FORMS.update((f"graphc.{target}.default", function) for target in targets)
        return function

    return register


@_form("residual_mix")
def _residual_mix(call: Call) -> list[Made]:
    """Stacked; key times query and its sum; square, mean, + eps, root; score, softmax; weighted,
    summed up. A norm behind it: square, mean, + eps, root, product, gain."""
    own, count = call.result(), len(call.argument("candidates"))
    row = own.shape
    every, scores = (count, *row), (count, *row[:-1])
    mixed = [Made(every, own.dtype), *_wide(every, scores, every, *[scores] * 5, every), own]
    if call.argument("norm_eps") is None:
        return mixed
    column = (*row[:-1], 1)
    gain = [own] if call.argument("gain") is not None else []
    return [*mixed, *_wide(row, column, column, column), own, *gain]


@_form("short_convolution")
def _short_convolution(call: Call) -> list[Made]:
    """The window before the inputs, the convolution, silu, the window after."""
    own = call.result()
    batch, tokens, channels = own.shape
    kept = call.shape("weight")[1] - 1
    silu = [own] if call.argument("silu") else []
    window = Made((batch, kept, channels), own.dtype)
    return [Made((batch, tokens + kept, channels), own.dtype), own, *silu, window]


@_form("delta_rule")
def _delta_rule(call: Call) -> list[Made]:
    """Norms; the scale; inside chunks decays summed, their differences and exp, two products and
    sums, the inverse, what it multiplies; a chunk after the other: three products with the state
    and one inside the chunk, their sums, the state decayed. One token: as it is defined."""
    batch, tokens, heads, wide = call.shape("value")
    keys = call.shape("key")[3]
    key, value = (batch, tokens, heads, keys), (batch, tokens, heads, wide)
    state, column = (batch, heads, keys, wide), (batch, tokens, heads)
    made: list[Made] = []
    if call.argument("normalize"):  # square, sum, + eps, root, product; of query and of key
        made += 2 * _wide(key, column, column, column, key)
    if call.argument("strength") is not None:
        made += _wide(column, column)
    made += _wide(key)
    if tokens == 1:
        made += _wide(key, state, value, value, value, state, state, value)
        return [*made, call.result()]
    chunks = -(-tokens // _CHUNK)
    square = (batch, heads, chunks, _CHUNK, _CHUNK)
    apart = (*square, keys)
    made += _wide(key, apart, apart, apart, square, apart, square, square, square, square)
    made += _wide(key, key, value, key, key)
    turn = Made((batch, heads, _CHUNK, wide), "float32", chunks)
    after = Made(state, "float32", chunks)
    return [*made, *[turn] * 5, *[after] * 3, call.result()]


@_form("lightning_indexer", "paged_lightning_indexer")
def _indexer(call: Call) -> list[Made]:
    """Keys gathered; products, relu, weighted, summed over heads; masked; the best, sorted."""
    batch, tokens, heads, _ = call.shape("query")
    made, seen = _rows(call, batch)
    scores, sums = (batch, tokens, heads, seen), (batch, tokens, seen)
    best = call.result()
    return [*made, *_wide(scores, scores, scores, sums, sums), best, best]


@_form("latent_attention")
def _latent(call: Call) -> list[Made]:
    """Rows gathered; a mask of the chosen; scores, scaled, masked, their softmax; the sum."""
    batch, tokens, heads, _ = call.shape("query")
    made, seen = _rows(call, batch)
    if call.argument("rope") is not None:  # both parts, side by side
        rope, width = call.shape("rope")[2], call.shape("query")[3]
        kind = call.result().dtype
        made += [Made((batch, seen, rope), kind), Made((batch, seen, width), kind)]
    if call.argument("indices") is not None:
        made.append(Made((batch, tokens, seen), "bool"))
    scores = (batch, heads, tokens, seen)
    return [*made, *_wide(scores, scores, scores, scores), call.result()]


@_form("sparse_attention")
def _sparse(call: Call) -> list[Made]:
    """As latent attention, over keys and values of every head."""
    batch, heads, tokens, _ = call.shape("query")
    seen = call.shape("key")[2]
    scores = (batch, heads, tokens, seen)
    mask = Made((batch, tokens, seen), "bool")
    return [mask, *_wide(scores, scores, scores, scores), call.result()]


@_form("append_pages")
def _append(call: Call) -> list[Made]:
    """The parts of the new rows side by side, put into their places."""
    parts = [call.own(part) for part in call.argument("rows")]
    width = sum(part.shape[-1] for part in parts)
    row = Made((*parts[0].shape[:-1], width), call.result().dtype)
    return [row] * (1 + (len(parts) > 1))


def _rows(call: Call, batch: int) -> tuple[list[Made], int]:
    """The rows of the sequences out of their pages, and how many a sequence has."""
    if all(argument.name != "pages" for argument in call.node.op._schema.arguments):
        return [], call.shape("key")[1]
    pages = call.own(call.argument("pages"))
    seen = call.shape("table")[1] * pages.shape[1]
    return [Made((batch, seen, pages.shape[2]), pages.dtype)], seen


@_form("experts")
def _experts(call: Call) -> list[Made]:
    """Sorted by expert; rows gathered; gates and ups; activation, product; downs; weighted;
    summed."""
    own = call.result()
    tokens, width = own.shape
    chosen, hidden = tokens * call.shape("index")[1], call.shape("down")[2]
    rows, inner = Made((chosen, width), own.dtype), Made((chosen, hidden), own.dtype)
    both = Made((chosen, 2 * hidden), own.dtype)
    return [Made((chosen,), "int64"), rows, both, inner, inner, rows, rows, own]


@_form("route")
def _route(call: Call) -> list[Made]:
    """Scores; with the bias; values of groups, the best of them, the mask; the best; their
    weights, sum, quotient, scale."""
    tokens, experts = call.shape("logits")
    index, weight = call.result(), call.result(1)
    made = _wide((tokens, experts)) * (1 + (call.argument("bias") is not None))
    groups = call.argument("groups")
    if groups > 1:
        made += _wide((tokens, groups), (tokens, groups), (tokens, groups), (tokens, experts))
    made += [index, weight]
    if call.argument("eps") is not None:
        made += [*_wide((tokens, 1), (tokens, 1)), weight]
    return made + [weight] * (call.argument("scale") != 1.0)
