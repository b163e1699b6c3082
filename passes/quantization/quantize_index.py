"""quantize_index: the Lightning Indexer's keys are kept in MXFP8 and its queries narrowed likewise.

They only rank: what is chosen is then read as it is. With `rescore` keys are kept in two terms, the
second being MXFP8 of what the first leaves; `rescore` times as many as are wanted, and at least 64
more, are chosen by the first terms, and among them by both, which are read of these alone. Numbers
of bfloat16 are two terms exactly where the first saturates nothing (mxfp8_ceil).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from graphc.errors import UsageError
from graphc.ir.graph import Graph, Value
from graphc.ops.lightning_indexer import candidates_for
from graphc.ops.records import GROUP, MX
from graphc.rewrite import Facts, Log
from graphc.rewrite.facts import packet_of
from passes.quantization.narrowed_states import INDEXERS, Narrowed, Rows, appended_rows, narrow


@dataclass(frozen=True)
class QuantizeIndex:
    """Keys and queries of indexers as `form`: mxfp8_floor, mxfp8_ceil or mxfp8_even; "" is off.
    `states` names (by spaces) states of index keys that a graph writes and does not read."""

    form: str = ""
    rescore: float = 0.0
    states: str = ""
    name: ClassVar[str] = "quantize_index"
    narrows: ClassVar[bool] = True

    def run(self, graph: Graph, log: Log) -> Graph:
        """Raises UsageError for a form that is none."""
        if not self.form:
            return graph
        if self.form not in MX or (self.rescore and self.rescore < 1):
            raise UsageError(
                f"expected a form of index keys, found {self.form!r}, rescore {self.rescore:g}",
                hint=f"forms: {', '.join(MX)}; rescore: 0, or 1.2 for a fifth more candidates",
            )
        told = self.states.split()
        narrowed: dict[Value, tuple[Rows, Narrowed]] = {}
        for found in appended_rows(graph, Facts(graph)):
            if not isinstance(found, Rows):
                log.refused(self.name, *found)
            elif not found.ranks and found.state.name not in told:
                continue
            elif any(packet_of(n.outputs[0]) not in INDEXERS for n in found.readers):
                log.refused(self.name, found.node, "its keys are not read by the indexer alone")
            elif self.rescore and packet_of(found.node.outputs[0]) == "graphc.pool_keys":
                log.refused(self.name, found.node, "pools are not chosen again")
            else:
                narrowed[found.state] = (found, self._narrowed(found))
        return narrow(graph, narrowed, log, self.name)

    def _narrowed(self, found: Rows) -> Narrowed:
        form = f"{self.form}:{found.width}"
        rows = found.state.type.shape[-2]
        if found.width % 64 == 0 and isinstance(rows, int) and rows % GROUP == 0:
            form += f"@{GROUP}"  # keys are scored sixteen at a time
        if not self.rescore:
            return Narrowed(form)
        keywords: dict[str, Any] = {}
        for node in found.readers:
            keywords["candidates"] = candidates_for(int(node.argument("count")), self.rescore)
        return Narrowed(form, 2, keywords)
