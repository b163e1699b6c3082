"""The policy of mixed precision: which roles of values may be narrowed, and to which formats.

    precision:
      index: mxfp8
      cache: fp8
      projections: [int8, int4]
      router: keep

`passes.quantization.guard` holds a graph against it; docs/precision.md says what the roles are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graphc.errors import UsageError
from graphc.shapes_reader import Reader

#: what a value is for, and in a few words what that covers
ROLES = {
    "index": "queries and keys of an indexer, which only choose",
    "cache": "keys, values and latent rows that are kept",
    "projections": "operands of products with weights",
    "attention": "queries, scores and weighting of attention",
    "residual": "the residual stream",
    "router": "scores of experts and their choice",
    "state": "recurrent states, windows of convolutions and what is written to them",
}
KEEP = "keep"
#: a name stands for its variants too: fp8 for fp8_pow2, int4 for int4_g32
FORMATS = (
    "mxfp8", "mxfp8_floor", "mxfp8_ceil", "mxfp8_even", "fp8", "fp8_pow2", "fp8_e5m2", "mxfp4",
    "int8", "int4", "int4_g32", "int4_g128", "bf16", "f16",
)  # fmt: skip
BUILT_IN = "built in"
#: what a cast tells: elements of a format, or its scales
E4M3, E8M0 = "e4m3", "e8m0"


@dataclass(frozen=True)
class Allowed:
    """The formats a role may be narrowed to; none: it is kept. `origin` is who said so."""

    formats: tuple[str, ...]
    origin: str = BUILT_IN

    def __str__(self) -> str:
        return "+".join(self.formats) or KEEP

    def takes(self, found: str) -> bool:
        """Whether a format that a graph has is one of these, or a variant of one. A cast to E4M3
        does not say which scales belong to it."""
        if found == E4M3:
            return any(f.startswith("mxfp8") or f in ("fp8", "fp8_pow2") for f in self.formats)
        if found == E8M0:
            return any(f.startswith("mx") for f in self.formats)
        return any(found == f or found.startswith(f + "_") for f in self.formats)


@dataclass(frozen=True)
class Precision:
    """What is allowed by role. A policy that is written names some roles; the others are those of
    the policy it is laid `over`."""

    rules: Mapping[str, Allowed]

    @staticmethod
    def parse(text: str, origin: str = "--precision") -> Precision:
        """The policy of "index=mxfp8,cache=keep,projections=int8+int4".

        Raises:
            UsageError: not of this form, an unknown role or format, or a role twice.
        """
        rules: dict[str, Allowed] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            role, equals, formats = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise UsageError(
                    f"expected role=format in {text!r}, found {part!r}", where=origin,
                    hint="such as index=mxfp8,cache=keep,projections=int8+int4",
                )  # fmt: skip
            if role in rules:
                raise UsageError(f"expected each role once, found {role!r} again", where=origin)
            _known(role, ROLES, "a role", origin)
            names = [name.strip() for name in formats.split("+")]
            for name in names:
                _known(name, (*FORMATS, KEEP), f"a format for {role}", origin)
            if KEEP in names and len(names) > 1:
                raise UsageError(f"expected {KEEP} alone for {role}, found {part!r}", where=origin)
            rules[role] = Allowed(() if names == [KEEP] else tuple(names), origin)
        return Precision(MappingProxyType(rules))

    @staticmethod
    def read(item: Reader) -> Precision:
        """The policy of a section of a YAML file.

        Raises:
            UsageError: an unknown role or format; `what` begins with file:line:column.
        """
        item.only(*ROLES)
        rules: dict[str, Allowed] = {}
        for role, entry in item.items():
            names: list[str] = []
            for one in entry.alternatives():
                name = one.text(f"{KEEP} or a format for {role}")
                if name not in (*FORMATS, KEEP):
                    raise one.error(f"{KEEP} or one of {', '.join(FORMATS)}")
                names.append(name)
            if not names or (KEEP in names and len(names) > 1):
                raise entry.error(f"{KEEP}, or formats")
            rules[role] = Allowed(() if names == [KEEP] else tuple(names), entry.place())
        return Precision(MappingProxyType(rules))

    def over(self, other: Precision) -> Precision:
        """This policy where it says something, else the other."""
        return Precision(MappingProxyType({**other.rules, **self.rules}))

    def opened(self, role: str, formats: Iterable[str], origin: str) -> Precision:
        """This policy, with further formats for a role: what an option that narrows it implies."""
        more = tuple(f for f in formats if not self[role].takes(f))
        if not more:
            return self
        rule = Allowed((*self[role].formats, *more), origin)
        return Precision(MappingProxyType({**self.rules, role: rule}))

    def __getitem__(self, role: str) -> Allowed:
        return self.rules.get(role, Allowed(()))

    def __str__(self) -> str:
        return ",".join(f"{role}={self[role]}" for role in ROLES)


def _known(name: str, names: Iterable[str], expected: str, origin: str) -> None:
    known = list(names)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
    raise UsageError(f"expected {expected}, found {name!r}", where=origin, hint=hint)


#: what holds where nobody says otherwise: narrow what ranks or stores, keep what decides
DEFAULT = Precision(
    MappingProxyType(
        {**dict.fromkeys(ROLES, Allowed(())), "index": Allowed(("mxfp8",)),
         "cache": Allowed(("fp8",))}
    )
)  # fmt: skip
