"""What a chunk needs before it meets the state: columns of tokens, rows over K, scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphc.dsl.operator import SequenceOperator
from graphc.dsl.tiles import ONE, K, T, Tile, inside
from graphc.lowering.context import Refuse
from graphc.lowering.sequence.simplify import is_column
from graphc.lowering.sequence.text import Body, block, literal

#: tiles of a pack, which one product multiplies with the state
PACK = 2


@dataclass
class Memory:
    """Scratch of a call in floats: rows of K, numbers, and tiles of 32 columns."""

    lines: list[str] = field(default_factory=list)
    rows: int = 0
    numbers: int = 0
    tiles: int = 0

    def take_rows(self, name: str, count: str, most: int) -> None:
        self.rows += most
        self.lines.append(f"float* const {name} = scratch.take({count} * ld);")

    def take(self, name: str, count: int) -> None:
        self.numbers += count
        self.lines.append(f"float* const {name} = scratch.take({count});")

    def take_tiles(self, name: str, tiles: int) -> None:
        self.tiles += tiles
        self.lines.append(f"float* const {name} = M::buffer(scratch, {tiles}, width);")


@dataclass
class Local:
    """Collects what is asked for, then writes the code that makes it. uses: readers of nodes."""

    operator: SequenceOperator
    uses: dict[Tile, int]
    memory: Memory = field(default_factory=Memory)
    columns: dict[Tile, str] = field(default_factory=dict)
    scalars: dict[Tile, str] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)  # operand -> its rows as floats
    norms: dict[str, str] = field(default_factory=dict)  # operand -> 1 / length
    stored: dict[Tile, str] = field(default_factory=dict)  # rows for scores
    packed: list[Tile] = field(default_factory=list)
    tails: list[Tile] = field(default_factory=list)
    kept: Tile | None = None
    by_channel: set[str] = field(default_factory=set)
    by_head: set[str] = field(default_factory=set)
    unfaded: bool = False  # whether there are scores without a decay
    matrices: dict[Tile, str] = field(default_factory=dict)
    scored: list[Tile] = field(default_factory=list)
    matrix_lines: list[str] = field(default_factory=list)
    column_lines: list[str] = field(default_factory=list)

    def index(self, name: str) -> int:
        """The position of an operand among the kernel's."""
        return list(self.operator.of_kind("rows", "decay", "column")).index(name)

    # -- columns and numbers --------------------------------------------------------------------

    def column(self, node: Tile) -> str:
        """An array [16] of a node [T, 1]."""
        if node not in self.columns:
            self.columns[node] = self._column(node)
        return self.columns[node]

    def _column(self, node: Tile) -> str:
        if node.op == "column":
            name = f"in_{node.data}"
            self.memory.take(name, 16)
            return name
        if node.op in ("prefix", "suffix"):
            self.fade(node.data)
            return f"{node.op}_{node.data}"
        if node.op == "inverse_norm":
            (rows,) = node.args
            if rows.op != "rows":
                raise Refuse("rows are normalized that are not an operand")
            self.rows(rows.data)
            self.norms[rows.data] = name = f"norm_{rows.data}"
            self.memory.take(name, 16)
            return name
        body = Body(lambda x: self._in_column(x, node))
        value = body.value(node)
        name = f"c{len(self.columns)}"
        self.memory.take(name, 16)
        self.column_lines += block(
            "for (int64_t h = 0; h < CHUNK; h += VL)",
            [*body.lines, f"store({name} + h, {value});"],
        )
        return name

    def _in_column(self, x: Tile, root: Tile) -> str | None:
        if x.shape == (ONE, ONE):
            return f"splat({self.scalar(x)})"
        if x.op in ("column", "prefix", "suffix", "inverse_norm"):
            return f"load<vf>({self.column(x)} + h)"
        return None

    def scalar(self, node: Tile) -> str:
        """A float of a node [1, 1]."""
        if node.op == "constant":
            return literal(node.data)
        if node.op == "number":
            return f"number_{node.data}"
        if node.op == "total":
            self.fade(node.data)
            return f"prefix_{node.data}[CHUNK - 1]"
        parts = {"add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "neg": "(-{})"}
        if node.op not in parts:
            raise Refuse(f"{node} of numbers")
        return parts[node.op].format(*map(self.scalar, node.args))

    def fade(self, decay: str) -> None:
        """Asks for the prefix and suffix of a head's decay."""
        if decay not in self.by_head:
            self.by_head.add(decay)
            for name in ("g", "prefix", "suffix"):
                self.memory.take(f"{name}_{decay}", 16)

    def rows(self, operand: str) -> str:
        """An operand's rows [ROWS][ld] as floats."""
        if operand not in self.raw:
            self.raw[operand] = f"row_{operand}"
            self.memory.take_rows(f"row_{operand}", "M::ROWS", 16)
        return self.raw[operand]

    # -- rows over K ------------------------------------------------------------------------------

    def pack(self, node: Tile) -> tuple[int, int]:
        """(pack, tile in it) of rows that are multiplied with the state or with each other."""
        if node not in self.packed:
            self.packed.append(node)
        return divmod(self.packed.index(node), PACK)

    def packs(self) -> int:
        return -(-len(self.packed) // PACK)

    def row_buffer(self, node: Tile) -> str:
        """Rows [ROWS][ld] of floats that scores read."""
        if node.op == "rows":
            return self.rows(node.data)
        if node not in self.stored:
            if any(x.op == "suffix" for x in inside((node,))):
                raise Refuse("scores of rows with a suffix")
            source = next((x for x in node.args if x.op == "rows"), None)
            if source is not None and self._overwritten(source, node):
                self.stored[node] = self.rows(source.data)
            else:
                self.stored[node] = name = f"kept_{len(self.stored)}"
                self.memory.take_rows(name, "M::ROWS", 16)
        return self.stored[node]

    def _overwritten(self, source: Tile, node: Tile) -> bool:
        """Whether nothing but `node` (and the length of the rows) reads an operand."""
        norm = any(x.op == "inverse_norm" and x.args[0] is source for x in self.uses)
        return self.uses[source] - norm == 1

    def row_code(self) -> list[str]:
        """The loop over channels."""
        forward = Body(lambda x: self._in_rows(x, forward=True))
        for node, name in self.stored.items():
            # the value is in a register for what follows, and in `name` afterwards
            forward.lines.append(f"store({name} + t * ld + i, {forward.value(node)});")
        for node in self.packed:
            pack, at = self.pack(node)
            value = forward.value(node)
            forward.lines.append(f"M::put_left(pack{pack}, {at}, t, ld, i, {value});")
        kept = Body(self._in_total)
        assert self.kept is not None
        total = kept.value(self.kept)
        tails = self._tail_functions()
        names = sorted(self.by_channel)  # all that read them are known now
        lines = [line for d in names for line in _decays(d)]
        lines += [*kept.lines, f"store(total + i, {total});"]
        lines += [*(f"vf p_{d} = splat(1.0f);" for d in names), "#pragma GCC unroll 1"]
        steps = [f"p_{d} *= e_{d}[t];" for d in names]
        lines += block("for (int64_t t = 0; t < M::ROWS; t++)", steps + forward.lines)
        lines += [f"vf s_{d} = splat(1.0f);" for d in names]
        lines += [*tails, *_tail_loops(len(self.tails), names)]
        return block("for (int64_t i = 0; i < ld; i += VL)", lines)

    def _tail_functions(self) -> list[str]:
        """The rows that are multiplied with what is written, one vector of one token at a time."""
        lines: list[str] = []
        for number, node in enumerate(self.tails):
            body = Body(lambda x: self._in_rows(x, forward=False))
            value = body.value(node)
            head = f"const auto tail{number} = [&](int64_t t) __attribute__((always_inline))"
            lines += block(head, [*body.lines, f"return {value};"])
            lines[-1] += ";"
        return lines

    def _in_rows(self, x: Tile, forward: bool) -> str | None:
        if is_column(x):
            return f"splat({self.scalar(x) if x.shape[0] == ONE else self.column(x) + '[t]'})"
        if x in self.stored and not forward:
            return f"load<vf>({self.stored[x]} + t * ld + i)"
        if x.op == "rows":
            return f"load<vf>({self.rows(x.data)} + t * ld + i)"
        if x.op in ("prefix", "suffix"):
            if (x.op == "prefix") != forward:
                raise Refuse("rows with a prefix and a suffix of decays")
            self.by_channel.add(x.data)
            return f"{x.op[0]}_{x.data}"
        return None

    def _in_total(self, x: Tile) -> str | None:
        if x.shape == (ONE, ONE):
            return f"splat({self.scalar(x)})"
        if x.op == "total":
            self.by_channel.add(x.data)
            return f"vexp(sum_{x.data})"
        return None

    # -- matrices [T, T] --------------------------------------------------------------------------

    def matrix(self, node: Tile) -> str:
        """An array [16][16] of a node [T, T], columns first."""
        if node not in self.matrices:
            if node.op == "scores":
                self._score(node)
            else:
                self._combine(node)
        return self.matrices[node]

    def _new_matrix(self, node: Tile) -> str:
        self.matrices[node] = name = f"m{len(self.matrices)}"
        self.memory.take(name, 256)
        return name

    def _score(self, node: Tile) -> None:
        self._new_matrix(node)
        self.scored.append(node)
        decay, axis, _ = node.data
        if decay is None:
            self.unfaded = True
        elif axis == K:
            self.by_channel.add(decay)
        else:
            self.fade(decay)

    def _combine(self, node: Tile) -> None:
        body = Body(self._in_matrix)
        value = body.value(node)
        alone = [x for x in node.args if x.op == "scores" and self.uses.get(x) == 1]
        if alone:
            self.matrices[node] = self.matrices[alone[0]]
        name = self.matrices.get(node) or self._new_matrix(node)
        inner = [*body.lines, f"store({name} + j * CHUNK + h, {value});"]
        self.matrix_lines += block(
            "for (int64_t j = 0; j < M::ROWS; j++)",
            block("for (int64_t h = 0; h < CHUNK; h += VL)", inner),
        )

    def _in_matrix(self, x: Tile) -> str | None:
        if x.shape == (ONE, ONE):
            return f"splat({self.scalar(x)})"
        if x.shape == (T, ONE):
            return f"load<vf>({self.column(x)} + h)"
        if x.shape == (ONE, T) and x.op == "transpose":
            return f"splat({self.column(x.args[0])}[j])"
        if x.op == "scores":
            return f"load<vf>({self.matrix(x)} + j * CHUNK + h)"
        return None


def _decays(d: str) -> list[str]:
    """exp of a decay by channel, for all tokens of a chunk."""
    lines = [f"vf e_{d}[M::ROWS], sum_{d} = {{}};", "#pragma GCC unroll 1"]
    return lines + block("for (int64_t t = 0; t < M::ROWS; t++)", [
        f"const vf g = t < n ? load_row(in_{d} + (t0 + t) * step_{d}, i, s.k) : vf{{}};",
        f"sum_{d} += g;", f"e_{d}[t] = vexp(g);", f"store(fade_{d} + t * ld + i, e_{d}[t]);",
    ])  # fmt: skip


def _tail_loops(count: int, names: list[str]) -> list[str]:
    """From the last token on, as products with suffixes grow; two at a time where pairs are
    stored."""
    tails = range(count)
    one = [f"M::put_tail(tail, {m}, t, ld, i, tail{m}(t));" for m in tails]
    one += [f"s_{d} *= e_{d}[t];" for d in names]
    two = [f"const vf hi{m} = tail{m}(t + 1);" for m in tails]
    two += [f"s_{d} *= e_{d}[t + 1];" for d in names]
    two += [f"const vf lo{m} = tail{m}(t);" for m in tails]
    two += [f"s_{d} *= e_{d}[t];" for d in names]
    two += [f"M::put_tail(tail, {m}, t, ld, i, lo{m}, hi{m});" for m in tails]
    few = block("for (int64_t t = M::ROWS - 1; t >= 0; t--)", one)
    many = block("for (int64_t t = M::ROWS - 2; t >= 0; t -= 2)", two)
    return [
        *block("if constexpr (M::FEW)", few),
        *block("else", ["#pragma GCC unroll 1", *many]),
    ]
