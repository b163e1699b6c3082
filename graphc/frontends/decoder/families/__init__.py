"""Day-0 adapters: which names of a model family's module stand for an operator of graphc.

One small file a family. `REBIND` maps a name in transformers' modeling module, or `Class.method`,
to what takes its place while a model is captured; nothing of the model's code is edited. A family
whose hooks are the usual ones (attention, mask and experts registries, cache object) needs no file.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch


def rebindings(modules: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(modeling module, replacements by name) of the families whose module is among `modules`."""
    for info in pkgutil.iter_modules(__path__):
        family = importlib.import_module(f"{__name__}.{info.name}")
        if family.MODULE in modules:
            yield family.MODULE, family.REBIND


@contextmanager
def substituted(model: torch.nn.Module) -> Iterator[None]:
    """Names of the model's own modules that stand for operators of graphc, while inside."""
    used = {type(part).__module__ for part in model.modules()}
    saved: list[tuple[Any, str, Any]] = []
    try:
        for name, table in rebindings(used):
            for path, replacement in table.items():
                *outer, attribute = path.split(".")
                owner = reduce(getattr, outer, sys.modules[name])
                saved.append((owner, attribute, getattr(owner, attribute)))
                setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, value in reversed(saved):
            setattr(owner, attribute, value)
