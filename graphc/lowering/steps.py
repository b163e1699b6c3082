"""Lowered steps, still symbolic: what `graphc.lowering.program` turns into a plan's Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphc.ir.graph import Graph, Node
from graphc.ir.types import Dim, TensorType
from graphc.lowering.context import Unit, View


@dataclass
class BufferInfo:
    """kind as in graphc.plan.Buffer; index is the position in that kind's table."""

    kind: str
    index: int
    nbytes: Dim
    name: str


@dataclass
class KernelStep:
    """A native kernel call, symbolic."""

    symbol: str
    unit: Unit
    units: tuple[Unit, ...]
    pointers: list[View]
    immediates: list[Dim]
    range: Dim
    grain: int
    scratch: Dim
    reads: list[int]
    writes: list[int]
    label: str
    nodes: list[str]
    flops: Dim | None = None
    read_views: tuple[View, ...] = ()
    write_views: tuple[View, ...] = ()
    choices: tuple[str, ...] = ()  # keys of what its rule left to measurement


@dataclass
class FallbackStep:
    """A torch call, symbolic: leaves of the argument trees are Views, Dims or literals."""

    node: Node
    arguments: Any
    keywords: Any
    outputs: list[View | None]
    reason: str
    reads: list[int]
    binds: list[tuple[str, int, int]]


@dataclass
class ConstantInfo:
    """A weight of the plan."""

    name: str
    tensor: torch.Tensor
    layout: str
    origin: str


@dataclass
class Lowered:
    """Steps over buffers, and where the results are."""

    graph: Graph
    buffers: list[BufferInfo]
    steps: list[KernelStep | FallbackStep]
    constants: list[ConstantInfo]
    results: list[tuple[str, Any]]  # ("buffer", id) | ("input", i) | ("constant", v) | ("dim", d)
    result_types: list[TensorType | None]
    fallbacks: list[tuple[str, str, str]] = field(default_factory=list)  # node, reason, location


def used_constants(
    buffers: Sequence[BufferInfo],
    steps: Sequence[KernelStep | FallbackStep],
    constants: Sequence[ConstantInfo],
) -> list[ConstantInfo]:
    """The constants that Steps read; `buffers` are renumbered. Weights that only their packed form
    is read of need no place in the plan."""
    used: set[int] = set()
    for step in steps:
        if isinstance(step, KernelStep):
            used.update(step.reads, step.writes, (v.buffer for v in step.pointers))
        else:
            used.update(step.reads)
    kept: list[ConstantInfo] = []
    for number, info in enumerate(buffers):
        if info.kind != "weight":
            continue
        if number in used:
            kept.append(constants[info.index])
            info.index = len(kept) - 1
        else:
            info.kind, info.index, info.nbytes = "arena", -1, 0
    return kept


def label_of(members: Sequence[Node]) -> str:
    """What a loop over these nodes is called."""
    names = [m.target.split(".")[1] for m in members]
    short = names if len(names) <= 4 else [*names[:3], f"+{len(names) - 3}"]
    return "_".join(short)
