"""What a chunk does with a panel of the state: reads it, writes it, and brings it up to date."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphc.dsl.operator import STATE
from graphc.dsl.tiles import ELEMENTWISE, ONE, K, T, Tile, V, constant, elementwise
from graphc.lowering.context import Refuse
from graphc.lowering.sequence.local import PACK, Local
from graphc.lowering.sequence.simplify import is_column
from graphc.lowering.sequence.text import Body, block


@dataclass
class Panel:
    """Writes the code inside the loop over panels, and asks `local` for what it needs."""

    local: Local
    output: Tile
    after: Tile
    lines: list[str] = field(default_factory=list)
    buffers: dict[Tile, str] = field(default_factory=dict)
    items: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    written: set[Tile] = field(default_factory=set)
    lefts: list[Tile] = field(default_factory=list)
    values: list[str] = field(default_factory=list)  # operands over V
    made: int = 0

    def code(self) -> list[str]:
        """All of it, from the products with the panel to its update."""
        kept, parts = _update(self.after)
        self.local.kept = kept
        self.written = {u for _, u in parts}
        for node in _reads(self.output, self.after):
            self.local.pack(node)
            self.lefts.append(node)
        y = self.buffer(self.output)
        self.lines.append(f"m.output({y}, panel, out + t0 * s.out_step(), s.out_step(), n);")
        self._update_code(parts)
        return self._products() + self.lines

    def _products(self) -> list[str]:
        """Every left tile times the panel, a pack at a time."""
        lines: list[str] = []
        for pack in range(-(-len(self.lefts) // PACK)):
            count = min(PACK, len(self.lefts) - PACK * pack)
            self.local.memory.take_tiles(f"xy{pack}", count)
            lines.append(f"m.template product<{count}>(pack{pack}, panel, xy{pack});")
        return lines

    def _update_code(self, parts: list[tuple[Tile, Tile]]) -> None:
        self.local.tails = [tail for tail, _ in parts]
        names = [self.buffer(u) for _, u in parts]
        if len(parts) == 1:
            items = self._items(names[0])
        else:
            self.local.memory.take_tiles("stack", len(parts))
            for number, name in enumerate(names):
                self.lines.append(
                    f"memcpy(stack + {number} * M::ROWS * panel.width, {name}, "
                    "(size_t)(M::ROWS * panel.width) * sizeof(float));"
                )
            items = self._items("stack", len(parts))
        self.lines.append(f"m.template update<{len(parts)}>(total, tail, {items}, panel);")

    # -- tiles [T, V] -----------------------------------------------------------------------------

    def buffer(self, node: Tile) -> str:
        """The memory [ROWS][width] of a node, made where it is first asked for."""
        if node not in self.buffers:
            self.buffers[node] = self._make(node)
            if node in self.written:
                self.lines.append(f"M::only_tokens({self.buffers[node]}, n, panel);")
        return self.buffers[node]

    def _make(self, node: Tile) -> str:
        if node.shape != (T, V):
            raise Refuse(f"{node} beside the state")
        if _is_read(node):
            pack, at = divmod(self.lefts.index(node.args[0]), PACK)
            return f"(xy{pack} + {at} * M::ROWS * panel.width)"
        if node.op == "solve":
            name = self._owned(node.args[1])
            self.lines.append(f"M::solve({self.local.matrix(node.args[0])}, {name}, panel);")
            return name
        if _is_product(node):
            return self._add_products(self._zeros(), [(node.args[0], node.args[1])])
        if node.op == "matmul":
            raise Refuse(f"the product {node.args[0]} @ {node.args[1]}")
        rest, products = self._sum(node)
        name = self._zeros() if rest is None else self._owned(rest, node)
        return self._add_products(name, products)

    def _zeros(self) -> str:
        name = self._new()
        self.lines.append(f"memset({name}, 0, (size_t)(M::ROWS * panel.width) * sizeof(float));")
        return name

    def _add_products(self, name: str, products: list[tuple[Tile, Tile]]) -> str:
        for matrix, right in products:
            items = self._items(self.buffer(right))
            self.lines.append(f"M::add_product({self._weights(matrix)}, {items}, {name}, panel);")
        return name

    def _shared(self, node: Tile) -> bool:
        """Whether several nodes read it: then it is made once, and nothing is written over it."""
        return self.local.uses.get(node, 1) > 1

    def _buffered(self, node: Tile) -> bool:
        """Whether a loop reads it rather than computing it."""
        if V not in node.shape:
            return False
        if node.op in ("matmul", "solve") or (node.op in ELEMENTWISE and self._shared(node)):
            return True
        return node.op in ("add", "sub") and bool(self._sum(node)[1])

    def _sum(self, node: Tile) -> tuple[Tile | None, list[tuple[Tile, Tile]]]:
        """(what loops compute, products of matrices that are added) of a sum."""
        rest: Tile | None = None
        products: list[tuple[Tile, Tile]] = []

        def add(term: Tile, minus: bool) -> None:
            nonlocal rest
            if _is_product(term) and not self._shared(term):
                matrix = term.args[0]
                products.append((elementwise("neg", matrix) if minus else matrix, term.args[1]))
            elif term.op in ("add", "sub") and (term is node or not self._shared(term)):
                add(term.args[0], minus)
                add(term.args[1], minus != (term.op == "sub"))
            elif rest is None:
                rest = elementwise("neg", term) if minus else term
            else:
                rest = elementwise("sub" if minus else "add", rest, term)

        add(node, False)
        return (rest, products) if products else (node, [])

    def _new(self) -> str:
        self.made += 1
        self.local.memory.take_tiles(f"tile{self.made}", 1)
        return f"tile{self.made}"

    def _owned(self, node: Tile, reader: Tile | None = None) -> str:
        """A buffer with the node's value that may be overwritten."""
        if node is not reader and self._buffered(node):
            name = self.buffer(node)
            if not self._shared(node):
                return name
            copy = self._new()
            self.lines.append(
                f"memcpy({copy}, {name}, (size_t)(M::ROWS * panel.width) * sizeof(float));"
            )
            return copy
        return self._elementwise(node)

    def _elementwise(self, node: Tile) -> str:
        """A loop; in the place of a buffer that nothing else reads, if there is one."""
        free: list[str] = []

        def leaf(x: Tile) -> str | None:
            if is_column(x):
                numbers = self.local
                one = x.shape[0] == ONE
                return f"splat({numbers.scalar(x) if one else numbers.column(x) + '[t]'})"
            if x.op == "rows":
                if x.data not in self.values:
                    self.values.append(x.data)
                return f"M::value(in_{x.data} + (t0 + t) * step_{x.data}, t < n, h, panel)"
            if x is node or not self._buffered(x):
                return None
            name = self.buffer(x)
            if not self._shared(x):
                free.append(name)
            return f"load<vf>({name} + t * panel.width + h)"

        body = Body(leaf)
        value = body.value(node)
        name = free[0] if free else self._new()
        inner = [*body.lines, f"store({name} + t * panel.width + h, {value});"]
        self.lines += block(
            "for (int64_t t = 0; t < M::ROWS; t++)",
            block("for (int64_t h = 0; h < panel.width; h += VL)", inner),
        )
        return name

    def _items(self, name: str, parts: int = 1) -> str:
        if name not in self.items:
            self.items[name] = items = f"items{len(self.items)}"
            self.local.memory.take(f"{items}_memory", 8 * 32 * parts)
            self.lines += [
                f"item* const {items} = M::FLOATS ? (item*){name} : (item*){items}_memory;",
                f"M::as_items({name}, {items}, {parts} * CHUNK);",
            ]
        return self.items[name]

    def _weights(self, matrix: Tile) -> str:
        name = self.local.matrix(matrix)
        if name not in self.weights:
            self.weights[name] = weights = f"weights{len(self.weights)}"
            self.local.memory.take(f"{weights}_memory", 256)
        return self.weights[name]

    def weight_code(self) -> list[str]:
        """Matrices as the items of products, before the loop over panels."""
        return [
            f"const item* const {weights} = M::weights({name}, (item*){weights}_memory);"
            for name, weights in self.weights.items()
        ]


