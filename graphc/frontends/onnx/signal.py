"""Fourier transforms and spectral tools as real arithmetic."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphc.frontends.onnx.dtypes import torch_dtype
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Int, Known, Static, Tensor, int_items, outside_capture

F = torch.nn.functional
LONGEST = 1 << 14  # a transform is a matrix product with n * n coefficients


def fourier(n: int, bins: int, dtype: torch.dtype, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin of the transform's angles, [n, bins]: e^(-2 pi i t f / n), conjugated if inverse.

    Angles are reduced modulo n as integers first, so large products lose nothing.
    """
    with outside_capture():
        turns = torch.arange(n).unsqueeze(1) * torch.arange(bins) % n
        angle = turns.to(torch.float64) * (2 * math.pi / n)
        sign = 1.0 if inverse else -1.0
        return torch.cos(angle).to(dtype), (sign * torch.sin(angle)).to(dtype)


def known_length(node: OnnxNode, n: Any) -> int:
    if not isinstance(n, int):
        raise node.refuse("a Fourier transform needs a length known at capture")
    if n > LONGEST:
        raise node.refuse(f"a Fourier transform longer than {LONGEST} is not supported")
    return n


@operator("DFT", since=17)
def dft_attribute(
    node: OnnxNode,
    x: Tensor,
    length: Known = None,
    *,
    axis: int = 1,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    return _dft(node, x, length, axis, bool(inverse), bool(onesided))


@operator("DFT", since=20)
def dft(
    node: OnnxNode,
    x: Tensor,
    length: Known = None,
    axis: Int | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    return _dft(node, x, length, -2 if axis is None else axis, bool(inverse), bool(onesided))


def _dft(
    node: OnnxNode, x: Tensor, length: Any, axis: int, inverse: bool, onesided: bool
) -> Tensor:
    axis = axis % x.ndim
    size = x.shape[axis]
    n = size if length is None else int_items(length, node.where, "dft_length")[0]
    full = x.shape[-1] == 1 and inverse and onesided
    if full or (onesided and inverse):
        return _inverse_onesided(node, x, n if length is not None else None, axis)
    n = known_length(node, n)
    if isinstance(size, int) and size > n:
        x = torch.narrow(x, axis, 0, n)
    elif isinstance(size, int) and size < n:
        pads = [0, 0] * (x.ndim - 1 - axis) + [0, n - size]
        x = F.pad(x, pads)
    bins = n // 2 + 1 if onesided else n
    cos, sin = fourier(n, bins, x.dtype, inverse)
    moved = x.movedim(axis, -2)  # [..., n, 1 or 2]
    parts = moved.transpose(-1, -2)  # [..., 1 or 2, n]
    real = torch.matmul(parts[..., 0, :], cos)
    imaginary = torch.matmul(parts[..., 0, :], sin)
    if x.shape[-1] == 2:
        real = real - torch.matmul(parts[..., 1, :], sin)
        imaginary = imaginary + torch.matmul(parts[..., 1, :], cos)
    y = torch.stack([real, imaginary], -1)
    y = y / n if inverse else y
    return y.movedim(-2, axis)


def _inverse_onesided(node: OnnxNode, x: Tensor, n: Any, axis: int) -> Tensor:
    """A real signal [.., n, 1] from the first half of its spectrum [.., n // 2 + 1, 2]."""
    bins = known_length(node, x.shape[axis])
    n = 2 * (bins - 1) if n is None else known_length(node, n)
    wanted = n // 2 + 1
    if bins > wanted:
        x = torch.narrow(x, axis, 0, wanted)
    elif bins < wanted:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, wanted - bins])
    cos, sin = fourier(n, wanted, x.dtype, True)
    with outside_capture():
        twice = torch.full((wanted, 1), 2.0, dtype=x.dtype)
        twice[0] = 1.0
        if n % 2 == 0:
            twice[-1] = 1.0
        cos, sin = (cos.t() * twice / n).contiguous(), (sin.t() * twice / n).contiguous()
    parts = x.movedim(axis, -2).transpose(-1, -2)
    y = torch.matmul(parts[..., 0, :], cos) - torch.matmul(parts[..., 1, :], sin)
    return y.unsqueeze(-1).movedim(-2, axis)


