"""Products of bytes: the kernel on each instruction set, and a dynamically quantized ONNX model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from graphc.api import build
from graphc.lowering.context import Refuse
from graphc.lowering.templates import load_rules
from graphc.ops.integer_linear import integer_linear
from graphc.plan_io import read_plan
from graphc.runtime.session import load
from tests.kernel_build import TARGET_OF
from tests.kernel_harness import Constant, available_isas, run_rule

ISAS = available_isas()
load_rules()
NAME = "graphc.integer_linear.default"


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_kernel_is_exact(isa: str, dtype: torch.dtype) -> None:
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    for m, k, n in [(1, 64, 33), (3, 1, 1), (7, 5, 70), (16, 384, 64), (90, 301, 65), (9, 4500, 2)]:
        x = integers(low, high, m, k, dtype=dtype)
        weight = integers(-128, 128, n, k, dtype=torch.int8)
        x[0], weight[0] = high - 1, -128  # the largest sums: nothing may saturate in between
        for zero in (None, torch.tensor(low + 3, dtype=dtype), torch.tensor([-300])):
            (got,) = run_rule(NAME, [x, zero, Constant(weight)], isa=isa)
            assert torch.equal(got, integer_linear(x, zero, weight)), (m, k, n, zero)


def test_strided_rows_and_batches() -> None:
    x = integers(0, 256, 5, 48, 6, dtype=torch.uint8).transpose(1, 2)  # K is not the last in memory
    weight = integers(-128, 128, 40, 48, dtype=torch.int8)
    (got,) = run_rule(NAME, [x, None, Constant(weight)], isa=ISAS[0])
    assert torch.equal(got, integer_linear(x, None, weight))


def test_weights_that_change_are_refused() -> None:
    x = integers(0, 256, 4, 8, dtype=torch.uint8)
    with pytest.raises(Refuse, match="not constant"):
        run_rule(NAME, [x, None, integers(-128, 128, 4, 8, dtype=torch.int8)], isa=ISAS[0])


def quantized_model(weight_zero: int) -> onnx.ModelProto:
    """x -> DynamicQuantizeLinear -> MatMulInteger -> Cast -> scale -> bias -> relu."""
    rng = np.random.default_rng(7)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero", "wz"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["scale", "w_scale"], ["factor"]),
        helper.make_node("Mul", ["wide", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["biased"]),
        helper.make_node("Relu", ["biased"], ["y"]),
    ]
    weights = {
        "w": rng.integers(-128, 128, (70, 50)).astype(np.int8),
        "wz": np.array(weight_zero, np.int8),
        "w_scale": np.float32(0.01),
        "bias": rng.standard_normal(50).astype(np.float32),
    }
    graph = helper.make_graph(
        nodes, "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 70])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", 50])],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_zero", [0, 100])
def test_a_dynamically_quantized_model_equals_onnx_runtime(
    tmp_path: Path, isa: str, weight_zero: int
) -> None:
    path, plan = tmp_path / "q.onnx", tmp_path / "plan"
    onnx.save(quantized_model(weight_zero), path)
    build(str(path), plan, target=TARGET_OF[isa])
    kernels = [
        s.kernel.symbol for p in read_plan(plan).programs for s in p.steps if s.kernel is not None
    ]
    # 228 levels off the lowest weight need nine bits: those stay with the 16-bit kernel
    wanted = "gemm_i8" if weight_zero == 0 else "gemm_i16"
    assert any(symbol.startswith(wanted) for symbol in kernels), kernels
    x = np.random.default_rng(3).standard_normal((33, 70)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (result,) = load(plan, threads=1).run(x)
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6)
