"""The bytes of tensors, for weights on disk and for digests."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor of any dtype: its own memory where it is row-major."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    if flat.numel() == 1:
        # its stride means nothing and may be 0, which a view as bytes refuses
        flat = torch.empty(1, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8).numpy().data
