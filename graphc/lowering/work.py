"""What each Step has to do: operations, and bytes read and written once.

Rules state the operations of their kernels (`flops`); those of generated loops are counted here.
Bytes follow from the views a kernel is given; where a kernel touches only a part of a view, the
part is worked out here, by the kernel's symbol. A fallback's work is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from graphc.ir.graph import Node
from graphc.ir.types import Dim, as_dim, dim_max, itemsize, product
from graphc.lowering.context import View
from graphc.lowering.loops import Compute, Loop, Reduce, row_level
from graphc.lowering.program import Expressions
from graphc.lowering.steps import BufferInfo, FallbackStep, KernelStep, Lowered
from graphc.plan import SideWork, StepWork

#: buffers that outlive a run
KEPT = ("weight", "state", "input")

#: additions, multiplications, divisions and roots in the functions of vmath.h and libm, where
#: there are several ways those of the shortest: a bound of time is built on them
FUNCTIONS = {
    "vexp": 14, "vexpm1": 26, "vlog": 26, "vlog1p": 30, "vsigmoid": 16, "vsilu": 16, "vtanh": 28,
    "verf": 16, "vgelu": 20, "vgelu_tanh": 22, "vsoftplus": 40, "vsin": 20, "vcos": 20,
    "exp": 14, "expf": 14, "log": 26, "logf": 26, "tanh": 28, "erf": 16, "sin": 20, "cos": 20,
    "pow": 40, "ipow": 2,
}  # fmt: skip
_TOKEN = re.compile(
    r"(?:gc::|std::)?([A-Za-z_]\w*)(?:<[^<>()]*>)?\("  # a call
    r"|\d(?:[\w.]|(?<=[eEpP])[+-])*"  # a number: its sign is no operation
    r"|&&|\|\||[<>=!]=|[-+*/%<>?]"
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a Step. kept: read of what outlives a run (weights, states, inputs); read: read of
    what the run itself made; made: written of what does not outlive it."""

    kept: Dim
    read: Dim
    written: Dim
    made: Dim


def loop_flops(loop: Loop) -> Dim:
    """Operations of a loop nest: those of each scalar at each point where it differs."""
    scalars = loop.scalars()
    rows = row_level(loop, scalars)
    points = product(loop.domain)
    kept = product([n for axis, n in enumerate(loop.domain) if axis not in loop.reduced])
    total: Dim = 0
    for scalar in scalars:
        if isinstance(scalar, Reduce):
            total = total + (kept if rows[id(scalar.arg)] else points)
        elif isinstance(scalar, Compute):
            total = total + operations(scalar.template) * (kept if rows[id(scalar)] else points)
    return as_dim(total)


def operations(text: str) -> int:
    """Arithmetic operations in a C++ expression: operators and calls; conversions are none."""
    count = 0
    for match in _TOKEN.finditer(text):
        name = match[1]
        if name is not None:
            count += FUNCTIONS.get(name, 1)
        elif not match[0][0].isdigit():
            count += 1
    return count


def traffic(step: KernelStep, buffers: Sequence[BufferInfo]) -> Traffic:
    """The bytes a kernel Step reads and writes, each once."""
    partly = next((rule for begin, rule in _PARTLY.items() if step.symbol.startswith(begin)), None)
    if partly is not None:
        reads, writes = partly(step)
    else:
        reads = [(view, _bytes(view)) for view in dict.fromkeys(step.read_views)]
        writes = [(view, _bytes(view)) for view in dict.fromkeys(step.write_views)]
    kept: Dim = 0
    read: Dim = 0
    written: Dim = 0
    made: Dim = 0
    for number, nbytes in _per_buffer(reads, buffers).items():
        if buffers[number].kind in KEPT:
            kept = kept + nbytes
        else:
            read = read + nbytes
    for number, nbytes in _per_buffer(writes, buffers).items():
        written = written + nbytes
        made = made + (0 if buffers[number].kind in KEPT else nbytes)
    return Traffic(as_dim(kept), as_dim(read), as_dim(written), as_dim(made))


Touched = list[tuple[View, Dim]]


def _bytes(view: View) -> Dim:
    """Bytes of the different elements of a view; a dimension it does not walk counts once."""
    sizes = [n for n, step in zip(view.shape, view.strides, strict=True) if not _zero(step)]
    return as_dim(product(sizes) * itemsize(view.dtype))


