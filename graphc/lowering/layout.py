"""Which values lie channels last in memory: [N, C, *spatial] stored as [N, *spatial, C].

Convolutions read and write images whose channels are neighbours (graphc/kernels/conv.h). What
stands between them, elementwise work, pooling, resizing, concatenation, keeps that order, so a
network of convolutions changes it once at its entry and once at its exit. Only strides differ: the
types of the graph stay as they are, and a reader that needs row-major memory gets a copy.
"""

from __future__ import annotations

from graphc.ir.graph import Graph, Node, Value
from graphc.ir.types import Dim, TensorType, as_dim, itemsize, product, same

#: dtypes that the channels-last kernels take
_FLOATS = frozenset(("float32", "bfloat16", "float16"))
#: a pixel of a multiple of these bytes is padded: the pixels of a tile would share cache sets
_ALIAS_BYTES, _PAD_BYTES = 2048, 64
#: views that leave the order of memory as it is
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "slice.Tensor", "narrow.default", "alias.default", "detach.default", "expand.default",
    )
)  # fmt: skip
#: templates that write either order (names without rank; those with indices do not)
_EITHER = ("max_pool", "avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "upsample_nearest",
           "_upsample_nearest_exact", "upsample_linear", "upsample_bilinear",
           "upsample_trilinear")  # fmt: skip


def channels_last_values(graph: Graph, kinds: dict[Node, tuple[str, str]]) -> set[Value]:
    """The values to be stored channels last, views of such values included."""
    found: set[Value] = set()
    # the caller's buffers and states are row-major
    fixed = {v for v in graph.kept() if isinstance(v, Value)}
    for node in graph.nodes:
        what = kinds[node][0]
        if (
            what != "fallback"
            and node.outputs[0] not in fixed
            and _keeps_channels_last(node, what, found)
        ):
            found.add(node.outputs[0])
    return found


def _keeps_channels_last(node: Node, what: str, found: set[Value]) -> bool:
    result = node.outputs[0]
    if not isinstance(result.type, TensorType) or not 3 <= len(result.type.shape) <= 5:
        return False
    rank = len(result.type.shape)
    name = node.target.split(".")[1]
    if what == "view":
        return node.target in _VIEWS and node.args[0] in found
    if result.type.dtype not in _FLOATS:
        return False
    if what == "pointwise":
        return any(v in found and _same_shape(v, result) for v in node.inputs())
    if what == "copy":
        return any(v in found for v in node.inputs())
    if what != "template":
        return False
    if name.startswith(("conv", "_convolution")):
        return rank == len(node.args[1].type.shape)
    return name.startswith(_EITHER) and len(node.outputs) == 1 and node.args[0] in found


def concatenation_windows(
    graph: Graph, kinds: dict[Node, tuple[str, str]], channels_last: set[Value]
) -> dict[Value, tuple[Node, int]]:
    """Values that are written where a concatenation wants them, with the concatenation and their
    place in it: both are stored channels last, and the value is computed, not a view."""
    windows: dict[Value, tuple[Node, int]] = {}
    for node in graph.nodes:
        if node.target != "aten.cat.default" or node.outputs[0] not in channels_last:
            continue
        for place, part in enumerate(node.args[0]):
            made = part.producer is not None and kinds[part.producer][0] in (
                "template",
                "pointwise",
            )
            if made and part in channels_last and part.type.dtype == node.outputs[0].type.dtype:
                windows.setdefault(part, (node, place))
    return windows


def _same_shape(a: Value, b: Value) -> bool:
    return len(a.type.shape) == len(b.type.shape) and all(
        same(x, y) for x, y in zip(a.type.shape, b.type.shape, strict=True)
    )


def channels_last_strides(shape: tuple[Dim, ...], dtype: str) -> tuple[Dim, ...]:
    """Strides of [N, C, *spatial] with neighbouring channels; the step from pixel to pixel may be
    larger than C (see `padded_channels`)."""
    strides: list[Dim] = [0] * len(shape)
    strides[1] = 1
    step: Dim = padded_channels(shape, dtype)
    for dim in reversed(range(2, len(shape))):
        strides[dim] = step
        step = as_dim(step * shape[dim])
    strides[0] = step
    return tuple(strides)


def padded_channels(shape: tuple[Dim, ...], dtype: str) -> Dim:
    """Elements from one pixel to the next: C, or a cache line more where neighbouring pixels would
    fall into the same sets of the first-level cache."""
    channels = shape[1]
    width = itemsize(dtype)
    if isinstance(channels, int) and channels > 0 and channels * width % _ALIAS_BYTES == 0:
        if not same(product(shape[2:]), 1):
            return channels + _PAD_BYTES // width
    return channels


def is_channels_last(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    """Whether channels are neighbours and pixels follow each other with one step."""
    if not (same(strides[1], 1) or same(shape[1], 1)):
        return False
    step = strides[-1] if not same(shape[-1], 1) else None
    for dim in reversed(range(2, len(shape))):
        if same(shape[dim], 1):
            continue
        if step is not None and not same(strides[dim], step):
            return False
        step = as_dim(strides[dim] * shape[dim])
    return True
