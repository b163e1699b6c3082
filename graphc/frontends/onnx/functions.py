"""Operators that the ONNX standard defines by a function body, used where no handler exists."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, TypeProto

from graphc.frontends.onnx.dtypes import ONNX_OF_TORCH
from graphc.frontends.onnx.graph import (
    OnnxGraph,
    OnnxNode,
    bind_attributes,
    normal_domain,
    parse_nodes,
)
from graphc.frontends.onnx.values import Value


def function_body(node: OnnxNode, values: list[Value]) -> OnnxGraph:
    """The graph of a node's function body, with the node's attributes filled in.

    Raises:
        UnsupportedError: the standard defines no body for this operator and version.
    """
    function = _function(node, values)
    if function is None:
        full = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise node.refuse(
            f"the operator {full} (opset {node.opset}) is not supported",
            "replace it in the model, or add a handler in graphc/frontends/onnx",
        )
    bound = {a.name: a for a in node.proto.attribute}
    for name, default in _defaults(node).items():
        bound.setdefault(name, default)
    for default in function.attribute_proto:
        bound.setdefault(default.name, default)
    opsets = {"": onnx.defs.onnx_opset_version(), **node.opsets}
    opsets.update({normal_domain(o.domain): o.version for o in function.opset_import})
    protos = [bind_attributes(n, bound) for n in function.node]
    nodes, constants = parse_nodes(protos, opsets, None, set(function.input))
    outputs = list(function.output)[: len(node.outputs)]
    return OnnxGraph(function.name, list(function.input), outputs, nodes, constants)


def _defaults(node: OnnxNode) -> dict[str, AttributeProto]:
    schema = onnx.defs.get_schema(node.op_type, node.opset, node.domain)
    return {
        a.name: a.default_value for a in schema.attributes.values() if a.default_value.ByteSize()
    }


def _function(node: OnnxNode, values: list[Value]) -> FunctionProto | None:
    try:
        # Any: the stubs of onnx do not declare the function part of a schema
        schema: Any = onnx.defs.get_schema(node.op_type, node.opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    version = node.opsets.get("", node.opset)
    if schema.has_function:
        usable = [v for v in schema.function_opset_versions if v <= version]
        if usable:
            body = schema.get_function_with_opset_version(max(usable))
            return _parsed(body)
    if schema.has_context_dependent_function:
        usable = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        if usable:
            types = [_type_of(value) for value in values]
            raw = schema.get_context_dependent_function_with_opset_version(
                max(usable), node.proto.SerializeToString(), types
            )
            return _parsed(raw) if raw else None
    return None


def _parsed(raw: bytes) -> FunctionProto:
    function = FunctionProto()
    function.ParseFromString(raw)
    return function


def _type_of(value: Value) -> bytes:
    proto = TypeProto()
    if value is not None:
        proto.tensor_type.elem_type = ONNX_OF_TORCH[value.dtype]
    return bytes(proto.SerializeToString())
