"""Which vector instructions this machine has, in three levels.

Only real instruction-set features count (names as in /proc/cpuinfo), never tuning attributes, so
a plan is refused exactly when it would meet an illegal instruction.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphc.errors import UsageError
from graphc.plan import Machine

LEVELS = ("portable", "avx2", "avx512")

#: x86-64-v3 (with v2), as cpuinfo spells it
AVX2 = ("sse4_1", "sse4_2", "ssse3", "popcnt", "cx16", "lahf_lm", "avx", "avx2", "bmi1", "bmi2",
        "f16c", "fma", "abm", "movbe")  # fmt: skip
#: x86-64-v4
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
#: used by avx512 kernels when present
AVX512_OPTIONAL = ("avx512_vnni", "avx512_bf16", "avx512vbmi", "avx512_vbmi2")

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Isa:
    """A level and the exact features code for it may use."""

    level: str  # "avx512" | "avx2" | "portable"
    architecture: str  # "x86_64", "aarch64", ...
    features: tuple[str, ...]  # sorted cpuinfo flag names

    @staticmethod
    def detect(environ: Mapping[str, str] = os.environ) -> Isa:
        """The best level of this machine, or the lower one that GRAPHC_ISA asks for.

        Raises:
            UsageError: GRAPHC_ISA is unknown or above what this machine has.
        """
        best = _best(architecture(), host_features())
        wanted = environ.get("GRAPHC_ISA", "")
        return best.lowered(wanted) if wanted else best

    def lowered(self, level: str) -> Isa:
        """This machine at `level`, which must not be higher than its own."""
        if level not in LEVELS:
            raise UsageError(
                f"expected an instruction set out of {', '.join(LEVELS)}, found {level!r}",
                where="GRAPHC_ISA or --isa",
            )
        if LEVELS.index(level) > LEVELS.index(self.level):
            needs = AVX512 if level == "avx512" else AVX2
            missing = [f for f in needs if f not in host_features()]
            reason = f"this CPU lacks {', '.join(missing)}" if missing else "GRAPHC_ISA forbids it"
            raise UsageError(
                f"expected an instruction set up to {self.level!r}, found {level!r}; {reason}",
                where="GRAPHC_ISA or --isa",
                hint="leave it out to use the best level of this machine",
            )
        features = frozenset(host_features())
        return _at(level, self.architecture, features)

    def machine(self) -> Machine:
        """What a plan built for this level needs of a machine."""
        return Machine(architecture=self.architecture, features=list(self.features), isa=self.level)


def architecture() -> str:
    """The machine's architecture: "x86_64", "aarch64", ..."""
    name = platform.machine().lower()
    return _ARCHITECTURES.get(name, name)


@cache
def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the CPU; empty where the system does not tell."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def _best(arch: str, features: frozenset[str]) -> Isa:
    if arch == "x86_64" and features.issuperset(AVX512):
        return _at("avx512", arch, features)
    if arch == "x86_64" and features.issuperset(AVX2):
        return _at("avx2", arch, features)
    return _at("portable", arch, features)


def _at(level: str, arch: str, features: frozenset[str]) -> Isa:
    if level == "avx512":
        used = (*AVX512, *(f for f in AVX512_OPTIONAL if f in features))
    else:
        used = AVX2 if level == "avx2" else ()
    return Isa(level, arch, tuple(sorted(used)))
