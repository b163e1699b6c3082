"""View arithmetic against torch's own: random chains of views, static and with symbolic sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sympy
import torch

from graphc.ir.graph import Node
from graphc.lowering import views
from graphc.lowering.context import View
from tests.built import Built, Call, agree, results

aten = torch.ops.aten


class Chain:
    """A random chain of view operators, as (overload, arguments) over a base of random shape."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        shape = [self.random.choice((1, 2, 3, 4, 6)) for _ in range(self.random.randint(1, 4))]
        self.base = torch.arange(float(torch.Size(shape).numel())).view(shape)
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        x = self.base
        for _ in range(self.random.randint(1, 6)):
            call = self._call(x)
            if call is None:
                continue
            operator, args = call
            x = operator(x, *args)
            self.calls.append(call)
        self.result = x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for operator, args in self.calls:
            x = operator(x, *args)
        return x

    def _call(self, x: torch.Tensor) -> tuple[Any, tuple[Any, ...]] | None:
        r, rank = self.random, x.dim()
        kind = r.choice(("view", "permute", "transpose", "slice", "select", "expand", "unfold",
                         "diagonal", "unsqueeze", "squeeze", "reshape", "as_strided"))  # fmt: skip
        if kind in ("view", "reshape"):
            shape = self._other_shape(x.numel())
            if kind == "view" and not self._viewable(x, shape):
                return None
            return (aten.view if kind == "view" else aten.reshape).default, (shape,)
        if kind == "unsqueeze":
            return aten.unsqueeze.default, (r.randint(-rank - 1, rank),)
        if kind == "squeeze":
            return aten.squeeze.default, ()
        if not rank or not x.numel():
            return None
        dim = r.randint(-rank, rank - 1)
        size = x.shape[dim]
        if kind == "permute":
            order = list(range(rank))
            r.shuffle(order)
            return aten.permute.default, (order,)
        if kind == "transpose":
            return aten.transpose.int, (dim, r.randrange(rank))
        if kind == "slice":
            bounds = r.randint(-size - 1, size), r.choice((size, 2**63 - 1, -1, size - 1))
            return aten.slice.Tensor, (dim, *bounds, r.randint(1, 3))
        if kind == "select":
            return aten.select.int, (dim, r.randint(-size, size - 1))
        if kind == "expand":
            lead = [2] * r.randint(0, 1)
            sizes = [r.choice((3, 1)) if s == 1 else r.choice((s, -1)) for s in x.shape]
            return aten.expand.default, ([*lead, *sizes],)
        if kind == "unfold":
            window = r.randint(1, size)
            return aten.unfold.default, (dim, window, r.randint(1, 3))
        if kind == "diagonal" and rank >= 2:
            a, b = r.sample(range(rank), 2)
            return aten.diagonal.default, (r.randint(-1, 1), a, b)
        if kind == "as_strided" and x.is_contiguous() and x.storage_offset() == 0:
            if x.numel() >= 4 and not self.calls:
                return aten.as_strided.default, ([2, 2], [1, 2], 0)
        return None

    def _other_shape(self, count: int) -> list[int]:
        shape: list[int] = []
        while count > 1 and len(shape) < 4:
            factor = self.random.choice([f for f in range(1, count + 1) if count % f == 0])
            shape.append(factor)
            count //= factor
        return [*shape, count] if count != 1 or self.random.random() < 0.5 else shape

    @staticmethod
    def _viewable(x: torch.Tensor, shape: list[int]) -> bool:
        try:
            x.view(shape)
        except RuntimeError:
            return False
        return True


def _fake(operator: Any, args: tuple[Any, ...], base: torch.Tensor, out: torch.Tensor) -> Node:
    """A node with just what `views.apply` asks of one."""

    class Type:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.shape, self.dtype = tuple(tensor.shape), "float32"

    class Value:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.type = Type(tensor)

    class Fake:
        target = str(operator)
        outputs = (Value(out),)

        def __init__(self) -> None:
            self.args = (Value(base), *args)

        def argument(self, name: str) -> Any:
            for position, argument in enumerate(operator._schema.arguments):
                if argument.name == name:
                    given = self.args[position : position + 1]
                    return given[0] if given else argument.default_value
            raise KeyError(name)

    return Fake()  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(300))
