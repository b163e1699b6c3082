"""The axes of a Loop: merging those that memory runs through in one line, reordering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphc.ir.types import Dim, as_dim, product, same
from graphc.lowering.context import View
from graphc.lowering.loops import Compute, Load, Loop, Position, Reduce, Scalar, Store


def collapses(loop_sizes: Sequence[Dim], axes: Sequence[int], strides: Sequence[Dim]) -> bool:
    """Whether an access runs through `axes` with a single stride."""
    for outer, inner in zip(axes, axes[1:], strict=False):
        if not same(strides[outer], as_dim(strides[inner] * loop_sizes[inner])):
            return False
    return True


def simplify(loop: Loop) -> Loop:
    """Merges neighbouring axes that every access crosses with one stride."""
    accesses: list[tuple[Dim, ...]] = [load.strides for load in loop.loads()]
    accesses += [store.strides for store in loop.stores]
    pinned = {s.axis for s in loop.scalars() if isinstance(s, Position)}
    groups: list[list[int]] = []
    for axis in range(len(loop.domain)):
        if groups:
            last = groups[-1][-1]
            mergeable = (
                (last in loop.reduced) == (axis in loop.reduced)
                and last not in pinned
                and axis not in pinned
                and all(
                    same(strides[last], as_dim(strides[axis] * loop.domain[axis]))
                    for strides in accesses
                )
                # a store must cover the reduced axes or none of them
            )
            if mergeable:
                groups[-1].append(axis)
                continue
        groups.append([axis])
    if len(groups) == len(loop.domain):
        return loop
    new_axis = {axis: number for number, group in enumerate(groups) for axis in group}

    def pick(strides: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(strides[group[-1]] for group in groups)

    return rebuild(
        loop,
        [product([loop.domain[axis] for axis in group]) for group in groups],
        frozenset(new_axis[axis] for axis in loop.reduced),
        pick,
        lambda axis: new_axis[axis],
    )


def reorder(loop: Loop, order: Sequence[int]) -> Loop:
    """The same loop with its axes in another order."""
    if list(order) == list(range(len(order))):
        return loop
    place = {axis: number for number, axis in enumerate(order)}
    return rebuild(
        loop,
        [loop.domain[axis] for axis in order],
        frozenset(place[axis] for axis in loop.reduced),
        lambda strides: tuple(strides[axis] for axis in order),
        lambda axis: place[axis],
    )


def rebuild(
    loop: Loop,
    domain: list[Dim],
    reduced: frozenset[int],
    pick: Callable[[tuple[Dim, ...]], tuple[Dim, ...]],
    axis_of: Callable[[int], int],
) -> Loop:
    made: dict[int, Scalar] = {}
    for scalar in loop.scalars():
        if isinstance(scalar, Load):
            made[id(scalar)] = Load(scalar.dtype, scalar.view, pick(scalar.strides))
        elif isinstance(scalar, Position) and scalar.axis is not None:
            made[id(scalar)] = Position(
                scalar.dtype, axis_of(scalar.axis), scalar.start, scalar.step
            )
        elif isinstance(scalar, Compute):
            args = tuple(made[id(o)] for o in scalar.args)
            made[id(scalar)] = Compute(
                scalar.dtype, scalar.template, args, scalar.takes, scalar.heavy
            )
        elif isinstance(scalar, Reduce):
            made[id(scalar)] = Reduce(
                scalar.dtype, scalar.kind, made[id(scalar.arg)], scalar.divisor
            )
        else:
            made[id(scalar)] = scalar
    stores = [Store(made[id(s.scalar)], s.view, pick(s.strides)) for s in loop.stores]
    return Loop(domain, reduced, stores, loop.names)


def result_axes(
    shape: Sequence[Dim], counts: tuple[int, int, int]
) -> tuple[list[int], list[int], list[int]]:
    """Domain axes (size-1 dims have none) of the Z, M and N dims of a result."""
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    axis = 0
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        which = 0 if dim < counts[0] else (1 if dim < counts[0] + counts[1] else 2)
        parts[which].append(axis)
        axis += 1
    return parts


def collapsible(
    loop: Loop, parts: tuple[list[int], list[int], list[int]], copied: Callable[[View], View]
) -> Loop:
    """Operands that do not run through a part of [Z, M, N] with one stride are `copied`."""
    replaced: dict[int, Load] = {}
    for load in loop.loads():
        if collapses(loop.domain, parts[2], load.strides):
            continue  # batches and rows may be anything
        # copied along the parts it varies in, broadcast along the others
        shape: list[Dim] = []
        for axes in parts:
            varies = any(load.strides[a] != 0 for a in axes)
            shape += [loop.domain[a] if varies else 1 for a in axes]
        order = [a for axes in parts for a in axes]
        source = load.view.with_(shape=tuple(shape), strides=tuple(load.strides[a] for a in order))
        target = copied(source)
        strides: list[Dim] = [0] * len(loop.domain)
        for position, axis in enumerate(order):
            if shape[position] != 1:
                strides[axis] = target.strides[position]
        replaced[id(load)] = Load(load.dtype, target, tuple(strides))
    if not replaced:
        return loop
    for scalar in loop.scalars():
        if id(scalar) in replaced:
            fresh = replaced[id(scalar)]
            object.__setattr__(scalar, "view", fresh.view)
            object.__setattr__(scalar, "strides", fresh.strides)
    return rebuild(loop, loop.domain, loop.reduced, lambda s: s, lambda a: a)
