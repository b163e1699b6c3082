"""Building without a compiler: the cache knows which compilers made what it holds.

The compiler's identity is part of every key. On a machine without a compiler a build looks up
under the identities of the cache's entries, and needs every kernel and the library to be there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from graphc.errors import CompileError
from graphc.store import KERNELS, KernelStore
from graphc.toolchain.compiler import INSTALL, Compiler, NoCompilerError
from graphc.toolchain.isa import Isa
from graphc.toolchain.sources import kernel_fields

if TYPE_CHECKING:  # sympy, which it needs, takes long to import
    from graphc.lowering.context import Unit

_IDENTITY = re.compile(r"(gcc|clang|zig) (.*)", re.DOTALL)
_MAJOR = {"gcc": r"(\d+)\.", "clang": r"clang version (\d+)\.", "zig": r"clang version (\d+)\."}


def usable_compiler(units: Sequence[Unit], isa: Isa, store: KernelStore) -> Compiler:
    """The compiler of this machine. Where there is none, the one, without a command, that made
    most of `units` in the cache.

    Raises:
        CompileError: there is no compiler, and the cache does not hold one library; or $CXX names
            something that cannot be used.
    """
    try:
        return Compiler.discover()
    except NoCompilerError:
        made = [recorded(*maker) for maker in store.makers()]
        found = [compiler for compiler in made if compiler is not None]
        if not found:
            raise
    if len(found) == 1:
        return found[0]
    return max(found, key=lambda compiler: _held(units, isa, compiler, store))


def recorded(identity: str, target: str) -> Compiler | None:
    """The compiler with this `identity`, without a command; None if it is none we know."""
    match = _IDENTITY.fullmatch(identity)
    major = match and re.search(_MAJOR[match[1]], match[2])
    if not match or not major:
        return None
    return Compiler((), match[1], match[2], int(major[1]), target)


def _held(units: Sequence[Unit], isa: Isa, compiler: Compiler, store: KernelStore) -> int:
    keys = [kernel_fields(unit, isa, compiler) for unit in units]
    with contextlib.closing(store.workspace()) as area, ThreadPoolExecutor(store.lanes) as pool:
        found = list(pool.map(lambda fields: store.fetch(KERNELS, fields, area), keys))
    return sum(stored is not None for stored in found)


def told(compiler: Compiler) -> str:
    """The note for a build without a compiler."""
    return (
        f"this machine has no C++ compiler: what {compiler.identity} made is taken out of the cache"
    )


def missing(compiler: Compiler, what: str) -> CompileError:
    """The error where the cache lacks `what` and nothing here can make it."""
    try:
        tried = Compiler.discover().identity  # somebody installed one meanwhile
    except CompileError as error:
        tried = error.what
    return CompileError(
        f"{tried}; and of what {compiler.identity} made, the cache lacks {what}",
        hint=f"{INSTALL}; or import a bundle of kernels (graphc cache import) from a machine that "
        "built this model with the same versions",
    )