def test_chains_agree_with_torch(seed: int) -> None:
    """Each step: the same elements in memory, or None exactly where torch must copy."""
    chain = Chain(seed)
    x = chain.base
    view = View(0, "float32", tuple(x.shape), tuple(x.stride()), 0)
    for operator, args in chain.calls:
        y = operator(x, *args)
        made = views.apply(_fake(operator, args, x, y), view)
        if made is None:
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            x = y.contiguous()
            view = View(0, "float32", tuple(x.shape), tuple(x.stride()), 0)
            continue
        assert made.shape == tuple(y.shape)
        if y.numel():
            store = x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0)
            ours = store.as_strided(made.shape, made.strides, made.offset)
            assert torch.equal(ours, y), f"{operator}{args}: {made} of {view}, torch {y.stride()}"
        if y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            break  # torch copied where strides suffice: it looks at its own memory from here
        x, view = y, made


def test_chains_through_the_whole_build() -> None:
    """Many chains in one graph: read, added to, summed, copied."""
    chains = [c for c in (Chain(seed) for seed in range(1000, 1040)) if c.calls]

    def function(*bases: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for chain, base in zip(chains, bases, strict=True):
            made += [chain(base) + 1, chain(base * 2), chain(base).contiguous()]
        return made

    bases = [c.base for c in chains]
    ours, fallbacks = results(function, *bases)
    agree(ours, function(*bases), 0.0, 0.0)
    assert not fallbacks


def test_symbolic_sizes() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        b, t, _ = x.shape
        made = [x[:, 1:], x[:, :-1], x[:, -2:], x[:, -1], x[:, ::2], x[:, 1::3], x[0], x[-1]]
        made += [
            x.view(b, t, 2, 4).transpose(1, 2),
            x.reshape(b * t, 8),
            x.flatten(),
            x.view(-1, 4),
        ]
        made += [x.transpose(0, 1).reshape(t, -1), x.unfold(1, 2, 1), x.permute(2, 0, 1)[1:3]]
        made += [x.transpose(1, 2).flatten(1), x[:, :, None].expand(b, t, 3, 8), x[:, t // 2 :]]
        made += [x[:, :2].diagonal(0, 1, 2), x.narrow(1, 1, 2)]
        made += [x.view(b, t, 2, 4).permute(0, 2, 1, 3).reshape(b * 2, t, 4), x.split(3, 2)[1]]
        return [y * 2 for y in made] + [y.sum() for y in made]

    torch.manual_seed(0)
    batch, length = torch.export.Dim("B", min=1, max=9), torch.export.Dim("T", min=5, max=64)
    x = torch.randn(3, 6, 8)
    built = Built(Call(function), (x,), dynamic=({0: batch, 1: length},))
    try:
        assert not built.fallbacks
        for sizes in ((3, 6), (1, 5), (2, 8), (9, 64), (1, 17)):
            x = torch.randn(*sizes, 8)
            # sums of thousands of numbers of both signs: both sides round, about 1e-4
            agree(built(x), function(x), 1e-5, 1e-3, str(sizes))
    finally:
        built.close()


@pytest.mark.parametrize(
    ("start", "length"),
    [(0, 5), (2, 3), (-2, 2), (-9, 5), (7, 0)],
)
def test_slice_starts_are_clipped(start: int, length: int) -> None:
    x = torch.arange(5.0)
    y = aten.slice.Tensor(x, 0, start, 2**63 - 1)
    assert y.shape[0] == length
    made = views.apply(_fake(aten.slice.Tensor, (0, start, 2**63 - 1), x, y),
                       View(0, "float32", (5,), (1,)))  # fmt: skip
    assert made is not None and made.shape == (length,)
    if length:
        assert torch.equal(x.as_strided(made.shape, made.strides, made.offset), y)


def test_reshape_of_symbolic_rows() -> None:
    t = sympy.Symbol("T", integer=True, positive=True)
    rows = View(0, "float32", (t, 4, 8), (32, 8, 1))
    assert views.reshape(rows, (t, 32)) == View(0, "float32", (t, 32), (32, 1))
    heads = View(0, "float32", (4, t, 8), (8, 32, 1))  # a transposition
    assert views.reshape(heads, (4, t * 8)) is None
    assert views.reshape(heads, (2, 2, t, 8)) == View(
        0, "float32", (2, 2, t, 8), (16, 8, 32, 1)
    )  # fmt: skip
    part = View(0, "float32", (t, 4, 4), (32, 8, 1), 4)  # a slice of the last dim
    assert views.reshape(part, (t * 4, 4)) == View(0, "float32", (t * 4, 4), (8, 1), 4)
    assert views.reshape(part, (t, 16)) is None
