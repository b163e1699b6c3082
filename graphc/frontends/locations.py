"""Where in the user's own code something was called."""

from __future__ import annotations

import re
import traceback

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