def _is_read(node: Tile) -> bool:
    """Rows times the state."""
    return node.op == "matmul" and node.args[1] is STATE


def _is_product(node: Tile) -> bool:
    return node.op == "matmul" and node.args[0].shape == (T, T)


def _reads(*roots: Tile) -> list[Tile]:
    """The rows that are multiplied with the state, in the order in which they are met."""
    found: dict[Tile, None] = {}
    seen: set[Tile] = set()

    def visit(node: Tile) -> None:
        if node in seen:
            return
        seen.add(node)
        if _is_read(node):
            if node.args[0].shape != (T, K):
                raise Refuse(f"{node.args[0]} times the state")
            found[node.args[0]] = None
        for arg in node.args:
            visit(arg)

    for root in reversed(roots):
        visit(root)
    return list(found)


def _update(after: Tile) -> tuple[Tile, list[tuple[Tile, Tile]]]:
    """(the factor of the state, [(tail [T, K], what is written [T, V])]) of the state behind."""
    kept: list[Tile] = []
    parts: list[tuple[Tile, Tile]] = []

    def add(term: Tile, minus: bool) -> None:
        if term.op in ("add", "sub"):
            add(term.args[0], minus)
            add(term.args[1], minus != (term.op == "sub"))
        elif term.op == "matmul" and term.args[0].op == "transpose":
            tail = term.args[0].args[0]
            parts.append((elementwise("neg", tail) if minus else tail, term.args[1]))
        elif term is STATE and not minus:
            kept.append(constant(1.0))
        elif term.op == "mul" and STATE in term.args and not minus:
            kept.append(next(x for x in term.args if x is not STATE))
        else:
            raise Refuse(f"a state that becomes {term}")

    add(after, False)
    if len(kept) != 1 or kept[0].shape not in ((K, ONE), (ONE, ONE)) or not parts:
        raise Refuse("a state that is not a factor of its rows times itself, and what is written")
    if any(x.op not in ELEMENTWISE and x.op not in ("total", "constant", "number") for x in kept):
        raise Refuse(f"a state with the factor {kept[0]}")
    return kept[0], parts
