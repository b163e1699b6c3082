"""What the index and window families share: dtype tags, size arithmetic, copies with index maps."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._sympy.functions import FloorDiv

from graphc.ir.types import product
from graphc.lowering.context import Dim, LoweringContext, Refuse, Unit, View

if TYPE_CHECKING:
    from graphc.ir.graph import Node

#: suffix of the kernel symbols for a dtype
TAGS = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "u8",
}
#: suffix -> C++ type, and the lists of kernels/strided.h that hold it
_LISTS = {
    **{tag: (tag_type, ("FLOATS", "ALL")) for tag, tag_type in (
        ("f32", "float"), ("f64", "double"), ("bf16", "gc::bf16"), ("f16", "gc::f16"),
    )},
    **{tag: (tag_type, ("INTS", "ALL")) for tag, tag_type in (
        ("u8", "uint8_t"), ("i8", "int8_t"), ("i16", "int16_t"), ("i32", "int32_t"),
        ("i64", "int64_t"),
    )},
    **{f"b{size}": (f"uint{8 * size}_t", ("BYTES",)) for size in (1, 2, 4, 8)},
}  # fmt: skip
#: bytes of an item
SIZES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
FLOATS = ("float32", "float64", "bfloat16", "float16")
#: items a core copies or reduces in about 20 us, the least that is worth a thread
ITEMS_PER_GRAIN = 32768
MAX_RANK = 16

IDENTITY, REPLICATE, REFLECT, CIRCULAR = 0, 1, 2, 3


def tag(dtype: str) -> str:
    """The symbol suffix of `dtype`. Raises Refuse for a dtype without kernels."""
    if dtype not in TAGS:
        raise Refuse(f"no kernel for dtype {dtype}")
    return TAGS[dtype]


def bytes_tag(dtype: str) -> str:
    """The symbol suffix of kernels that only move items."""
    if dtype not in SIZES:
        raise Refuse(f"no kernel for dtype {dtype}")
    return f"b{SIZES[dtype]}"


def float_tag(dtype: str) -> str:
    """The symbol suffix of a floating dtype; others are refused."""
    if dtype not in FLOATS:
        raise Refuse(f"expected a floating dtype, found {dtype}")
    return TAGS[dtype]


def floordiv(a: Dim, b: Dim) -> Dim:
    """floor(a / b) for positive b, symbolic if either is."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    result: Dim = FloorDiv(a, b)
    return result


def normal_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front; a scalar counts as one dimension."""
    return dim + max(rank, 1) if dim < 0 else dim


def grain(ctx: LoweringContext, work: Dim, target: int = ITEMS_PER_GRAIN) -> int:
    """How many outer items of `work` elements each make a grain; 1 if work is symbolic."""
    known = ctx.static(work)
    return 1 if known is None else max(1, target // max(1, known))


def float_bits(value: float) -> int:
    """A float64 as the int64 that carries it through the immediates."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def unit(ctx: LoweringContext, name: str, only: str = "") -> Unit:
    """The constant unit graphc/kernels/<name>.cpp.

    only: the suffix of one dtype, to compile its kernels alone: for files whose kernels all come
    out of the GC_FOR_ lists or stand under GC_ONLY_<suffix>, so that units for several dtypes can
    stand in one library.
    """
    source = ctx.header(f"{name}.cpp")
    if not only:
        return Unit(name, source)
    held, lists = _LISTS[only]
    lines = ["#define GC_ONE_DTYPE", f"#define GC_ONLY_{only}"]
    for kind in ("FLOATS", "INTS", "ALL", "BYTES"):
        one = f" M({only}, {held})" if kind in lists else ""
        lines.append(f"#define GC_FOR_{kind}(M){one}")
    return Unit(f"{name}_{only}", "\n".join([*lines, source]))


def is_static_one(dim: Dim) -> bool:
    """True for a size known to be 1 (a broadcast dimension)."""
    return bool(dim == 1)


def around(shape: Sequence[Dim], dim: int) -> tuple[Dim, Dim, Dim]:
    """(outer, n, inner): sizes before, of, and after dimension `dim`; a scalar is [1, 1, 1]."""
    if not shape:
        return 1, 1, 1
    return product(shape[:dim]), shape[dim], product(shape[dim + 1 :])


