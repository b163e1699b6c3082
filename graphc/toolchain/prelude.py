"""The precompiled header that is put in front of every translation unit.

Parsing <immintrin.h> is most of a small kernel's compile time. The header is used through a stub
beside it that holds nothing but an #error: should the compiler ever ignore the precompiled form,
the unit fails loudly and is compiled without it, so use is verified on every single compile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graphc.errors import CompileError
from graphc.store import PCH, KernelStore, Stored, Workspace
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.flags import compile_flags, include_flags
from graphc.toolchain.isa import Isa
from graphc.toolchain.process import Runner
from graphc.toolchain.sources import INCLUDE_ROOTS, PRELUDE, prelude_fields


def plain_prelude() -> tuple[str, ...]:
    """Flags that include the prelude as text."""
    return ("-include", str(INCLUDE_ROOTS[0] / PRELUDE))


def precompiled_prelude(
    isa: Isa,
    compiler: Compiler,
    store: KernelStore,
    workspace: Workspace,
    runner: Runner,
    waiting: Callable[[], None] = lambda: None,
) -> tuple[tuple[str, ...], Stored]:
    """Flags that include the precompiled prelude, built now if the cache has none, and the file,
    which must be kept referenced while the flags are in use. `waiting` is called now and then
    while another process builds it.

    Raises:
        CompileError: it cannot be built; compile with `plain_prelude` then.
    """

    def make(path: Path) -> None:
        command = [
            *compiler.command,
            *compile_flags(isa, compiler),
            *include_flags(INCLUDE_ROOTS),
            *(("-Xclang", "-fno-pch-timestamp") if compiler.kind != "gcc" else ()),
            *("-x", "c++-header", str(INCLUDE_ROOTS[0] / PRELUDE), "-o", str(path)),
        ]
        done = runner.run(command, path.parent)
        if done.status != 0 or not path.is_file():
            raise CompileError(f"the precompiled header failed: {done.output.strip()[:500]}")

    stored = store.fetch_or_make(
        PCH,
        prelude_fields(isa, compiler),
        make,
        workspace,
        label="precompiled header",
        cancelled=lambda: runner.cancelled,
        waiting=waiting,
    )
    if compiler.kind != "gcc":
        return ("-include-pch", str(stored.path)), stored
    stub = stored.path.parent / PRELUDE
    stub.write_text('#error "the precompiled header was not used"\n', encoding="utf-8")
    stored.path.rename(stub.with_name(PRELUDE + ".gch"))
    return ("-include", str(stub)), stored
