"""Runs passes; verification, timing, dumps, numbers and reports hang here, not in the passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
from msgspec.structs import replace

from graphc.errors import InternalError, NumericsError
from graphc.ir.graph import Graph, Node, Value
from graphc.ir.run import Outcome, evaluate, run
from graphc.ir.text import print_graph
from graphc.ir.types import UNBOUNDED, Dim, TensorType, itemsize
from graphc.ir.verify import verify as check
from graphc.report import Match, PassRecord
from graphc.rewrite.numerics import Difference, Samples, compare, runnable, tolerance
from graphc.rewrite.options import describe
from graphc.rewrite.rules import Log, Pass

#: length of an unbounded symbol when traffic is estimated
_LENGTH = 2048


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    *,
    verify: bool = False,
    samples: Samples | int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    dump: Path | None = None,
    phase: str = "",
    limits: Mapping[str, int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Graph, list[PassRecord]]:
    """The graph after all passes, and a record of each.

    Args:
        verify: infer all types again, and run the graph in eager torch before and after each
            pass.
        samples: inputs to do so on, or how many to draw.
        rtol, atol: what a pass may cost; by the graph's dtypes if not given.
        dump: folder for `NN_name.txt`, the graph after each pass; `00_captured.txt` before.
        limits: length of each symbol for the estimate of traffic.
        progress: called with (name, position, count) before each pass.

    A pass that narrows numbers because it was asked to (`narrows`) is recorded, not judged.

    Raises:
        NumericsError: a pass changed a result beyond the tolerance; names the pass.
        IllegalGraph: a pass made an illegal graph.
    """
    check(graph, deep=verify)
    _dump(dump, 0, "captured", graph)
    inputs, before = runnable(graph, samples) if verify else ([], [])
    standard = tolerance(graph)
    bounds = (standard[0] if rtol is None else rtol, standard[1] if atol is None else atol)
    records: list[PassRecord] = []
    for position, one in enumerate(passes):
        if progress is not None:
            progress(one.name, position, len(passes))
        after, log, seconds = _run_one(one, graph, deep=verify)
        _dump(dump, position + 1, one.name, after)
        worst: Difference | None = None
        narrows = getattr(one, "narrows", False)
        if verify and after is not graph:
            outcomes = [run(after, sample) for sample in inputs]
            worst = _worst(before, outcomes, states=not narrows)
            before = outcomes
        elif verify:
            worst = Difference()
        records.append(_record(one, log, phase, seconds, graph, after, worst, limits or {}))
        if worst is not None and not narrows and not worst.within(*bounds):
            raise _failure(one, worst, bounds)
        graph = after
    return graph, records


def _run_one(one: Pass, graph: Graph, *, deep: bool) -> tuple[Graph, Log, float]:
    log = Log()
    start = time.perf_counter()
    try:
        after = one.run(graph, log)
        if after is not graph:
            check(after, deep=deep, trusted=graph.nodes)
    except InternalError as error:
        raise type_with_pass(error, one.name) from error
    return after, log, time.perf_counter() - start


def type_with_pass(error: InternalError, name: str) -> InternalError:
    """The same error, naming the pass it came from."""
    error.what = f"in pass {name}: {error.what}"
    error.args = (error.message(),)
    return error


def _worst(before: Sequence[Outcome], after: Sequence[Outcome], *, states: bool) -> Difference:
    found: list[Difference] = []
    for one, other in zip(before, after, strict=True):
        tensors = one.tensors()
        if not states:  # they are kept in another form
            tensors = {k: t for k, t in tensors.items() if not k.startswith("state ")}
        found.append(compare(tensors, other.tensors()))
    return max(found, key=lambda d: (d.max_rel != d.max_rel, d.max_rel))


def _failure(one: Pass, worst: Difference, bounds: tuple[float, float]) -> NumericsError:
    return NumericsError(
        f"expected pass {one.name} within rtol {bounds[0]:g}, atol {bounds[1]:g}, found max abs "
        f"{worst.max_abs:.3g}, max rel {worst.max_rel:.3g} in {worst.output}",
        hint=f"leave it out with --disable-pass {one.name}; find the node with --bisect",
    )


def _record(
    one: Pass, log: Log, phase: str, seconds: float, before: Graph, after: Graph,
    worst: Difference | None, limits: Mapping[str, int],
) -> PassRecord:  # fmt: skip
    work, left = _work(before, limits), _work(after, limits)
    return PassRecord(
        name=one.name,
        phase=phase,
        seconds=seconds,
        nodes_before=len(before.nodes),
        nodes_after=len(after.nodes),
        options=describe(one),
        kind=type(one).__module__.split(".")[-2] if "." in type(one).__module__ else "",
        matches=_with_sizes(log.matches, before, limits),
        refusals=log.refusals,
        launches_removed=work[0] - left[0],
        bytes_removed=work[1] - left[1],
        reads_removed=work[2] - left[2],
        weight_bytes_removed=_weight_bytes(before) - _weight_bytes(after),
        max_abs=None if worst is None else worst.max_abs,
        max_rel=None if worst is None else worst.max_rel,
    )


def _work(graph: Graph, limits: Mapping[str, int]) -> tuple[int, int, int]:
    """(operators that compute, bytes of their results, bytes of these that operators read)."""
    sizes = _sizes(graph, limits)
    computing = [n for n in graph.nodes if not is_view(n)]
    known: dict[Dim, int] = {}
    written = sum(_bytes(n.outputs, sizes, known) for n in computing)
    read = sum(_bytes([v for v in dict.fromkeys(n.inputs()) if v.producer], sizes, known)
               for n in computing)  # fmt: skip
    return len(computing), written, read


def _sizes(graph: Graph, limits: Mapping[str, int]) -> dict[sympy.Symbol, int]:
    sizes: dict[sympy.Symbol, int] = {}
    for info in graph.symbols.values():
        bound = info.maximum if info.maximum < UNBOUNDED else _LENGTH
        sizes[info.expr] = limits.get(info.name, min(bound, _LENGTH))
    return sizes


def _with_sizes(matches: Sequence[Match], graph: Graph, limits: Mapping[str, int]) -> list[Match]:
    """The matches with the bytes of what stood there."""
    if not matches:
        return []
    sizes = _sizes(graph, limits)
    known: dict[Dim, int] = {}
    nodes = {node.name: node for node in graph.nodes}
    return [
        replace(m, nbytes=_bytes(nodes[m.node].outputs, sizes, known)) if m.node in nodes else m
        for m in matches
    ]


def _weight_bytes(graph: Graph) -> int:
    return sum(tensor.nbytes for tensor in graph.weights.values())


def is_view(node: Node) -> bool:
    """Whether the call only looks at its argument in another way."""
    returns: Sequence[Any] = node.op._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


def _bytes(
    values: Sequence[Value], sizes: Mapping[sympy.Symbol, int], known: dict[Dim, int]
) -> int:
    total = 0
    for value in values:
        if isinstance(value.type, TensorType):
            count = itemsize(value.type.dtype)
            for dim in value.type.shape:
                if dim not in known:
                    known[dim] = int(evaluate(dim, sizes))
                count *= known[dim]
            total += count
    return total


def _dump(folder: Path | None, number: int, name: str, graph: Graph) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = print_graph(graph, contents=False)
    (folder / f"{number:02d}_{name}.txt").write_text(text, encoding="utf-8")
