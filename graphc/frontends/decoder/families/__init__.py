"""Day-0 adapters: which names of a model family's module stand for an operator of graphc.

One small file a family. `REBIND` maps a name in transformers' modeling module to what takes its
place while a model is captured; nothing of the model's code is edited. A family whose hooks are the
usual ones (attention, mask and experts registries, cache object) needs no file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any


def rebindings(modules: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(modeling module, replacements by name) of the families whose module is among `modules`."""
    for info in pkgutil.iter_modules(__path__):
        family = importlib.import_module(f"{__name__}.{info.name}")
        if family.MODULE in modules:
            yield family.MODULE, family.REBIND
