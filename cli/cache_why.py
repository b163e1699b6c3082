"""`graphc cache why`: which keys miss, the nearest entries, and the fields in which they differ."""

from __future__ import annotations

from dataclasses import asdict

import click

from cache import entry
from cache.key import Key
from cache.store import Store
from cache.why import Nearest, nearest
from cli.render import print_json
from graphc.errors import DamagedError, UsageError
from graphc.store import PAYLOADS


@click.command()
@click.argument("key", required=False)
@click.option("--last", is_flag=True, help="The misses of the last build.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
            f"entry {digest[:12]}: {error}", hint="run: graphc cache verify --repair"
        ) from None
    return label, digest, nearest(store.root, bucket, key, without=digest)


def _lines(near: Nearest | None) -> list[str]:
    if near is None:
        return ["the cache holds no other entry of this kind"]
    return [f"nearest: {near.label} {near.digest[:12]}", *(diff.line() for diff in near.diffs)]


def _as_data(label: str, digest: str, near: Nearest | None) -> dict[str, object]:
    return {"label": label, "key": digest, "nearest": None if near is None else asdict(near)}
