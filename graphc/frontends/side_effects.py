"""Python numbers that a module keeps and changes while it runs.

A trace holds the value such a number had at the capture: `self.calls += 1` is right once, and wrong
in every later call. Tensors that change are states; numbers cannot be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphc.errors import CaptureError
from graphc.frontends.minimum import agree
from graphc.frontends.naming import where_defined

Numbers = Mapping[tuple[str, str], int | float]


def plain_numbers(module: torch.nn.Module) -> dict[tuple[str, str], int | float]:
    """The Python numbers among the attributes of a module and those inside it."""
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if type(value) in (int, float)
    }


@contextmanager
def watched(module: torch.nn.Module) -> Iterator[dict[tuple[str, str], int | float]]:
    """Fills the dict with the numbers at the end of forward; torch.export puts them back after."""
    after: dict[tuple[str, str], int | float] = {}
    handle = module.register_forward_hook(lambda *_: after.update(plain_numbers(module)))
    try:
        yield after
    finally:
        handle.remove()


def check_unchanged(
    module: torch.nn.Module,
    before: Numbers,
    after: Numbers,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Puts numbers that a trace changed back, and refuses the module if they matter.

    Raises:
        CaptureError: a number changed, and two calls on the same inputs differ.
    """
    changed = [place for place, value in before.items() if after.get(place, value) != value]
    if not changed:
        return
    parts = dict(module.named_modules())
    for name, key in changed:
        setattr(parts[name], key, before[name, key])
    trial = copy.deepcopy(module)
    with torch.no_grad():
        first = trial(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
        second = trial(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
    if not agree(first, second):
        names = ", ".join(f"{name}.{key}".removeprefix(".") for name, key in changed)
        raise CaptureError(
            f"expected a forward that keeps its Python numbers, found {names} changed by it",
            where=where_defined(parts[changed[0][0]].forward),
            hint="keep the number in a buffer (register_buffer), which becomes a state of the plan",
        )
