"""Tensors that are, or share, the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphc.errors import UnsupportedError


def window(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same window on the same storage."""
    if tensor.numel() == 0:
        return (tuple(tensor.shape), tensor.dtype)
    return (
        tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape),
        tuple(tensor.stride()), tensor.dtype,
    )  # fmt: skip


def overlapping(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of tensors whose memory meets (by first and last byte)."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.layout == torch.strided and tensor.device.type == "cpu":
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name))
    groups: list[list[str]] = []
    end = -1
    for start, stop, name in sorted(spans):
        if start < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def shared_state(names: Sequence[str]) -> UnsupportedError:
    """The error for a state that would change behind another tensor's back."""
    return UnsupportedError(
        f"expected states with memory of their own, found {', '.join(names)} in the same memory",
        hint="register one buffer and take views of it inside forward",
    )