@operator("STFT", since=17)
def stft(
    node: OnnxNode,
    signal: Tensor,
    frame_step: Int,
    window: Tensor | None = None,
    frame_length: Int | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """Windowed transforms of [B, L, 1 or 2] every `frame_step`: [B, frames, bins, 2].

    Written as one convolution per part with the windowed Fourier basis as its kernel.
    """
    length = frame_length if frame_length is not None else None
    if length is None:
        length = window.shape[0] if window is not None else signal.shape[1]
    n = known_length(node, length)
    step = known_length(node, frame_step)
    bins = n // 2 + 1 if onesided else n
    cos, sin = fourier(n, bins, signal.dtype)
    basis = torch.cat([cos, sin], 1).t()  # [2 * bins, n]
    if window is not None:
        if window.shape[0] != n:
            raise node.refuse("an STFT window shorter than its frame is not supported")
        basis = basis * window
    kernel = basis.unsqueeze(1)
    samples = signal if signal.ndim == 2 else signal[:, :, 0]  # onnxruntime takes [B, L] too
    real = F.conv1d(samples.unsqueeze(1), kernel, stride=step)  # [B, 2 * bins, frames]
    if signal.ndim == 3 and signal.shape[2] == 2:
        other = F.conv1d(signal[:, :, 1].unsqueeze(1), kernel, stride=step)
        real = real + torch.cat([-other[:, bins:], other[:, :bins]], 1)
    parts = real.reshape(real.shape[0], 2, bins, real.shape[2])
    return parts.permute(0, 3, 2, 1)


@operator("HannWindow", "HammingWindow", "BlackmanWindow", since=17)
def window(node: OnnxNode, size: Int, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    if not isinstance(size, int):
        raise node.refuse("a window needs a size known at capture")
    terms = {
        "HannWindow": (0.5, 0.5, 0.0),
        "HammingWindow": (25 / 46, 21 / 46, 0.0),
        "BlackmanWindow": (0.42, 0.5, 0.08),
    }[node.op_type]
    with outside_capture():
        turn = 2 * math.pi / (size if periodic else size - 1)
        angle = torch.arange(size, dtype=torch.float64) * turn
        values = terms[0] - terms[1] * torch.cos(angle) + terms[2] * torch.cos(2 * angle)
        return values.to(torch_dtype(output_datatype, node.where))


@operator("MelWeightMatrix", since=17)
def mel_weight_matrix(
    node: OnnxNode,
    bins: Int,
    dft_length: Int,
    sample_rate: Int,
    low: Known,
    high: Known,
    *,
    output_datatype: int = 1,
) -> Tensor:
    """Triangular filters on the mel scale, [dft_length // 2 + 1, bins]."""
    edges = []
    for value in (low, high):
        if isinstance(value, Static) and value.concrete:
            edges.append(float(value.flat[0]))
        elif torch.compiler.is_exporting():
            raise node.refuse("mel edges must be known when the model is captured")
        else:
            edges.append(float(node.tensor(value).item()))
    with outside_capture():
        spectrum = dft_length // 2 + 1
        mels = [2595 * math.log10(1 + edge / 700) for edge in edges]
        step = (mels[1] - mels[0]) / (bins + 2)
        points = [
            int((dft_length + 1) * (700 * (10 ** ((mels[0] + i * step) / 2595) - 1)) // sample_rate)
            for i in range(bins + 2)
        ]
        result = torch.zeros(spectrum, bins, dtype=torch.float64)
        for i in range(bins):
            lower, center, upper = points[i : i + 3]
            if center == lower:
                result[center, i] = 1.0
            for j in range(lower, center + 1 if center != lower else lower):
                result[j, i] = (j - lower) / (center - lower)
            for j in range(center, upper):
                result[j, i] = (upper - j) / (upper - center)
        return result.to(torch_dtype(output_datatype, node.where))
