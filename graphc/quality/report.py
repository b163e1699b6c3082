"""What `graphc verify --quality` found, as data. Shares and changes are in percent."""

from __future__ import annotations

import msgspec


class Stretch(msgspec.Struct, frozen=True):
    """A figure of the positions first <= p < last of a sequence."""

    first: int
    last: int
    value: float


class PerplexityRecord(msgspec.Struct, frozen=True):
    """A plan's perplexity on the text. change: against the plain plan; error: its standard error,
    from differences of the log-loss at the same tokens, averaged over blocks of 256 that follow one
    another. bits: of a token, by position."""

    quant: str
    perplexity: float
    change: float
    error: float
    bits: list[Stretch]


class RankRecord(msgspec.Struct, frozen=True):
    """Which keys an indexer of this form chooses, at the same queries as the plain one.

    overlap, mass, rho: see `graphc.quality.ranking`, against the choice by the keys as the plain
    plan has them; `_bf16`: against that by keys and queries rounded to bfloat16. predicted: the
    overlap that rho foretells. covered: the attention weight over all keys that is covered; kept:
    what that is of the weight that those choices cover. recall: of relevant keys; drop: points
    less than those choices have; kept_error, drop_error: standard errors, queries being taken for
    independent.
    """

    layer: str
    form: str
    queries: int
    samples: int  # relevant keys
    overlap: float
    predicted: float
    rho: float
    mass: float
    kept: float
    kept_error: float
    drop: float
    drop_error: float
    overlap_bf16: float
    predicted_bf16: float
    rho_bf16: float
    mass_bf16: float
    kept_bf16: float
    kept_error_bf16: float
    drop_bf16: float
    drop_error_bf16: float
    recall: float
    covered: float


class ErrorRecord(msgspec.Struct, frozen=True):
    """Relative rms difference of what a part of a layer gives from the plain plan's, in percent."""

    quant: str
    part: str
    error: float
    by_position: list[Stretch]


class BucketQuality(msgspec.Struct, frozen=True):
    """One context: `windows` sequences of `length` tokens. errors: the worst come first."""

    bucket: str
    length: int
    windows: int
    tokens: int
    perplexity: list[PerplexityRecord]
    ranking: list[RankRecord]
    errors: list[ErrorRecord]


class QualityReport(msgspec.Struct, frozen=True):
    """text: where it came from; text_digest: sha256 of its tokens as int32. dtype: of the plain
    plan's keys. count: keys that are chosen; relevant: how many of all count as relevant."""

    model: str
    text: str
    text_digest: str
    dtype: str
    count: int
    relevant: int
    buckets: list[BucketQuality]
    notes: list[str] = []
