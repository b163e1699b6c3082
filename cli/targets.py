"""The CPUs that a plan was built for, as `inspect` and `build` show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.render import size
from graphc.cpu import lacking, told
from graphc.errors import UsageError

if TYPE_CHECKING:
    from cli.plans import PlanFolder


def targets(folder: PlanFolder) -> list[dict[str, object]]:
    """Each target: what it needs, what this machine lacks for it, and what only it takes of the
    plan's bytes (all of them where there is one target)."""
    records = {record.name: record for record in folder.report.targets}
    made: list[dict[str, object]] = []
    for target in folder.file.manifest.targets:
        machine, begin = target.machine, f"{target.folder}/" if target.folder else ""
        own = sum(n for name, n in folder.file.sizes.items() if name.startswith(begin))
        if begin and target.name in records:
            own += records[target.name].own_weights_bytes
        made.append(
            {
                "name": target.name,
                "isa": machine.isa,
                "features": machine.features,
                "lacking": lacking(machine.architecture, machine.features),
                "shown": target.name == folder.plan.target,
                "own_bytes": own,
            }
        )
    return made


def must_run(text: str) -> None:
    """Refuses targets that are to run here at once, if none can, before anything is built.

    Raises UsageError, also for words that are no targets.
    """
    from graphc.toolchain import isa

    found = isa.targets(text)
    lacks = {name: lacking(level.architecture, level.features) for name, level in found.items()}
    if all(lacks.values()):
        name, missing = list(lacks.items())[-1]
        raise UsageError(
            f"expected a target that runs here, found {name!r}: {told()} lacks "
            f"{', '.join(missing)}",
            where="--target",
            hint="graphc build makes plans for other machines",
        )


def print_targets(folder: PlanFolder, line: str) -> None:
    """A line for each target; `line` begins it."""
    import click

    found = targets(folder)
    for target in found:
        lacks = target["lacking"]
        assert isinstance(lacks, list) and isinstance(target["own_bytes"], int)
        verdict = f"this CPU lacks {', '.join(lacks)}" if lacks else "runs here"
        shown = ", shown" if target["shown"] and len(found) > 1 else ""
        click.echo(
            f"{line}{target['name']} ({target['isa']}): {size(target['own_bytes'])}"
            f"{' of its own' if len(found) > 1 else ''}, {verdict}{shown}"
        )
