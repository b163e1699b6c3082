"""quantize_kv: what attention keeps of each token (keys and values, or latent rows) is kept in FP8.

A scale for each token, head and tile of 128 numbers. The part of latent rows that carries positions
(rope) stays as it is: it is small, and its error would not average out. Attention reads records and
computes as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphc.errors import UsageError
from graphc.ir.graph import Graph, Value
from graphc.ops.records import FP8, TILE
from graphc.rewrite import Facts, Log
from graphc.rewrite.facts import packet_of
from passes.quantization.narrowed_states import PLAIN, Narrowed, Rows, appended_rows, narrow

#: operators through which rows are still rows
_VIEWS = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "reshape", "permute", "transpose", "unsqueeze", "squeeze",
                 "expand", "slice", "clone", "contiguous", "_to_copy")
)  # fmt: skip
_PRODUCTS = ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm")


@dataclass(frozen=True)
class QuantizeKv:
    """Rows as `form`: fp8 (float32 scales) or fp8_pow2 (powers of two); "" is off. `rope`: also
    the part that carries positions. `index` names (by spaces) states of index keys, which are not
    this pass's."""

    form: str = ""
    rope: bool = False
    index: str = ""
    name: ClassVar[str] = "quantize_kv"
    narrows: ClassVar[bool] = True

    def run(self, graph: Graph, log: Log) -> Graph:
        """Raises UsageError for a form that is none."""
        if not self.form:
            return graph
        if self.form not in FP8:
            raise UsageError(
                f"expected a form of keys and values, found {self.form!r}",
                hint=f"forms: {', '.join(FP8)}",
            )
        facts = Facts(graph)
        narrowed: dict[Value, tuple[Rows, Narrowed]] = {}
        for found in appended_rows(graph, facts):
            if not isinstance(found, Rows):
                log.refused(self.name, *found)
            elif found.ranks or found.state.name in self.index.split():
                continue
            elif (reason := _mixed_heads(found)) is not None:
                log.refused(self.name, found.node, reason)
            else:
                narrowed[found.state] = (found, Narrowed(self._format(found, facts)))
        return narrow(graph, narrowed, log, self.name)

    def _format(self, found: Rows, facts: Facts) -> str:
        if found.apart:
            return f"{self.form}:{found.width}"
        plain = PLAIN[found.state.type.dtype]
        cuts = _cuts(found)
        places = None if self.rope else _rope(found, facts)
        parts: list[str] = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            kind = plain if places is not None and begin >= places else self.form
            parts.append(f"{kind}:{end - begin}")
        return "+".join(parts)


def _cuts(found: Rows) -> list[int]:
    """Where parts of a row begin and end, by what reads them."""
    cuts = {0, found.width}
    for node in found.readers:
        name = packet_of(node.outputs[0])
        if name == "graphc.read_pages":
            cuts |= {int(node.args[2]), int(node.args[2]) + int(node.args[3])}
        elif name == "graphc.latent_attention":
            cuts.add(int(node.argument("latent")))
        elif name == "graphc.paged_attention":
            size = int(node.argument("query").type.shape[3])
            cuts.add(int(node.argument("heads")) * size)
    return sorted(cuts)


def _rope(found: Rows, facts: Facts) -> int | None:
    """Where the part that carries positions begins: behind the latent, which is that part of a row
    that is multiplied by weights, or that values are taken from. None where there is no latent."""
    ends: list[int] = []
    for node in found.readers:
        name = packet_of(node.outputs[0])
        if name == "graphc.latent_attention":
            ends.append(int(node.argument("latent")))
        elif name == "graphc.read_pages" and _is_multiplied(node.outputs[0], facts):
            ends.append(int(node.args[2]) + int(node.args[3]))
    return max(ends, default=None)


def _is_multiplied(value: Value, facts: Facts) -> bool:
    for node in facts.readers(value):
        name = packet_of(node.outputs[0])
        if name in _PRODUCTS and facts.weight(node.args[1]) is not None:
            return True
        if name in _VIEWS and _is_multiplied(node.outputs[0], facts):
            return True
    return False


def _mixed_heads(found: Rows) -> str | None:
    """Why scales would not belong to one head."""
    for node in found.readers:
        if packet_of(node.outputs[0]) == "graphc.paged_attention" and not found.apart:
            heads = int(node.argument("heads"))
            sizes = (int(node.argument("query").type.shape[3]), int(node.argument("width")))
            if heads > 1 and any(size % TILE for size in sizes):
                return f"heads of {sizes[0]} and {sizes[1]} numbers lie in one row"
    return None
