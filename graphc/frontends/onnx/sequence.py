"""Sequences and optionals, which exist only while the model is captured."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.graph import OnnxGraph, OnnxNode
from graphc.frontends.onnx.interpreter import Scope
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Int, Known, Raw, Static, Tensor, Value, int_items


def _position(node: OnnxNode, position: Any, count: int) -> int:
    if not isinstance(position, int):
        raise node.refuse("a sequence position must be known when the model is captured")
    place = position + count if position < 0 else position
    if not 0 <= place < count:
        raise node.invalid(f"position {position} in a sequence of {count}")
    return place


@operator("SequenceConstruct")
def construct(node: OnnxNode, *values: Raw) -> Any:
    return (list(values),)


@operator("SequenceEmpty")
def empty(node: OnnxNode, *, dtype: int = 1) -> Any:
    return ([],)


@operator("SequenceInsert")
def insert(node: OnnxNode, items: Raw, value: Raw, position: Int | None = None) -> Any:
    place = len(items)
    if position is not None:
        place = (
            _position(node, position, len(items) + 1)
            if position >= 0
            else _position(node, position, len(items))
        )
    return ([*items[:place], value, *items[place:]],)


@operator("SequenceErase")
def erase(node: OnnxNode, items: Raw, position: Int | None = None) -> Any:
    place = _position(node, -1 if position is None else position, len(items))
    return ([*items[:place], *items[place + 1 :]],)


@operator("SequenceAt")
def at(node: OnnxNode, items: Raw, position: Int) -> Any:
    return items[_position(node, position, len(items))]


@operator("SequenceLength")
def length(node: OnnxNode, items: Raw) -> Static:
    return Static.of(len(items))


@operator("SplitToSequence")
def split_to_sequence(
    node: OnnxNode, x: Tensor, split: Known = None, *, axis: int = 0, keepdims: int = 1
) -> Any:
    size = x.shape[axis]
    if split is None:
        parts = list(torch.split(x, 1, axis))
        return (parts if keepdims else [torch.squeeze(p, axis) for p in parts],)
    sizes = int_items(split, node.where, "split")
    if not split.shape:
        if not isinstance(size, int) or not isinstance(sizes[0], int):
            raise node.refuse("the number of parts must be known when the model is captured")
        return (list(torch.split(x, sizes[0], axis)),)
    return (list(torch.split(x, sizes, axis)),)


@operator("ConcatFromSequence")
def concat_from_sequence(node: OnnxNode, items: Raw, *, axis: int, new_axis: int = 0) -> Tensor:
    tensors = [node.tensor(v) for v in items]
    return torch.stack(tensors, axis) if new_axis else torch.cat(tensors, axis)


@operator("SequenceMap")
def sequence_map(node: OnnxNode, scope: Scope, *values: Raw, body: OnnxGraph) -> Any:
    count = len(values[0])
    columns: list[list[Value]] = [[] for _ in body.outputs]
    for i in range(count):
        arguments = [v[i] if isinstance(v, list) else v for v in values]
        for column, result in zip(
            columns, scope.interpreter.run(body, arguments, scope), strict=True
        ):
            column.append(result)
    return tuple(columns)


@operator("Optional")
def optional(node: OnnxNode, value: Raw = None, *, type: Any = None) -> Any:
    return (value,)


@operator("OptionalHasElement")
def has_element(node: OnnxNode, value: Raw = None) -> Static:
    return Static.of(value is not None, torch.bool)


@operator("OptionalGetElement")
def get_element(node: OnnxNode, value: Raw) -> Any:
    if value is None:
        raise node.invalid("OptionalGetElement of an empty optional")
    return (value,)