def _per_buffer(touched: Touched, buffers: Sequence[BufferInfo]) -> dict[int, Dim]:
    """Bytes by buffer; views that overlap (windows, shifted rows) are no more than the whole."""
    sums: dict[int, Dim] = {}
    for view, nbytes in touched:
        sums[view.buffer] = as_dim(sums.get(view.buffer, 0) + nbytes)
    return {number: smaller(total, buffers[number].nbytes) for number, total in sums.items()}


def smaller(a: Dim, b: Dim) -> Dim:
    """The smaller of two sizes, without a "min" where it is known which that is."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    difference = sympy.expand(sympy.sympify(a - b))
    if difference.is_nonpositive:
        return a
    if difference.is_nonnegative:
        return b
    from torch.utils._sympy.functions import Min

    return as_dim(Min(a, b))


def _zero(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 0


# ---------------------------------------------------------------- kernels that touch a part


def _gathered(step: KernelStep) -> tuple[Touched, Touched]:
    """Of the table only as much as the result takes."""
    table, out, *indices = step.pointers
    taken = smaller(_bytes(table), _bytes(out))
    return [(table, taken), *((v, _bytes(v)) for v in indices)], [(out, _bytes(out))]


def _scattered(step: KernelStep) -> tuple[Touched, Touched]:
    """Of the target only the places that are named; all but "set" read them too."""
    target, source, factor, *indices = step.pointers
    sizes = step.immediates[4 : 4 + 2 * int(step.immediates[0]) : 2]
    items = as_dim(step.range * product(sizes))
    places = smaller(as_dim(items * itemsize(target.dtype)), _bytes(target))
    named = [(v, _bytes(v)) for v in (source, factor, *indices)]
    if step.symbol.startswith("gc_scatter_set_"):
        return named, [(target, places)]
    return [*named, (target, places)], [(target, places)]


def _copied(step: KernelStep) -> tuple[Touched, Touched]:
    """As many items as the box of the copy has, whatever the views around it are."""
    source, target = step.pointers
    items = step.range
    if step.symbol.startswith("gc_mapped_copy_"):
        items = as_dim(items * step.immediates[6 * int(step.immediates[0]) - 5])
    nbytes = as_dim(items * itemsize(target.dtype))
    return [(source, smaller(_bytes(source), nbytes))], [(target, nbytes)]


def _seen_rows(step: KernelStep) -> tuple[Touched, Touched]:
    """Of a pool of pages the rows that its table has room for, or those that are chosen; see
    templates/row_source.py."""
    place = 1 if step.symbol.startswith("attention_latent_") else 2
    rows, table = step.pointers[place : place + 2]
    size = _bytes(rows)
    if table is not rows:
        row = rows.shape[-1] * itemsize(rows.dtype)
        size = smaller(as_dim(product((*table.shape, rows.shape[1])) * row), size)
        if place == 1 and step.pointers[4] is not step.pointers[0]:
            size = smaller(as_dim(product(step.pointers[4].shape) * row), size)
    reads = [(v, _bytes(v)) for v in dict.fromkeys(step.read_views) if v is not rows]
    if "_merge_" not in step.symbol:
        reads.append((rows, size))
    return reads, [(v, _bytes(v)) for v in dict.fromkeys(step.write_views)]


def _experts(step: KernelStep) -> tuple[Touched, Touched]:
    """Weights of as many experts as rows can choose."""
    rows, weights, order, *rest, out = step.pointers
    chosen = smaller(order.shape[0], weights.shape[0])
    touched = as_dim(chosen * (product(weights.shape[1:]) * itemsize(weights.dtype)))
    named = [(v, _bytes(v)) for v in (rows, order, *rest)]
    return [*named, (weights, touched)], [(out, _bytes(out))]


def _read(step: KernelStep) -> tuple[Touched, Touched]:
    """Of the pages as much as the result takes."""
    pages, table, out = step.pointers
    taken = smaller(_bytes(pages), _bytes(out))
    return [(pages, taken), (table, _bytes(table))], [(out, _bytes(out))]


def _appended(step: KernelStep) -> tuple[Touched, Touched]:
    """Of the pages only the new rows."""
    pages, *named = step.pointers
    items = as_dim(sum(product(part.shape) for part in named[2:]))
    rows = smaller(as_dim(items * itemsize(pages.dtype)), _bytes(pages))
    return [(v, _bytes(v)) for v in named], [(pages, rows)]


_PARTLY: dict[str, Callable[[KernelStep], tuple[Touched, Touched]]] = {
    "gc_append_pages_": _appended,
    "gc_gather_": _gathered,
    "gc_read_pages_": _read,
    "gc_scatter_set_": _scattered,
    "gc_scatter_sum_": _scattered,
    "gc_scatter_prod_": _scattered,
    "gc_scatter_amax_": _scattered,
    "gc_scatter_amin_": _scattered,
    "gc_mapped_copy_": _copied,
    "gc_linear_copy_": _copied,
    "attention_latent_": _seen_rows,
    "lightning_indexer_": _seen_rows,
    "gc_experts_gate_": _experts,
    "gc_experts_down_": _experts,
}


# ---------------------------------------------------------------- the work of a plan


def side_work(lowered: Lowered, symbols: Sequence[str], places: dict[str, int]) -> SideWork:
    """The work of all Steps of one lowered graph. `places` numbers source lines and grows."""
    table = Expressions(symbols)
    nodes = {node.name: node for node in lowered.graph.nodes}
    steps: list[StepWork] = []
    for step in lowered.steps:
        if isinstance(step, FallbackStep):
            steps.append(StepWork(place=_place([step.node], places)))
            continue
        made = [nodes[name] for name in step.nodes if name in nodes]
        moved = traffic(step, lowered.buffers)
        flops = attended(step.flops, made)
        steps.append(
            StepWork(
                -1 if flops is None else table.add(as_dim(flops)), table.add(moved.kept),
                table.add(moved.read), table.add(moved.written), arithmetic(step),
                _place(made, places),
            )
        )  # fmt: skip
    return SideWork(table.table, steps)


def _place(nodes: Sequence[Node], places: dict[str, int]) -> int:
    """The first source line of the user's among the nodes; -1 without."""
    for node in nodes:
        if node.location:
            return places.setdefault(node.location, len(places))
    return -1


