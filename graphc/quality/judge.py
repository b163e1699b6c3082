"""Builds a model plain and narrowed, runs all of it over one text, and reports what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from graphc.api import Options, Progress
from graphc.decoders import Limits, Traced, build_traced, trace
from graphc.errors import UsageError
from graphc.quality.probes import Probes
from graphc.quality.ranking import PLAIN as PLAIN_FORM
from graphc.quality.ranking import ROUNDED, Form, Ranks, measure
from graphc.quality.report import BucketQuality, QualityReport, RankRecord
from graphc.quality.runs import PLAIN, Drift, Sampled, follow, positions, windows
from graphc.quantization import RESCORE, quantization
from graphc.runtime.decoder import Decoder, load

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: what is judged where nothing is asked for
DEFAULT = (
    ("index=mxfp8",), ("index=mxfp8_floor",), ("index=mxfp8+rescore",),
    ("kv=fp8",), ("kv=fp8+rope",), ("index=mxfp8", "kv=fp8"),
)  # fmt: skip
#: the longest context of them
CONTEXT = 1 << 15
TOKENS = 1 << 16
CHUNK = 512
#: relevant (query, key) pairs of each layer and bucket, at least
SAMPLES = 20_000


@dataclass(frozen=True)
class Question:
    """What is judged: tokens of a text for each bucket, up to `tokens` of them.

    quant: words of `graphc.quantization`, judged alone and together; none: `DEFAULT`.
    samples: relevant keys that are looked at, for each layer and bucket.
    """

    model: str
    dtype: str | None = None
    quant: tuple[str, ...] = ()
    tokens: int = TOKENS
    chunk: int = CHUNK
    samples: int = SAMPLES


#: text of a plan -> its tokens, and where they come from
Tokens = Callable[[Path, Decoder], tuple["NDArray[np.int64]", str]]


def judge(question: Question, options: Options, folder: Path, tokens: Tokens) -> QualityReport:
    """The whole report.

    Args:
        options: of every build; its `quant` is not read. Buckets: those asked for, else all up
            to `CONTEXT` that the model has positions for.
        folder: where the plans go.
        tokens: makes the text's tokens, once a plan is there that knows how.

    Raises:
        UsageError: the text is shorter than a bucket; a word that the model has no place for.
    """
    limits = Limits(question.chunk, 1, CONTEXT, 1, score=True)
    traced = trace(question.model, options, limits, dtype=question.dtype)
    plans, probes, notes = _plans(question, traced, options, folder)
    text, source = tokens(folder / PLAIN, plans[PLAIN])
    judged = _Judged(question, plans, probes)
    made: list[BucketQuality] = []
    for bucket, length in traced.buckets.items():
        if len(text) <= length:
            raise UsageError(
                f"expected a text of more than {length} tokens for the bucket {bucket}, found "
                f"{len(text)}",
                hint="give more text, or a smaller --bucket",
            )
        made.append(judged.bucket(bucket, windows(text, length, question.tokens), options.progress))
    states = {s.tensor.name: s.tensor.dtype for s in plans[PLAIN].session.plan.states}
    keys = [states[indexer.keys] for indexer in probes.indexers]
    digest = sha256(text.astype(np.int32).tobytes()).hexdigest()
    return QualityReport(
        question.model, source, digest, keys[0] if keys else "", judged.count, judged.relevant,
        made, notes,
    )  # fmt: skip


class _Judged:
    """The plans at work."""

    def __init__(self, question: Question, plans: Mapping[str, Decoder], probes: Probes) -> None:
        self.plans, self.probes, self.samples = plans, probes, question.samples
        self.forms = forms_of(question.quant)
        #: keys that are chosen; relevant are an eighth of them
        self.count = min((indexer.count for indexer in probes.indexers), default=0)
        self.relevant = max(1, self.count // 8)
        self.most = max((indexer.count for indexer in probes.indexers), default=0)

    def bucket(
        self, name: str, pieces: Sequence[NDArray[np.int64]], progress: Progress | None
    ) -> BucketQuality:
        """The figures of windows of one length."""
        length = len(pieces[0]) - 1
        drift = Drift(length, self.probes.parts)
        queries = -(-self.samples // (self.relevant * len(pieces)))
        ranks: dict[str, dict[str, Ranks]] = {i.layer: {} for i in self.probes.indexers}
        for k, piece in enumerate(pieces):
            if progress is not None:
                progress(f"judge {name}", k, len(pieces))
            places = positions(length, self.most, queries, k)
            sampled = Sampled(self.probes.indexers, places)
            asked = follow(self.plans, piece, drift, sampled)
            for found, own in zip(ranks.values(), asked, strict=True):
                for part in own.parts():
                    measure(part, self.forms, self.relevant, found)
        errors = [r for plan in self.plans if plan != PLAIN for r in drift.errors(plan)]
        return BucketQuality(
            name, length, len(pieces), length * len(pieces),
            [drift.perplexity(plan) for plan in self.plans],
            [record for layer, found in ranks.items() for record in records(layer, found)],
            sorted(errors, key=lambda record: -record.error),
        )  # fmt: skip


def combinations(quant: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Each word alone, and the last of each role together; `DEFAULT` where there is none."""
    words = tuple(dict.fromkeys(part.strip() for text in quant for part in text.split(",")))
    alone = tuple((word,) for word in words)
    together = tuple({word.partition("=")[0]: word for word in words}.values())
    return (*alone, together) if len(together) > 1 else alone or DEFAULT


