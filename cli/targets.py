"""The CPUs that a plan was built for, as `inspect` and `build` show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.render import size
from graphc.cpu import lacking

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