@dataclass(frozen=True)
class Axis:
    """One dimension of a mapped copy (kernels/mapped_copy.cpp), strides in elements."""

    size: Dim
    dst_stride: Dim
    src_stride: Dim
    mode: int = IDENTITY
    left: Dim = 0
    source: Dim = 0


def _merge(axes: Sequence[Axis]) -> list[Axis]:
    """Drops axes of size 1 and joins neighbours that lie in one piece on both sides."""
    result: list[Axis] = []
    for axis in axes:
        plain = axis.mode == IDENTITY and axis.left == 0
        if plain and is_static_one(axis.size):
            continue
        if result and plain:
            last = result[-1]
            if (
                last.mode == IDENTITY
                and last.left == 0
                and last.dst_stride == axis.dst_stride * axis.size
                and last.src_stride == axis.src_stride * axis.size
            ):
                result[-1] = Axis(last.size * axis.size, axis.dst_stride, axis.src_stride)
                continue
        result.append(axis)
    return result


def mapped_copy(
    ctx: LoweringContext, src: View, dst: View, axes: Sequence[Axis], label: str
) -> None:
    """Emits dst[o] = src[map(o)] over the box of `axes`, outermost first; the last axis is the
    inner loop."""
    merged = _merge(axes) or [Axis(1, 1, 1)]
    if len(merged) > MAX_RANK:
        raise Refuse(f"a copy of rank {len(merged)}; at most {MAX_RANK} is supported")
    if len(merged) == 1 and merged[0].mode == IDENTITY and merged[0].left == 0:
        (only,) = merged
        ctx.kernel(
            unit(ctx, "mapped_copy"),
            f"gc_linear_copy_{bytes_tag(dst.dtype)}",
            pointers=[src, dst],
            immediates=[only.dst_stride, only.src_stride],
            reads=[src],
            writes=[dst],
            range=only.size,
            grain=ITEMS_PER_GRAIN,
            label=label,
        )
        return
    immediates: list[Dim] = [len(merged)]
    for axis in merged:
        immediates += [
            axis.size, axis.dst_stride, axis.src_stride, axis.mode, axis.left, axis.source
        ]  # fmt: skip
    ctx.kernel(
        unit(ctx, "mapped_copy"),
        f"gc_mapped_copy_{bytes_tag(dst.dtype)}",
        pointers=[src, dst],
        immediates=immediates,
        reads=[src],
        writes=[dst],
        range=product([axis.size for axis in merged[:-1]]),
        grain=grain(ctx, merged[-1].size),
        label=label,
    )


def start_from(ctx: LoweringContext, base: View, out: View, label: str) -> None:
    """Copies `base` to `out`, both contiguous, unless the context gave the result the memory of
    its dead operand: an update in place needs no copy."""
    if base.buffer != out.buffer or base.offset != out.offset:
        convert(ctx, base, out, label)


def fill(ctx: LoweringContext, value: View, dst: View, label: str) -> None:
    """Emits dst[...] = value (one item of dst's dtype); dst is contiguous."""
    ctx.kernel(
        unit(ctx, "mapped_copy"),
        f"gc_fill_{bytes_tag(dst.dtype)}",
        pointers=[value, dst],
        reads=[value],
        writes=[dst],
        range=product(dst.shape),
        grain=ITEMS_PER_GRAIN,
        label=label,
    )


def scalar(ctx: LoweringContext, node: Node, name: str, value: Any, dtype: str) -> View:
    """A one-element constant of `dtype`."""
    data = torch.tensor([value]).to(getattr(torch, dtype))
    return ctx.constant(f"{node.name}.{name}", data)


def convert(ctx: LoweringContext, src: View, dst: View, label: str) -> None:
    """Emits a contiguous conversion; equal storage is copied."""
    if TAGS[src.dtype] == TAGS[dst.dtype]:
        count = product(dst.shape)
        mapped_copy(ctx, src, dst, [Axis(count, 1, 1)], label)
        return
    ctx.kernel(
        unit(ctx, "convert"),
        f"gc_convert_{tag(src.dtype)}_{tag(dst.dtype)}",
        pointers=[src, dst],
        reads=[src],
        writes=[dst],
        range=product(dst.shape),
        grain=ITEMS_PER_GRAIN,
        label=label,
    )
