"""`graphc inspect PLAN precision`: the formats of every class of tensors, with bytes, and the
policy that let them pass."""

from __future__ import annotations

import click

from cli.render import print_table, size
from graphc.report import PrecisionReport, TensorClassRecord


def print_precision(report: PrecisionReport | None) -> None:
    """Two tables: the policy, the classes."""
    if report is None:
        click.echo("built by a graphc that did not say: build the plan again")
        return
    rows = [[one.role, "+".join(one.formats) or "keep", one.origin] for one in report.policy]
    print_table(["role", "may be narrowed to", "says"], rows)
    click.echo()
    columns = ["tensors", "count", "bytes", "a token", "a sequence", "path", "allowed by"]
    print_table(columns, [_row(one) for one in report.classes], "lrrrrll")


def print_states(report: PrecisionReport | None) -> None:
    """What a plan keeps of sequences: a table, nothing where it keeps nothing."""
    found = [one for one in report.classes if one.place == "states"] if report else []
    if not found:
        return
    columns = ["states", "count", "bytes", "a token", "of plain", "a sequence", "kept as"]
    print_table(columns, [_state(one) for one in found], "lrrrrrl")
    click.echo()


def _state(one: TensorClassRecord) -> list[object]:
    token, plain = one.token_nbytes, one.plain_token_nbytes
    return [
        one.kind,
        one.tensors,
        size(one.nbytes),
        f"{token:g} B" if token else "",
        f"{token / plain:.3f} x" if plain else "",
        size(one.bucket_nbytes) if one.bucket_nbytes else "",
        one.path.split(" -> ")[1] if token and " -> " in one.path else one.path.split(" -> ")[0],
    ]


def _row(one: TensorClassRecord) -> list[object]:
    kind = f"{one.kind}, {one.phase} {one.bucket}" if one.bucket else one.kind
    return [
        kind,
        one.tensors,
        size(one.nbytes) if one.place != "registers" else one.place,
        f"{one.token_nbytes:g} B" if one.token_nbytes else "",
        size(one.bucket_nbytes) if one.bucket_nbytes else "",
        one.path,
        one.allowed,
    ]
