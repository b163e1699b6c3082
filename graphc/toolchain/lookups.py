"""What a build would look up in the cache: it goes as far as the keys of its kernels, and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphc.store import Fields
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa
from graphc.toolchain.sources import kernel_fields

if TYPE_CHECKING:  # sympy, which it needs, takes long to import
    from graphc.lowering.context import Unit


@dataclass(frozen=True)
class Lookups:
    """Of one target. kernels: name and fields of the key of every kernel, in the order of the
    library. compiler: the one that would make them."""

    kernels: tuple[tuple[str, Fields], ...]
    compiler: Compiler


class LookupsOnly(Exception):
    """Ends a build that was asked for its look-ups only, of each target, before anything is
    compiled or written."""

    def __init__(self, lookups: tuple[Lookups, ...]) -> None:
        super().__init__("the build was to end with its look-ups")
        self.lookups = lookups


def lookups(units: Sequence[Unit], isa: Isa, compiler: Compiler) -> Lookups:
    """The look-ups of a build of these units for one target."""
    return Lookups(tuple((u.name, kernel_fields(u, isa, compiler)) for u in units), compiler)
