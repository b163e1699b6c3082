"""The bytes of tensors, for weights on disk and for digests."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    if flat.numel() == 1:
        # its stride means nothing and may be 0, which a view as bytes refuses
        flat = torch.empty(1, dtype=flat.dtype).copy_(flat)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data
