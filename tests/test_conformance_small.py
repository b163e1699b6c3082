"""Operators that real models use, each through the whole build: ONNX's own node cases, and calls
of torch operators. The large suites run with `make conformance`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from graphc.frontends.onnx_model import load_onnx
from tests.built import Built, agree, results

F = torch.nn.functional

#: one node case of the onnx package for each operator
ONNX = (
    "abs add and2d argmax_keepdims_example averagepool_2d_pads basic_conv_with_padding "
    "batchnorm_epsilon cast_FLOAT_to_DOUBLE ceil clip_example concat_2d_axis_1 "
    "constantofshape_float_ones conv_with_strides_padding convtranspose_1d cos "
    "cumsum_1d depthtospace_example div dynamicquantizelinear einsum_batch_matmul "
    "elu_example equal erf exp expand_dim_changed flatten_axis1 floor gather_0 "
    "gather_elements_1 gathernd_example_float32 gelu_default_1 gemm_all_attributes "
    "globalaveragepool greater group_normalization_example gru_defaults hardsigmoid_example "
    "hardswish identity instancenorm_epsilon layer_normalization_2d_axis1 leakyrelu_example "
    "less log logsoftmax_axis_1 lstm_defaults matmul_3d matmulinteger max_example "
    "maxpool_2d_pads mish mod_mixed_sign_int32 mul neg nonzero_example not_2d "
    "onehot_with_axis or2d constant_pad pow prelu_broadcast quantizelinear "
    "range_float_type_positive_delta "
    "reciprocal reduce_mean_keepdims_example reduce_sum_keepdims_example relu "
    "reshape_reordered_all_dims resize_upsample_scales_nearest rms_normalization_2d_axis1 "
    "scatter_elements_with_axis scatternd shape sigmoid sin slice softmax_axis_1 softplus "
    "split_equal_parts_1d_opset18 sqrt squeeze sub tanh tile top_k transpose_all_permutations_3 "
    "tril unsqueeze_axis_1 where_example rotary_embedding attention_4d"
)  # fmt: skip


@cache
def node_cases() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name.removeprefix("test_"): case for case in load_model_tests(kind="node")}


def _array(value: Any) -> Any:
    """A copy of the data of a case: an array, a number or a TensorProto."""
    if hasattr(value, "SerializeToString"):
        from onnx.numpy_helper import to_array

        return to_array(value).copy()
    return np.array(value)


NAMES = ONNX.split()


@pytest.mark.parametrize(
    "name",
    [n if k % 2 else pytest.param(n, marks=pytest.mark.heavy) for k, n in enumerate(NAMES)],
)
def test_onnx_node(name: str) -> None:
    if name not in node_cases():
        pytest.skip("this onnx release has no such case")
    case = node_cases()[name]
    inputs, expected = case.data_sets[0]
    module = load_onnx(case.model)
    names = [i.name for i in case.model.graph.input]
    feeds = dict(zip(names, inputs, strict=False))
    tensors = {k: torch.from_numpy(_array(v)) for k, v in feeds.items()}
    if module.structural_inputs:
        module = load_onnx(case.model, fixed={k: feeds[k] for k in module.structural_inputs})
    args = tuple(tensors[n] for n in module.input_names)
    built = Built(module, args)
    try:
        ours = [x for x in pytree.tree_leaves(built(*args)) if isinstance(x, torch.Tensor)]
        theirs = [torch.from_numpy(_array(e)) for e in expected]
        agree(ours[: len(theirs)], theirs, case.rtol, max(case.atol, 1e-6), name)
    finally:
        built.close()


def _data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "x": normal(2, 6, 8), "y": normal(2, 6, 8), "w": normal(8, 8), "b": normal(8),
        "image": normal(2, 4, 9, 11), "kernel": normal(6, 4, 3, 3), "q": normal(2, 4, 6, 8),
        "i": torch.randint(0, 6, (2, 5), generator=generator), "m": normal(6, 6),
        "n": torch.randint(-9, 9, (2, 6), generator=generator),
    }  # fmt: skip


Call = Callable[[dict[str, torch.Tensor]], Any]
#: calls by family: one graph is built of each family
TORCH: dict[str, dict[str, Call]] = {
    "products": {
        "linear": lambda d: F.linear(d["x"], d["w"], d["b"]),
        "matmul": lambda d: d["x"] @ d["w"],
        "bmm": lambda d: torch.bmm(d["x"], d["y"].transpose(1, 2)),
        "addmm": lambda d: torch.addmm(d["b"], d["w"], d["w"], beta=0.5, alpha=2),
        "baddbmm": lambda d: torch.baddbmm(d["y"][:, :, :6], d["x"], d["y"].mT),
        "mv": lambda d: torch.mv(d["w"], d["b"]),
        "dot": lambda d: torch.dot(d["b"], d["b"]),
        "outer": lambda d: torch.outer(d["b"], d["b"]),
        "einsum": lambda d: torch.einsum("bij,bkj->bik", d["x"], d["y"]),
        "attention": lambda d: F.scaled_dot_product_attention(d["q"], d["q"], d["q"]),
        "causal": lambda d: F.scaled_dot_product_attention(
            d["q"], d["q"], d["q"], is_causal=True, scale=0.3
        ),
        "masked": lambda d: F.scaled_dot_product_attention(
            d["q"], d["q"], d["q"], attn_mask=d["m"]
        ),
    },
    "convolutions": {
        "conv2d": lambda d: F.conv2d(d["image"], d["kernel"], padding=1),
        "stride": lambda d: F.conv2d(d["image"], d["kernel"], stride=2, dilation=2),
        "groups": lambda d: F.conv2d(d["image"], d["kernel"][:, :2], groups=2),
        "depthwise": lambda d: F.conv2d(d["image"], d["kernel"][:4, :1], groups=4, padding=1),
        "conv1d": lambda d: F.conv1d(d["image"][:, :, 0], d["kernel"][:, :, 0], padding=2),
        "transposed": lambda d: F.conv_transpose2d(
            d["image"], d["kernel"].transpose(0, 1), stride=2, output_padding=1
        ),
        "max_pool": lambda d: F.max_pool2d(d["image"], 3, 2, 1),
        "avg_pool": lambda d: F.avg_pool2d(d["image"], 2, ceil_mode=True),
        "adaptive": lambda d: F.adaptive_avg_pool2d(d["image"], (3, 4)),
        "nearest": lambda d: F.interpolate(d["image"], scale_factor=2),
        "bilinear": lambda d: F.interpolate(d["image"], (5, 20), mode="bilinear"),
        "reflect": lambda d: F.pad(d["image"], (1, 2, 2, 1), mode="reflect"),
        "replicate": lambda d: F.pad(d["image"], (1, 2, 0, 1), mode="replicate"),
        "unfold": lambda d: F.unfold(d["image"], 3, padding=1),
        "pixel_shuffle": lambda d: F.pixel_shuffle(d["image"], 2),
    },
    "normalisations": {
        "layer_norm": lambda d: F.layer_norm(d["x"], (8,), d["b"], d["b"]),
        "rms_norm": lambda d: F.rms_norm(d["x"], (8,), d["b"]),
        "group_norm": lambda d: F.group_norm(d["image"], 2),
        "instance_norm": lambda d: F.instance_norm(d["image"]),
        "batch_norm": lambda d: F.batch_norm(
            d["image"], d["b"][:4], d["b"][4:].abs() + 0.1, d["b"][:4], d["b"][4:]
        ),
        "softmax": lambda d: torch.softmax(d["x"], 1),
        "log_softmax": lambda d: torch.log_softmax(d["x"], -1),
        "logsumexp": lambda d: torch.logsumexp(d["x"], (1, 2)),
        "var_mean": lambda d: torch.var_mean(d["x"], 1),
        "std": lambda d: d["x"].std(-1, correction=0),
        "norm": lambda d: torch.linalg.vector_norm(d["x"], 2, -1),
        "normalize": lambda d: F.normalize(d["x"], dim=-1),
        "cosine": lambda d: F.cosine_similarity(d["x"], d["y"], -1),
        "glu": lambda d: F.glu(d["x"]),
    },
    "indexing": {
        "index_select": lambda d: torch.index_select(d["x"], 1, d["i"][0]),
        "gather": lambda d: torch.gather(d["x"], 1, d["i"][:, :, None].expand(2, 5, 8)),
        "index": lambda d: d["x"][:, d["i"][1]],
        "two_indices": lambda d: d["x"][torch.tensor([[0], [1]]), d["i"]],
        "embedding": lambda d: F.embedding(d["i"], d["m"]),
        "index_put": lambda d: d["m"].index_put((d["i"][0],), d["m"][0], accumulate=True),
        "scatter": lambda d: torch.scatter(d["m"], 1, d["i"], 2.5),
        "scatter_add": lambda d: torch.scatter_add(d["m"], 1, d["i"], d["m"][:2, :5]),
        "scatter_reduce": lambda d: torch.scatter_reduce(d["m"], 1, d["i"], d["m"][:2, :5], "amax"),
        "topk": lambda d: torch.topk(d["x"], 3),
        "sort": lambda d: torch.sort(d["x"], 1, descending=True),
        "argsort": lambda d: torch.argsort(d["n"], stable=True),
        "cumsum": lambda d: d["x"].cumsum(1),
        "one_hot": lambda d: F.one_hot(d["i"], 6),
        "roll": lambda d: torch.roll(d["x"], (1, -2), (1, 2)),
        "flip": lambda d: d["x"].flip(0, 2),
        "repeat": lambda d: d["x"].repeat(1, 2, 1),
        "repeat_interleave": lambda d: d["x"].repeat_interleave(2, 1),
        "stack": lambda d: torch.stack([d["x"], d["y"]], 2),
        "tril": lambda d: d["m"].tril(-1),
        "meshgrid": lambda d: torch.meshgrid(d["b"], d["b"][:3], indexing="ij"),
        "bucketize": lambda d: torch.bucketize(d["x"], torch.tensor([-1.0, 0.0, 1.0])),
        "where": lambda d: torch.where(d["n"] > 0, d["n"], -1),
        "masked_fill": lambda d: d["n"].masked_fill(d["n"] < 2, 7),
    },
}


@pytest.mark.parametrize("family", TORCH)
def test_torch_operators(family: str) -> None:
    data = _data()
    keys, calls = list(data), TORCH[family]

    def function(*args: torch.Tensor) -> dict[str, Any]:
        given = dict(zip(keys, args, strict=True))
        return {name: call(given) for name, call in calls.items()}

    ours, fallbacks = results(function, *data.values())
    theirs = function(*data.values())
    wrong: list[str] = []
    for name in calls:
        try:
            agree(ours[name], theirs[name], 2e-5, 2e-5, name)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert not fallbacks
