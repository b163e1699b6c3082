"""The translation unit of an operator over sequence state.

One function template is written over kernels/sequence_many.h and kernels/sequence_few.h, the two
ways in which a chunk meets the state: the kernel of a decoding step is that of prefill with chunks
of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from graphc.dsl.operator import SequenceOperator, trace
from graphc.dsl.tiles import ONE, K
from graphc.lowering.context import Dim, ceildiv
from graphc.lowering.sequence import scores
from graphc.lowering.sequence.local import Local, Memory
from graphc.lowering.sequence.panel import Panel
from graphc.lowering.sequence.simplify import consumers, simplify
from graphc.lowering.sequence.text import block

_HEAD = """// {name}, written by graphc/lowering/sequence.
#include "sequence_many.h"
#include "sequence_few.h"

namespace {{

template <class T, class M>
static void compute(const gc_args* args, int64_t z, int64_t first, int64_t last,
                    const float* next) {{
  typedef typename M::item item;
  const Sequence s(args, {operands}, z);
"""
_TAIL = """
template <class T> static void run(const gc_args* args, int64_t begin, int64_t end) {{
  const int64_t tokens = args->imm[0], v = args->imm[3], panels = (v + GC_NR - 1) / GC_NR;
  const bool few = tokens > 0 && tokens <= MOST_FEW && v % VL == 0;
  for (int64_t u = begin; u < end;) {{
    const int64_t z = u / panels, first = u % panels, last = min64(panels, first + end - u);
    u += last - first;
    const bool more = few && u + panels <= end;
    const float* next = more ? Sequence(args, {operands}, z + 1).before : nullptr;
    switch (few ? tokens : 0) {{
      case 0: compute<T, Many<T>>(args, z, first, last, next); break;
{cases}
    }}
  }}
}}

}}  // namespace

GC_EXPORT void {symbol}(const gc_args* args, int64_t begin, int64_t end) {{
  run<{type}>(args, begin, end);
}}
"""
TYPES = {"f32": "float", "f16": "f16", "bf16": "bf16"}


@dataclass(frozen=True)
class Generated:
    """source of the unit, its kernel's symbol, and what it needs of the scratch."""

    source: str
    symbol: str
    memory: Memory

