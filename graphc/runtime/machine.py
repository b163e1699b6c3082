"""What this machine is: the check of a plan's CPU needs, and the default number of threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from graphc import cpu
from graphc.cpu import architecture, lacking
from graphc.errors import PlanMismatchError, UsageError

if TYPE_CHECKING:
    from graphc.plan import Target
    from graphc.plan_io import PlanFile


def runnable(file: PlanFile) -> Target:
    """The best target of a plan that this machine runs.

    Raises PlanMismatchError, which names what the machine lacks and how to build for it.
    """
    targets = file.manifest.targets
    lacks: list[str] = []
    for target in targets:
        missing = lacking(target.machine.architecture, target.machine.features)
        if not missing:
            return target
        lacks.append(", ".join(missing))
    level = cpu.level()
    if not any(architecture(t.machine.architecture) == architecture() for t in targets):
        what = f"expected a plan for {architecture()}, found one for {lacks[0]}"
        names = [level]
    elif len(targets) == 1:
        what = f"the plan was built for {_name(targets[0])}; {cpu.told()} lacks {lacks[0]}"
        names = [level]
    else:
        what = f"{cpu.told()} runs none of the plan's targets:" + "".join(
            f"\n    for {_name(target)} it lacks {some}"
            for target, some in zip(targets, lacks, strict=True)
        )
        names = [*(t.name for t in targets if t.name in cpu.LEVELS and t.name != level), level]
    raise PlanMismatchError(
        what, where=file.folder, hint=f"build it for this machine: {file.rebuild(names)}"
    )


def _name(target: Target) -> str:
    return f"{target.name} ({target.machine.isa})"


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
