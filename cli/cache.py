"""`graphc cache`: what the kernel cache holds, whether it is sound, and why something missed."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from cache import entry
from cache.bundle import Counts, export_bundle, import_bundle
from cache.key import Key
from cache.store import Store
from cache.why import Nearest, nearest
from cli.plans import PlanFolder
from cli.render import duration, print_json, print_table, size
from graphc.errors import DamagedError, UsageError
from graphc.store import PAYLOADS

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def cache() -> None:
    """Show, explain, check and carry the kernel cache.

    The folder is $GRAPHC_CACHE_DIR, its size limit $GRAPHC_CACHE_SIZE (5G).
    """


@cache.command()
@as_json_option
def info(as_json: bool) -> None:
    """Folder, size, number of entries, and look-ups so far."""
    store = Store()
    buckets = {bucket: _volume(store, bucket) for bucket in PAYLOADS}
    used = sum(nbytes for _, nbytes in buckets.values())
    hits, misses = store.lookups()
    notes = store.drain_notes()
    data = {
        "folder": str(store.root),
        "writable": store.writable,
        "bytes": used,
        "limit": store.limit,
        "buckets": {
            name: {"entries": count, "bytes": nbytes} for name, (count, nbytes) in buckets.items()
        },
        "hits": hits,
        "misses": misses,
        "notes": notes,
    }
    if as_json:
        print_json(data)
        return
    click.echo(f"{store.root}{'' if store.writable else f'  (not writable: {store.obstacle})'}")
    click.echo(f"{size(used)} of {size(store.limit)} ({100 * used / store.limit:.1f}%)")
    rows = [(name, count, size(nbytes)) for name, (count, nbytes) in buckets.items()]
    print_table(("bucket", "entries", "size"), rows, " rr")
    if hits + misses:
        share = 100 * hits / (hits + misses)
        click.echo(f"look-ups: {hits} of {hits + misses} hit ({share:.1f}%)")
    for note in notes:
        click.echo(note, err=True)


@cache.command(name="list")
@as_json_option
def list_(as_json: bool) -> None:
    """Every entry, the one used last at the top."""
    store = Store()
    entries = _entries(store)
    if as_json:
        print_json(entries)
        return
    rows = [
        (
            str(item["key"])[:12],
            item["bucket"],
            item["label"],
            size(int(str(item["bytes"]))),
            duration(float(str(item["seconds"]))),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(item["used"])))),
        )
        for item in entries
    ]
    columns = ("key", "bucket", "kernel", "size", "made in", "last used")
    print_table(columns, rows, "   rr")
    _say(store)


@cache.command()
@click.option("--repair", is_flag=True, help="Drop what is damaged, bring the index in line.")
@as_json_option
def check(repair: bool, as_json: bool) -> None:
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
            hint="" if repair else "run: graphc cache check --repair",
        )


@cache.command()
@as_json_option
def clear(as_json: bool) -> None:
    """Remove every entry. Plans that were built keep working."""
    store = Store()
    if not store.writable:
        raise UsageError(f"the cache cannot be written: {store.obstacle}", where=str(store.root))
    count = store.clear()
    if as_json:
        print_json({"removed": count})
        return
    click.echo(f"removed {count} entries")


@cache.command()
@click.argument("key", required=False)
@click.option("--last", is_flag=True, help="The misses of the last build.")
@as_json_option
def why(key: str | None, last: bool, as_json: bool) -> None:
    """Name the fields in which KEY (or its first digits) differs from the nearest other entry."""
    store = Store()
    if (key is None) == (not last):
        raise UsageError("expected a KEY or --last", hint="`graphc cache list` shows the keys")
    found = _last(store) if key is None else [_of(store, key)]
    if as_json:
        print_json([_as_data(*item) for item in found])
        return
    if not found:
        click.echo("the last build that missed is not recorded: nothing has missed so far")
    for label, digest, near in found:
        click.echo(f"{label} {digest[:12]}")
        for line in _lines(near):
            click.echo(f"  {line}")


@cache.command(name="export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--plan",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Only what this plan is made of.",
)
@as_json_option
def export(file: Path, plan: Path | None, as_json: bool) -> None:
    """Write all kernels into one FILE, to import on another machine."""
    store = Store()
    only = None if plan is None else PlanFolder.open(plan).entries()
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


def _volume(store: Store, bucket: str) -> tuple[int, int]:
    count = total = 0
    for digest in entry.digests(store.root, bucket):
        try:
            total += entry.read_meta(entry.folder(store.root, bucket, digest)).bytes
        except (OSError, entry.Damage):
            continue
        count += 1
    return count, total


def _entries(store: Store) -> list[dict[str, object]]:
    used = store.used()
    found: list[tuple[float, dict[str, object]]] = []
    for bucket in PAYLOADS:
        for digest in entry.digests(store.root, bucket):
            place = entry.folder(store.root, bucket, digest)
            try:
                meta = entry.read_meta(place)
                when = used.get(digest) or place.stat().st_mtime
            except (OSError, entry.Damage):
                continue
            item = {"key": digest, "bucket": bucket, "label": meta.label, "bytes": meta.bytes}
            found.append((when, {**item, "seconds": meta.seconds, "used": when}))
    return [item for _, item in sorted(found, key=lambda pair: -pair[0])]


def _last(store: Store) -> list[tuple[str, str, Nearest | None]]:
    keys = [(label, bucket, Key(fields)) for bucket, label, fields in store.last_misses()]
    return [
        (label, key.digest, nearest(store.root, bucket, key, without=key.digest))
        for label, bucket, key in keys
    ]


def _of(store: Store, start: str) -> tuple[str, str, Nearest | None]:
    matches = [
        (bucket, digest)
        for bucket in PAYLOADS
        for digest in entry.digests(store.root, bucket)
        if digest.startswith(start.lower())
    ]
    if len(matches) != 1:
        raise UsageError(
            f"expected the key of one entry, found {len(matches)} that start with {start!r}",
            where=str(store.root),
            hint="`graphc cache list` shows the keys",
        )
    bucket, digest = matches[0]
    place = entry.folder(store.root, bucket, digest)
    try:
        key, label = entry.read_key(place), entry.read_meta(place).label
    except entry.Damage as error:
        raise DamagedError(
            f"entry {digest[:12]}: {error}", hint="run: graphc cache check --repair"
        ) from None
    return label, digest, nearest(store.root, bucket, key, without=digest)


def _lines(near: Nearest | None) -> list[str]:
    if near is None:
        return ["the cache holds no other entry of this kind"]
    return [f"nearest: {near.label} {near.digest[:12]}", *(diff.line() for diff in near.diffs)]


def _as_data(label: str, digest: str, near: Nearest | None) -> dict[str, object]:
    return {"label": label, "key": digest, "nearest": None if near is None else asdict(near)}


def _say(store: Store) -> None:
    for note in store.drain_notes():
        click.echo(note, err=True)
