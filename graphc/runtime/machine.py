"""What this machine is: the check of a plan's CPU needs, and the default number of threads."""

from __future__ import annotations

import os

from graphc.cpu import architecture, lacking
from graphc.errors import PlanMismatchError, UsageError
from graphc.plan import Machine


def check_machine(needed: Machine, where: str) -> None:
    """Raises PlanMismatchError, naming what lacks, if a plan's kernels cannot run here."""
    hint = "rebuild the plan on this machine: graphc build"
    missing = lacking(needed.architecture, needed.features)
    if not missing:
        return
    if architecture(needed.architecture) != architecture():
        raise PlanMismatchError(
            f"expected a plan for {architecture()}, found one for {missing[0]}",
            where=where,
            hint=hint,
        )
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
