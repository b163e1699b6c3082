"""What is done once at load: constant folding, packing of weights, registration as buffers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator

import torch

from graphc.errors import UnsupportedError
from graphc.frontends.onnx.graph import Constant, OnnxGraph, OnnxNode
from graphc.frontends.onnx.interpreter import Interpreter, Scope
from graphc.frontends.onnx.registry import find_prepare
from graphc.frontends.onnx.values import Static

SMALL_BYTES = 1 << 16  # a folded result may always be this large
GROWTH = 2  # a larger one may have this multiple of the bytes it is computed from

Lookup = Callable[[str], Constant | None]


def fold(graph: OnnxGraph, interpreter: Interpreter, outer: Lookup = lambda name: None) -> None:
    """Replaces nodes whose inputs are all constants by their results, inside subgraphs too.

    A result that would be much larger than its inputs (an expanded or dequantized weight) stays
    a computation of the graph.
    """

    def lookup(name: str) -> Constant | None:
        return graph.constants.get(name) or outer(name)

    kept = []
    for node in graph.nodes:
        _choose_branch(node, lookup)
        results = _evaluate(node, lookup, interpreter, graph)
        if results is None:
            kept.append(node)
            for value in node.attributes.values():
                if isinstance(value, OnnxGraph):
                    fold(value, interpreter, lookup)
        else:
            graph.constants.update(results)
    graph.nodes = kept


def _choose_branch(node: OnnxNode, lookup: Lookup) -> None:
    """Empties the branch of a constant `If` that is never taken, so its weights are dropped."""
    if node.op_type != "If" or node.domain:
        return
    condition = lookup(node.inputs[0])
    if condition is not None and condition.tensor is not None and condition.tensor.numel() == 1:
        dead = "else_branch" if bool(condition.tensor.item()) else "then_branch"
        node.attributes[dead] = OnnxGraph("never taken", [], [], [], {})


def _evaluate(
    node: OnnxNode, lookup: Lookup, interpreter: Interpreter, graph: OnnxGraph
) -> dict[str, Constant] | None:
    if node.operator is None or node.operator.scoped or not node.inputs:
        return None
    found = [lookup(name) if name else None for name in node.inputs]
    if any(name and c is None for name, c in zip(node.inputs, found, strict=True)):
        return None
    real = [c.tensor if c is not None else None for c in found]
    values = [c.static or c.tensor if c is not None else None for c in found]
    interpreter.real = True
    try:
        with torch.no_grad():
            results = interpreter.execute(node, values, Scope(graph, None, interpreter))
    except UnsupportedError:
        return None  # refused with its own message if the graph needs it
    finally:
        interpreter.real = False
    tensors = [r.real() if isinstance(r, Static) else r for r in results]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    given = sum(t.nbytes for t in real if t is not None)
    if sum(t.nbytes for t in tensors) > max(SMALL_BYTES, GROWTH * given):
        return None
    return {
        name: Constant.of(t.contiguous())
        for name, t in zip(node.outputs, tensors, strict=False)
        if name
    }


def pack(graph: OnnxGraph, outer: Lookup = lambda name: None) -> None:
    """Runs the `prepare` rules of all nodes on their constant inputs."""

    def lookup(name: str) -> Constant | None:
        return graph.constants.get(name) or outer(name)

    for node in graph.nodes:
        rule = find_prepare(node.domain, node.op_type)
        if rule is not None and node.operator is not None:
            found = [lookup(name) if name else None for name in node.inputs]
            node.packed_tensors = rule(node, [c.tensor if c is not None else None for c in found])
    for inner in graph.subgraphs():
        pack(inner, lookup)


def register(graph: OnnxGraph, module: torch.nn.Module) -> None:
    """Makes buffers of the constants that remain in use; equal tensors share one buffer."""
    names: dict[bytes, str] = {}
    used = _used_names(graph)
    for inner in graph.walk():
        inner.constants = {n: c for n, c in inner.constants.items() if n in used}
        for name, constant in inner.constants.items():
            tensor = constant.tensor
            if tensor is None or not _is_weight(tensor):
                continue
            constant.buffer = _register(module, names, name, tensor)
            constant.tensor = None
            if constant.static is not None:
                constant.static.buffer = constant.buffer
        for node in inner.nodes:
            for key, tensor in node.packed_tensors.items():
                base = node.name or node.outputs[0]
                node.packed_buffers[key] = _register(module, names, f"{base}_{key}", tensor)
            node.packed_tensors = {}


def _is_weight(tensor: torch.Tensor) -> bool:
    """Shapes, axes and scalars are literals of the graph; everything else is a weight."""
    return tensor.numel() > 1 and (tensor.is_floating_point() or tensor.numel() > 64)


def _register(
    module: torch.nn.Module, names: dict[bytes, str], name: str, tensor: torch.Tensor
) -> str:
    tensor = tensor.detach().contiguous()
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    key = digest.digest()
    if key not in names:
        base = re.sub(r"\W+", "_", name).strip("_") or "weight"
        if base[0].isdigit() or hasattr(module, base):
            base = f"w_{base}"
        unique, count = base, 1
        while hasattr(module, unique):
            count += 1
            unique = f"{base}_{count}"
        module.register_buffer(unique, tensor)
        names[key] = unique
    return names[key]


def _used_names(graph: OnnxGraph) -> set[str]:
    return set(_reads(graph))


def _reads(graph: OnnxGraph) -> Iterator[str]:
    for inner in graph.walk():
        yield from inner.outputs
        for node in inner.nodes:
            for index, name in enumerate(node.inputs):
                if index not in node.consumed:
                    yield name
