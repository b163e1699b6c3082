"""`graphc cache`: what the kernel cache holds, whether it is sound, and why something missed."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from cache.bundle import Counts, export_bundle, import_bundle
from cache.folder import default_root, parse_size
from cache.listing import Listed, listed, parse_age, prune
from cache.store import Store
from cli.cache_stats import as_stats, print_stats
from cli.cache_why import why
from cli.plans import PlanFolder, unbundled
from cli.render import duration, print_json, print_table, size
from graphc.errors import DamagedError, UsageError

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def cache() -> None:
    """Show, explain, check and carry the kernel cache.

    The folder is $GRAPHC_CACHE_DIR, its size limit $GRAPHC_CACHE_SIZE (5G).
    """


@cache.command()
@as_json_option
def stats(as_json: bool) -> None:
    """What the cache holds, and what look-ups came to so far: hits, misses by reason, losses."""
    store = Store()
    held = listed(store)
    data = as_stats(store, held)
    if as_json:
        print_json(data)
        return
    used = sum(item.bytes for item in held)
    click.echo(f"{store.root}{'' if store.writable else f'  (not writable: {store.obstacle})'}")
    click.echo(f"{size(used)} of {size(store.limit)} ({100 * used / store.limit:.1f}%)")
    print_stats(data)
    _say(store)


@cache.command(name="list")
@as_json_option
def list_(as_json: bool) -> None:
    """Every entry, the one used last at the top."""
    store = Store()
    _print_entries(listed(store), as_json)
    _say(store)


@cache.command()
@click.option("--repair", is_flag=True, help="Drop what is damaged, bring the index in line.")
@as_json_option
def verify(repair: bool, as_json: bool) -> None:
    """Verify every entry and the index; exit 7 if something is left damaged."""
    store = Store()
    findings = store.check(repair)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(("repaired: " if finding.repaired else "damaged: ") + finding.what)
        if not findings:
            click.echo("every entry is sound")
        _say(store)
    left = [finding for finding in findings if not finding.repaired]
    if left:
        raise DamagedError(
            f"{len(left)} damaged",
            where=str(store.root),
            hint="" if repair else "run: graphc cache verify --repair",
        )


@cache.command(name="prune")
@click.option("--max-size", metavar="SIZE", help="Keep at most so much, e.g. 2G or 500M.")
@click.option("--max-age", metavar="AGE", help="Keep what was used within 30d, 12h, 2w, ...")
@click.option("--dry-run", is_flag=True, help="Say what would go, and leave it.")
@as_json_option
def prune_(max_size: str | None, max_age: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove the entries that were used longest ago. Plans that were built keep working."""
    if max_size is None and max_age is None:
        raise UsageError("expected --max-size, --max-age or both")
    most = None if max_size is None else parse_size(max_size, "--max-size")
    oldest = None if max_age is None else parse_age(max_age, "--max-age")
    store = _writable()
    gone = prune(store, most, oldest, dry_run=dry_run)
    total = sum(item.bytes for item in gone)
    if as_json:
        print_json({"removed": len(gone), "nbytes": total, "dry_run": dry_run,
                    "entries": [as_entry(item) for item in gone]})  # fmt: skip
        return
    if dry_run and gone:
        _print_entries(gone, as_json)
    click.echo(f"{'would remove' if dry_run else 'removed'} {len(gone)} entries, {size(total)}")
    _say(store)


@cache.command()
@as_json_option
def clear(as_json: bool) -> None:
    """Remove every entry. Plans that were built keep working."""
    count = _writable().clear()
    if as_json:
        print_json({"removed": count})
        return
    click.echo(f"removed {count} entries")


@cache.command(name="dir")
@as_json_option
def dir_(as_json: bool) -> None:
    """The cache's folder."""
    folder = str(default_root().absolute())
    if as_json:
        print_json({"folder": folder})
        return
    click.echo(folder)


cache.add_command(why)


@cache.command(name="export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Only what this plan is made of.",
)
@as_json_option
def export(file: Path, plan: Path | None, as_json: bool) -> None:
    """Write all kernels into one FILE, to import on another machine."""
    store = Store()
    only = None if plan is None else PlanFolder.open(unbundled(plan)).entries()
    _counts("exported", export_bundle(store, file, only), as_json, "damaged")
    _say(store)


@cache.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
def import_(file: Path, as_json: bool) -> None:
    """Take the kernels of FILE, verified. They are code: import only what you would run."""
    store = Store()
    _counts("imported", import_bundle(store, file), as_json, "already there")
    _say(store)


def _counts(verb: str, counts: Counts, as_json: bool, skipped: str) -> None:
    if as_json:
        print_json(asdict(counts))
        return
    more = f", {counts.skipped} {skipped}" if counts.skipped else ""
    click.echo(f"{verb} {counts.entries} entries, {size(counts.bytes)}{more}")


def _print_entries(entries: list[Listed], as_json: bool) -> None:
    if as_json:
        print_json([as_entry(item) for item in entries])
        return
    rows = [
        (
            item.key[:12], item.bucket, item.label, size(item.bytes), duration(item.seconds),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.used)),
        )
        for item in entries
    ]  # fmt: skip
    print_table(("key", "bucket", "kernel", "size", "made in", "last used"), rows, "   rr")


def as_entry(item: Listed) -> dict[str, object]:
    """The entry as `--json` has it."""
    data = asdict(item)
    return {"nbytes" if name == "bytes" else name: value for name, value in data.items()}


def _writable() -> Store:
    store = Store()
    if not store.writable:
        raise UsageError(f"the cache cannot be written: {store.obstacle}", where=str(store.root))
    return store


def _say(store: Store) -> None:
    for note in store.drain_notes():
        click.echo(note, err=True)