def forms_of(quant: Sequence[str]) -> list[Form]:
    """The plain keys, those rounded to bfloat16, and every form of MXFP8 that is asked for."""
    found = [PLAIN_FORM, ROUNDED]
    for words in combinations(quant):
        if len(words) == 1 and (asked := quantization(words)).index:
            found.append(Form(words[0], asked.index, RESCORE if asked.rescore else 0.0))
    return found


def records(layer: str, ranks: Mapping[str, Ranks]) -> list[RankRecord]:
    """The figures of one layer, in percent but for rho."""
    means = {name: found.means() for name, found in ranks.items()}
    made: list[RankRecord] = []
    for name, own in means.items():
        found = ranks[name]
        figures = {"recall": 100 * own["recall"], "covered": 100 * own["covered"]}
        for suffix, reference in (("", PLAIN_FORM.name), ("_bf16", ROUNDED.name)):
            whole = 100 / means[reference]["covered"]
            drop_error = found.error(f"dropped{suffix}", f"dropped_squares{suffix}")
            kept_error = found.error(f"lost{suffix}", f"lost_squares{suffix}")
            figures |= {
                f"overlap{suffix}": 100 * own[f"overlap{suffix}"],
                f"predicted{suffix}": 100 * own[f"predicted{suffix}"],
                f"rho{suffix}": own[f"rho{suffix}"],
                f"mass{suffix}": 100 * own[f"mass{suffix}"],
                f"kept{suffix}": whole * own["covered"],
                f"kept_error{suffix}": whole * kept_error,
                f"drop{suffix}": 100 * own[f"dropped{suffix}"],
                f"drop_error{suffix}": 100 * drop_error,
            }
        counts = {"queries": found.queries, "samples": found.relevant}
        fields = {"layer": layer, "form": name, **counts, **figures}
        made.append(msgspec.convert(fields, RankRecord))
    return made


def _plans(
    question: Question, traced: Traced, options: Options, folder: Path
) -> tuple[dict[str, Decoder], Probes, list[str]]:
    """(plans by what they narrow, what the plain one tells, why some are missing)."""
    probes = Probes()
    plans = {PLAIN: _plan(traced, options, folder, (), probes)}
    notes = list(probes.refused)
    for words in combinations(question.quant):
        try:
            plans[",".join(words)] = _plan(traced, options, folder, words, Probes())
        except UsageError as error:
            if question.quant:
                raise
            notes.append(f"{','.join(words)} is left out: {error.what}")
    return plans, probes, notes


def _plan(
    traced: Traced, options: Options, folder: Path, words: Sequence[str], probes: Probes
) -> Decoder:
    place = folder / (",".join(words) or PLAIN)
    build_traced(traced, place, replace(options, quant=tuple(words)), probes)
    return load(place)
