"""Sequences over a plan: equal to the model, in pieces, in batches, forked, rolled back, saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graphc.errors import DamagedError, UsageError
from graphc.runtime.decoder import Decoder, load
from graphc.runtime.pages import PagePool
from tests.decoder_plans import CONTEXT, DRAFTS, Plans, Tiny

#: a plan takes its time: two kinds are always built, keys and values of heads, and everything else
FAMILIES = (
    "qwen3",
    "hybrid",
    *(
        pytest.param(name, marks=pytest.mark.heavy)
        for name in ("kimi_linear", "deepseek_v32", "glm5_next")
    ),
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decoder(decoder_plans: Plans, family: str) -> Decoder:
    return load(decoder_plans.place(Tiny(family)), threads=1)


@pytest.fixture
def simple(decoder_plans: Plans) -> Iterator[Decoder]:
    """The family without ties and experts."""
    yield load(decoder_plans.place(Tiny("qwen3")), threads=1)


@cache
def prompt(family: str, count: int, seed: int = 1) -> NDArray[np.int64]:
    return Tiny(family).tokens(count, seed)


def reference(family: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The model's own scores of what follows, without any cache."""
    with torch.no_grad():
        out = Tiny(family).model()(torch.from_numpy(ids)[None])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    answer: NDArray[np.float32] = logits[0, -1].numpy()
    return answer


def relative(a: Any, b: Any) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_no_fallbacks(decoder_plans: Plans, family: str) -> None:
    report = decoder_plans.report(Tiny(family))
    assert {(f.phase, f.target, f.reason) for f in report.fallbacks} == set()
    assert {(b.phase, b.name) for b in report.buckets} >= {
        ("prefill", "128"), ("prefill", "512"), ("decode", "128"), ("decode", "512"),
        ("verify", "128"), ("verify", "512"),
    }  # fmt: skip


def test_prefill_and_decode(decoder: Decoder, family: str) -> None:
    """transformers' top-k breaks ties by the length of a row: fewer tokens than top-k there."""
    count = 12 if family == "deepseek_v32" else 150
    ids = prompt(family, count + 3)
    with decoder.sequence() as sequence:
        assert relative(sequence.prefill(ids[:count]), reference(family, ids[:count])) < 1e-5
        for t in range(count, count + 3):
            found = sequence.decode(int(ids[t]))
            assert relative(found, reference(family, ids[: t + 1])) < 1e-5


def test_pieces_and_single_tokens_give_the_same(decoder: Decoder, family: str) -> None:
    ids = prompt(family, 200)
    with decoder.sequence() as whole, decoder.sequence() as some, decoder.sequence() as single:
        wanted = whole.prefill(ids)
        for begin, end in ((0, 63), (63, 64), (64, 130), (130, 200)):
            pieces = some.prefill(ids[begin:end])
        for token in ids:
            alone = single.decode(int(token))
        assert relative(pieces, wanted) < 1e-5
        assert relative(alone, wanted) < 1e-5


@pytest.mark.parametrize("count", [2, DRAFTS])
def test_verified_drafts_are_decoded_tokens(decoder: Decoder, family: str, count: int) -> None:
    """Four sequences, more than one run takes; some of them end a page on the way."""
    lengths = (5, 62, 127, 60)
    drafts = np.stack([prompt(family, count, seed=n) for n in lengths])
    texts = [decoder.sequence() for _ in lengths]
    for text, length in zip(texts, lengths, strict=True):
        text.prefill(prompt(family, length, seed=length))
    with contextlib.ExitStack() as opened:
        before = [opened.enter_context(text.snapshot()) for text in texts]
        scores = decoder.verify(texts, drafts)
        after = decoder.decode(texts, [7] * len(texts))
        for text, snapshot in zip(texts, before, strict=True):
            text.rollback(snapshot)
        for k in range(count):
            alone = decoder.decode(texts, drafts[:, k])
            assert relative(scores[:, k], alone) < 1e-5
        assert relative(after, decoder.decode(texts, [7] * len(texts))) < 1e-5
    for text in texts:
        text.close()


@pytest.mark.parametrize("accepted", range(DRAFTS))
def test_rejected_drafts_leave_nothing(decoder: Decoder, family: str, accepted: int) -> None:
    ids, drafts = prompt(family, 62), prompt(family, DRAFTS, seed=5)
    with decoder.sequence() as text, decoder.sequence() as never:
        text.prefill(ids)
        never.prefill(ids)
        with text.snapshot() as place:
            text.verify(drafts)
            text.rollback(place)
        for token in drafts[:accepted]:
            text.decode(int(token))
            never.decode(int(token))
        assert np.array_equal(text.decode(30), never.decode(30))
        assert len(text.pages) == len(never.pages)


def test_drafts_that_are_refused(simple: Decoder) -> None:
    with simple.sequence() as text:
        text.prefill([3, 4, 5])
        for drafts in ([1], np.ones(DRAFTS + 1)):
            with pytest.raises(UsageError, match=f"2 to {DRAFTS}"):
                text.verify(drafts)
        assert text.length == 3


