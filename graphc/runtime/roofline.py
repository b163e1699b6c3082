"""The least time each Step of a plan can take here: its work against the machine's peaks.

A Step needs at least the time of its operations at the peak of their format, and at least that of
its bytes at the speed of the memory they are in. Which memory that is follows from two sizes: what
stays across runs (weights, states, inputs) is in the nearest level that holds all that a run
touches; what the run made itself, in the nearest that holds all bytes of the Step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphc.plan import Plan, PlanWork, StepWork
from graphc.runtime.calibration import Level, Peaks
from graphc.runtime.expressions import known


@dataclass(frozen=True)
class StepBound:
    """The work of one Step at given lengths (None: unknown), and the least seconds it takes.

    limit: what bounds it: "fp32", "fp64", "bf16", "int8", or a level of memory such as "L2" and
    "DRAM"; "" if the machine was not measured or the work is unknown.
    """

    index: int
    kernel: str
    label: str
    place: str
    arithmetic: str
    flops: int | None
    kept: int | None
    read: int | None
    written: int | None
    seconds: float | None
    limit: str

    @property
    def nbytes(self) -> int | None:
        """All bytes it moves, each once."""
        parts = (self.kept, self.read, self.written)
        return None if None in parts else sum(part or 0 for part in parts)

    @property
    def computes(self) -> bool:
        """Whether arithmetic bounds it, not memory."""
        return self.limit in ("fp32", "fp64", "bf16", "int8")


def choose_program(plan: Plan, symbols: Mapping[str, int]) -> int | None:
    """The smallest program whose limits hold for these lengths; None if there is none."""
    fitting = [
        index
        for index, program in enumerate(plan.programs)
        if all(value <= program.limits.get(name, value) for name, value in symbols.items())
    ]
    return min(
        fitting,
        key=lambda i: math.prod(plan.programs[i].limits.get(name, 1) for name in symbols),
        default=None,
    )


def step_bounds(
    plan: Plan,
    program: int,
    work: PlanWork,
    symbols: Mapping[str, int],
    peaks: Peaks | None,
    threads: int,
) -> list[StepBound]:
    """One bound for each Step of a program, at the lengths `symbols` with so many threads."""
    side = work.sides[work.programs[program]]
    order = [symbols.get(symbol.name) for symbol in plan.symbols]
    values = [known(expression, order) for expression in side.expressions]

    def value(index: int) -> int | None:
        return values[index] if index >= 0 else None

    sizes = [(value(w.kept), value(w.read), value(w.written)) for w in side.steps]
    touched = sum(kept or 0 for kept, _, _ in sizes)
    touched += max(((read or 0) + (written or 0) for _, read, written in sizes), default=0)
    made: list[StepBound] = []
    for index, (step, one) in enumerate(zip(plan.programs[program].steps, side.steps, strict=True)):
        if step.kernel is not None:
            kernel, label = step.kernel.symbol, step.kernel.label or step.kernel.symbol
        else:
            assert step.fallback is not None
            kernel, label = step.fallback.target, step.fallback.label or step.fallback.target
        flops, (kept, read, written) = value(one.flops), sizes[index]
        seconds, limit = None, ""
        if peaks is not None and kept is not None and read is not None and written is not None:
            seconds, limit = least_time(
                one.arithmetic, flops or 0, kept, read, written, touched, peaks, threads
            )
        made.append(
            StepBound(
                index, kernel, label, _place(work, one), one.arithmetic, flops, kept, read,
                written, seconds, limit,
            )
        )  # fmt: skip
    return made


def _place(work: PlanWork, step: StepWork) -> str:
    return work.places[step.place] if step.place >= 0 else ""


def least_time(
    arithmetic: str,
    flops: int,
    kept: int,
    read: int,
    written: int,
    touched: int,
    peaks: Peaks,
    threads: int,
) -> tuple[float, str]:
    """Seconds that no implementation can go below at the measured peaks, and what says so.
    `touched`: bytes that a whole run goes over."""
    near = peaks.level(kept + read + written, threads)
    far = peaks.level(max(touched, kept + read + written), threads)
    choices = [
        (flops / 1e9 / peaks.gflops(arithmetic, threads), arithmetic),
        (_stream(near, kept + read, written), near.name),
        (_stream(far, kept, 0), far.name),
    ]
    return max(choices, key=lambda choice: choice[0])


def _stream(level: Level, read: int, written: int) -> float:
    """The most of what reading, writing and both together need at the least."""
    both = max(level.read, level.write, level.copy)
    return max(read / level.read, written / level.write, (read + written) / both) / 1e9


def total(bounds: Sequence[StepBound]) -> float:
    """Least seconds of all Steps whose work is known, one after the other."""
    return sum(bound.seconds or 0.0 for bound in bounds)
