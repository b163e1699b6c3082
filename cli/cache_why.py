"""`graphc cache why`: what misses, why, the nearest entries and the fields in which they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cache import entry
from cache.counters import REASONS
from cache.lookups import Miss, explain, look_up
from cache.store import Store
from cache.why import Catalogue
from cli.options import BuildOptions, code_options, decoder_options
from cli.render import print_json
from graphc.errors import DamagedError, UsageError
from graphc.store import KERNELS, LINKS, PAYLOADS, Stored
from graphc.toolchain.link import link_fields

if TYPE_CHECKING:
    from graphc.toolchain.lookups import Lookups

_KEY = re.compile(r"[0-9a-fA-F]{2,64}")


@dataclass(frozen=True)
class Answer:
    """What is explained. `lookups` and `hits` are of the build of a model, else None."""

    entries: Sequence[Miss]
    lookups: int | None = None
    hits: int | None = None


@click.command()
@click.argument("what", metavar="[MODEL|KEY]", required=False)
@click.option("--last", is_flag=True, help="The misses of the last build.")
@code_options
@click.option("--generate", is_flag=True, help="As `graphc build --generate`.")
@decoder_options
@click.option("--drafts", type=click.IntRange(2), metavar="K", help="As `graphc build --drafts`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(
    what: str | None,
    last: bool,
    generate: bool,
    chunk: int | None,
    batch: int | None,
    drafts: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the fields in which keys that miss differ from the nearest entries.

    MODEL, with the options of its build: what that build would look up in the cache, and what it
    would not find; nothing is compiled. KEY, or its first digits: how that entry differs from the
    nearest other one.
    """
    if (what is None) == (not last):
        raise UsageError(
            "expected a MODEL, a KEY or --last", hint="`graphc cache list` shows the keys"
        )
    build = BuildOptions(**options)
    sized = bool(chunk or batch or drafts)
    store = Store()
    if what is None or (_KEY.fullmatch(what) and not Path(what).exists()):
        if build != BuildOptions() or generate or sized:
            raise UsageError("expected options of a build only with a MODEL")
        answer = Answer(_last(store) if what is None else [_of(store, what)])
    elif sized and not generate:
        raise UsageError("expected --generate with --chunk, --batch and --drafts")
    else:
        lookups = build.lookups(
            what, generate=generate, chunk=chunk, batch=batch, drafts=drafts, quiet=as_json
        )
        answer = _together([_of_build(store, each) for each in lookups])
        if build.tune:
            click.echo("what --tune never measured here is taken at its default", err=True)
    if as_json:
        print_json(asdict(answer))
    else:
        _print(answer, last)
    for note in store.drain_notes():
        click.echo(note, err=True)


def _of_build(store: Store, lookups: Lookups) -> Answer:
    found = look_up(store, KERNELS, [fields for _, fields in lookups.kernels])
    objects: list[Stored] = [stored for stored in found if stored is not None]
    count, hits = len(found), len(objects)
    missing = explain(
        store, KERNELS, [w for w, s in zip(lookups.kernels, found, strict=True) if s is None]
    )
    if count == hits:  # the library's key is made of the kernels' contents
        library = link_fields(objects, lookups.compiler)
        linked = look_up(store, LINKS, [library])[0]
        count, hits = count + 1, hits + (linked is not None)
        if linked is None:
            missing = explain(store, LINKS, [("library", library)])
    return Answer(missing, count, hits)


def _together(answers: Sequence[Answer]) -> Answer:
    """The answers for all targets of a build."""
    return Answer(
        [miss for answer in answers for miss in answer.entries],
        sum(answer.lookups or 0 for answer in answers),
        sum(answer.hits or 0 for answer in answers),
    )


def _last(store: Store) -> list[Miss]:
    found: list[Miss] = []
    for bucket in PAYLOADS:
        misses = [(label, fields) for b, label, fields in store.last_misses() if b == bucket]
        found += explain(store, bucket, misses)
    return found


def _of(store: Store, start: str) -> Miss:
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
    near = Catalogue(store.root, bucket).nearest(key, without=digest)
    return Miss(label, bucket, digest, "", True, near)


def _print(answer: Answer, last: bool) -> None:
    if answer.lookups is not None:
        click.echo(f"{answer.hits} of {answer.lookups} look-ups hit; nothing was compiled")
    elif last and not answer.entries:
        click.echo("the last build that missed is not recorded: nothing has missed so far")
    for miss in answer.entries:
        told = [REASONS.get(miss.reason, ""), "there now" if miss.made else ""]
        click.echo(f"{miss.label} {miss.key[:12]}: {', '.join(filter(None, told))}")
        for line in _lines(miss):
            click.echo(f"  {line}")


def _lines(miss: Miss) -> list[str]:
    near = miss.nearest
    if near is None:
        return ["the cache holds no other entry of this kind"]
    return [f"nearest: {near.label} {near.digest[:12]}", *(diff.line() for diff in near.diffs)]
