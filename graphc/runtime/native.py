"""The Python side of executor.cpp: libraries, thread pools, encoded programs, frames."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import DamagedError, InternalError, PlanMismatchError
from graphc.plan import ABI_VERSION, OPERATORS, Expression, Plan, Program

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = 0x31504347
UNBOUND = -(1 << 63)  # value of a symbol that is not known yet
_OPCODES = {name: i + 2 for i, name in enumerate(OPERATORS)}
_KINDS = {"input": 0, "output": 1, "weight": 2, "state": 3, "arena": 4, "external": 5, "dynamic": 5}
_ERRORS = {
    1: "a size it needs is undefined (an unbound symbol, a division by zero or an overflow)",
    2: "a buffer it needs has no memory",
    3: "its scratch is larger than what was reserved",
}
_pointer = ctypes.c_void_p
_i64 = ctypes.c_int64


def now() -> int:
    """Nanoseconds of the clock that executor.cpp uses."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Frame(ctypes.Structure):
    """gc_frame of executor.cpp: base addresses of one run."""

    _fields_ = [
        ("symbols", _pointer),
        ("inputs", _pointer),
        ("outputs", _pointer),
        ("weights", _pointer),
        ("states", _pointer),
        ("arena", _pointer),
        ("externals", _pointer),
        ("scratch", _pointer),
        ("scratch_stride", _i64),
        ("pool", _pointer),
        ("times", _pointer),
        ("trace", _pointer),
    ]


