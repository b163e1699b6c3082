"""What this machine's CPU can do for a program: instructions that it has and whose registers the
operating system saves. Features are named as /proc/cpuinfo spells them.

GRAPHC_CPU narrows the machine, to see what another one would do: a level (`x86-64-v3`) or `host`,
and behind it features to take away (`host,-avx512_bf16`). What is taken away is neither built for
nor found when a plan is loaded.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from graphc.errors import UsageError

#: features of the levels of x86-64, as its psABI defines them
V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
V3 = (*V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
#: further features that kernels make use of where a CPU has them
EXTRA = ("avx512_vnni", "avx512_bf16", "avx512vbmi", "avx512_vbmi2")
LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (), "x86-64-v2": V2, "x86-64-v3": V3, "x86-64-v4": V4,
}  # fmt: skip
VARIABLE = "GRAPHC_CPU"

_CPUINFO = "/proc/cpuinfo"
_ALIASES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
# bits of XCR0 (Intel 64 SDM, volume 1, section 13.1)
_YMM, _ZMM = 0x6, 0xE6
_IN_YMM = ("f16c", "fma")
# the request that tells them (Linux 5.16, arch/x86/include/uapi/asm/prctl.h) and its system call
_ARCH_PRCTL, _GET_XCOMP_PERM = 158, 0x1022


def architecture(name: str | None = None) -> str:
    """This machine's architecture (or that of another name for it) as Linux calls it: "x86_64",
    "aarch64"."""
    name = (name or os.uname().machine).lower()
    return _ALIASES.get(name, name)


def features() -> frozenset[str] | None:
    """What programs may use of this CPU, narrowed by GRAPHC_CPU; None where nothing tells.

    Raises UsageError: GRAPHC_CPU names what is unknown, or a level above the CPU's own.
    """
    found = detected()
    text = os.environ.get(VARIABLE, "")
    return narrowed(found or frozenset(), text) if text else found


def lacking(wanted: str, needs: tuple[str, ...] | list[str]) -> list[str]:
    """Which of `needs` this machine lacks to run code for the architecture `wanted`; the
    architecture itself if it is another."""
    if architecture(wanted) != architecture():
        return [architecture(wanted)]
    if not needs:
        return []
    present = features() or frozenset()
    return [name for name in needs if name not in present]


def level() -> str:
    """The highest level that this machine has; "host" where levels have no names."""
    if architecture() != "x86_64":
        return "host"
    return next(name for name in reversed(LEVELS) if not lacking("x86_64", LEVELS[name]))


def told() -> str:
    """How to speak of this CPU: what is narrowed must not pass for what it is."""
    text = os.environ.get(VARIABLE, "")
    if detected() is None:
        return f"this CPU, of which {_CPUINFO} does not tell what it has,"
    return f"this CPU (as {VARIABLE}={text} narrows it)" if text else "this CPU"


def narrowed(found: frozenset[str], text: str) -> frozenset[str]:
    """`found` as GRAPHC_CPU says."""
    level, *removed = (part.strip() for part in text.split(","))
    known = (*V4, *EXTRA)
    if (level not in LEVELS and level != "host") or any(
        part[:1] != "-" or part[1:] not in known for part in removed
    ):
        raise UsageError(
            f"expected a level and features to take away, found {text!r}",
            where=f"environment variable {VARIABLE}",
            hint=f"for example host,-avx512_bf16; levels: host, {', '.join(reversed(LEVELS))}; "
            f"features: {', '.join(known)}",
        )
    if level != "host":
        missing = [name for name in LEVELS[level] if name not in found]
        if missing:
            raise UsageError(
                f"expected a level that this CPU has, found {level!r}: it lacks "
                f"{', '.join(missing)}",
                where=f"environment variable {VARIABLE}",
            )
        found &= frozenset(LEVELS[level])
    return found - {part[1:] for part in removed}


@cache
def detected() -> frozenset[str] | None:
    """What the CPU has and the system supports; None where the system does not tell."""
    try:
        # The file repeats itself per core and costs time per core: the first page is enough.
        with open(_CPUINFO, "rb", buffering=0) as file:
            text = b""
            while b"\n\n" not in text and (more := file.read(8192)):
                text += more
    except OSError:
        return None
    flags = _flags(text.decode("ascii", "replace"))
    return None if flags is None else supported(flags, _saved())


def supported(flags: frozenset[str], saved: int | None) -> frozenset[str]:
    """`flags` without those whose registers are lost when the system switches programs. saved: as
    XCR0 of the CPU; None if unknown."""
    if saved is None:
        return flags
    without = set()
    for name in flags:
        needs = _ZMM if name.startswith("avx512") else _YMM
        if (name.startswith("avx") or name in _IN_YMM) and saved & needs != needs:
            without.add(name)
    return flags - without


def _flags(text: str) -> frozenset[str] | None:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def _saved() -> int | None:
    """The register sets that the kernel saves for this process; None where it does not say, which
    are kernels that leave out of cpuinfo what they do not support."""
    if not (sys.platform == "linux" and architecture() == "x86_64" and sys.maxsize > 1 << 32):
        return None
    import ctypes

    mask = ctypes.c_uint64()
    done = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _GET_XCOMP_PERM, ctypes.byref(mask))
    return None if done else mask.value
