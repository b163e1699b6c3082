"""Expressions of an operator as kernels compute them: factors of tokens are joined, and those that
the prefix of a head's decay puts in front of a product with the state come behind it."""

from __future__ import annotations

from graphc.dsl.tiles import ONE, T, Tile, V, elementwise, inside, tile


def simplify(roots: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Equal in exact arithmetic, less work."""
    new: dict[Tile, Tile] = {}
    for node in inside(roots):
        args = tuple(new[arg] for arg in node.args)
        if node.op == "mul":
            new[node] = _product(*args)
        elif node.op == "matmul":
            new[node] = _matmul(*args)
        else:
            new[node] = tile(node.op, *args, shape=node.shape, data=node.data)
    return tuple(new[root] for root in roots)


def is_column(node: Tile) -> bool:
    """One number for a token, or one for all."""
    return node.shape[1] == ONE and node.shape[0] in (T, ONE)


def _product(a: Tile, b: Tile) -> Tile:
    """Rows before their factors, of which there is one."""
    if is_column(a) and not is_column(b):
        a, b = b, a
    if is_column(b) and not is_column(a) and a.op == "mul" and is_column(a.args[1]):
        rows, factor = a.args
        if not (_fades(b) or _fades(factor)):
            return elementwise("mul", rows, elementwise("mul", factor, b))
    return elementwise("mul", a, b)


def _matmul(a: Tile, b: Tile) -> Tile:
    """(factor rows) @ state is factor (rows @ state): the rows also make scores as they are."""
    if V in b.shape and a.op == "mul" and a.shape[0] == T and _fades(a.args[1]):
        rows, factor = a.args
        if is_column(factor):
            return elementwise("mul", tile("matmul", rows, b, shape=(T, b.shape[1])), factor)
    return tile("matmul", a, b, shape=(a.shape[0], b.shape[1]))


def _fades(node: Tile) -> bool:
    return is_column(node) and any(x.op == "prefix" for x in inside((node,)))


def consumers(roots: tuple[Tile, ...]) -> dict[Tile, int]:
    """How many nodes, or results, read each node."""
    found = dict.fromkeys(inside(roots), 0)
    for node in list(found):
        for arg in set(node.args):
            found[arg] += 1
    for root in roots:
        found[root] += 1
    return found
