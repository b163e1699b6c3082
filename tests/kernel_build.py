"""Compiles kernel units with g++ for an ISA level, and calls one on guarded memory."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from graphc.cpu import features
from graphc.files import replacing
from graphc.lowering.context import Unit
from graphc.toolchain.isa import ISAS, Isa

KERNELS = Path(__file__).resolve().parents[1] / "graphc" / "kernels"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
]
GUARD = 256  # canary bytes before and after each buffer we allocate
CANARY = 0xA5
#: a target of each ISA level; of the best one that with all that this machine has
TARGET_OF = {"portable": "portable", "avx2": "x86-64-v3", "avx512": "host"}


def isa_flags(isa: str) -> list[str]:
    """Compiler flags of an ISA level ("avx512", "avx2", "portable")."""
    if isa == "portable":
        return ["-march=x86-64"]
    if isa == "avx2":
        return ["-march=x86-64-v3"]
    optional = ("avx512_bf16", "avx512_vnni", "avx512vbmi")
    extra = [f"-m{name.replace('_', '')}" for name in optional if name in (features() or ())]
    return ["-march=x86-64-v4", *extra]


def available_isas() -> tuple[str, ...]:
    """The levels this machine can execute, or GRAPHC_CPU lets it, fastest first."""
    return tuple(reversed(ISAS[: ISAS.index(Isa.detect().level) + 1]))


@cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(command: list[str], target: Path) -> None:
    if target.exists():
        return
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    partial.replace(target)


@cache
def _library(units: tuple[Unit, ...], isa: str) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / f"graphc-kernel-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    flags = [*COMMON_FLAGS, *isa_flags(isa), f"-I{KERNELS}"]
    compiler = os.environ.get("CXX", "g++")
    objects = []
    for unit in units:
        text = "\0".join([compiler, *flags, _headers_digest(), unit.source])
        stem = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        source = stem.with_suffix(".cpp")
        if not source.exists():
            with replacing(source) as file:
                file.write(unit.source.encode())
        _compile([compiler, *flags, "-c", str(source)], stem.with_suffix(".o"))
        objects.append(str(stem.with_suffix(".o")))
    name = hashlib.sha256("\0".join(objects).encode()).hexdigest()[:32]
    target = folder / f"{name}.so"
    _compile([compiler, "-shared", *objects], target)
    return ctypes.CDLL(str(target))


def build(units: Sequence[Unit], isa: str) -> ctypes.CDLL:
    """Compiles the units (each once per content and ISA) and links them into one library."""
    return _library(tuple(dict.fromkeys(units)), isa)


class _Args(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("imm", ctypes.c_void_p), ("scratch", ctypes.c_void_p)]


def call(
    library: ctypes.CDLL,
    symbol: str,
    pointers: Sequence[int | torch.Tensor],
    immediates: Sequence[int],
    pieces: Sequence[tuple[int, int]],
    scratch: int = 0,
) -> None:
    """Calls one kernel over the given half-open ranges; `scratch` is in bytes."""
    addresses = [p.data_ptr() if isinstance(p, torch.Tensor) else p for p in pointers]
    table = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
    numbers = (ctypes.c_int64 * max(1, len(immediates)))(*immediates)
    function = getattr(library, symbol)
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = None
    for begin, end in pieces:
        memory = Memory(scratch)
        args = _Args(
            ctypes.cast(table, ctypes.c_void_p),
            ctypes.cast(numbers, ctypes.c_void_p),
            ctypes.c_void_p(memory.address),
        )
        function(ctypes.byref(args), begin, end)
        memory.check(f"scratch of {symbol}")


class Memory:
    """A 64-byte aligned block of NaN bytes between canaries."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.raw = torch.full((nbytes + 2 * GUARD + 64,), CANARY, dtype=torch.uint8)
        self.start = GUARD + (-(self.raw.data_ptr() + GUARD)) % 64
        self.address = self.raw.data_ptr() + self.start
        self.raw[self.start : self.start + nbytes] = 0xFF

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return self.raw[self.start : self.start + self.nbytes].view(dtype).view(tuple(shape))

    def check(self, what: str) -> None:
        before, after = self.raw[: self.start], self.raw[self.start + self.nbytes :]
        if not bool((before == CANARY).all()) or not bool((after == CANARY).all()):
            raise AssertionError(f"{what}: written out of bounds")


def before_a_forbidden_page(tensor: torch.Tensor) -> tuple[int, object]:
    """A copy of a dense tensor that ends where readable memory ends: reading past it crashes.

    Gives its address and an object that keeps it alive.
    """
    nbytes = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    room = -(-max(nbytes, 1) // page) * page
    area = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(start + room, page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.memmove(start + room - nbytes, tensor.data_ptr(), nbytes)
    return start + room - nbytes, area
