"""Small ONNX models for the tests of the frontend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None] | None

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, shape: Shape, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 18,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A checked model; constants become initializers."""
    weights = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), weights)
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(d, v) for d, v in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=opsets)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


def reference(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What the ONNX package's own evaluator computes."""
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(proto).run(None, dict(feeds)))
