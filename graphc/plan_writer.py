"""Writing a plan folder, so that a reader sees the plan that was there or the whole new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from graphc.distinct import Distinct
from graphc.errors import UsageError
from graphc.plan import Manifest, Plan, Target, Weight
from graphc.plan_io import (
    HEAD,
    MANIFEST,
    PROGRAM,
    TAIL,
    Payload,
    digest,
    file_digest,
    open_plan,
    own,
    safe_name,
    with_files,
)

ALIGNMENT = 4096  # of each weight in weights.bin
_MOST_PIECES = 1024  # of one write: IOV_MAX of Linux and macOS

#: content of one file of a plan: bytes or text to write, a file to copy, or what writes the file
Content: TypeAlias = "bytes | str | Path | Callable[[Path], None]"


class WeightsWriter:
    """Collects weights.bin, for one target after the other; equal bytes are stored once.

    writer = WeightsWriter()
    index = writer.add("fc.weight", "float32", [4, 8], array)
    write_plan(folder, Plan(..., weights=writer.weights), {"weights.bin": writer.write, ...})
    """

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self._end = 0
        self._pieces: list[memoryview] = []
        self._places: Distinct[int] = Distinct()

    def begin(self) -> None:
        """Starts the list of another target."""
        self.weights = []

    def add(
        self,
        name: str,
        dtype: str,
        shape: Iterable[int],
        data: bytes | bytearray | memoryview,
        layout: str = "",
        origin: str = "",
    ) -> int:
        """Appends one constant, given as its C-contiguous bytes, which must stay as they are until
        all is written; gives its index in `weights`."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        offset = self._places.find(view) if view.nbytes else 0
        if offset is None:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._pieces += [memoryview(bytes(offset - self._end)), view]
            self._places.note(view, offset)
            self._end = offset + view.nbytes
        self.weights.append(
            Weight(name, dtype, list(shape), offset, view.nbytes, layout=layout, origin=origin)
        )
        return len(self.weights) - 1

    def write(self, path: Path) -> None:
        """Writes the file, as much at a time as the kernel takes. Linux then keeps it in its page
        cache in pages as large as it finds, where a mapped file is read faster than in pieces."""
        waiting = [piece for piece in self._pieces if piece.nbytes]
        first = 0
        with path.open("wb", buffering=0) as file:
            while first < len(waiting):
                done = os.writev(file.fileno(), waiting[first : first + _MOST_PIECES])
                while first < len(waiting) and done >= waiting[first].nbytes:
                    done -= waiting[first].nbytes
                    first += 1
                if done:
                    waiting[first] = waiting[first][done:]


def write_plan(folder: Path | str, plan: Plan, files: Mapping[str, Content]) -> Plan:
    """As `write_plans` for a plan of one target; gives it as written (`files` filled in)."""
    return write_plans(folder, [(plan, files)])[0]


def write_plans(
    folder: Path | str,
    plans: Sequence[tuple[Plan, Mapping[str, Content]]],
    shared: Mapping[str, Content] | None = None,
    command: Sequence[str] = (),
) -> list[Plan]:
    """Writes a plan folder, replacing a plan that stands there, and gives its plans as written
    (`files` filled in).

    Args:
        folder: where to. It must not exist, be empty, or hold a plan.
        plans: for each target, the most demanding first, its plan, whose `files` and `folder` are
            ignored, and its own files by name ("kernels.so", "report.json", "sources/x.cpp").
        shared: the files of all targets ("weights.bin"), unless there is one target.
        command: see `Manifest`.

    The folder is prepared beside its destination and moved there whole: a reader sees the old
    plan or the new one. Raises UsageError if the destination holds something else; OSError (disk
    full, read-only) leaves the old plan in place.
    """
    with _taking_place(Path(folder)) as work:
        return _write_files(work, plans, shared or {}, command)


def copy_plan(source: Path, folder: Path) -> None:
    """Writes the plan at `source`, which is whole, into another folder, as `write_plans` does."""
    with _taking_place(folder) as work:
        for name in (*open_plan(source).manifest.files, MANIFEST):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, work / name)


@contextlib.contextmanager
def _taking_place(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of the plan at `folder` at the end of the `with` block."""
    folder = folder.absolute()
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())
    ):
        raise UsageError(
            "the output folder holds something that is not a plan",
            where=str(folder),
            hint="name another folder or empty it",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        work.chmod(0o755)
        yield work
        old = None
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.rename(folder, old / "plan")
        try:
            os.rename(work, folder)
        except OSError:
            if old:
                os.rename(old / "plan", folder)
            raise
        finally:
            if old:
                shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_files(
    work: Path,
    plans: Sequence[tuple[Plan, Mapping[str, Content]]],
    shared: Mapping[str, Content],
    command: Sequence[str],
) -> list[Plan]:
    """Fills a new folder, the manifest last."""
    contents = dict(shared)
    made: list[Plan] = []
    for plan, files in plans:
        plan = msgspec.structs.replace(plan, files={}, folder=plan.target if len(plans) > 1 else "")
        made.append(plan)
        contents |= {own(plan, name): content for name, content in files.items()}
        contents[own(plan, PROGRAM)] = msgspec.json.encode(plan)
    digests: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, content in contents.items():
        path = work / safe_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, str | bytes):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            path.write_bytes(content.read_bytes())
        digests[name] = file_digest(path)
        sizes[name] = path.stat().st_size
    first = made[0]
    manifest = Manifest(
        first.format, first.abi, first.version, first.model, list(command),
        [Target(plan.target, plan.machine, plan.folder) for plan in made], digests,
    )  # fmt: skip
    payload = msgspec.json.encode(Payload(sizes, manifest))
    with (work / MANIFEST).open("wb") as file:
        file.write(HEAD % digest(payload).encode() + payload + TAIL)
        file.flush()
        os.fsync(file.fileno())
    return [with_files(plan, manifest) for plan in made]
