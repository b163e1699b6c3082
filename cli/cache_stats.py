"""The figures of `graphc cache stats`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from cache.counters import CAUSES, REASONS
from cache.listing import Listed
from cache.store import Store
from cli.render import duration, print_table, size
from graphc.store import GRAPHS, KERNELS, LINKS, PAYLOADS, PCH


def as_stats(store: Store, held: Sequence[Listed]) -> dict[str, Any]:
    """What `--json` prints (docs/json.md)."""
    counts = store.counters.counts()
    reasons = Counter[str]()
    for found in counts.misses.values():
        reasons += found
    buckets = {
        name: {
            "entries": sum(item.bucket == name for item in held),
            "nbytes": sum(item.bytes for item in held if item.bucket == name),
            "hits": counts.hits[name],
            "misses": counts.misses.get(name, Counter()).total(),
            "waits": counts.waits[name],
            "remote_hits": counts.remotes[name],
        }
        for name in PAYLOADS
    }
    return {
        "folder": str(store.root),
        "writable": store.writable,
        "entries": len(held),
        "nbytes": sum(item.bytes for item in held),
        "limit_bytes": store.limit,
        "since": counts.since or None,
        "hits": counts.hits.total(),
        "misses": reasons.total(),
        "waits": counts.waits.total(),
        "remote_hits": counts.remotes.total(),
        "reasons": {reason: reasons[reason] for reason in REASONS},
        "evicted": store.counters.evicted(item.key for item in held),
        **{cause: counts.lost[cause] for cause in CAUSES},
        "saved_s": round(sum(counts.saved[name] for name in (KERNELS, LINKS, PCH)), 3),
        "capture_saved_s": round(counts.saved[GRAPHS], 3),
        "buckets": buckets,
    }


def print_stats(data: dict[str, Any]) -> None:
    """The same for people."""
    rows = [
        (name, b["entries"], size(b["nbytes"]), b["hits"], b["misses"])
        for name, b in data["buckets"].items()
    ]
    print_table(("bucket", "entries", "size", "hits", "misses"), rows, " rrrr")
    hits = data["hits"] + data["remote_hits"]
    looked = hits + data["misses"]
    if not looked:
        click.echo("nothing was looked up so far")
        return
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(data["since"]))
    click.echo(f"{hits} of {looked} look-ups hit ({100 * hits / looked:.1f}%) since {since}")
    if data["remote_hits"]:
        click.echo(f"{data['remote_hits']} of the hits came from the shared tier")
    saved = f"{duration(data['saved_s'])} of compiling"
    if data["capture_saved_s"]:
        saved += f" and {duration(data['capture_saved_s'])} of capturing"
    click.echo(f"{saved} saved")
    if data["waits"]:
        click.echo(f"{data['waits']} of the misses were filled by another process meanwhile")
    missed = [(reason, n, REASONS[reason]) for reason, n in data["reasons"].items() if n]
    if missed:
        print_table(("missed for", "times", ""), missed, " r")
    lost = ", ".join(f"{data[cause]} {cause}" for cause in ("evicted", *CAUSES) if data[cause])
    if lost:
        click.echo(f"entries lost: {lost}")
