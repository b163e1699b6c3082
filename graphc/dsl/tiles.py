"""Tiles: the expressions in which operators over sequence state are written.

A tile has two axes out of T (the tokens of a chunk), K (key channels), V (value channels) and ONE.
Elementwise operations broadcast ONE; `a @ b` contracts the inner axis. Equal expressions are one
object, so that what is written twice is computed once.
"""

from __future__ import annotations

from typing import Any

from graphc.errors import GraphcError

T, K, V, ONE = "T", "K", "V", "1"
Shape = tuple[str, str]

#: elementwise operations: what they are called and how many tiles they take
ELEMENTWISE = {"add": 2, "sub": 2, "mul": 2, "neg": 1, "exp": 1, "sigmoid": 1}


class SequenceOperatorError(GraphcError):
    """A definition that means nothing, or breaks a law."""


class Tile:
    """A node: what it does (`op`), to which tiles (`args`), with what constant (`data`)."""

    __slots__ = ("args", "data", "op", "shape")

    def __init__(self, op: str, args: tuple[Tile, ...], shape: Shape, data: Any) -> None:
        self.op, self.args, self.shape, self.data = op, args, shape, data

    def __add__(self, other: Tile | float) -> Tile:
        return elementwise("add", self, other)

    def __radd__(self, other: float) -> Tile:
        return elementwise("add", other, self)

    def __sub__(self, other: Tile | float) -> Tile:
        return elementwise("sub", self, other)

    def __rsub__(self, other: float) -> Tile:
        return elementwise("sub", other, self)

    def __mul__(self, other: Tile | float) -> Tile:
        return elementwise("mul", self, other)

    def __rmul__(self, other: float) -> Tile:
        return elementwise("mul", other, self)

    def __neg__(self) -> Tile:
        return elementwise("neg", self)

    def __matmul__(self, other: Tile) -> Tile:
        if self.shape[1] != other.shape[0]:
            raise SequenceOperatorError(f"{self} @ {other} does not fit")
        return tile("matmul", self, other, shape=(self.shape[0], other.shape[1]))

    @property
    def T(self) -> Tile:
        """Rows become columns."""
        if self.op == "transpose":
            return self.args[0]
        return tile("transpose", self, shape=(self.shape[1], self.shape[0]))

    def __repr__(self) -> str:
        name = f"{self.op} {self.data}" if self.data is not None else self.op
        return f"{name}[{', '.join(self.shape)}]"


_KNOWN: dict[tuple[Any, ...], Tile] = {}


def tile(op: str, *args: Tile, shape: Shape, data: Any = None) -> Tile:
    """The one node of this content."""
    key = (op, *map(id, args), shape, data)
    if key not in _KNOWN:
        _KNOWN[key] = Tile(op, args, shape, data)
    return _KNOWN[key]


def constant(value: float) -> Tile:
    """A number known where the operator is written."""
    return tile("constant", shape=(ONE, ONE), data=float(value))


def elementwise(op: str, *operands: Tile | float) -> Tile:
    """One of ELEMENTWISE. Raises SequenceOperatorError where axes do not match."""
    args = tuple(x if isinstance(x, Tile) else constant(x) for x in operands)
    shape = []
    for axis in (0, 1):
        names = {x.shape[axis] for x in args} - {ONE}
        if len(names) > 1:
            raise SequenceOperatorError(f"{op} of {' and '.join(map(str, args))}: axes differ")
        shape.append(names.pop() if names else ONE)
    return tile(op, *args, shape=(shape[0], shape[1]))


def exp(x: Tile) -> Tile:
    """e^x."""
    return elementwise("exp", x)


def sigmoid(x: Tile) -> Tile:
    """1 / (1 + e^-x)."""
    return elementwise("sigmoid", x)


def normalized(x: Tile) -> Tile:
    """Each row divided by sqrt(sum of its squares + 1e-6)."""
    if x.shape != (T, K):
        raise SequenceOperatorError(f"normalized takes rows [T, K], not {x}")
    return x * tile("inverse_norm", x, shape=(T, ONE))


def scores(a: Tile, b: Tile, decay: Decay | None = None, *, strict: bool = False) -> Tile:
    """[T, T]: sum_c a_ic b_jc exp(g_(j+1)c + ... + g_ic) for j < i, and for j = i unless strict; 0
    above. How far token j has faded when token i looks, not at all without a decay; no sum of
    decays is ever subtracted."""
    if a.shape != (T, K) or b.shape != (T, K):
        raise SequenceOperatorError(f"scores takes rows [T, K], not {a} and {b}")
    name, axis = (decay.name, decay.axis) if decay else (None, ONE)
    return tile("scores", a, b, shape=(T, T), data=(name, axis, strict))


def solve(strict: Tile, right: Tile) -> Tile:
    """(I + N)^-1 `right` for N [T, T] with zeros on and above the diagonal."""
    if strict.shape != (T, T) or right.shape[0] != T:
        raise SequenceOperatorError(f"solve takes [T, T] and [T, .], not {strict} and {right}")
    return tile("solve", strict, right, shape=right.shape)


class Decay:
    """Log-decays g <= 0 of the tokens of a chunk, by key channel (axis K) or by head (ONE)."""

    def __init__(self, name: str, axis: str) -> None:
        self.name, self.axis = name, axis

    @property
    def prefix(self) -> Tile:
        """[T, K or 1]: exp(g_1 + ... + g_i), from the start of the chunk to and with token i."""
        return tile("prefix", shape=(T, self.axis), data=self.name)

    @property
    def suffix(self) -> Tile:
        """[T, K or 1]: exp(g_(i+1) + ... ), from behind token i to the end of the chunk."""
        return tile("suffix", shape=(T, self.axis), data=self.name)

    @property
    def total(self) -> Tile:
        """[K or 1, 1]: the whole chunk's, a factor of the rows of the state."""
        return tile("total", shape=(self.axis, ONE), data=self.name)


def inside(roots: tuple[Tile, ...]) -> list[Tile]:
    """All nodes of expressions, each once, operands first."""
    found: dict[Tile, None] = {}

    def visit(node: Tile) -> None:
        if node not in found:
            for arg in node.args:
                visit(arg)
            found[node] = None

    for root in roots:
        visit(root)
    return list(found)
