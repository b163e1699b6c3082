"""The ONNX frontend: meaning of operators, static shapes, capture, refusals and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from graphc.errors import UnsupportedError, UsageError
from graphc.frontends.onnx.registry import operators
from graphc.frontends.onnx_model import OnnxModule, load_onnx
from tests import onnx_models as m

torch.set_num_threads(1)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(module: torch.nn.Module, *arrays: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        return [o.numpy() for o in module(*[torch.from_numpy(np.array(a)) for a in arrays])]


def export(module: OnnxModule, *arrays: np.ndarray, auto: bool = True) -> Any:
    inputs = tuple(torch.from_numpy(np.array(a)) for a in arrays)
    with torch.no_grad():
        return torch.export.export(
            module, inputs, dynamic_shapes=module.dynamic_shapes(auto), strict=False
        )


def operators_of(program: Any) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


# ---------------------------------------------------------------------------------------------
# meaning
# ---------------------------------------------------------------------------------------------
ONE_NODE: list[tuple[str, dict[str, Any], list[Any], int]] = [
    ("Div", {}, [np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])], 18),
    ("Mod", {}, [np.array([7, -7, 7, -7]), np.array([3, 3, -3, -3])], 18),
    ("Mod", {"fmod": 1}, [np.array([7, -7, 7, -7]), np.array([3, 3, -3, -3])], 18),
    ("Softmax", {}, [floats(2, 3, 4)], 13),
    ("Clip", {"min": -0.5, "max": 0.5}, [floats(9)], 6),
    ("Clip", {}, [floats(9), np.float32(-0.5), np.float32(0.5)], 13),
    ("TopK", {}, [np.array([[3.0, 1.0, 3.0, 2.0]], np.float32), np.array([3])], 11),
    ("ReduceMean", {"axes": [1], "keepdims": 0}, [floats(2, 3, 4)], 13),
    ("ReduceMax", {}, [floats(2, 3, 4), np.array([-1])], 18),
    ("ReduceL2", {"noop_with_empty_axes": 1}, [floats(2, 3), np.array([], np.int64)], 18),
    ("ArgMax", {"select_last_index": 1}, [np.array([1.0, 3.0, 3.0, 0.0], np.float32)], 13),
    ("CumSum", {"exclusive": 1, "reverse": 1}, [floats(2, 5), np.array(1)], 14),
    ("Gather", {"axis": 1}, [floats(2, 5), np.array([[-1, 0], [2, -5]])], 13),
    ("GatherElements", {"axis": 1}, [floats(2, 3), np.array([[-1, 0], [2, 1]])], 13),
    (
        "ScatterND",
        {"reduction": "add"},
        [floats(4, 2), np.array([[1], [1]]), floats(2, 2, seed=1)],
        18,
    ),
    (
        "ScatterElements",
        {"axis": 1, "reduction": "max"},
        [floats(2, 5), np.array([[0, -1]]), floats(1, 2, seed=1)],
        18,
    ),
    (
        "Slice",
        {},
        [floats(6, 5), np.array([-1]), np.array([-100]), np.array([0]), np.array([-2])],
        13,
    ),
    ("Pad", {"mode": "reflect"}, [floats(1, 1, 4, 5), np.array([0, 0, 1, 2, 0, 0, 2, 3])], 18),
    ("Pad", {"mode": "edge"}, [floats(3, 4), np.array([1, 0, 0, 2])], 18),
    ("Pad", {"mode": "wrap"}, [floats(3, 4), np.array([1, 2, 4, 0])], 19),
    (
        "Conv",
        {"auto_pad": "SAME_UPPER", "strides": [2, 2], "group": 2},
        [floats(1, 4, 7, 8), floats(6, 2, 3, 2, seed=1), floats(6, seed=2)],
        11,
    ),
    (
        "Conv",
        {"pads": [1, 0, 2, 1], "dilations": [2, 1]},
        [floats(1, 2, 7, 8), floats(3, 2, 2, 3, seed=1)],
        11,
    ),
    (
        "ConvTranspose",
        {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [1, 1]},
        [floats(1, 2, 4, 5), floats(2, 3, 3, 3, seed=1), floats(3, seed=2)],
        11,
    ),
    (
        "MaxPool",
        {"kernel_shape": [3, 2], "pads": [1, 0, 0, 1], "strides": [2, 2], "ceil_mode": 1},
        [floats(1, 2, 7, 8)],
        12,
    ),
    (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2], "count_include_pad": 0},
        [floats(1, 1, 5, 5)],
        19,
    ),
    # as many images as channels: the reference evaluator stops at the channel of that number
    ("LRN", {"size": 4, "alpha": 0.5}, [floats(6, 6, 2, 2)], 13),
    ("InstanceNormalization", {}, [floats(2, 3, 1), floats(3, seed=1), floats(3, seed=2)], 6),
    ("LayerNormalization", {"axis": 1}, [floats(2, 3, 4), floats(3, 4, seed=1)], 17),
    ("Einsum", {"equation": "bij, bjk -> bik"}, [floats(2, 3, 4), floats(2, 4, 2, seed=1)], 12),
    (
        "Resize",
        {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "exclude_outside": 1},
        [floats(1, 1, 4, 5), np.array([], np.float32), np.array([1, 1, 0.8, 1.7], np.float32)],
        18,
    ),
    (
        "Resize",
        {"mode": "linear", "antialias": 1},
        [floats(1, 1, 6, 6), np.array([], np.float32), np.array([1, 1, 0.6, 0.5], np.float32)],
        18,
    ),
    ("DFT", {"onesided": 1}, [floats(2, 9, 1)], 17),
    (
        "STFT",
        {},
        [floats(1, 40, 1), np.array(8), floats(16, seed=1)],
        17,
    ),
]


@pytest.mark.parametrize("op,attributes,arrays,opset", ONE_NODE)
def test_operator_agrees_with_the_standard(
    op: str, attributes: dict[str, Any], arrays: list[np.ndarray], opset: int
) -> None:
    names = [f"x{i}" for i in range(len(arrays))]
    outputs = ["y", "z"] if op == "TopK" else ["y"]
    infos = [
        m.value(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype))
        for n, a in zip(names, arrays, strict=True)
    ]
    given = [
        "" if a.size == 0 and op == "Resize" else n for n, a in zip(names, arrays, strict=True)
    ]
    proto = m.model(
        [m.node(op, given, outputs, **attributes)],
        infos,
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        opset=opset,
    )
    want = m.reference(proto, dict(zip(names, arrays, strict=True)))
    got = run(load_onnx(proto), *arrays)
    assert len(got) == len(want)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_version_13_flattens(op: str) -> None:
    """Over all axes from 1 on; the reference evaluator knows version 13 only."""
    proto = m.model(
        [m.node(op, ["x"], ["y"])], [m.value("x", None)], [m.value("y", None)], opset=11
    )
    x = floats(2, 3, 4)
    e = np.exp(x.reshape(2, 12).astype(np.float64))
    want = e / e.sum(1, keepdims=True)
    if op == "LogSoftmax":
        want = np.log(want)
    if op == "Hardmax":
        want = (want == want.max(1, keepdims=True)).astype(np.float64)
    np.testing.assert_allclose(run(load_onnx(proto), x)[0].reshape(2, 12), want, rtol=1e-5)


def test_unsigned_division_is_exact_above_the_signed_range() -> None:
    a = np.array([2**63 + 5, 2**64 - 1, 7], np.uint64)
    b = np.array([3, 2**63 + 1, 2], np.uint64)
    infos = [m.value(n, [3], TensorProto.UINT64) for n in "ab"]
    proto = m.model(
        [m.node("Div", ["a", "b"], ["y"])], infos, [m.value("y", [3], TensorProto.UINT64)], opset=14
    )
    assert (run(load_onnx(proto), a, b)[0] == a // b).all()


def test_recurrent_layers_agree_with_the_standard() -> None:
    for op, gates, linear in (("LSTM", 4, 0), ("GRU", 3, 0), ("GRU", 3, 1), ("RNN", 1, 0)):
        attributes = {"linear_before_reset": linear} if op == "GRU" else {}
        constants = {
            "w": floats(1, gates * 4, 3, seed=1),
            "r": floats(1, gates * 4, 4, seed=2),
            "b": floats(1, 2 * gates * 4, seed=3),
        }
        proto = m.model(
            [m.node(op, ["x", "w", "r", "b"], ["y", "h"], hidden_size=4, **attributes)],
            [m.value("x", ["t", 2, 3])],
            [m.value("y", None), m.value("h", None)],
            constants,
            opset=14,
        )
        x = floats(5, 2, 3)
        for a, b in zip(m.reference(proto, {"x": x}), run(load_onnx(proto), x), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# static shapes and capture
# ---------------------------------------------------------------------------------------------
def split_heads_model() -> onnx.ModelProto:
    """[b, t, 12] -> [b * t, 3, 4] with the arithmetic that exporters write."""
    nodes = [
        m.node("Shape", ["x"], ["s"]),
        m.node("Gather", ["s", "zero"], ["b"]),
        m.node("Gather", ["s", "one"], ["t"]),
        m.node("Mul", ["b", "t"], ["rows"]),
        m.node("Unsqueeze", ["rows", "axis"], ["rows1"]),
        m.node("Concat", ["rows1", "rest"], ["target"], axis=0),
        m.node("Reshape", ["x", "target"], ["y"]),
        m.node("ConstantOfShape", ["target"], ["mask"]),
        m.node("Add", ["y", "mask"], ["z"]),
    ]
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "axis": np.array([0]),
        "rest": np.array([3, 4]),
    }
    return m.model(nodes, [m.value("x", ["b", "t", 12])], [m.value("z", None)], constants)


def test_shape_arithmetic_stays_symbolic() -> None:
    program = export(load_onnx(split_heads_model()), floats(2, 5, 12))
    assert not any("item" in op or "scalar_tensor" in op for op in operators_of(program))
    for shape in ((2, 5, 12), (3, 7, 12)):
        x = floats(*shape)
        assert (run(program.module(), x)[0] == x.reshape(-1, 3, 4)).all()


def test_floor_of_a_scaled_length_is_exact_for_other_lengths() -> None:
    """size -> float -> / 2 -> Floor -> int, as exporters compute sizes of poolings."""
    nodes = [
        m.node("Shape", ["x"], ["s"]),
        m.node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        m.node("Div", ["f", "two"], ["h"]),
        m.node("Floor", ["h"], ["w"]),
        m.node("Cast", ["w"], ["i"], to=TensorProto.INT64),
        m.node("Slice", ["x", "zero", "i"], ["y"]),
    ]
    proto = m.model(
        nodes,
        [m.value("x", ["t"])],
        [m.value("y", None)],
        {"two": np.array([2], np.float32), "zero": np.array([0])},
    )
    program = export(load_onnx(proto), floats(8))
    for size in (8, 11, 31):
        assert run(program.module(), floats(size))[0].shape == (size // 2,)


def test_products_with_constant_weights_become_linear() -> None:
    constants = {"w": floats(4, 6), "g": floats(6, 5, seed=1), "c": floats(5, seed=2)}
    nodes = [m.node("MatMul", ["x", "w"], ["h"]), m.node("Gemm", ["h", "g", "c"], ["y"])]
    proto = m.model(nodes, [m.value("x", ["t", 4])], [m.value("y", None)], constants)
    module = load_onnx(proto)
    program = export(module, floats(3, 4))
    assert operators_of(program) == ["aten.linear.default", "aten.linear.default"]
    x = floats(7, 4)
    want = m.reference(proto, {"x": x})[0]
    np.testing.assert_allclose(run(program.module(), x)[0], want, rtol=1e-4, atol=1e-5)


def test_equal_initializers_share_one_buffer() -> None:
    w = floats(3, 3)
    nodes = [m.node("Add", ["x", "a"], ["h"]), m.node("Mul", ["h", "b"], ["y"])]
    proto = m.model(nodes, [m.value("x", [3, 3])], [m.value("y", None)], {"a": w, "b": w.copy()})
    assert len(dict(load_onnx(proto).named_buffers())) == 1


def test_constant_nodes_are_weights_and_fold() -> None:
    w = floats(4, 6)
    nodes = [
        m.node("Constant", [], ["w"], value=numpy_helper.from_array(w)),
        m.node("Transpose", ["w"], ["wt"]),
        m.node("MatMul", ["x", "wt"], ["y"]),
    ]
    proto = m.model(nodes, [m.value("x", ["t", 6])], [m.value("y", None)])
    program = export(load_onnx(proto), floats(3, 6))
    assert operators_of(program) == ["aten.linear.default"]


@pytest.mark.parametrize("op,gates", [("LSTM", 4), ("GRU", 3)])
def test_recurrence_is_captured_whole_with_a_symbolic_length(op: str, gates: int) -> None:
    attributes = {"linear_before_reset": 1} if op == "GRU" else {}
    constants = {
        "w": floats(2, gates * 4, 3, seed=1),
        "r": floats(2, gates * 4, 4, seed=2),
        "b": floats(2, 2 * gates * 4, seed=3),
    }
    proto = m.model(
        [
            m.node(
                op,
                ["x", "w", "r", "b"],
                ["y"],
                hidden_size=4,
                direction="bidirectional",
                **attributes,
            )
        ],
        [m.value("x", ["t", 2, 3])],
        [m.value("y", None)],
        constants,
        opset=14,
    )
    module = load_onnx(proto)
    program = export(module, floats(5, 2, 3), auto=False)
    assert operators_of(program).count(f"aten.{op.lower()}.input") == 1
    x = floats(9, 2, 3)
    np.testing.assert_allclose(run(program.module(), x)[0], run(module, x)[0], rtol=1e-5, atol=1e-6)


def test_attention_becomes_the_fused_operator() -> None:
    proto = m.model(
        [m.node("Attention", ["q", "k", "v"], ["y"], is_causal=1)],
        [m.value(n, ["b", 2, "t", 8]) for n in "qkv"],
        [m.value("y", None)],
        opset=23,
    )
    arrays = [floats(2, 2, 5, 8, seed=i) for i in range(3)]
    program = export(load_onnx(proto), *arrays)
    assert "aten.scaled_dot_product_attention.default" in operators_of(program)
    want = m.reference(proto, dict(zip("qkv", arrays, strict=True)))[0]
    np.testing.assert_allclose(run(program.module(), *arrays)[0], want, rtol=1e-4, atol=1e-5)


def test_attention_with_a_cache_sees_the_past() -> None:
    names = ["q", "k", "v", "", "pk", "pv"]
    shapes = {
        "q": (1, 2, 3, 8),
        "k": (1, 2, 3, 8),
        "v": (1, 2, 3, 8),
        "pk": (1, 2, 4, 8),
        "pv": (1, 2, 4, 8),
    }
    proto = m.model(
        [m.node("Attention", names, ["y", "nk", "nv"], is_causal=1)],
        [m.value(n, s) for n, s in shapes.items()],
        [m.value(n, None) for n in ("y", "nk", "nv")],
        opset=24,
    )
    feeds = {n: floats(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    for a, b in zip(m.reference(proto, feeds), run(load_onnx(proto), *feeds.values()), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_specs_and_dynamic_shapes() -> None:
    infos = [m.value("a", ["n", 3]), m.value("b", ["n", None]), m.value("c", [0, "?"], m.INT64)]
    nodes = [m.node("Identity", [n], [n + "y"]) for n in "abc"]
    outputs = [helper.make_empty_tensor_value_info(n + "y") for n in "abc"]
    module = load_onnx(m.model(nodes, infos, outputs))
    assert [s.dims for s in module.input_specs] == [["n", 3], ["n", None], [None, None]]
    (shapes,) = module.dynamic_shapes()
    assert shapes[0] is not None and shapes[1] is not None
    assert shapes[0][0] is shapes[1][0] and set(shapes[0]) == {0}
    examples = module.example_inputs({"n": 4, "c[1]": 9})
    assert [tuple(e.shape) for e in examples][0] == (4, 3) and examples[2].shape[1] == 9
    with pytest.raises(UsageError, match="no dimension named q"):
        module.example_inputs({"q": 1})


# ---------------------------------------------------------------------------------------------
# control flow
# ---------------------------------------------------------------------------------------------
def branch(name: str, *nodes: Any) -> onnx.GraphProto:
    last = nodes[-1].output[0]
    return helper.make_graph(list(nodes), name, [], [m.value(last, None)])


def if_model(depth: int = 1) -> onnx.ModelProto:
    """Doubles or negates `depth` times, by the flag."""
    then = [m.node("Add", ["x", "x"], ["t0"])]
    other = [m.node("Neg", ["x"], ["e0"])]
    for i in range(1, depth):
        then.append(m.node("Add", [f"t{i - 1}"] * 2, [f"t{i}"]))
        other.append(m.node("Neg", [f"e{i - 1}"], [f"e{i}"]))
    cond = m.node(
        "If", ["flag"], ["y"], then_branch=branch("t", *then), else_branch=branch("e", *other)
    )
    return m.model([cond], [m.value("x", [3]), m.value("flag", [], m.BOOL)], [m.value("y", [3])])


def test_if_takes_one_branch_when_the_condition_is_fixed() -> None:
    module = load_onnx(if_model(200), fixed={"flag": False})
    assert module.input_names == ["x"]
    assert set(operators_of(export(module, floats(3)))) == {"aten.neg.default"}


def test_small_if_on_data_selects_between_both() -> None:
    program = export(load_onnx(if_model()), floats(3), np.array(True))
    assert "aten.where.self" in operators_of(program)
    x = floats(3)
    assert (run(program.module(), x, np.array(False))[0] == -x).all()
    assert (run(program.module(), x, np.array(True))[0] == 2 * x).all()


def test_large_if_on_data_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError, match="fixed") as error:
        export(load_onnx(if_model(200)), floats(3), np.array(True))
    assert "(If, output y)" in str(error.value)


def loop_model() -> onnx.ModelProto:
    """Doubles `x` n times and collects the steps."""
    body = helper.make_graph(
        [
            m.node("Identity", ["go"], ["go_out"]),
            m.node("Add", ["v", "v"], ["v_out"]),
            m.node("Identity", ["v_out"], ["seen"]),
        ],
        "body",
        [m.value("i", [], m.INT64), m.value("go", [], m.BOOL), m.value("v", [2])],
        [m.value("go_out", [], m.BOOL), m.value("v_out", [2]), m.value("seen", [2])],
    )
    return m.model(
        [m.node("Loop", ["n", "", "x"], ["y", "all"], body=body)],
        [m.value("n", [], m.INT64), m.value("x", [2])],
        [m.value("y", [2]), m.value("all", [None, 2])],
    )


def test_loop_is_unrolled_for_a_fixed_trip_count() -> None:
    module = load_onnx(loop_model(), fixed={"n": 3})
    program = export(module, floats(2))
    assert operators_of(program).count("aten.add.Tensor") == 3
    y, seen = run(program.module(), np.array([1, 2], np.float32))
    assert y.tolist() == [8, 16] and seen.shape == (3, 2)


def test_loop_over_a_count_from_data_is_refused() -> None:
    module = load_onnx(loop_model())
    assert module.structural_inputs == ["n"]
    with pytest.raises(UnsupportedError, match="trip count"):
        export(module, np.array(3), floats(2))


# ---------------------------------------------------------------------------------------------
# refusals
# ---------------------------------------------------------------------------------------------
def test_unknown_operator_names_the_node() -> None:
    proto = m.model(
        [m.node("Frobnicate", ["x"], ["y"], domain="org.x", name="n1")],
        [m.value("x", [1])],
        [m.value("y", [1])],
        domains={"org.x": 1},
    )
    with pytest.raises(UnsupportedError, match=r"org\.x\.Frobnicate") as error:
        run(load_onnx(proto), floats(1))
    assert "n1" in str(error.value)


def test_unknown_attribute_is_never_ignored() -> None:
    proto = m.model(
        [m.node("Relu", ["x"], ["y"], slope=0.5)], [m.value("x", [1])], [m.value("y", [1])]
    )
    with pytest.raises(UnsupportedError, match="slope"):
        run(load_onnx(proto), floats(1))


@pytest.mark.parametrize(
    "node",
    [
        m.node("RandomNormalLike", ["x"], ["y"]),
        m.node("Dropout", ["x", "ratio", "train"], ["y"]),
        m.node("Cast", ["x"], ["y"], to=TensorProto.INT4),
        m.node("Cast", ["x"], ["y"], to=TensorProto.STRING),
    ],
)
def test_random_training_and_low_bit_types_are_refused(node: Any) -> None:
    constants = {"ratio": np.array(0.5, np.float32), "train": np.array(True)}
    proto = m.model(
        [node], [m.value("x", [4])], [helper.make_empty_tensor_value_info("y")], constants
    )
    with pytest.raises(UnsupportedError):
        run(load_onnx(proto), floats(4))


def test_wrong_inputs_are_rejected() -> None:
    module = load_onnx(split_heads_model())
    with pytest.raises(UsageError, match="1 inputs expected"):
        module()
    with pytest.raises(UsageError, match=r"torch\.float32"):
        module(torch.zeros(1, 2, 12, dtype=torch.float64))
    with pytest.raises(UsageError, match="no input 'q'"):
        load_onnx(split_heads_model(), fixed={"q": 1})


def test_a_symbolic_recurrence_without_a_fused_form_is_refused() -> None:
    constants = {"w": floats(1, 12, 3), "r": floats(1, 12, 4, seed=1)}
    proto = m.model(
        [m.node("GRU", ["x", "w", "r"], ["y"], hidden_size=4)],
        [m.value("x", ["t", 2, 3])],
        [m.value("y", None)],
        constants,
        opset=14,
    )
    with pytest.raises(UnsupportedError, match="fixed sequence length"):
        export(load_onnx(proto), floats(5, 2, 3))


# ---------------------------------------------------------------------------------------------
# files
# ---------------------------------------------------------------------------------------------
def external(folder: Path, location: str, **entries: int) -> Path:
    """A model whose weight of 6 floats lies in `location`."""
    proto = m.model(
        [m.node("Add", ["x", "w"], ["y"])],
        [m.value("x", [2, 3])],
        [m.value("y", [2, 3])],
        {"w": np.zeros((2, 3), np.float32)},
    )
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **{k: str(v) for k, v in entries.items()}}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, text
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_is_read_from_the_models_folder(tmp_path: Path) -> None:
    path = external(tmp_path / "m", "w.bin", offset=8, length=24)
    (tmp_path / "m" / "w.bin").write_bytes(b"12345678" + np.arange(6, dtype=np.float32).tobytes())
    x = floats(2, 3)
    want = x + np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (run(load_onnx(path), x)[0] == want).all()
    assert (run(load_onnx(path.read_bytes(), base_dir=path.parent), x)[0] == want).all()


@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/passwd", "link.bin", "a/../../w.bin", "C:\\w", ""]
)
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(24))
    path = external(tmp_path / "m", location)
    (tmp_path / "m" / "link.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(UsageError) as error:
        load_onnx(path)
    assert error.value.exit_code == 2 and "'w'" in str(error.value)


@pytest.mark.parametrize(
    "entries", [{"length": 20}, {"offset": 8, "length": 24}, {"length": 28}, {"offset": -1}]
)
def test_external_data_with_wrong_sizes_is_refused(tmp_path: Path, entries: dict[str, int]) -> None:
    path = external(tmp_path / "m", "w.bin", **entries)
    (tmp_path / "m" / "w.bin").write_bytes(bytes(24))
    with pytest.raises(UsageError):
        load_onnx(path)


def test_external_data_without_a_folder_is_refused(tmp_path: Path) -> None:
    raw = external(tmp_path / "m", "w.bin").read_bytes()
    with pytest.raises(UsageError, match="base_dir"):
        load_onnx(raw)


def test_damaged_and_missing_files_are_usage_errors(tmp_path: Path) -> None:
    raw = split_heads_model().SerializeToString()
    for name, data in (("cut", raw[: len(raw) // 2]), ("text", b"not a model"), ("empty", b"")):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(data)
        with pytest.raises(UsageError):
            load_onnx(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_onnx(tmp_path / "none.onnx")


def test_a_weight_that_does_not_fit_its_shape_is_a_usage_error() -> None:
    proto = split_heads_model()
    proto.graph.initializer[-1].raw_data = b"123"
    with pytest.raises(UsageError, match="does not fit"):
        load_onnx(proto)


def test_undefined_names_are_usage_errors() -> None:
    proto = m.model([m.node("Neg", ["nowhere"], ["y"])], [m.value("x", [1])], [m.value("y", [1])])
    with pytest.raises(UsageError, match="nowhere"):
        load_onnx(proto)


def test_newer_opsets_than_known_are_refused() -> None:
    proto = m.model(
        [m.node("Neg", ["x"], ["y"])], [m.value("x", [1])], [m.value("y", [1])], opset=999
    )
    with pytest.raises(UnsupportedError, match="newer"):
        load_onnx(proto)


# ---------------------------------------------------------------------------------------------
# functions and the table
# ---------------------------------------------------------------------------------------------
def test_functions_of_the_model_are_inlined() -> None:
    function = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [m.node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    proto = m.model(
        [m.node("Twice", ["x"], ["y"], domain="local")],
        [m.value("x", [2])],
        [m.value("y", [2])],
        domains={"local": 1},
    )
    proto.functions.append(function)
    assert run(load_onnx(proto), np.array([1, 2], np.float32))[0].tolist() == [2, 4]


def test_function_bodies_of_the_standard_get_their_attributes() -> None:
    """SoftmaxCrossEntropyLoss has no handler; its body calls another function with a reference."""
    proto = m.model(
        [m.node("SoftmaxCrossEntropyLoss", ["x", "l"], ["y"], reduction="sum")],
        [m.value("x", [3, 5]), m.value("l", [3], m.INT64)],
        [m.value("y", [])],
        opset=13,
    )
    x, labels = floats(3, 5), np.array([0, 4, 2])
    want = m.reference(proto, {"x": x, "l": labels})[0]
    np.testing.assert_allclose(run(load_onnx(proto), x, labels)[0], want, rtol=1e-5)


def test_every_operator_of_the_table_exists_in_its_domain() -> None:
    known = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    ours = {o.name for o in operators() if o.domain == ""}
    assert ours - known == {"SimplifiedLayerNormalization"}


def test_conformance_sample_has_no_wrong_answer() -> None:
    """Every ninth node case of the ONNX package on plain tensors: right, or refused."""
    from onnx.backend.test.loader import load_model_tests

    plain = {np.dtype(t) for t in ("float32", "int64", "int32", "bool", "uint8", "int8")}
    wrong, right, refused = [], 0, 0
    for case in load_model_tests(kind="node")[::9]:
        arrays = [a for i, o in case.data_sets or [] for a in (*i, *o)]
        if not all(isinstance(a, np.ndarray) and a.dtype in plain for a in arrays):
            continue
        if "training" in case.name or "bernoulli" in case.name:
            continue
        assert case.model is not None
        for given, want in case.data_sets or []:
            try:
                got = run(load_onnx(case.model), *given)
            except UnsupportedError:
                refused += 1
                continue
            close = len(got) == len(want) and all(
                a.shape == b.shape
                and a.dtype == b.dtype
                and np.allclose(b, a, rtol=1e-3, atol=1e-5, equal_nan=True)
                for a, b in zip(want, got, strict=True)
            )
            right += close
            if not close:
                wrong.append(case.name)
    assert not wrong
    assert right > 120 and refused <= right // 30
