"""graphc: a graph-mode compiler and kernel cache for CPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "build", "compile", "load"]

if TYPE_CHECKING:
    from pathlib import Path

    from graphc.api import build, compile
    from graphc.runtime.session import Session


def load(
    path: Path | str,
    *,
    threads: int | None = None,
    verify: bool = False,
    share_weights: bool | None = None,
) -> Session:
    """Loads a plan: its folder, or the file that `graphc bundle` made of it, which is unpacked into
    the cache folder first. For the other arguments, and errors, see `graphc.runtime.session.load`.
    """
    from graphc.runtime.session import load as load_folder

    if os.path.isfile(path):
        from pathlib import Path

        from graphc.api import unpacked

        path = unpacked(Path(path))
    return load_folder(path, threads=threads, verify=verify, share_weights=share_weights)


def __getattr__(name: str) -> Any:
    # lazily: loading a plan must import neither torch nor the compiler
    if name in ("build", "compile"):
        from graphc import api

        return getattr(api, name)
    raise AttributeError(f"module 'graphc' has no attribute {name!r}")
