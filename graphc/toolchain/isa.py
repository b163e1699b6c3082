"""What code is made for: the targets of a build, and the vector instructions that each may use.

Kernels know three levels of instructions. A target is a level with the exact features its code may
use; only real features count (names as in /proc/cpuinfo), never tuning attributes, so a plan is
refused exactly when it would meet an illegal instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphc.cpu import EXTRA, LEVELS, V2, V3, V4, architecture, features
from graphc.errors import UsageError
from graphc.plan import Machine

#: of kernels, the least demanding first
ISAS = ("portable", "avx2", "avx512")
HOST = "host"
_ISA_OF = {"portable": "portable", "x86-64-v2": "portable", "x86-64-v3": "avx2",
           "x86-64-v4": "avx512"}  # fmt: skip
TARGETS = (HOST, *reversed(LEVELS))


@dataclass(frozen=True)
class Isa:
    """A level and the exact features code for it may use."""

    level: str  # "avx512" | "avx2" | "portable"
    architecture: str  # "x86_64", "aarch64", ...
    features: tuple[str, ...]  # sorted cpuinfo flag names

    @staticmethod
    def detect() -> Isa:
        """The best of this machine.

        Raises:
            UsageError: GRAPHC_CPU is malformed.
        """
        return best(architecture(), features() or frozenset())

    @staticmethod
    def of(target: str) -> Isa:
        """What a target's code may use. It need not run here.

        Raises:
            UsageError: no such target, or none of this machine's architecture.
        """
        if target == HOST:
            return Isa.detect()
        here = architecture()
        if target not in TARGETS or (target.startswith("x86-64") and here != "x86_64"):
            known = TARGETS if here == "x86_64" else (HOST, "portable")
            raise UsageError(
                f"expected a target out of {', '.join(known)}, found {target!r}",
                where="--target",
            )
        return Isa(_ISA_OF[target], here, tuple(sorted(LEVELS[target])))

    @property
    def rank(self) -> tuple[int, int]:
        """Orders what one CPU can run: the greatest is the best."""
        return ISAS.index(self.level), len(self.features)

    def machine(self) -> Machine:
        """What a plan built for it needs of a machine."""
        return Machine(architecture=self.architecture, features=list(self.features), isa=self.level)


def targets(text: str) -> dict[str, Isa]:
    """The targets of a list such as "x86-64-v3,host", the best first; of those that come to the
    same on this machine, the first that is named.

    Raises:
        UsageError: an unknown target, or none.
    """
    made: dict[str, Isa] = {}
    for name in (part.strip() for part in text.split(",")):
        isa = Isa.of(name)
        if isa not in made.values():
            made[name] = isa
    return dict(sorted(made.items(), key=lambda item: item[1].rank, reverse=True))


def best(arch: str, found: frozenset[str]) -> Isa:
    """The best level for a CPU of these features."""
    if arch == "x86_64" and found.issuperset(V4):
        return Isa("avx512", arch, tuple(sorted((*V4, *(f for f in EXTRA if f in found)))))
    if arch == "x86_64" and found.issuperset(V3):
        return Isa("avx2", arch, tuple(sorted(V3)))
    if arch == "x86_64" and found.issuperset(V2):
        return Isa("portable", arch, tuple(sorted(V2)))
    return Isa("portable", arch, ())
