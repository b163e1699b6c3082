"""A plan folder for the commands: manifest and report, read without torch and without loading
kernels, so that a plan for another machine can be inspected here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from graphc.errors import UsageError
from graphc.plan import Plan
from graphc.plan_io import MANIFEST, PlanFile, open_plan, own
from graphc.report import BuildReport


@dataclass(frozen=True)
class PlanFolder:
    """A checked plan on disk."""

    path: Path
    file: PlanFile
    plan: Plan

    @staticmethod
    def open(path: Path, target: str = "") -> PlanFolder:
        """The plan for a target; without a name, the best that runs here, else the first.

        Raises UsageError (no plan or no such target there), DamagedError or PlanMismatchError.
        """
        file = open_plan(path)
        return PlanFolder(path, file, file.read(file.target(target)))

    @cached_property
    def report(self) -> BuildReport:
        return BuildReport.load(self.path / own(self.plan, "report.json"))

    def graph_text(self) -> str:
        """The graph after all passes."""
        return (self.path / own(self.plan, "graph.txt")).read_text(encoding="utf-8")

    def entries(self) -> list[str]:
        """The cache's entries that the plan is made of, "bucket/digest".

        Raises UsageError: the plan's build did not note them.
        """
        plans = [self.file.read(target) for target in self.file.manifest.targets]
        reports = [BuildReport.load(self.path / own(plan, "report.json")) for plan in plans]
        keys = list(dict.fromkeys(key for report in reports for key in report.compile.keys))
        if not all(report.compile.keys for report in reports):
            raise UsageError(
                "the plan does not say which entries of the cache it is made of",
                where=str(self.path),
                hint="build it again: graphc build",
            )
        return keys

    def source(self, kernel: str) -> tuple[str, str]:
        """File name and text of the generated source of a kernel: its symbol, the symbol's
        beginning, or its file.

        Raises:
            UsageError: no such kernel.
        """
        from difflib import get_close_matches

        sources = {
            step.kernel.symbol: step.kernel.source
            for program in self.plan.programs
            for step in program.steps
            if step.kernel
        }
        names = {**sources, **{Path(file).name: file for file in sources.values()}}
        begun = [name for name in sources if name.startswith(kernel)]
        file = names.get(kernel) or (sources[begun[0]] if len(begun) == 1 else None)
        if file is None:
            close = begun[:3] or get_close_matches(kernel, names, n=3)
            hint = f"did you mean: {', '.join(close)}?"
            raise UsageError(
                f"expected a kernel of the plan, found {kernel!r}",
                where=str(self.path),
                hint=hint if close else f"graphc inspect {self.path} kernels lists them",
            )
        path = self.path / own(self.plan, file)
        if not path.is_file():
            path = self.path / own(self.plan, f"sources/{file}")
        return path.name, path.read_text(encoding="utf-8")


def unbundled(path: Path) -> Path:
    """The plan's folder: of a bundle, where it is unpacked; else the path itself."""
    from graphc.plan_bundle import is_bundle

    if not path.is_file() or not is_bundle(path):
        return path
    from graphc.api import unpacked

    return unpacked(path)


def is_plan(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def plan_place(model: str, options: object) -> Path:
    """Where `run` puts the plan of a model it builds itself: one folder a model and options."""
    from cache.folder import default_root

    name = str(Path(model).absolute()) if Path(model).exists() else model
    digest = sha256(repr((name, options)).encode()).hexdigest()[:24]
    return default_root() / "plans-v1" / digest
