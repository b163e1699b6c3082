"""What goes into a kernel's key: its source and every header it includes with quotes.

Includes are followed without looking at #if, so a key may know one header too many, never one too
few. System headers (`<...>`) belong to the compiler's identity.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphc.errors import CompileError
from graphc.plan import ABI_VERSION
from graphc.store import Fields
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.flags import compile_flags
from graphc.toolchain.isa import Isa

if TYPE_CHECKING:  # sympy, which it needs, takes long to import
    from graphc.lowering.context import Unit

_PACKAGE = Path(__file__).resolve().parents[1]
#: where `#include "..."` of a unit is looked up, in this order
INCLUDE_ROOTS = (_PACKAGE / "kernels", _PACKAGE / "runtime")
PRELUDE = "prelude.h"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|(<)|(\S+))', re.MULTILINE)


@dataclass(frozen=True)
class _Header:
    stamp: tuple[int, int]  # mtime_ns and size when read
    digest: str
    includes: tuple[str, ...]


_headers: dict[Path, _Header] = {}


def kernel_fields(
    unit: Unit, isa: Isa, compiler: Compiler, roots: Sequence[Path] = INCLUDE_ROOTS
) -> Fields:
    """The readable fields of the key of `unit`'s object file."""
    headers = included({PRELUDE: None, **dict.fromkeys(_includes(unit.source, unit.name))}, roots)
    return (
        ("kind", "kernel"),
        *_machine_fields(isa, compiler),
        *((f"header {name}", digest) for name, digest in sorted(headers.items())),
        ("source", unit.source),
    )


def prelude_fields(isa: Isa, compiler: Compiler, roots: Sequence[Path] = INCLUDE_ROOTS) -> Fields:
    """The fields of the key of the precompiled header. Unlike all others they name the headers'
    folder where the compiler (clang) insists on finding them there again."""
    place = () if compiler.kind == "gcc" else (("folder", str(roots[0])),)
    headers = included({PRELUDE: None}, roots)
    return (
        ("kind", "precompiled header"),
        *_machine_fields(isa, compiler),
        *place,
        *((f"header {name}", digest) for name, digest in sorted(headers.items())),
    )


def _machine_fields(isa: Isa, compiler: Compiler) -> Fields:
    return (
        ("abi", str(ABI_VERSION)),
        ("compiler", compiler.identity),
        ("target", compiler.target),
        ("isa", isa.level),
        ("features", " ".join(isa.features)),
        ("flags", " ".join(compile_flags(isa, compiler))),
    )


def included(names: dict[str, None], roots: Sequence[Path]) -> dict[str, str]:
    """Header name relative to its root -> "sha256:..." of its text, for `names` and all they
    include. Names that are in no root are left to the compiler to find or to refuse."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, Path | None]] = [(name, None) for name in names]
    seen: set[Path] = set()
    while waiting:
        name, folder = waiting.pop()
        place = _locate(name, folder, roots)
        if place is None or place[0] in seen:
            continue
        path, shown = place
        seen.add(path)
        header = _read(path)
        found[shown] = f"sha256:{header.digest}"
        waiting += [(inner, path.parent) for inner in header.includes]
    return found


def _locate(name: str, folder: Path | None, roots: Sequence[Path]) -> tuple[Path, str] | None:
    for start in (*([folder] if folder is not None else []), *roots):
        path = Path(start, name)
        if path.is_file():
            path = path.resolve()
            for root in roots:
                if path.is_relative_to(root):
                    return path, f"{root.name}/{path.relative_to(root).as_posix()}"
            return path, path.name
    return None


def _read(path: Path) -> _Header:
    status = path.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    known = _headers.get(path)
    if known is None or known.stamp != stamp:
        data = path.read_bytes()
        includes = _includes(data.decode(), path.name)
        known = _Header(stamp, hashlib.sha256(data).hexdigest(), includes)
        _headers[path] = known
    return known


def _includes(text: str, where: str) -> tuple[str, ...]:
    names: list[str] = []
    for match in _INCLUDE.finditer(text):
        if match[3] is not None:
            raise CompileError(
                f"expected an include with a literal name, found {match[0].strip()!r}",
                where=where,
                hint="a header named by a macro cannot be part of the cache key",
            )
        if match[1] is not None:
            names.append(match[1])
    return tuple(names)