def test_a_batch_of_different_lengths(decoder: Decoder, family: str) -> None:
    """More sequences than one decode takes; each as if it were alone."""
    ids = [prompt(family, n, seed=n) for n in (5, 64, 127, 190)]
    together = [decoder.sequence() for _ in ids]
    for sequence, tokens in zip(together, ids, strict=True):
        sequence.prefill(tokens)
    made = [decoder.decode(together, [7, 8, 9, 10 + i]) for i in range(3)]
    for sequence in together:
        sequence.close()
    for k, tokens in enumerate(ids):
        with decoder.sequence() as alone:
            alone.prefill(tokens)
            for i in range(3):
                logits = alone.decode([7, 8, 9, 10 + i][k])
                assert relative(made[i][k], logits) < 1e-5


def test_forks_and_snapshots_share_a_past_only(decoder: Decoder, family: str) -> None:
    with decoder.sequence() as sequence:
        sequence.prefill(prompt(family, 70))
        with sequence.snapshot() as before, sequence.fork() as other:
            a = sequence.decode(7)
            assert not np.array_equal(other.decode(9), a)
            sequence.decode(11)
            sequence.rollback(before)
            assert sequence.length == 70
            assert np.array_equal(sequence.decode(7), a)
            sequence.rollback(before)
            assert np.array_equal(sequence.decode(7), a), "a snapshot is good for any number"


@pytest.mark.parametrize("kept", range(5))
def test_undone_tokens_leave_nothing(decoder: Decoder, family: str, kept: int) -> None:
    """Decode n, go back, go on == never decoded, across the end of a page."""
    ids = prompt(family, 62)
    with decoder.sequence() as sequence, decoder.sequence() as never:
        sequence.prefill(ids)
        never.prefill(ids)
        for token in range(kept):
            sequence.decode(token + 20)
            never.decode(token + 20)
        with sequence.snapshot() as place:
            for token in (5, 6, 7, 8):
                sequence.decode(token)
            sequence.rollback(place)
        assert np.array_equal(sequence.decode(30), never.decode(30))
        assert len(sequence.pages) == len(never.pages)


def test_saved_sequences_go_on_elsewhere(
    decoder_plans: Plans, decoder: Decoder, family: str, tmp_path: Path
) -> None:
    with decoder.sequence() as sequence:
        sequence.prefill(prompt(family, 100))
        sequence.save(tmp_path / "text.npz")
        wanted = sequence.decode(5)
    fresh = load(decoder_plans.place(Tiny(family)), threads=2)
    with fresh.sequence() as first, fresh.sequence() as read:
        first.prefill(prompt(family, 30, seed=4))
        read.load(tmp_path / "text.npz")
        assert read.length == 100
        assert np.array_equal(read.decode(5), wanted)


def test_results_do_not_depend_on_threads(decoder_plans: Plans, family: str) -> None:
    ids = prompt(family, 180)
    made = []
    for threads in (1, 2, 3):
        with load(decoder_plans.place(Tiny(family)), threads=threads).sequence() as sequence:
            sequence.prefill(ids)
            made.append(sequence.decode(9))
    assert np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2])


def test_a_new_sequence_begins_empty(decoder: Decoder, family: str) -> None:
    ids = prompt(family, 80)
    with decoder.sequence() as first:
        wanted = first.prefill(ids)
        slot = first.slot
    with decoder.sequence() as second:
        assert second.slot == slot
        assert np.array_equal(second.prefill(ids), wanted)


def test_damaged_and_foreign_files(decoder_plans: Plans, simple: Decoder, tmp_path: Path) -> None:
    with simple.sequence() as sequence:
        sequence.prefill([1, 2, 3])
        place = tmp_path / "a.npz"
        sequence.save(place)
        place.write_bytes(place.read_bytes()[:-200])
        with pytest.raises(DamagedError):
            sequence.load(place)
        with load(decoder_plans.place(Tiny("hybrid")), threads=1).sequence() as other:
            other.prefill([1, 2])
            other.save(place)
        with pytest.raises(UsageError, match="another model"):
            sequence.load(place)
        assert sequence.length == 3


def test_what_does_not_fit_changes_nothing(simple: Decoder) -> None:
    with simple.sequence() as sequence:
        sequence.prefill(np.arange(3, 10))
        with pytest.raises(UsageError, match="at most 512 tokens") as error:
            sequence.prefill(np.ones(CONTEXT, np.int64))
        assert "--bucket 519" in str(error.value.hint)
        assert sequence.length == 7
        with pytest.raises(UsageError, match="one twice"):
            simple.decode([sequence, sequence], [1, 2])
        with pytest.raises(UsageError, match="at least one token"):
            sequence.prefill([])
        others = [simple.sequence() for _ in range(3)]
        with pytest.raises(UsageError, match="free slot"):
            simple.sequence()
        for other in others:
            other.close()
    with pytest.raises(UsageError, match="closed"):
        sequence.decode(1)


def test_pages_come_back() -> None:
    pool = PagePool(6)
    first = pool.take(3)
    assert first == [1, 2, 3]
    second = pool.share(first[:1])
    pool.give_back(first)
    assert pool.free == 4
    with pytest.raises(UsageError, match="expected 5 free pages, found 4"):
        pool.take(5)
    pool.give_back(second)
    assert pool.free == 5
