"""Links objects into a plan's one shared library, through the cache."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphc.errors import CompileError, UsageError
from graphc.files import replacing
from graphc.store import LINKS, Fields, KernelStore, NoSpaceError, Stored
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.flags import link_flags
from graphc.toolchain.process import Runner
from graphc.toolchain.recorded import missing


def link(objects: Sequence[Stored], output: Path, compiler: Compiler, store: KernelStore) -> Stored:
    """Writes the shared library `output` (atomically) from `objects`, in their order.

    Equal objects give an equal file, so the key is their digests.

    Raises:
        CompileError: the linker refused, for example an undefined symbol; or there is no compiler,
            and the cache does not hold this library.
        NoSpaceError: the disk of `output`, or of all temporary folders, is full.
        UsageError: `output` cannot be written.
    """
    runner = Runner()
    workspace = store.workspace()

    def make(path: Path) -> None:
        if not compiler.command:
            raise missing(compiler, f"the library of these {len(objects)} kernels")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            # numbered names: the library shall not know where its parts came from
            names = [f"{number}.o" for number in range(len(objects))]
            for name, item in zip(names, objects, strict=True):
                Path(folder, name).symlink_to(item.path)
            command = (*compiler.command, *link_flags(compiler), *names, "-o", str(path))
            done = runner.run(command, Path(folder))
        if done.status != 0 or not path.is_file():
            raise CompileError(f"linking failed:\n    {_first_lines(done.output)}")

    try:
        fields = link_fields(objects, compiler)
        stored = store.fetch_or_make(LINKS, fields, make, workspace, label=output.name)
        _place(stored.path, output)
    except BaseException:
        runner.cancel()
        workspace.close()
        raise
    return stored


def link_fields(objects: Sequence[Stored], compiler: Compiler) -> Fields:
    """The fields of the key of a linked library."""
    return (
        ("kind", "library"),
        ("compiler", compiler.identity),
        ("target", compiler.target),
        ("flags", " ".join(link_flags(compiler))),
        ("objects", "\n".join(item.sha256 for item in objects)),
    )


def _first_lines(output: str) -> str:
    lines = output.strip().splitlines()
    told = [line for line in lines if "undefined" in line or "multiple definition" in line]
    return "\n    ".join((told or lines)[:12])


def _place(source: Path, output: Path) -> None:
    """Copies (a plan must not share bytes with the cache) and renames into place."""
    try:
        with replacing(output, 0o644) as target, source.open("rb") as reader:
            shutil.copyfileobj(reader, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise _unwritable(error, output) from None


def _unwritable(error: OSError, output: Path) -> UsageError:
    kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
    return kind(f"cannot write {output.name}: {error.strerror}", where=str(output.parent))
