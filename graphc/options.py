"""How a model becomes a plan: the options of a build, and which of them decide what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from graphc.report import StageRecord

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How a captured graph becomes a plan.

    disable_pass: passes left out, by name. pass_options: "name{key=value}". verify: every pass is
    checked numerically. dump_passes: folder for the graph after each pass. target: the CPUs to
    build for (`graphc.toolchain.isa.targets`). jobs: compiler processes at a time. tune: choices
    that kernels leave open are measured on this machine, or taken from the cache if they were.
    quant: what is narrowed, words of `graphc.quantization`. fresh: the model is captured anew,
    whatever earlier builds left in the cache. lookups_only: the build ends with `LookupsOnly`,
    which says what it would look up in the cache, before anything is compiled or measured.
    command: what follows `graphc build` for the same plan; empty where no command can say it.
    precision: what may be narrowed, "index=mxfp8,cache=keep"; roles it leaves out are those of
    shapes.yaml (`graphc.precision`).
    """

    shapes: Path | None = None
    phase: str | None = None
    buckets: Sequence[str] = ()
    disable_pass: Sequence[str] = ()
    pass_options: Sequence[str] = ()
    verify: bool = False
    dump_passes: Path | None = None
    require_cached: bool = False
    jobs: int | None = None
    target: str = "host"
    progress: Progress | None = None
    stages: Sequence[StageRecord] = field(default_factory=tuple)
    tune: bool = False
    quant: Sequence[str] = ()
    precision: str = ""
    fresh: bool = False
    lookups_only: bool = False
    command: Sequence[str] = ()

    def words(self) -> list[str]:
        """These options as the command line has them, those that decide what the plan is; target
        and folder apart."""
        several = (
            ("--bucket", self.buckets), ("--disable-pass", self.disable_pass),
            ("--pass", self.pass_options), ("--quant", self.quant),
        )  # fmt: skip
        single = (
            ("--shapes", self.shapes), ("--phase", self.phase), ("--precision", self.precision),
        )  # fmt: skip
        words = [word for name, values in several for value in values for word in (name, value)]
        words += [word for name, value in single if value for word in (name, str(value))]
        return [*words, *(["--tune"] if self.tune else [])]


#: what says how a build runs, not what comes out
NOT_DECISIVE = {
    "verify", "dump_passes", "require_cached", "jobs", "progress", "stages", "tune", "shapes",
    "fresh", "lookups_only",
}  # fmt: skip


def shapes_digest(options: Options) -> str:
    """SHA-256 of the shapes file that is used; "" if it is not there."""
    from graphc.plan_io import file_digest
    from graphc.shapes import find_file

    shapes = find_file(options.shapes)
    return file_digest(shapes) if shapes.is_file() else ""


def decisive(options: Options, **further: object) -> dict[str, object]:
    """All that decides which plan comes out of a model, as plain JSON."""
    made: dict[str, object] = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in NOT_DECISIVE
    }
    return {**made, "shapes": shapes_digest(options), **further}
