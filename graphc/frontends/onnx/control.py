"""Control flow, decided while the model is captured."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxGraph, OnnxNode
from graphc.frontends.onnx.interpreter import Scope
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Known, Raw, Static, Value, decided

TRIP_LIMIT = 1000
BRANCH_LIMIT = 100  # nodes of both branches that may be computed for one selection


def truth(node: OnnxNode, value: Value) -> bool | None:
    """A condition as a bool; None if it depends on data while capturing."""
    if isinstance(value, Static):
        if value.items.size != 1:
            raise node.invalid("a condition must have one element")
        known = decided(value.flat[0])
        # a symbolic condition becomes a guard of the capture
        return bool(value.flat[0]) if known is None else known
    if not torch.compiler.is_exporting():
        return bool(value.reshape(()).item())
    return None


@operator("If")
def if_(
    node: OnnxNode,
    scope: Scope,
    condition: Known,
    *,
    then_branch: OnnxGraph,
    else_branch: OnnxGraph,
) -> tuple[Value, ...]:
    chosen = truth(node, condition)
    run = scope.interpreter.run
    if chosen is not None:
        return tuple(run(then_branch if chosen else else_branch, [], scope))
    size = sum(len(g.nodes) for b in (then_branch, else_branch) for g in b.walk())
    remedy = "bind the input that the condition depends on with `fixed`"
    if size > BRANCH_LIMIT:
        raise node.refuse("If on a condition that depends on data", remedy)
    pairs = zip(run(then_branch, [], scope), run(else_branch, [], scope), strict=True)
    return tuple(_select(node, condition, a, b, remedy) for a, b in pairs)


def _select(node: OnnxNode, condition: torch.Tensor, a: Value, b: Value, remedy: str) -> Value:
    if isinstance(a, list) or isinstance(b, list) or a is None or b is None:
        raise node.refuse("If on data that yields a sequence or an optional", remedy)
    left, right = node.tensor(a), node.tensor(b)
    if (
        left.dtype != right.dtype
        or left.ndim != right.ndim
        or any(decided(p == q) is not True for p, q in zip(left.shape, right.shape, strict=True))
    ):
        raise node.refuse("If on data whose branches yield different shapes", remedy)
    return torch.where(condition.reshape(()), left, right)


@operator("Loop")
def loop(
    node: OnnxNode, scope: Scope, trips: Known, condition: Known, *carried: Raw, body: OnnxGraph
) -> tuple[Value, ...]:
    remedy = "bind the input that the loop depends on with `fixed`, or export a fixed length"
    count = None if trips is None else _trip_count(node, trips, remedy)
    if count is None and condition is None:
        raise node.invalid("Loop without a trip count and without a condition never ends")
    going: Value = Static.of(True, torch.bool) if condition is None else condition
    state = list(carried)
    collected: list[list[Value]] = []
    step = 0
    while count is None or step < count:
        proceed = truth(node, going)
        if proceed is None:
            raise node.refuse("Loop on a condition that depends on data", remedy)
        if not proceed:
            break
        if step >= TRIP_LIMIT and torch.compiler.is_exporting():
            raise node.refuse(f"Loop of more than {TRIP_LIMIT} iterations", remedy)
        results = scope.interpreter.run(body, [Static.of(step), going, *state], scope)
        going, state = results[0], results[1 : 1 + len(state)]
        collected.append(results[1 + len(state) :])
        step += 1
    scans = len(body.outputs) - 1 - len(state)
    if scans and not collected:
        raise node.refuse("Loop without iterations that yields scan outputs")
    stacked = [torch.stack([node.tensor(c[i]) for c in collected]) for i in range(scans)]
    return (*state, *stacked)


def _trip_count(node: OnnxNode, trips: Value, remedy: str) -> int:
    if isinstance(trips, Static) and isinstance(trips.flat[0], int):
        return int(trips.flat[0])
    if isinstance(trips, torch.Tensor) and not torch.compiler.is_exporting():
        return int(trips.reshape(()).item())
    raise node.refuse("Loop with a trip count that is not known at capture", remedy)


@operator("Scan")
def scan_batched(
    node: OnnxNode,
    scope: Scope,
    lengths: Raw,
    *values: Raw,
    body: OnnxGraph,
    num_scan_inputs: int,
    directions: list[int] | None = None,
) -> tuple[Value, ...]:
    """Version 8, with a batch axis before everything."""
    if lengths is not None:
        raise node.refuse("Scan with sequence_lens is not supported")
    tensors = [node.tensor(v) for v in values]
    batch = tensors[0].shape[0]
    if not isinstance(batch, int):
        raise node.refuse("Scan over a symbolic batch size is not supported")
    rows = [
        scan(
            node,
            scope,
            *(t[i] for t in tensors),
            body=body,
            num_scan_inputs=num_scan_inputs,
            scan_input_directions=directions,
        )
        for i in range(batch)
    ]
    return tuple(
        torch.stack([node.tensor(v) for v in column]) for column in zip(*rows, strict=True)
    )


@operator("Scan", since=9)
def scan(
    node: OnnxNode,
    scope: Scope,
    *values: Raw,
    body: OnnxGraph,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[int] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[int] | None = None,
) -> tuple[Value, ...]:
    states = len(values) - num_scan_inputs
    state: list[Value] = list(values[:states])
    sources = [node.tensor(v) for v in values[states:]]
    axes = scan_input_axes or [0] * num_scan_inputs
    directions = scan_input_directions or [0] * num_scan_inputs
    length = sources[0].shape[axes[0]]
    if not isinstance(length, int) or (length > TRIP_LIMIT and torch.compiler.is_exporting()):
        raise node.refuse(
            "Scan over a symbolic or very long sequence", "export the model with a fixed length"
        )
    collected: list[list[Value]] = []
    for step in range(length):
        items = [
            torch.select(s, a, length - 1 - step if d else step)
            for s, a, d in zip(sources, axes, directions, strict=True)
        ]
        results = scope.interpreter.run(body, [*state, *items], scope)
        state = results[:states]
        collected.append(results[states:])
    count = len(body.outputs) - states
    if count and not collected:
        raise node.refuse("Scan over an empty sequence that yields scan outputs")
    out_axes = scan_output_axes or [0] * count
    backwards = scan_output_directions or [0] * count
    outputs: list[Any] = []
    for i in range(count):
        parts = [node.tensor(c[i]) for c in collected]
        outputs.append(torch.stack(parts[::-1] if backwards[i] else parts, out_axes[i]))
    return (*state, *outputs)