class Library:
    """A plan's kernels.so, loaded."""

    def __init__(self, path: Path | str) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            for name, result, arguments in (
                ("gc_abi_version", _i64, []),
                ("gc_pool_version", _i64, []),
                ("gc_pool_create", _pointer, [_i64]),
                ("gc_resolve", _i64, [ctypes.c_char_p, _i64, _pointer]),
                ("gc_program_create", _pointer, [_pointer, _i64, _pointer]),
                ("gc_program_destroy", None, [_pointer]),
                ("gc_program_evaluate", _i64, [_pointer, _pointer]),
                ("gc_program_values", _pointer, [_pointer]),
                ("gc_program_defined", _pointer, [_pointer]),
                ("gc_program_run", _i64, [_pointer, _pointer, _i64, _i64]),
            ):
                function = getattr(self._library, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise DamagedError(
                f"cannot load the kernels: {error}",
                where=str(path),
                hint="rebuild the plan: graphc build",
            ) from error
        self.path = path
        self.pool_create = self._library.gc_pool_create
        self.program_create = self._library.gc_program_create
        self.program_destroy = self._library.gc_program_destroy
        self.program_evaluate = self._library.gc_program_evaluate
        self.program_values = self._library.gc_program_values
        self.program_defined = self._library.gc_program_defined
        self.program_run = self._library.gc_program_run
        self.pool_version: int = self._library.gc_pool_version()
        found = self._library.gc_abi_version()
        if found != ABI_VERSION:
            raise PlanMismatchError(
                f"expected kernel ABI {ABI_VERSION}, found {found}",
                where=str(path),
                hint="rebuild the plan: graphc build",
            )

    def resolve(self, names: Sequence[str]) -> NDArray[np.uint64]:
        """Addresses of kernels, by symbol."""
        addresses = np.zeros(max(len(names), 1), np.uint64)
        if names:
            text = "\0".join(names).encode() + b"\0"
            missing = self._library.gc_resolve(text, len(names), addresses.ctypes.data)
            if missing >= 0:
                raise DamagedError(
                    f"the kernels lack the symbol {names[missing]!r}",
                    where=str(self.path),
                    hint="rebuild the plan: graphc build",
                )
        return addresses


_lock = threading.Lock()
_libraries: dict[str, Library] = {}  # by SHA-256
_paths: set[str] = set()
_pools: dict[tuple[int, int], int] = {}  # (pool version, threads) -> address
# A forked child has none of the parent's threads: it makes pools of its own.
os.register_at_fork(after_in_child=_pools.clear)


def load_library(path: Path | str, digest: str) -> Library:
    """The library with this content. Equal content is loaded once per process. The loader goes by
    path, so other content at a path that was loaded before is loaded from a private copy."""
    with _lock:
        if digest not in _libraries:
            place = os.path.realpath(path)
            if place in _paths:
                import shutil
                import tempfile

                with tempfile.TemporaryDirectory(prefix="graphc-") as folder:
                    copy = os.path.join(folder, f"{digest}.so")
                    shutil.copyfile(path, copy)
                    library = Library(copy)  # stays mapped when the file is gone
            else:
                library = Library(place)
                _paths.add(place)
            _libraries[digest] = library
        return _libraries[digest]


def thread_pool(library: Library, threads: int) -> int:
    """Address of the process-wide pool of so many threads; 0 for one thread."""
    if threads == 1:
        return 0
    key = (library.pool_version, threads)
    pool = _pools.get(key)
    if pool is None:
        with _lock:
            pool = _pools.get(key)
            if pool is None:
                pool = library.pool_create(threads)
                if not pool:
                    raise MemoryError(f"cannot start {threads} threads")
                _pools[key] = pool
    return pool


def encode_program(plan: Plan, program: Program) -> tuple[array[int], list[str]]:
    """A program as the blob that gc_program_create takes, and the kernels it calls by number."""
    begin, code = array("q", [0]), array("q")
    for expression in program.expressions:
        _encode_expression(expression, code)
        begin.append(len(code))
    buffers = array("q")
    for buffer in program.buffers:
        offset = buffer.offset
        if buffer.kind == "weight":
            offset += plan.weights[buffer.index].offset
        buffers.extend((_KINDS[buffer.kind], buffer.index, offset))
    functions: dict[str, int] = {}
    steps, pointers, immediates = array("q"), array("q"), array("q")
    for step in program.steps:
        kernel = step.kernel
        if kernel is None:
            steps.extend((-1, 0, 0, 0, 0, 0, 0, 0))
            continue
        number = functions.setdefault(kernel.symbol, len(functions))
        steps.extend(
            (
                number,
                len(pointers) // 2,
                len(kernel.pointers),
                len(immediates),
                len(kernel.immediates),
                kernel.range,
                kernel.grain,
                kernel.scratch,
            )
        )
        for pair in kernel.pointers:
            pointers.extend(pair)
        immediates.extend(kernel.immediates)
    head = (
        _MAGIC,
        len(plan.symbols),
        len(program.expressions),
        len(code),
        len(program.buffers),
        len(program.steps),
        len(pointers) // 2,
        len(immediates),
        len(functions),
    )
    blob = array("q", head) + begin + code + buffers + steps + pointers + immediates
    return blob, list(functions)


def _encode_expression(expression: Expression, code: array[int]) -> None:
    for item in expression:
        if isinstance(item, int):
            code.extend((0, item))
        elif item in _OPCODES:
            code.append(_OPCODES[item])
        elif item[:1] == "s" and item[1:].isdigit():
            code.extend((1, int(item[1:])))
        else:
            raise InternalError(f"unknown item {item!r} in an expression of the plan")


class NativeProgram:
    """A Program inside the executor. `symbols` holds the assignment (UNBOUND where unknown),
    `values`/`defined` the expressions under it once `evaluate` was called."""

    def __init__(self, library: Library, plan: Plan, program: Program) -> None:
        self.library = library
        self.program = program
        blob, names = encode_program(plan, program)
        functions = library.resolve(names)
        address, length = blob.buffer_info()
        self.handle = library.program_create(address, length, functions.ctypes.data)
        if not self.handle:
            raise InternalError(
                f"the step table of phase {program.phase!r}, bucket "
                f"{program.bucket!r} is inconsistent"
            )
        self.assigned: object = None  # the Assignment that `values` belong to, if any
        self.symbols: NDArray[np.int64] = np.full(max(len(plan.symbols), 1), UNBOUND, np.int64)
        self.symbols_address = int(self.symbols.ctypes.data)
        n = len(program.expressions)
        self.values = _view(library.program_values(self.handle), n, np.dtype(np.int64))
        self.defined = _view(library.program_defined(self.handle), n, np.dtype(np.bool_))

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle:
            self.library.program_destroy(handle)

    def evaluate(self) -> int:
        """Evaluates the expressions under `symbols`; gives the scratch bytes per thread."""
        self.assigned = None
        return int(self.library.program_evaluate(self.handle, self.symbols_address))

    def value(self, expression: int) -> int:
        """The value of an expression; InternalError if it is undefined."""
        if not self.defined[expression]:
            raise InternalError(
                f"expression {self.program.expressions[expression]} of the plan is undefined here"
            )
        return int(self.values[expression])

    def holds(self, condition: int) -> bool | None:
        """Whether a guard holds; None while it depends on a symbol that is not known yet. One that
        is undefined otherwise (a division by zero, an overflow) does not hold."""
        if self.defined[condition]:
            return bool(self.values[condition])
        for item in self.program.expressions[condition]:
            if isinstance(item, str) and item[:1] == "s" and item[1:].isdigit():
                if self.symbols[int(item[1:])] == UNBOUND:
                    return None
        return False

    def shape(self, expressions: Sequence[int]) -> tuple[int, ...] | None:
        """A shape, or None while one of its sizes is undefined."""
        defined = self.defined
        if not all(defined[e] for e in expressions):
            return None
        values = self.values
        return tuple(int(values[e]) for e in expressions)

    def run(self, frame: int, first: int, last: int) -> None:
        """Runs the native steps in [first, last); `frame` is the address of a Frame."""
        code = self.library.program_run(self.handle, frame, first, last)
        if code:
            kernel = self.program.steps[code >> 3].kernel
            name = kernel.label or kernel.symbol if kernel else "?"
            raise InternalError(f"step {code >> 3} ({name}) cannot run: {_ERRORS[code & 7]}")


def _view(address: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array over native memory, which its owner must outlive."""
    if not count:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    array: NDArray[Any] = np.frombuffer(memory, dtype)
    return array
