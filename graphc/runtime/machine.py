"""What this machine is: the check of a plan's CPU needs, and the default number of threads."""

from __future__ import annotations

import os

from graphc.errors import PlanMismatchError, UsageError
from graphc.plan import Machine

_ALIASES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
_CPUINFO = "/proc/cpuinfo"


def architecture() -> str:
    """This machine's architecture by its usual Linux name ("x86_64", "aarch64")."""
    name = os.uname().machine.lower()
    return _ALIASES.get(name, name)


def cpu_features() -> frozenset[str] | None:
    """Flag names of the first CPU as /proc/cpuinfo spells them; None where that does not exist."""
    try:
        # The file repeats itself per core and costs time per core: the first page is enough.
        with open(_CPUINFO, "rb", buffering=0) as file:
            text = b""
            while b"\n\n" not in text and (more := file.read(8192)):
                text += more
    except OSError:
        return None
    for line in text.decode("ascii", "replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def check_machine(needed: Machine, where: str) -> None:
    """Raises PlanMismatchError, naming what lacks, if a plan's kernels cannot run here."""
    hint = "rebuild the plan on this machine: graphc build"
    wanted = _ALIASES.get(needed.architecture.lower(), needed.architecture.lower())
    if wanted != architecture():
        raise PlanMismatchError(
            f"expected a plan for {architecture()}, found one for {wanted}", where=where, hint=hint
        )
    if not needed.features:
        return
    present = cpu_features()
    if present is None:
        raise PlanMismatchError(
            f"cannot tell whether this CPU has {', '.join(needed.features)}: no {_CPUINFO}",
            where=where,
            hint="build the plan for the portable instruction set",
        )
    missing = [name for name in needed.features if name not in present]
    if missing:
        raise PlanMismatchError(
            f"the plan was built for {needed.isa}; this CPU lacks {', '.join(missing)}",
            where=where,
            hint=hint,
        )


def _cpu_quota() -> int | None:
    """Whole CPUs that the container's quota grants, or None without a quota."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()[:2]
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def default_threads() -> int:
    """$GRAPHC_THREADS, else the CPUs this process may use (affinity and container quota)."""
    text = os.environ.get("GRAPHC_THREADS", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise UsageError(
                f"expected a positive number of threads, found {text!r}",
                where="environment variable GRAPHC_THREADS",
            )
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    return min(cpus, _cpu_quota() or cpus)
