"""What this machine can do at best, measured once: the roof of every roofline.

`measure` runs the loops of graphc/kernels/calibrate.cpp; `save` and `measured` keep the answer in
a folder under the CPU's key. `graphc.api.calibrate()` does all of it, `graphc.api.measured()` gives
what is known.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from graphc.cpu import architecture, features
from graphc.errors import DamagedError
from graphc.files import replacing
from graphc.runtime.machine import default_threads

FORMAT = 1
#: folder inside graphc's cache folder
FOLDER = "machine-v1"
KINDS = ("fp32", "bf16", "int8")

#: numbers of calibrate.cpp
_FP32, _BF16, _INT8, _READ, _WRITE, _COPY, _WRITE_STREAMING, _COPY_STREAMING = range(8)
#: the best of so many rounds of so long; several threads are undisturbed at once less often
_ALONE, _TOGETHER = (12, 0.008), (24, 0.004)
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_INSTRUCTIONS = ("avx", "fma", "sse", "ssse", "amx", "asimd", "sve", "f16c")

Progress = Callable[[str, int, int], None]


class Level(msgspec.Struct, frozen=True):
    """A level of memory: "L1", "L2", "L3" or "DRAM"; GB/s of all threads together.

    capacity: bytes of one such cache (0: no limit), shared by `shared` CPUs. working_set: bytes
    each thread went over. copy counts the bytes read and those written.
    """

    name: str
    capacity: int
    shared: int
    working_set: int
    read: float
    write: float
    copy: float


class Rates(msgspec.Struct, frozen=True):
    """Peaks of `threads` threads together: GFLOP/s (a multiply-add is two) and levels of memory,
    the nearest first. bf16 and int8 are dot products with fp32 and int32 sums; 0 where the CPU has
    no instruction for them."""

    threads: int
    fp32: float
    bf16: float
    int8: float
    levels: list[Level]


class Peaks(msgspec.Struct, frozen=True):
    """The measured peaks of a machine: one thread, and a thread for each CPU. `runs` counts the
    calibrations they are the best of."""

    cpu: str
    key: dict[str, str]
    one: Rates
    all: Rates
    runs: int = 1
    format: int = FORMAT

    def best(self, other: Peaks | None) -> Peaks:
        """The higher figure of two calibrations of one CPU: nothing runs faster than it can, and
        much runs slower on a busy machine. Of those of all CPUs, more threads count."""
        if other is None or other.key != self.key:
            return self
        return Peaks(
            self.cpu, self.key, _best_rates(self.one, other.one), _best_rates(self.all, other.all),
            self.runs + other.runs,
        )  # fmt: skip

    def gflops(self, kind: str, threads: int) -> float:
        """Peak of "fp32", "fp64", "bf16" or "int8" arithmetic in GFLOP/s. Where the CPU has no
        instruction for a format, that of fp32: such kernels widen. fp64 goes half as fast."""
        if kind == "fp64":
            return self.gflops("fp32", threads) / 2
        one = float(getattr(self.one, kind)) or self.one.fp32
        most = float(getattr(self.all, kind)) or self.all.fp32
        return min(threads * one, max(most, one))

    def level(self, nbytes: int, threads: int) -> Level:
        """The nearest level that holds `nbytes`, with what `threads` threads get of it."""
        for one, most in zip(self.one.levels, self.all.levels, strict=True):
            # a cache of its own for each thread, or one for all that share it
            room = one.capacity * max(1, threads // max(1, one.shared))
            if not one.capacity or nbytes <= room:
                return Level(
                    one.name, one.capacity, one.shared, one.working_set,
                    *(
                        min(threads * alone, max(together, alone))
                        for alone, together in (
                            (one.read, most.read), (one.write, most.write), (one.copy, most.copy),
                        )
                    ),
                )  # fmt: skip
        raise AssertionError("the last level has no limit")


def _best_rates(new: Rates, old: Rates) -> Rates:
    if new.threads != old.threads:
        return max(new, old, key=lambda rates: rates.threads)
    if [_place(level) for level in new.levels] != [_place(level) for level in old.levels]:
        return new
    levels = [
        msgspec.structs.replace(
            x, read=max(x.read, y.read), write=max(x.write, y.write), copy=max(x.copy, y.copy)
        )
        for x, y in zip(new.levels, old.levels, strict=True)
    ]
    return Rates(
        new.threads, max(new.fp32, old.fp32), max(new.bf16, old.bf16), max(new.int8, old.int8),
        levels,
    )  # fmt: skip


def _place(level: Level) -> tuple[str, int, int, int]:
    """What must agree for two measurements of a level to be compared."""
    return level.name, level.capacity, level.shared, level.working_set


class Calibrator:
    """The measuring loops, from a shared library made of calibrate.cpp."""

    def __init__(self, library: Path) -> None:
        try:
            self._call = ctypes.CDLL(str(library)).gc_calibrate
        except (OSError, AttributeError) as error:
            raise DamagedError(
                f"cannot load the calibration: {error}", where=str(library)
            ) from None
        self._call.restype = ctypes.c_double
        self._call.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_double]

    def rate(self, kind: int, nbytes: int, threads: int) -> float:
        """1e9 operations or bytes a second, to four digits; MemoryError without memory."""
        found = float(self._call(kind, nbytes, threads, *(_ALONE if threads == 1 else _TOGETHER)))
        if found < 0:
            raise MemoryError(f"no {threads} x {nbytes} bytes to measure memory with")
        return float(f"{found / 1e9:.4g}")


def measure(
    library: Path, *, threads: int | None = None, progress: Progress | None = None
) -> Peaks:
    """Measures this machine, in a few seconds. One thread is timed by its own CPU time, more by
    the clock: they should have the machine to themselves."""
    calibrator = Calibrator(library)
    most = threads or default_threads()
    caches = cache_levels()
    counts = [1] if most == 1 else [1, most]
    total, done = len(counts) * (3 + 3 * (len(caches) + 1)), 0

    def rate(kind: int, what: str, nbytes: int, count: int) -> float:
        nonlocal done
        if progress is not None:
            progress(f"{what}, {count} thread{'s'[: count > 1]}", done, total)
        done += 1
        return calibrator.rate(kind, nbytes, count)

    made: list[Rates] = []
    for count in counts:
        flops = [rate(kind, name, 0, count) for kind, name in enumerate(KINDS)]
        levels = [
            _level(rate, calibrator, name, capacity, shared, nbytes, count)
            for (name, capacity, shared), nbytes in zip(
                [*caches, ("DRAM", 0, 1)], _working_sets(caches, count), strict=True
            )
        ]
        made.append(Rates(count, flops[0], flops[1], flops[2], levels))
    return Peaks(cpu_name(), cpu_key(), made[0], made[-1])


def _level(
    rate: Callable[[int, str, int, int], float],
    calibrator: Calibrator,
    name: str,
    capacity: int,
    shared: int,
    nbytes: int,
    threads: int,
) -> Level:
    read, write, copy = (
        rate(kind, f"{name} {what}", nbytes, threads)
        for kind, what in ((_READ, "read"), (_WRITE, "write"), (_COPY, "copy"))
    )
    if not capacity:  # stores that pass the caches by
        write = max(write, calibrator.rate(_WRITE_STREAMING, nbytes, threads))
        copy = max(copy, calibrator.rate(_COPY_STREAMING, nbytes, threads))
    return Level(name, capacity, shared, nbytes, read, write, copy)


def cache_levels(folder: Path = _CACHES) -> list[tuple[str, int, int]]:
    """(name, bytes, CPUs that share it) of the data caches, nearest first. A machine that does not
    tell is taken to have 32 KB and 1 MB."""
    found: dict[int, tuple[str, int, int]] = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size, shared = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
                nbytes = int(size.rstrip("KMG")) * units.get(size[-1:], 1)
                found[int(level)] = (f"L{level}", nbytes, _count(shared))
        except (OSError, ValueError):
            continue
    fallback = [("L1", 32 << 10, 1), ("L2", 1 << 20, 1)]
    return [found[level] for level in sorted(found)] or fallback


def _count(cpus: str) -> int:
    """How many CPUs a list such as "0-3,8" names."""
    ends = [part.partition("-") for part in cpus.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends) or 1


def _working_sets(caches: list[tuple[str, int, int]], threads: int) -> list[int]:
    """Bytes each thread goes over to meet a level: half of a cache of its own; a quarter of its
    part of a shared one, yet more than the level before holds; several times all caches."""
    sets: list[int] = []
    inner = 0
    for _, capacity, shared in caches:
        users = min(shared, threads)
        part = capacity // 2 if shared == 1 else min(capacity // (4 * users), 8 << 20)
        sets.append(max(part, 2 * inner))
        inner = capacity
    # 256 MB or four times the last cache, among all threads, and never most of the memory
    wanted = max(256 << 20, 4 * inner) // threads
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (8 * threads)
    return [*sets, max(min(max(wanted, 64 << 20), limit), 2 * inner)]


def cpu_name() -> str:
    """The CPU's name as /proc/cpuinfo tells it, else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            fields = dict(_pair(line) for line in lines)
    except OSError:
        fields = {}
    parts = [fields.get(name, "") for name in ("model name", "CPU implementer", "CPU part")]
    name = " ".join(part for part in parts if part)
    family = [fields[n] for n in ("cpu family", "model", "stepping") if n in fields]
    return " ".join([name or architecture(), *([f"({'/'.join(family)})"] if family else [])])


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def cpu_key() -> dict[str, str]:
    """What the figures belong to: model, instructions, number of CPUs."""
    return {
        "cpu": cpu_name(),
        "architecture": architecture(),
        "features": " ".join(sorted(f for f in features() or () if f.startswith(_INSTRUCTIONS))),
        "cpus": str(os.cpu_count() or 1),  # of the machine: pinning must not hide what is known
    }


def key_digest(key: dict[str, str]) -> str:
    """Name of the files that belong to a CPU."""
    return hashlib.sha256(msgspec.json.encode(sorted(key.items()))).hexdigest()[:24]


def measured(folder: Path) -> Peaks | None:
    """This machine's peaks as `save` left them in `folder`; None if it was never measured here
    (or what was written is of another version)."""
    try:
        data = (folder / FOLDER / f"{key_digest(cpu_key())}.json").read_bytes()
        peaks = msgspec.json.decode(data, type=Peaks)
    except (OSError, msgspec.DecodeError):
        return None
    return peaks if peaks.format == FORMAT and peaks.key == cpu_key() else None


def save(peaks: Peaks, folder: Path) -> Path:
    """Keeps measured peaks in `folder`, atomically; gives the file. Raises OSError."""
    place = folder / FOLDER
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = place / f"{key_digest(peaks.key)}.json"
    with replacing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(peaks), indent=1) + b"\n")
    return path
