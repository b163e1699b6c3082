"""ONNX graphs as plain Python objects: nodes with parsed attributes, constants by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from graphc.errors import UnsupportedError, UsageError
from graphc.frontends.onnx.external_data import load_tensor
from graphc.frontends.onnx.registry import Operator, find_operator
from graphc.frontends.onnx.values import STATIC_LIMIT, Static, Value

if TYPE_CHECKING:
    from graphc.frontends.onnx.interpreter import Interpreter

DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(eq=False)
class Constant:
    """A value fixed at load: a real tensor, later a buffer of the module.

    Args:
        tensor: the value; dropped once it is registered as a buffer.
        static: the same value for shape arithmetic, if it is small.
        buffer: the name of the buffer that holds it.
    """

    tensor: torch.Tensor | None
    static: Static | None = None
    buffer: str | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Constant:
        small = tensor.numel() <= STATIC_LIMIT
        return Constant(tensor, Static.of_tensor(tensor) if small else None)


@dataclass(eq=False)
class OnnxNode:
    """One operator call of a graph.

    `packed_buffers` and `consumed` are filled at load by the operator's `prepare` rule.
    """

    op_type: str
    domain: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    opset: int
    proto: NodeProto
    opsets: Mapping[str, int]
    operator: Operator | None = None
    packed_buffers: dict[str, str] = field(default_factory=dict)
    packed_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)
    interpreter: Interpreter | None = None

    @property
    def where(self) -> str:
        """Where an error message points: operator, node name and outputs."""
        full = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"node {self.name!r} ({full}, output {', '.join(self.outputs)})"

    def wants(self, index: int) -> bool:
        """True if the graph names the output at `index`."""
        return index < len(self.outputs) and self.outputs[index] != ""

    def tensor(self, value: Value) -> torch.Tensor:
        """`value` as a tensor in the running capture."""
        assert self.interpreter is not None
        return self.interpreter.tensor(value)

    def packed(self, key: str) -> torch.Tensor | None:
        """The buffer that the operator's `prepare` rule made under `key`."""
        assert self.interpreter is not None
        if key in self.packed_buffers:
            return self.interpreter.buffer(self.packed_buffers[key])
        return self.packed_tensors.get(key)

    def refuse(self, what: str, hint: str = "") -> UnsupportedError:
        """The error that says that this node cannot be built."""
        return UnsupportedError(what, where=self.where, hint=hint)

    def invalid(self, what: str, hint: str = "") -> UsageError:
        """The error that says that this node breaks the ONNX standard."""
        return UsageError(what, where=self.where, hint=hint)


@dataclass(eq=False)
class OnnxGraph:
    """A graph or subgraph: inputs and outputs by name, nodes in order, constants by name."""

    name: str
    inputs: list[str]
    outputs: list[str]
    nodes: list[OnnxNode]
    constants: dict[str, Constant]

    def subgraphs(self) -> Iterator[OnnxGraph]:
        for node in self.nodes:
            for value in node.attributes.values():
                if isinstance(value, OnnxGraph):
                    yield value

    def walk(self) -> Iterator[OnnxGraph]:
        """This graph and all graphs inside it."""
        yield self
        for graph in self.subgraphs():
            yield from graph.walk()


def normal_domain(domain: str) -> str:
    return "" if domain in DEFAULT_DOMAINS else domain


def parse_graph(
    proto: GraphProto, opsets: Mapping[str, int], base_dir: Path | None, outer: set[str]
) -> OnnxGraph:
    """A GraphProto as an OnnxGraph.

    Args:
        opsets: opset version by domain.
        outer: names that enclosing graphs define.

    Raises:
        UsageError: a node reads a name that nothing before it defines.
    """
    if proto.sparse_initializer:
        raise UnsupportedError("sparse initializers are not supported", where=proto.name)
    constants = {i.name: Constant.of(load_tensor(i, base_dir)) for i in proto.initializer}
    inputs = [i.name for i in proto.input]
    nodes, extra = parse_nodes(proto.node, opsets, base_dir, outer | set(inputs) | set(constants))
    constants.update(extra)
    known = outer | set(inputs) | set(constants) | {o for n in nodes for o in n.outputs}
    for output in proto.output:
        if output.name not in known:
            raise UsageError(f"graph output {output.name!r} is never computed", where=proto.name)
    return OnnxGraph(proto.name, inputs, [o.name for o in proto.output], nodes, constants)


