"""Attention and rotary embedding."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphc.frontends.onnx.dtypes import torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Tensor, statically_true

F = torch.nn.functional


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H * D] -> [B, H, T, D]"""
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H * D]"""
    x = x.transpose(1, 2)
    return x.reshape(x.shape[0], x.shape[1], x.shape[2] * x.shape[3])


def joined_mask(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Two masks as one: boolean masks intersect, additive masks add."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        first, second = second, first
    if second.dtype == torch.bool:
        return torch.where(second, first, -math.inf)
    return first + second


@operator("Attention", since=23)
def attention(
    node: OnnxNode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Any:
    packed = q.ndim == 3
    if packed:
        if not q_num_heads or not kv_num_heads:
            raise node.invalid("q_num_heads and kv_num_heads are needed with 3-D inputs")
        q, k, v = (
            split_heads(q, q_num_heads),
            split_heads(k, kv_num_heads),
            split_heads(v, kv_num_heads),
        )
    if (past_key is None) != (past_value is None):
        raise node.invalid("past_key and past_value come together")
    offset: Any = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    elif nonpad_kv_seqlen is not None:
        offset = (nonpad_kv_seqlen.to(torch.int64) - q.shape[2]).reshape(-1, 1, 1, 1)
    plain_causal = bool(is_causal) and past_key is None and nonpad_kv_seqlen is None
    plain_causal = plain_causal and attn_mask is None
    plain_causal = plain_causal and left_window_size < 0 and right_window_size < 0
    mask = _padded_mask(attn_mask, k.shape[2])
    if not plain_causal:
        mask = joined_mask(
            mask, _position_mask(q, k, offset, bool(is_causal), left_window_size, right_window_size)
        )
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        mask = joined_mask(mask, torch.arange(k.shape[2]) < lengths)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    grouped = int(q.shape[1]) != int(k.shape[1])  # head counts are never symbolic
    if softcap == 0.0 and not node.wants(3) and not _other_precision(node, softmax_precision, q):
        if mask is not None and mask.ndim < 2:
            mask = mask.expand(q.shape[2], k.shape[2])
        y = F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, plain_causal, scale=scale, enable_gqa=grouped
        )
        scores = None
    else:
        if plain_causal:
            mask = _position_mask(q, k, 0, True, -1, -1)
        y, scores = _explicit(
            node, q, k, v, mask, scale, softcap, softmax_precision, qk_matmul_output_mode
        )
    y = merge_heads(y) if packed else y
    if not any(node.wants(i) for i in (1, 2, 3)):
        return y
    return (y, k, v) if scores is None else (y, k, v, scores)


def _other_precision(node: OnnxNode, softmax_precision: int, q: Tensor) -> bool:
    """True if softmax shall run in a type that the fused operator does not use.

    The fused operator computes the softmax of half types in float32.
    """
    if not softmax_precision:
        return False
    dtype = torch_dtype(softmax_precision, node.where)
    return dtype != q.dtype and dtype != torch.float32


def _padded_mask(mask: Tensor | None, keys: Any) -> Tensor | None:
    """A mask whose key axis may be short: keys beyond it are masked."""
    if mask is None or mask.ndim == 0 or mask.shape[-1] is keys:
        return mask
    have = mask.shape[-1]
    if isinstance(have, int) and isinstance(keys, int):
        if have == keys:
            return mask
    elif statically_true(have == keys):
        return mask
    missing = keys - have
    return F.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else -math.inf)


def _position_mask(
    q: Tensor, k: Tensor, offset: Any, causal: bool, left: int, right: int
) -> Tensor | None:
    """True where query i (at position offset + i) may see key j."""
    if not causal and left < 0 and right < 0:
        return None
    ahead = torch.arange(k.shape[2]) - (torch.arange(q.shape[2]).unsqueeze(1) + offset)
    allowed: Tensor | None = ahead <= 0 if causal else None
    if left >= 0:
        allowed = joined_mask(allowed, ahead >= -left)
    if right >= 0:
        allowed = joined_mask(allowed, ahead <= right)
    return allowed


def _explicit(
    node: OnnxNode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    softmax_precision: int,
    mode: int,
) -> tuple[Tensor, Tensor]:
    """Attention in single steps, with the product that `mode` asks for."""
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k, v = torch.repeat_interleave(k, groups, 1), torch.repeat_interleave(v, groups, 1)
    root = math.sqrt(scale)
    scores = torch.matmul(q * root, (k * root).transpose(2, 3))
    stages = [scores]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    stages.append(scores)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    stages.append(scores)
    work = scores
    if softmax_precision:
        work = scores.to(torch_dtype(softmax_precision, node.where))
    weights = torch.softmax(work, -1)
    if mask is not None:  # a row without any key is zero
        empty = torch.amax(work, -1, keepdim=True) == -math.inf
        weights = torch.where(empty, 0, weights)
    weights = weights.to(q.dtype)
    stages.append(weights)
    if not 0 <= mode < len(stages):
        raise node.invalid(f"unknown qk_matmul_output_mode {mode}")
    return torch.matmul(weights, v), stages[mode]


@operator("RotaryEmbedding", since=23)
def rotary_embedding(
    node: OnnxNode,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    packed = x.ndim == 3
    if packed:
        if not num_heads:
            raise node.invalid("num_heads is needed with a 3-D input")
        x = split_heads(x, num_heads)
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    width = rotary_embedding_dim or x.shape[3]
    y = rotated(x, cos.unsqueeze(1), sin.unsqueeze(1), width, bool(interleaved))
    return merge_heads(y) if packed else y


def rotated(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: bool) -> Tensor:
    """The first `width` channels of `x` [B, H, T, D] rotated by angles [B, 1, T, width / 2]."""
    turning = x[..., :width] if width != x.shape[3] else x
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., : width // 2], turning[..., width // 2 :]
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        y = torch.stack([real, imaginary], -1).reshape(turning.shape)
    else:
        y = torch.cat([real, imaginary], -1)
    return y if width == x.shape[3] else torch.cat([y, x[..., width:]], -1)
