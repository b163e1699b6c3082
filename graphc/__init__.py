"""graphc: a graph-mode compiler and kernel cache for CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "build", "compile", "load"]

if TYPE_CHECKING:
    from graphc.api import build, compile
    from graphc.runtime.session import load


def __getattr__(name: str) -> Any:
    # lazily: loading a plan must import neither torch nor the compiler
    if name == "load":
        from graphc.runtime.session import load

        return load
    if name in ("build", "compile"):
        from graphc import api

        return getattr(api, name)
    raise AttributeError(f"module 'graphc' has no attribute {name!r}")