def parse_nodes(
    protos: Any,
    opsets: Mapping[str, int],
    base_dir: Path | None,
    known: set[str],
) -> tuple[list[OnnxNode], dict[str, Constant]]:
    """Nodes in order, with Constant nodes taken out as constants."""
    known = set(known)
    nodes: list[OnnxNode] = []
    constants: dict[str, Constant] = {}
    for proto in protos:
        node = parse_node(proto, opsets, base_dir, known)
        for name in node.inputs:
            if name and name not in known:
                raise node.invalid(
                    f"input {name!r} is not defined before it is read",
                    "the file is damaged or its nodes are not sorted",
                )
        known.update(node.outputs)
        if node.op_type == "Constant" and not node.domain:
            constants[node.outputs[0]] = Constant.of(constant_value(node))
        else:
            nodes.append(node)
    return nodes, constants


def parse_node(
    proto: NodeProto, opsets: Mapping[str, int], base_dir: Path | None, known: set[str]
) -> OnnxNode:
    domain = normal_domain(proto.domain)
    where = f"node {proto.name!r} ({proto.op_type}, output {', '.join(proto.output)})"
    if domain not in opsets:
        raise UsageError(f"the model does not import the operator domain {domain!r}", where=where)
    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.ref_attr_name:
            raise UsageError(f"attribute {attribute.name!r} refers outside a function", where=where)
        attributes[attribute.name] = parse_attribute(attribute, opsets, base_dir, known, where)
    return OnnxNode(
        op_type=proto.op_type,
        domain=domain,
        name=proto.name,
        inputs=list(proto.input),
        outputs=list(proto.output),
        attributes=attributes,
        opset=opsets[domain],
        proto=proto,
        opsets=opsets,
        operator=find_operator(domain, proto.op_type, opsets[domain]),
    )


def parse_attribute(
    attribute: AttributeProto,
    opsets: Mapping[str, int],
    base_dir: Path | None,
    known: set[str],
    where: str,
) -> Any:
    """An attribute as int, float, str, list, tensor or OnnxGraph."""
    kind = attribute.type
    if kind == AttributeProto.INT:
        return int(attribute.i)
    if kind == AttributeProto.FLOAT:
        return float(attribute.f)
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.INTS:
        return [int(i) for i in attribute.ints]
    if kind == AttributeProto.FLOATS:
        return [float(f) for f in attribute.floats]
    if kind == AttributeProto.STRINGS:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind == AttributeProto.TENSOR:
        if attribute.t.data_type == TensorProto.STRING:
            raise UnsupportedError("string tensors are not supported", where=where)
        return load_tensor(attribute.t, base_dir, where)
    if kind == AttributeProto.GRAPH:
        return parse_graph(attribute.g, opsets, base_dir, known)
    name = AttributeProto.AttributeType.Name(kind)
    raise UnsupportedError(
        f"attribute {attribute.name!r} of type {name} is not supported", where=where
    )


def bind_attributes(node: NodeProto, bound: Mapping[str, AttributeProto]) -> NodeProto:
    """A node of a function body with its attribute references replaced by their values.

    A reference to an attribute that the caller leaves out disappears.
    """
    result = NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in bound:
                value = result.attribute.add()
                value.CopyFrom(bound[attribute.ref_attr_name])
                value.name = attribute.name
            continue
        copy = result.attribute.add()
        copy.CopyFrom(attribute)
        if attribute.type == AttributeProto.GRAPH:
            del copy.g.node[:]
            copy.g.node.extend(bind_attributes(n, bound) for n in attribute.g.node)
    return result


def constant_value(node: OnnxNode) -> torch.Tensor:
    """The tensor of a Constant node."""
    attributes = node.attributes
    if len(attributes) != 1:
        raise node.invalid(f"one value attribute expected, found {sorted(attributes)}")
    ((key, value),) = attributes.items()
    if key == "value" and isinstance(value, torch.Tensor):
        return value
    if key in ("value_int", "value_ints"):
        return torch.tensor(value, dtype=torch.int64)
    if key in ("value_float", "value_floats"):
        return torch.tensor(value, dtype=torch.float32)
    raise node.refuse(f"a Constant given as {key!r} is not supported")
