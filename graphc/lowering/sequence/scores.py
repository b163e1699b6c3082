"""Calls that make the scores of a chunk: those with one right operand together, two at a time."""

from __future__ import annotations

from graphc.dsl.tiles import K, Tile
from graphc.lowering.sequence.local import Local


def place(local: Local) -> None:
    """Asks for the rows that scores read."""
    for _, group in _groups(local.scored):
        for node in group:
            for rows in (node.args[1], node.args[0]):
                if node.data[1] == K:
                    local.row_buffer(rows)
                else:
                    local.pack(rows)


def score_code(local: Local) -> list[str]:
    """The calls, after the loop over channels."""
    lines: list[str] = []
    for (b, decay, axis), group in _groups(local.scored):
        while group:
            some = group[:2]
            if axis != K and len(some) == 2 and not _neighbours(local, some):
                some = some[:1]
            group = group[len(some) :]
            lines += _call(local, b, decay, axis, some)
    return lines


def _groups(scored: list[Tile]) -> list[tuple[tuple[Tile, str | None, str], list[Tile]]]:
    found: dict[tuple[Tile, str | None, str], list[Tile]] = {}
    for node in scored:
        found.setdefault((node.args[1], node.data[0], node.data[1]), []).append(node)
    return list(found.items())


def _neighbours(local: Local, some: list[Tile]) -> bool:
    first, second = (local.pack(node.args[0]) for node in some)
    return second == (first[0], first[1] + 1)


def _call(local: Local, b: Tile, decay: str | None, axis: str, some: list[Tile]) -> list[str]:
    count = len(some)
    to = ", ".join(local.matrix(node) for node in some)
    strict = ", ".join("true" if node.data[2] else "false" for node in some)
    common = [f"const bool strict[] = {{{strict}}};", f"float* const to[] = {{{to}}};"]
    if axis == K:
        rows = ", ".join(local.row_buffer(node.args[0]) for node in some)
        call = f"{local.row_buffer(b)}, a, strict, fade_{decay}, ld, to, run"
        lines = [f"const float* const a[] = {{{rows}}};", *common,
                 f"M::template scores_by_channel<{count}>({call});"]  # fmt: skip
    else:
        pack, at = local.pack(b)
        a_pack, a_at = local.pack(some[0].args[0])
        g = f"g_{decay}" if decay is not None else "unfaded"
        call = f"pack{pack}, {at}, pack{a_pack}, {a_at}, strict, {g}, ld, to"
        lines = [*common, f"M::template scores_by_head<{count}>({call});"]
    return ["{", *(f"  {line}" for line in lines), "}"]
