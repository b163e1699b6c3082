"""Where in the user's own code something was called."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.fx.traceback import annotate

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_FOREIGN = ("/torch/", "/graphc/frontends/", "<frozen ", "<string>", "<eval_with_key>")


def is_user(path: str) -> bool:
    """Whether a file is neither torch's nor graphc's own machinery."""
    return not any(part in path for part in _FOREIGN)


def location_of(stack_trace: str | None) -> str:
    """The innermost frame of the user's code in a stack trace: "models/net.py:12" ("" if none)."""
    for path, line in reversed(_FRAME.findall(stack_trace or "")):
        if is_user(path):
            return f"{'/'.join(path.split('/')[-2:])}:{line}"
    return ""


_PART = "graphc_part"


def part(name: str) -> AbstractContextManager[None]:
    """What is traced inside stems from this part of a model that has no source lines."""
    marked: AbstractContextManager[None] = annotate({_PART: name})
    return marked


def traced_at(meta: Mapping[str, Any]) -> str:
    """Where an fx node's call stands: the user's source line, else the part of the model."""
    found = location_of(meta.get("stack_trace"))
    return found or str((meta.get("custom") or {}).get(_PART, ""))


def module_of(meta: Mapping[str, Any]) -> str:
    """ "layers.0.self_attn KimiDeltaAttention": path and class of the part of a model that an fx
    node's call belongs to; "" if unknown.

    Of layers with numbers it is what such a layer is made of, of all else the innermost module.
    """
    modules = meta.get("nn_module_stack") or {}
    stack = [(str(path), _class(kind)) for path, kind in modules.values() if path]
    for place, (path, kind) in enumerate(stack):
        if any(name.isdigit() for name in path.split(".")):
            whole = stack[place + 1] if place + 1 < len(stack) else (path, kind)
            return " ".join(whole)
    return " ".join(stack[-1]) if stack else ""


def _class(kind: Any) -> str:
    """A class's own name, of the class or of "package.Class"."""
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2]


def raised_at(error: BaseException, root: str = "") -> str:
    """ "path/net.py:12": the innermost frame of the user's code (below `root` if given) that an
    exception, or one it stems from, passed through."""
    seen: BaseException | None = error
    visited: set[int] = set()
    while seen is not None and id(seen) not in visited:
        visited.add(id(seen))
        for frame in reversed(traceback.extract_tb(seen.__traceback__)):
            if is_user(frame.filename) and frame.filename.startswith(root):
                return f"{frame.filename}:{frame.lineno}"
        seen = seen.__cause__ or seen.__context__
    return ""
