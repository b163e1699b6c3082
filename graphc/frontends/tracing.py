"""The settings under which torch traces a module for us."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

import torch
from torch.fx.traceback import preserve_node_meta

#: loggers that comment on what torch.export then raises, and the levels that nobody chose
_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
)
_UNSET = (logging.NOTSET, logging.WARNING)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """No fused eager fast paths, no gradients, and none of torch's own words: what it raises
    becomes an error of ours, with the user's line and the remedy."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # node meta: what `locations.part` notes reaches the graph
        with warnings.catch_warnings(), _quiet_logs(), torch.no_grad(), preserve_node_meta():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(cast(TextIO, _Stderr(sys.stderr))):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """torch logs a traceback before it raises. A level that the user set (TORCH_LOGS) stays."""
    quiet = [log for log in map(logging.getLogger, _LOGGERS) if log.level in _UNSET]
    levels = [log.level for log in quiet]
    for log in quiet:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(quiet, levels, strict=True):
            log.setLevel(level)


class _Stderr:
    """stderr without the half-traced graph that torch.export prints while it handles an error;
    what the model itself writes goes through."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if hasattr(sys.exc_info()[1], "partial_fx_graph"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
