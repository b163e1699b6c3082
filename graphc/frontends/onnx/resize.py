"""Resize and Upsample: separable interpolation, axis by axis, as the ONNX standard defines it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import (
    Floats,
    Ints,
    Known,
    Ratio,
    Tensor,
    float_items,
    outside_capture,
    statically_true,
)

F = torch.nn.functional
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Options:
    """How coordinates are mapped and taps are weighted."""

    mode: str
    transform: str
    nearest: str
    cubic: float
    exclude_outside: bool
    antialias: bool
    extrapolation: float


@dataclass(frozen=True)
class Axis:
    """One resized axis: sizes before and after, and the scale (a number, or None: after/before)."""

    index: int
    before: Any
    after: Any
    scale: float | None
    roi: tuple[float, float] | None

    @property
    def static(self) -> bool:
        return isinstance(self.before, int) and isinstance(self.after, int)

    def factor(self) -> Any:
        return self.after / self.before if self.scale is None else self.scale


@operator("Upsample")
def upsample_attributes(
    node: OnnxNode, x: Tensor, *, scales: list[float], mode: str = "nearest"
) -> Tensor:
    return _resize(node, x, None, scales, None, None, _legacy(mode))


@operator("Upsample", since=9)
@operator("Resize", since=10)
def upsample(node: OnnxNode, x: Tensor, scales: Floats, *, mode: str = "nearest") -> Tensor:
    return _resize(node, x, None, scales, None, None, _legacy(mode))


def _legacy(mode: str) -> Options:
    return Options(
        "linear" if mode == "bilinear" else mode, "asymmetric", "floor", -0.75, False, False, 0.0
    )


@operator("Resize", since=11)
def resize(
    node: OnnxNode,
    x: Tensor,
    roi: Known = None,
    scales: Known = None,
    sizes: Ints | None = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    options = Options(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )
    factors = None if scales is None else float_items(scales, node.where, "scales")
    if factors is not None and not factors:
        factors = None
    regions = None
    if options.transform == "tf_crop_and_resize":
        regions = float_items(roi, node.where, "roi")
    if sizes is not None and not sizes:
        sizes = None
    return _resize(node, x, axes, factors, sizes, regions, options, keep_aspect_ratio_policy)


def _resize(
    node: OnnxNode,
    x: Tensor,
    axes: list[int] | None,
    scales: list[float] | None,
    sizes: list[int] | None,
    roi: list[float] | None,
    options: Options,
    policy: str = "stretch",
) -> Tensor:
    places = list(range(x.ndim)) if axes is None else [a % x.ndim for a in axes]
    if (scales is None) == (sizes is None):
        raise node.invalid("Resize needs either scales or sizes")
    plan: list[Axis] = []
    if sizes is not None:
        sizes, ratio = _kept_aspect(node, [x.shape[p] for p in places], sizes, policy)
    else:
        ratio = None
    count = len(places)
    for i, place in enumerate(places):
        before = x.shape[place]
        region = (roi[i], roi[i + count]) if roi else None
        if sizes is not None:
            plan.append(Axis(place, before, sizes[i], ratio, region))
        else:
            assert scales is not None
            after, scale = _scaled_size(node, before, scales[i])
            plan.append(Axis(place, before, after, scale, region))
    plan = [a for a in plan if not _unchanged(a, options)]
    native = _native(x, plan, options)
    if native is not None:
        return native
    work = x if x.is_floating_point() or options.mode == "nearest" else x.to(torch.float32)
    for axis in plan:
        work = _resize_axis(node, work, axis, options)
    if work.dtype != x.dtype:
        work = torch.round(work) if not x.is_floating_point() else work
    return work.to(x.dtype)


def _unchanged(axis: Axis, options: Options) -> bool:
    same = axis.scale == 1.0 or (axis.scale is None and axis.before is axis.after)
    if isinstance(axis.before, int) and isinstance(axis.after, int) and axis.scale is None:
        same = axis.before == axis.after
    return same and options.transform != "tf_crop_and_resize"


def _scaled_size(node: OnnxNode, before: Any, scale: Any) -> tuple[Any, float | None]:
    """floor(before * scale), exact for symbolic sizes; and the scale if it is a number."""
    if isinstance(scale, Ratio):
        if scale.numerator is before or statically_true(scale.numerator == before):
            return before, 1.0
        raise node.refuse("Resize with a scale that depends on a symbolic length")
    if not isinstance(scale, float):
        raise node.refuse("Resize with a symbolic scale is not supported")
    if isinstance(before, int):
        return int(np.floor(np.float32(before) * np.float32(scale))), scale
    exact = Fraction(scale)
    inverse = round(1 / scale) if scale > 0 else 0
    if inverse > 1 and np.float32(1 / inverse) == np.float32(scale):
        # 1 / k in float32: for sizes below 2**23 the product floors to size // k, unless the
        # rounding of the scale went down by so much that whole quotients come out too small
        error = exact * inverse - 1
        if error >= 0 or -error < Fraction(1, 1 << 25):
            return before // inverse, scale
    if exact.denominator > 64 or exact.numerator >= 1 << 16:
        raise node.refuse(f"Resize of a symbolic length by {scale} is not exact", "fix that length")
    return before * exact.numerator // exact.denominator, scale


def _kept_aspect(
    node: OnnxNode, before: list[int], sizes: list[int], policy: str
) -> tuple[list[int], float | None]:
    if policy == "stretch":
        return sizes, None
    if not all(isinstance(s, int) for s in before + sizes):
        raise node.refuse("Resize that keeps the aspect ratio needs known sizes")
    choose = {"not_larger": min, "not_smaller": max}.get(policy)
    if choose is None:
        raise node.invalid(f"unknown keep_aspect_ratio_policy {policy!r}")
    ratio = choose(s / b for s, b in zip(sizes, before, strict=True))
    return [math.floor(ratio * b + 0.5) for b in before], ratio


def _native(x: Tensor, plan: list[Axis], options: Options) -> Tensor | None:
    """F.interpolate where it computes exactly this, since kernels know it; else None."""
    spatial = x.ndim - 2
    axes = [a.index for a in plan]
    if spatial not in LINEAR or not plan or min(axes) < 2 or not x.is_floating_point():
        return None
    if options.exclude_outside or options.antialias or options.extrapolation:
        return None
    sizes = list(x.shape[2:])
    for axis in plan:
        sizes[axis.index - 2] = axis.after
    whole = all(a.scale is not None and a.scale == int(a.scale) and a.scale > 0 for a in plan)
    if options.mode == "nearest":
        floors = options.transform == "asymmetric" and options.nearest == "floor"
        centered = options.transform in ("half_pixel", "pytorch_half_pixel")
        rounds = centered and options.nearest in ("round_prefer_floor", "round_prefer_ceil")
        # an integer factor repeats each element, under either rule
        if whole and (floors or rounds) and all(_single(a.after) is False for a in plan):
            return F.interpolate(x, size=sizes, mode="nearest")
        return None
    exact = all(a.scale is None or whole or _is_product(a) for a in plan)
    centered = options.transform == "half_pixel" or (
        options.transform == "pytorch_half_pixel" and all(_single(a.after) is False for a in plan)
    )
    corners = options.transform == "align_corners"
    if not exact or not (centered or corners):
        return None
    if options.mode == "linear":
        return F.interpolate(x, size=sizes, mode=LINEAR[spatial], align_corners=corners)
    if options.mode == "cubic" and options.cubic == -0.75 and spatial == 2:
        return F.interpolate(x, size=sizes, mode="bicubic", align_corners=corners)
    return None


def _single(size: Any) -> bool | None:
    """Whether a size is 1; None if that differs among the lengths the capture allows."""
    if isinstance(size, (int, float)):
        return size == 1
    if statically_true(size > 1):
        return False
    return True if statically_true(size == 1) else None


def _is_product(axis: Axis) -> bool:
    """True if the size after is exactly scale * size before, so both give the same coordinates."""
    return axis.static and axis.scale is not None and axis.before * axis.scale == axis.after


def _resize_axis(node: OnnxNode, x: Tensor, axis: Axis, options: Options) -> Tensor:
    if axis.static:
        with outside_capture():
            places, weights, inside = _taps(node, axis, options)
    else:
        places, weights, inside = _taps(node, axis, options)
    shape = [1] * x.ndim
    shape[axis.index] = -1
    if weights is None:
        result = torch.index_select(x, axis.index, places[0])
    else:
        parts = [
            torch.index_select(x, axis.index, p) * w.to(x.dtype).reshape(shape)
            for p, w in zip(places, weights, strict=True)
        ]
        result = parts[0]
        for part in parts[1:]:
            result = result + part
    if inside is not None:
        result = torch.where(inside.reshape(shape), result, options.extrapolation)
    return result


def _taps(
    node: OnnxNode, axis: Axis, options: Options
) -> tuple[list[Tensor], list[Tensor] | None, Tensor | None]:
    """Per tap the input index of each output position and its weight, in float64.

    Returns:
        indices, weights (None: copy the one tap), and where the coordinate is inside (or None).
    """
    source = _coordinates(node, axis, options)
    last = axis.before - 1
    inside = None
    if options.transform == "tf_crop_and_resize":
        inside = (source >= 0) & (source <= last)
    if options.mode == "nearest":
        rounding: dict[str, Callable[[Tensor], Tensor]] = {
            "round_prefer_floor": lambda s: torch.ceil(s - 0.5),
            "round_prefer_ceil": lambda s: torch.floor(s + 0.5),
            "floor": torch.floor,
            "ceil": torch.ceil,
        }
        if options.nearest not in rounding:
            raise node.invalid(f"unknown nearest_mode {options.nearest!r}")
        place = rounding[options.nearest](source).to(torch.int64)
        return [torch.clamp(place, 0, last)], None, inside
    base = torch.floor(source)
    fraction = source - base
    offsets, weights = _weights(node, axis, options, fraction)
    positions = [base.to(torch.int64) + offset for offset in offsets]
    if options.exclude_outside:
        kept = [
            torch.where((p >= 0) & (p <= last), w, 0.0)
            for p, w in zip(positions, weights, strict=True)
        ]
        total = sum(kept[1:], kept[0])
        weights = [w / total for w in kept]
    return [torch.clamp(p, 0, last) for p in positions], weights, inside


def _coordinates(node: OnnxNode, axis: Axis, options: Options) -> Tensor:
    """The input coordinate of every output position, float64."""
    y = torch.arange(axis.after, dtype=torch.float64)
    factor = axis.factor()
    width = axis.after if axis.scale is None else axis.scale * axis.before
    transform = options.transform
    single = _single(width)
    if single is None and transform in (
        "align_corners",
        "pytorch_half_pixel",
        "tf_crop_and_resize",
    ):
        raise node.refuse(f"Resize by {transform} to a length that may be 1", "fix that length")
    last = axis.before - 1
    centered: Tensor = (y + 0.5) / factor - 0.5
    if transform == "half_pixel" or (transform == "pytorch_half_pixel" and not single):
        return centered
    result: Tensor
    if transform == "pytorch_half_pixel" or (transform == "align_corners" and single):
        result = torch.zeros_like(y)
    elif transform == "align_corners":
        result = y * last / (width - 1)
    elif transform == "asymmetric":
        result = y / factor
    elif transform == "half_pixel_symmetric":
        result = axis.before / 2 * (1 - axis.after / width) + centered
    elif transform == "tf_half_pixel_for_nn":
        result = (y + 0.5) / factor
    elif transform == "tf_crop_and_resize":
        if axis.roi is None:
            raise node.invalid("tf_crop_and_resize without a roi")
        start, end = axis.roi
        if single:
            result = torch.full_like(y, (start + end) * last / 2)
        else:
            result = start * last + y * (end - start) * last / (width - 1)
    else:
        raise node.invalid(f"unknown coordinate_transformation_mode {transform!r}")
    return result


def _weights(
    node: OnnxNode, axis: Axis, options: Options, fraction: Tensor
) -> tuple[list[int], list[Tensor]]:
    """Offsets of the taps from the floor of the coordinate, and their weights."""
    if options.mode not in ("linear", "cubic"):
        raise node.invalid(f"unknown mode {options.mode!r}")
    reach = 1 if options.mode == "linear" else 2
    a = options.cubic

    def kernel(distance: Tensor) -> Tensor:
        d = torch.abs(distance)
        if options.mode == "linear":
            return torch.clamp(1 - d, min=0.0)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))

    stretch = 1.0
    if options.antialias:
        factor = axis.factor()
        if not isinstance(factor, (int, float)):
            raise node.refuse("antialiased Resize needs a known scale")
        stretch = min(float(factor), 1.0)
    # one tap more on the left: a coordinate on a grid point counts as the end of its interval
    first = math.floor(-reach / stretch) + 1
    offsets = (
        list(range(first, 2 - first)) if options.antialias else list(range(1 - reach, reach + 1))
    )
    weights = [kernel((offset - fraction) * stretch) for offset in offsets]
    if options.antialias:
        total = sum(weights[1:], weights[0])
        weights = [w / total for w in weights]
    return offsets, weights
