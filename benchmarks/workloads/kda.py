"""A layer of Kimi Delta Attention, transformers' own: 1024 wide, 8 heads of 128.

kda_prefill            x[1, T, 1024] -> y, nothing before it
kda_prefill_operator   by hand for ONNX Runtime: its LinearAttention in the place of the chunks
kda_step               one token, its window of the convolution and its recurrent state in and out
kda_step_operator      the same with LinearAttention
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from benchmarks.workloads import Workload

WIDTH, HEADS, SIZE, KERNEL = 1024, 8, 128, 4
INNER = HEADS * SIZE
#: tokens of a chunk, for the count of operations
CHUNK = 64
#: tokens from which on compilers take minutes and ONNX files tens of GB: the chunks are unrolled
LONG = 8192
_DOMAIN = "graphc_bench"


def _layer() -> nn.Module:
    config = KimiLinearConfig(
        hidden_size=WIDTH, linear_num_heads=HEADS, linear_head_dim=SIZE,
        linear_conv_kernel_dim=KERNEL, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        num_hidden_layers=1, layer_types=["linear_attention"], vocab_size=128,
        intermediate_size=3072, num_local_experts=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    layer: nn.Module = modeling.KimiLinearDeltaAttention(config, 0)
    gate: nn.Module = layer.get_submodule("forget_gate")
    with torch.no_grad():  # decays of 0.7 to 0.98 a token
        gate.get_parameter("dt_bias").uniform_(-4, -1)
        gate.get_parameter("A_log").uniform_(0, 1)
    return layer


class Prefill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _layer()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


class TokenByToken(Prefill):
    """The same results; in float64 the chunks of a long prompt take more memory than there is."""

    def forward(self, x: Tensor) -> Tensor:
        chunked = modeling.chunk_kimi_delta_attention
        modeling.chunk_kimi_delta_attention = modeling.recurrent_kimi_delta_attention
        try:
            return super().forward(x)
        finally:
            modeling.chunk_kimi_delta_attention = chunked


class WithOperator(nn.Module):
    """A layer written by hand for ONNX Runtime: over a prompt, or a token and the states. In torch
    its results are no numbers: the operator is a place holder that only ONNX files know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _layer()

    @staticmethod
    def finish_onnx(program: Any) -> None:
        """The exporter knows no opset with the operator: its node joins the others here."""
        graph = program.model.graph
        for node in graph:
            if node.domain == _DOMAIN:
                node.domain = ""
        graph.opset_imports.pop(_DOMAIN, None)
        graph.opset_imports[""] = 27

    def forward(self, x: Tensor, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        layer, length = self.layer, x.shape[1]
        mixed = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), -1).transpose(1, 2)
        window = states[0] if states else x.new_zeros(1, 3 * INNER, KERNEL - 1)
        mixed = torch.cat((window, mixed), -1)
        kernel = layer.conv1d.weight
        turned = functional.silu(functional.conv1d(mixed, kernel, groups=3 * INNER))
        query, key, value = turned.transpose(1, 2).split(INNER, -1)
        state = states[1] if states else x.new_zeros(1, HEADS, SIZE, SIZE)
        query, key = (
            modeling.l2norm(t.unflatten(-1, (HEADS, SIZE))).flatten(-2) for t in (query, key)
        )
        operands = [query, key, value, state, layer.forget_gate(x).flatten(-2)]
        seen, state = torch.onnx.ops.symbolic_multi_out(
            f"{_DOMAIN}::LinearAttention", [*operands, torch.sigmoid(layer.b_proj(x))],
            {"q_num_heads": HEADS, "kv_num_heads": HEADS, "update_rule": "gated_delta"},
            dtypes=(x.dtype, x.dtype), shapes=(value.shape, state.shape), version=1,
        )  # fmt: skip
        gate = layer.g_b_proj(layer.g_a_proj(x)).view(1, length, HEADS, SIZE)
        seen = layer.o_norm(seen.view(1, length, HEADS, SIZE), gate)
        made: Tensor = layer.o_proj(seen.reshape(1, length, INNER))
        return (made, mixed[:, :, 1:].contiguous(), state) if states else made


class Step(nn.Module):
    """What the layer does with one token and a cache, its states as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _layer()

    def forward(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        mixed = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), -1)
        window = torch.cat((window, mixed.transpose(1, 2)), -1)
        mixed = functional.silu((window * layer.conv1d.weight.squeeze(1)).sum(-1))
        query, key, value = mixed.view(1, 1, 3, HEADS, SIZE).unbind(2)
        seen, state = modeling.recurrent_kimi_delta_attention(
            query, key, value, g=layer.forget_gate(x), beta=torch.sigmoid(layer.b_proj(x)),
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        gate = layer.g_b_proj(layer.g_a_proj(x)).view(1, 1, HEADS, SIZE)
        made = layer.o_proj(layer.o_norm(seen, gate).reshape(1, 1, INNER))
        return made, window[:, :, 1:].contiguous(), state


def make(kind: str, length: int, random: np.random.Generator) -> Workload:
    # queries, keys, values and result; decay and output gate in two products each; beta
    products = 4 * WIDTH * INNER + 2 * (WIDTH * SIZE + SIZE * INNER) + WIDTH * HEADS
    operator = kind.endswith("_operator")
    runtimes = ("ort",) if operator else ()
    left_out = "ONNX Runtime alone has the operator" if operator else ""
    if kind.startswith("kda_prefill"):
        chunks = HEADS * length * (8.0 * CHUNK * SIZE + 6.0 * SIZE * SIZE)
        inputs = {"x": random.standard_normal((1, length, WIDTH), dtype=np.float32)}
        if length >= LONG and not operator:
            runtimes, left_out = ("graphc", "eager"), f"{length // CHUNK} chunks, unrolled"
        return Workload(
            inputs, WithOperator if operator else Prefill, runtimes=runtimes, left_out=left_out,
            reference=TokenByToken, flops=2.0 * length * products + chunks,
        )  # fmt: skip
    inputs = {
        "x": random.standard_normal((1, 1, WIDTH), dtype=np.float32),
        "window": random.standard_normal((1, 3 * INNER, KERNEL - 1), dtype=np.float32),
        "state": 0.1 * random.standard_normal((1, HEADS, SIZE, SIZE), dtype=np.float32),
    }
    return Workload(
        inputs, WithOperator if operator else Step, runtimes=runtimes, left_out=left_out,
        kept=("state",), reference=Step, flops=2.0 * products + 8.0 * HEADS * SIZE * SIZE,
    )  # fmt: skip
