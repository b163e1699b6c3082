"""Lowering rules by kernel family, one module each; `load_rules` imports them all."""

from __future__ import annotations

import importlib
import pkgutil


def load_rules() -> None:
    """Fills graphc.lowering.context.RULES."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
