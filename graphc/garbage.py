"""Python's garbage collector, called less often while a model is built.

A build imports and makes some million objects that stay. The collector, which runs after every 700
new ones, looks at all of them again and again: a fifth of Python's time in a build.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_THRESHOLDS = (100_000, 10, 10)
_lock = threading.Lock()
_builds = 0
_before = (0, 0, 0)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Whatever the program had chosen holds again when the last of several threads leaves. A
    collector that is off, or called even less often, stays so."""
    global _builds, _before
    with _lock:
        if _builds == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < _THRESHOLDS[0]:
                gc.set_threshold(*_THRESHOLDS)
        _builds += 1
    try:
        yield
    finally:
        with _lock:
            _builds -= 1
            if _builds == 0:
                gc.set_threshold(*_before)