    def scratch(self, channels: Dim, width: Dim) -> Dim:
        """Bytes."""
        row, panels = 16 * ceildiv(channels, 16), ceildiv(width, 32)
        m = self.memory
        return 4 * (
            row * m.rows + m.numbers + m.tiles * 18 * 32 + panels * (48 * row + 8 * 32 * m.tiles)
        )


@cache
def generate(operator: SequenceOperator, flags: frozenset[tuple[str, bool]], tag: str) -> Generated:
    """The unit for rows of the dtype `tag` (f32, f16, bf16). Raises Refuse for expressions that
    the routines do not compute."""
    definition = trace(operator, flags)
    output, after = simplify((definition.output, definition.after))
    local = Local(operator, consumers((output, after)))
    panel = Panel(local, output, after)
    lines = _function(local, panel)
    names = list(operator.of_kind("rows", "decay", "column"))
    settings = "".join(f"_{name}" for name, on in sorted(flags) if on)
    symbol = f"gc_{operator.name}{settings}_{tag}"
    cases = "\n".join(
        f"      {f'case {n}' if n < 8 else 'default'}: compute<T, Few<T, {n}>>"
        "(args, z, first, last, next); break;"
        for n in range(1, 9)
    )
    head = _HEAD.format(name=operator.name, operands=len(names))
    tail = _TAIL.format(operands=len(names), cases=cases, symbol=symbol, type=TYPES[tag])
    body = "\n".join(line if line.startswith("#") else f"  {line}" for line in lines)
    return Generated(f"{head}{body}\n}}\n{tail}", symbol, local.memory)


def _function(local: Local, panel: Panel) -> list[str]:
    """The body. What is done with the state is written first: it tells what must be made for it,
    which in turn tells what is read."""
    at_panel = panel.code()
    scores.place(local)
    rows = local.row_code()
    before = _reading(local) + local.column_lines + rows
    before += [f"M::turn(pack{p}, {_tiles(local, p)}, ld);" for p in range(local.packs())]
    before += scores.score_code(local) + local.matrix_lines + panel.weight_code()
    loop = ["const auto panel = m.panel(p);", *_asks(local, panel), *at_panel]
    chunk = [
        "const int64_t n = min64(M::ROWS, s.tokens - t0);", *before,
        *block("for (int64_t p = first; p < m.last_panel(); p++)", loop),
    ]  # fmt: skip
    lines = [*_operands(local, panel), *_scratch(local), "m.begin();"]
    lines += block("for (int64_t t0 = 0; t0 < s.tokens; t0 += M::ROWS)", chunk)
    return [*lines, "m.end();"]


def _tiles(local: Local, pack: int) -> int:
    return min(2, len(local.packed) - 2 * pack)


def _reading(local: Local) -> list[str]:
    """Operands of the chunk as floats."""
    lines: list[str] = []
    for operand, name in local.raw.items():
        squares = "squares" if operand in local.norms else "nullptr"
        lines.append(
            f"read_rows<M::ROWS>(in_{operand} + t0 * step_{operand}, step_{operand}, n, s.k, "
            f"{name}, {squares});"
        )
        if operand in local.norms:
            norm = local.norms[operand]
            lines.append(f"M::sum_squares(squares, {norm});")
            lines += block("for (int64_t h = 0; h < CHUNK; h += VL)", [
                f"store({norm} + h, 1.0f / vsqrt(load<vf>({norm} + h) + NORM_EPS));"
            ])  # fmt: skip
    for node, name in local.columns.items():
        if node.op == "column":
            lines.append(f"s.column({local.index(node.data)}, t0, n, {name});")
    for decay in sorted(local.by_head):
        lines.append(f"s.column({local.index(decay)}, t0, n, g_{decay});")
        lines.append(f"fade_by_head(g_{decay}, M::ROWS, prefix_{decay}, suffix_{decay});")
    return lines


def _operands(local: Local, panel: Panel) -> list[str]:
    lines = ["const int64_t ld = whole(s.k);", "T* const out = s.template out<T>();"]
    for name in [*local.raw, *panel.values, *sorted(local.by_channel)]:
        kind = "float" if name in local.by_channel else "T"
        at = local.index(name)
        lines += [
            f"const {kind}* const in_{name} = s.template rows<{kind}>({at});",
            f"const int64_t step_{name} = s.step({at});",
        ]
    numbers = list(local.operator.of_kind("number"))
    return lines + [
        f"const float number_{n} = s.number({at}); (void)number_{n};"
        for at, n in enumerate(numbers)
    ]


def _scratch(local: Local) -> list[str]:
    """All memory of a call; the state's comes last."""
    memory = local.memory
    memory.take_rows("total", "1", 1)
    memory.take_rows("run", "1", 1)
    for decay in sorted(local.by_channel):
        memory.take_rows(f"fade_{decay}", "M::ROWS", 16)
    if local.norms:
        memory.take("squares", 256)
    if local.unfaded:
        memory.lines.append("const float unfaded[CHUNK] = {};")
    memory.take_rows("tail_memory", f"{len(local.tails)} * M::ROWS", 16 * len(local.tails))
    for pack in range(local.packs()):
        memory.rows += 64
        memory.numbers += 16
        memory.lines.append(f"const typename M::Pack pack{pack}(scratch, ld);")
    return [
        "Scratch scratch = {(float*)args->scratch};",
        "M m(s, first, last, next, scratch);",
        "const int64_t width = m.panel(first).width;",
        *memory.lines,
        "item* const tail = (item*)tail_memory; (void)run; (void)width;",
    ]


def _asks(local: Local, panel: Panel) -> list[str]:
    """The next chunk's rows, a share with each panel."""
    lines = ["const int64_t ahead = min64(M::ROWS, s.tokens - t0 - n);"]
    for name in [*local.raw, *panel.values, *sorted(local.by_channel)]:
        operand = local.operator.operands()[name]
        width = "s.k" if operand.axis == K else "s.v"
        if operand.axis != ONE:
            lines.append(
                f"m.ask(in_{name} + (t0 + n) * step_{name}, step_{name}, ahead, {width}, p);"
            )
    return lines