def attended(flops: Dim | None, nodes: Sequence[Node]) -> Dim | None:
    """Attention's operations, which its rule counts for all keys of all queries, without those of
    the keys that causality hides. (Rules of windows count what their windows show.)"""
    for node in nodes:
        if flops is None or node.target != "aten.scaled_dot_product_attention.default":
            continue
        if not node.argument("is_causal"):
            continue
        queries, keys = (node.args[i].type.shape[-2] for i in (0, 1))
        pairs = causal_pairs(queries, keys)
        if isinstance(flops, int) and isinstance(pairs, int):
            whole = int(queries * keys)
            return flops * pairs // whole if whole else flops
        return as_dim(sympy.cancel(sympy.sympify(flops) / (queries * keys)) * pairs)
    return flops


def causal_pairs(queries: Dim, keys: Dim) -> Dim:
    """Pairs (i, j) with j <= i of `queries` i and `keys` j."""
    hidden = dim_max(keys - 1, 0)  # from the first query; from each further one a key less
    rows = smaller(queries, hidden)
    return as_dim(queries * keys - rows * hidden + _triangle(as_dim(rows - 1)))


def _triangle(n: Dim) -> Dim:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2 if isinstance(n, int) else as_dim(n * (n + 1) / 2)


_DOT_PRODUCTS = (
    r"gemm_|attention_|lightning_|conv_(?!depthwise)"
    r"|gc_(cached|grouped|experts_gate|experts_down|recurrent)"
)


def arithmetic(step: KernelStep) -> str:
    """Which peak a Step's operations are compared with: "bf16" and "int8" are dot products of
    that format with wider sums, all else is done in "fp32" ("fp64" for doubles)."""
    dtype = step.pointers[0].dtype if step.pointers else "float32"
    if dtype == "float64":
        return "fp64"
    if not re.match(_DOT_PRODUCTS, step.symbol):
        return "fp32"
    return {"bfloat16": "bf16", "int8": "int8", "uint8": "int8"}.get(dtype, "fp32")
