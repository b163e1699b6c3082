"""Sampling of images and detection: grids, regions, deformable convolution, box suppression."""

from __future__ import annotations

from typing import Any

import torch

from graphc.frontends.onnx.convolution import kernel_sizes
from graphc.frontends.onnx.graph import OnnxNode
from graphc.frontends.onnx.registry import operator
from graphc.frontends.onnx.values import Ints, Known, Raw, Static, Tensor, float_items, int_items

F = torch.nn.functional
BOX_LIMIT = 1024  # suppression is unrolled box by box


@operator("GridSample", since=16)
def grid_sample(
    node: OnnxNode,
    x: Tensor,
    grid: Tensor,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Tensor:
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if name == "bicubic" and x.ndim != 4:
        raise node.refuse("cubic GridSample is supported over two spatial axes only")
    if x.ndim not in (4, 5):
        raise node.refuse(f"GridSample over {x.ndim - 2} spatial axes is not supported")
    return F.grid_sample(x, grid, name, padding_mode, bool(align_corners))


@operator("AffineGrid", since=20)
def affine_grid(node: OnnxNode, theta: Tensor, size: Ints, *, align_corners: int = 0) -> Tensor:
    return F.affine_grid(theta, size, bool(align_corners))


@operator("RoiAlign", since=10)
def roi_align_legacy(
    node: OnnxNode,
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    return roi_align(
        node,
        x,
        rois,
        batch,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@operator("RoiAlign", since=16)
def roi_align(
    node: OnnxNode,
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Regions [R, 4] of `x` [N, C, H, W] pooled to [R, C, output_height, output_width]."""
    if sampling_ratio <= 0:
        raise node.refuse("RoiAlign with a sampling ratio that depends on the region")
    if mode not in ("avg", "max"):
        raise node.invalid(f"unknown mode {mode!r}")
    half = coordinate_transformation_mode == "half_pixel"
    corners = rois * spatial_scale - (0.5 if half else 0.0)
    height, width = x.shape[2], x.shape[3]
    ys = _samples(corners[:, 1], corners[:, 3], output_height, sampling_ratio, half)
    xs = _samples(corners[:, 0], corners[:, 2], output_width, sampling_ratio, half)
    y_low, y_high, y_part, y_valid = _neighbours(ys, height)
    x_low, x_high, x_part, x_valid = _neighbours(xs, width)
    count, channels = rois.shape[0], x.shape[1]
    planes = x[batch].reshape(count, channels, height * width)
    valid = (y_valid.unsqueeze(2) & x_valid.unsqueeze(1)).to(x.dtype)
    terms = []
    for rows, row_weight in ((y_low, 1 - y_part), (y_high, y_part)):
        for columns, column_weight in ((x_low, 1 - x_part), (x_high, x_part)):
            places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).reshape(count, 1, -1)
            values = torch.gather(planes, 2, places.expand(-1, channels, -1))
            weight = row_weight.unsqueeze(2) * column_weight.unsqueeze(1) * valid
            terms.append(values * weight.reshape(count, 1, -1))
    if mode == "avg":
        total = terms[0] + terms[1] + terms[2] + terms[3]
    else:  # ONNX takes the largest weighted corner
        total = torch.amax(torch.stack(terms), 0)
    bins = total.reshape(
        count, channels, output_height, sampling_ratio, output_width, sampling_ratio
    )
    return torch.mean(bins, (3, 5)) if mode == "avg" else torch.amax(bins, (3, 5))


def _samples(start: Tensor, end: Tensor, bins: int, ratio: int, half: bool) -> Tensor:
    """Sampling positions along one axis of every region, [R, bins * ratio]."""
    extent = end - start if half else torch.clamp(end - start, min=1.0)
    size = (extent / bins).unsqueeze(1)
    steps = torch.arange(bins * ratio)
    inner = (steps % ratio + 0.5) / ratio
    return start.unsqueeze(1) + (steps // ratio) * size + inner * size


def _neighbours(position: Tensor, size: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both grid points around a position, the weight of the upper one, and if it is inside."""
    valid = (position >= -1.0) & (position <= size)
    position = torch.clamp(position, min=0.0)
    low = torch.clamp(position.to(torch.int64), max=size - 1)
    high = torch.clamp(low + 1, max=size - 1)
    part = torch.where(low >= size - 1, 0.0, position - low)
    return low, high, part, valid


@operator("DeformConv", since=19)
def deform_conv(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    offset_group: int = 1,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """A 2-D convolution that samples `x` at shifted positions, bilinear with zeros outside."""
    if x.ndim != 4:
        raise node.refuse("DeformConv is supported over two spatial axes only")
    kh, kw = kernel_sizes(node, w, kernel_shape)
    pads, strides, dilations = pads or [0] * 4, strides or [1, 1], dilations or [1, 1]
    n, channels = x.shape[:2]
    rows, columns = offset.shape[2:]
    shift = offset.reshape(n, offset_group, kh, kw, 2, rows, columns)
    y = torch.arange(kh).reshape(-1, 1, 1, 1) * dilations[0] - pads[0]
    y = y + (torch.arange(rows) * strides[0]).reshape(1, 1, -1, 1)
    z = torch.arange(kw).reshape(1, -1, 1, 1) * dilations[1] - pads[1]
    z = z + (torch.arange(columns) * strides[1]).reshape(1, 1, 1, -1)
    sampled = _bilinear(
        x.reshape(n, offset_group, channels // offset_group, x.shape[2], x.shape[3]),
        shift[:, :, :, :, 0] + y,
        shift[:, :, :, :, 1] + z,
    )  # [N, offset groups, C / offset groups, kh, kw, rows, columns]
    if mask is not None:
        sampled = sampled * mask.reshape(n, offset_group, 1, kh, kw, rows, columns)
    columns_matrix = sampled.reshape(n, group, (channels // group) * kh * kw, rows * columns)
    weight = w.reshape(1, group, w.shape[0] // group, -1)
    result = torch.matmul(weight, columns_matrix).reshape(n, w.shape[0], rows, columns)
    return result if b is None else result + b.reshape(1, -1, 1, 1)


def _bilinear(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """`x` [N, G, C, H, W] at positions y, z [N, G, ...]: [N, G, C, ...], zero outside."""
    height, width = x.shape[3], x.shape[4]
    flat = x.reshape(x.shape[0], x.shape[1], x.shape[2], height * width)
    top, left = torch.floor(y), torch.floor(z)
    result: Any = 0
    for row, row_weight in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, column_weight in ((left, 1 - (z - left)), (left + 1, z - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            places = torch.where(inside, row * width + column, 0.0).to(torch.int64)
            places = places.reshape(x.shape[0], x.shape[1], 1, -1)
            values = torch.gather(flat, 3, places.expand(-1, -1, x.shape[2], -1))
            weight = torch.where(inside, row_weight * column_weight, 0.0)
            result = result + values * weight.reshape(x.shape[0], x.shape[1], 1, -1)
    return result.reshape(*x.shape[:3], *y.shape[2:])  # type: ignore[no-any-return]


@operator("NonMaxSuppression", since=10)
def non_max_suppression(
    node: OnnxNode,
    boxes: Tensor,
    scores: Tensor,
    limit: Known = None,
    iou_threshold: Raw = None,
    score_threshold: Raw = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """Rows (batch, class, box) of the boxes kept, best first in each class."""
    count = boxes.shape[1]
    if not isinstance(count, int) or (count > BOX_LIMIT and torch.compiler.is_exporting()):
        raise node.refuse(
            f"NonMaxSuppression of a symbolic number or of more than {BOX_LIMIT} boxes",
            "cut the model before it and select boxes outside",
        )
    most = 0 if limit is None else int_items(limit, node.where, "max_output_boxes_per_class")[0]
    overlap = _number(node, iou_threshold, 0.0)
    values, order = torch.sort(scores, dim=2, descending=True, stable=True)  # [B, C, N]
    over = _overlapping(boxes, overlap, bool(center_point_box))  # [B, N, N]
    over = over.unsqueeze(1).expand(-1, scores.shape[1], -1, -1)
    over = torch.gather(over, 2, order.unsqueeze(3).expand(-1, -1, -1, count))
    over = torch.gather(over, 3, order.unsqueeze(2).expand(-1, -1, count, -1))
    candidate = torch.ones_like(values, dtype=torch.bool)
    if score_threshold is not None:
        candidate = values > _number(node, score_threshold, 0.0)
    kept: list[Tensor] = []
    blocked = ~candidate
    for i in range(count):
        keep = ~blocked[:, :, i]
        kept.append(keep)
        blocked = blocked | (over[:, :, i] & keep.unsqueeze(2))
    if not kept:
        return torch.zeros([0, 3], dtype=torch.int64)
    chosen = torch.stack(kept, 2)
    chosen = chosen & (torch.cumsum(chosen.to(torch.int64), 2) <= most)
    rows = torch.nonzero(chosen)
    box = order[rows[:, 0], rows[:, 1], rows[:, 2]]
    return torch.stack([rows[:, 0], rows[:, 1], box], 1)


def _number(node: OnnxNode, value: Any, default: float) -> Any:
    if value is None:
        return default
    if isinstance(value, Static):
        return float_items(value, node.where, "a threshold")[0]
    return node.tensor(value).reshape(())


def _overlapping(boxes: Tensor, threshold: Any, centered: bool) -> Tensor:
    """Which pairs of boxes overlap by more than `threshold` of their union, [B, N, N]."""
    if centered:
        x, y, w, h = boxes.unbind(-1)
        left, right, top, bottom = x - w / 2, x + w / 2, y - h / 2, y + h / 2
    else:
        y1, x1, y2, x2 = boxes.unbind(-1)
        left, right = torch.minimum(x1, x2), torch.maximum(x1, x2)
        top, bottom = torch.minimum(y1, y2), torch.maximum(y1, y2)

    def common(low: Tensor, high: Tensor) -> Tensor:
        start = torch.maximum(low.unsqueeze(2), low.unsqueeze(1))
        end = torch.minimum(high.unsqueeze(2), high.unsqueeze(1))
        return torch.clamp(end - start, min=0.0)

    inter = common(left, right) * common(top, bottom)
    area = (right - left) * (bottom - top)
    union = area.unsqueeze(2) + area.unsqueeze(1) - inter
    valid = (inter > 0) & (area > 0).unsqueeze(2) & (area > 0).unsqueeze(1) & (union > 0)
    share: Tensor = inter / torch.where(union > 0, union, 1.0)
    result: Tensor = valid & (share > threshold)
    return result
