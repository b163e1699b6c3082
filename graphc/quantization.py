"""What is to be narrowed, in a user's words, and the pass options that do it.

index=mxfp8            keys of the Lightning Indexer; scales by the rule _ceil (the default: it
                       loses least), _floor (OCP's own) or _even
index=mxfp8+rescore    chosen again, among a fifth more (64 at least), by a second term of each
                       key: with _ceil two terms are a number of bfloat16 exactly
kv=fp8                 keys and values, latent rows; scales of fp8_pow2 are powers of two
kv=fp8+rope            also the part of latent rows that carries positions
weights=int8           projections and experts: int8, int4_g32, int4_g128, mxfp4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from graphc.errors import UsageError
from graphc.report import PassRecord

RESCORE = 1.2
INDEX = {"mxfp8": "mxfp8_ceil", **{f"mxfp8_{r}": f"mxfp8_{r}" for r in ("floor", "ceil", "even")}}
KV = {"fp8": "fp8_pow2", "fp8_pow2": "fp8_pow2", "fp8_f32": "fp8"}
WEIGHTS = ("int8", "int4_g32", "int4_g128", "mxfp4")
#: the pass of a role
PASSES = {"index": "quantize_index", "kv": "quantize_kv", "weights": "quantize_weights"}
#: the role of a policy (`graphc.precision`) that a pass narrows
OPENS = {"quantize_index": "index", "quantize_kv": "cache", "quantize_weights": "projections"}

_WHAT = {
    "index": "keys of an indexer in pages",
    "kv": "keys and values in pages",
    "weights": "weights that can be narrowed",
}
_PAGES = "models with such states are built with --generate"
_HINTS = {"index": _PAGES, "kv": _PAGES, "weights": "leave it out"}


@dataclass(frozen=True)
class Quantization:
    """Forms by role, "" where nothing is narrowed. index_states: states known to hold keys of
    indexers, where a graph writes them and does not read them."""

    index: str = ""
    rescore: bool = False
    kv: str = ""
    rope: bool = False
    weights: str = ""
    index_states: tuple[str, ...] = ()

    def of_weights(self) -> Quantization:
        """What concerns weights alone."""
        return replace(self, index="", kv="")

    def of_states(self, index: Sequence[str]) -> Quantization:
        """What concerns states alone; index: those that hold keys of indexers."""
        return replace(self, weights="", index_states=tuple(index))

    def pass_options(self) -> list[str]:
        """For `graphc.rewrite.configure`."""
        names = " ".join(self.index_states)
        made: list[str] = []
        if self.index:
            rescore = RESCORE if self.rescore else 0
            made.append(f"quantize_index{{form={self.index},rescore={rescore},states={names}}}")
        if self.kv:
            made.append(f"quantize_kv{{form={self.kv},rope={self.rope},index={names}}}")
        if self.weights:
            made.append(f"quantize_weights{{form={self.weights}}}")
        return made

    def check(self, records: Sequence[PassRecord]) -> None:
        """Raises UsageError where a pass that was asked for found nothing to narrow."""
        asked = {"index": self.index, "kv": self.kv, "weights": self.weights}
        for role, form in asked.items():
            own = [record for record in records if record.name == PASSES[role]]
            if not form or any(record.matches for record in own):
                continue
            reasons = list(dict.fromkeys(r.reason for record in own for r in record.refusals))
            because = f": {'; '.join(reasons)}" if reasons else ""
            raise UsageError(
                f"expected {_WHAT[role]} for --quant {role}={form}, found none{because}",
                hint=_HINTS[role],
            )


def quantization(words: Iterable[str]) -> Quantization:
    """The forms that "ROLE=FORM" words, single or joined by commas, ask for; later ones win.

    Raises:
        UsageError: a word is none of those above.
    """
    found: dict[str, str | bool] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        if word == "none":
            found.clear()
            continue
        role, _, form = word.partition("=")
        name, plus, extra = form.partition("+")
        if role == "index" and name in INDEX and extra in ("", "rescore"):
            found |= {"index": INDEX[name], "rescore": bool(plus)}
        elif role == "kv" and name in KV and extra in ("", "rope"):
            found |= {"kv": KV[name], "rope": bool(plus)}
        elif role == "weights" and form in WEIGHTS:
            found["weights"] = form
        else:
            raise UsageError(
                f"expected what to narrow, found {word!r}",
                hint="index=mxfp8 (_floor, _ceil, _even) or index=mxfp8+rescore; kv=fp8 (_pow2, "
                f"_f32) or kv=fp8+rope; weights={', weights='.join(WEIGHTS)}; none",
            )
    return Quantization(**found)  # type: ignore[arg-type]
