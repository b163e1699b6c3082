"""The text that the embedded default was trained on, and what was held out: the standard library of
the Python that runs this."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

#: folders of the library that hold no code of the library: tests, tables, generated text, builds
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__",
    "ensurepip", "lib-dynload", "pydoc_data",
}  # fmt: skip
#: part of the files, chosen by the digest of their names, that is never trained on
HELD_OUT = 16 / 256


def files() -> list[tuple[str, bytes]]:
    """(path inside the library, content) of every file, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        skipped = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
        if not skipped and not LEFT_OUT.intersection(name.parts[:-1]):
            if content := path.read_bytes():
                found.append((name.as_posix(), content))
    return found


def corpus() -> tuple[list[bytes], list[bytes], str]:
    """(files to train on, files held out, sha256 of all their names and contents)."""
    digest = hashlib.sha256()
    kept: list[bytes] = []
    held: list[bytes] = []
    for name, content in files():
        own = hashlib.sha256(name.encode()).digest()
        digest.update(own + hashlib.sha256(content).digest())
        (held if own[0] < HELD_OUT * 256 else kept).append(content)
    return kept, held, digest.hexdigest()
