"""Sequences whose states are narrowed: read as written in every phase, and kept like any state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from graphc.errors import UsageError
from graphc.ops.records import record_format
from graphc.quantization import quantization
from graphc.runtime.decoder import Decoder, load
from tests.decoder_plans import Plans, Tiny

HEAVY = pytest.mark.heavy
NARROW = (
    Tiny("hybrid", quant="index=mxfp8,kv=fp8"),
    Tiny("qwen3", quant="kv=fp8"),
    *(
        pytest.param(tiny, marks=HEAVY, id=f"{tiny.family}-{tiny.quant}")
        for tiny in (
            Tiny("hybrid", quant="index=mxfp8_ceil+rescore,kv=fp8_f32+rope"),
            Tiny("deepseek_v32", quant="index=mxfp8+rescore,kv=fp8"),
            Tiny("glm5_next", quant="index=mxfp8,kv=fp8"),
            Tiny("kimi_linear", quant="kv=fp8"),
        )
    ),
)


@pytest.fixture(params=NARROW, ids=lambda tiny: f"{tiny.family}-{tiny.quant}")
def tiny(request: pytest.FixtureRequest) -> Tiny:
    made: Tiny = request.param
    return made


@pytest.fixture
def decoder(decoder_plans: Plans, tiny: Tiny) -> Decoder:
    return load(decoder_plans.place(tiny), threads=1)


def relative(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_all_rows_are_narrowed(decoder_plans: Plans, decoder: Decoder, tiny: Tiny) -> None:
    plain = load(decoder_plans.place(Tiny(tiny.family)), threads=1)
    states = decoder.session.plan.states
    for place in decoder.facts.rows:
        own, other = states[place].tensor, plain.session.plan.states[place].tensor
        assert own.name == other.name and own.dtype == "uint8"
        rows = 4 * np.prod([int(n) for n in other.text[1:]])
        assert np.prod([int(n) for n in own.text[1:]]) < 0.6 * rows
    assert not decoder_plans.report(tiny).fallbacks


def test_near_the_plain_plan(decoder_plans: Plans, decoder: Decoder, tiny: Tiny) -> None:
    """Narrowed indeed, and no more than that: random weights magnify what codes lose."""
    plain = load(decoder_plans.place(Tiny(tiny.family)), threads=1)
    ids = tiny.tokens(150)
    with decoder.sequence() as narrow, plain.sequence() as wide:
        assert 1e-5 < relative(narrow.prefill(ids), wide.prefill(ids)) < 0.3


def test_pieces_and_single_tokens_give_the_same(decoder: Decoder, tiny: Tiny) -> None:
    """But for codes that fall otherwise where sums of another order lie next to a tie."""
    ids = tiny.tokens(200)
    with decoder.sequence() as whole, decoder.sequence() as some, decoder.sequence() as single:
        wanted = whole.prefill(ids)
        for begin, end in ((0, 63), (63, 64), (64, 130), (130, 200)):
            pieces = some.prefill(ids[begin:end])
        for token in ids:
            alone = single.decode(int(token))
        assert relative(pieces, wanted) < 2e-2
        assert relative(alone, wanted) < 2e-2


def test_states_are_kept(decoder: Decoder, tiny: Tiny, tmp_path: Path) -> None:
    """Forked, rolled back, saved and read again: the same bits."""
    ids = tiny.tokens(130)
    with decoder.sequence() as text:
        text.prefill(ids)
        with text.snapshot() as place:
            wanted = [text.decode(int(token)) for token in (5, 9, 11)]
            text.rollback(place)
        with text.fork() as other:
            text.decode(20)
            found = [other.decode(int(token)) for token in (5, 9, 11)]
        assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
    with decoder.sequence() as text:
        text.prefill(ids)
        text.save(tmp_path / "text")
    with decoder.sequence() as text:
        text.load(tmp_path / "text")
        again = [text.decode(int(token)) for token in (5, 9, 11)]
    assert all(np.array_equal(a, b) for a, b in zip(wanted, again, strict=True))


def test_pages_of_others_leave_nothing(decoder: Decoder, tiny: Tiny) -> None:
    ids = tiny.tokens(100)
    with decoder.sequence() as text:
        wanted = text.prefill(ids)
    for seed in (2, 3):
        with decoder.sequence() as text, decoder.sequence() as more:
            text.prefill(tiny.tokens(300, seed))
            more.prefill(tiny.tokens(211, seed))
    with decoder.sequence() as text:
        assert np.array_equal(text.prefill(ids), wanted)


@pytest.mark.parametrize("word", ["index=fp8", "kv=mxfp8", "kv=fp8+rescore", "mxfp8", "weights=",
                                  "index=mxfp8+rope"])  # fmt: skip
def test_wrong_words(word: str) -> None:
    with pytest.raises(UsageError, match="expected what to narrow"):
        quantization([word])


def test_later_words_win() -> None:
    assert quantization(["index=mxfp8+rescore,kv=fp8", "index=mxfp8_ceil"]).index == "mxfp8_ceil"
    assert not quantization(["index=mxfp8+rescore", "index=mxfp8"]).rescore
    assert quantization(["kv=fp8", "none"]) == quantization([])


def test_nothing_to_narrow(tmp_path: Path) -> None:
    from graphc import decoders
    from graphc.api import Options

    tiny = Tiny("qwen3")
    options = Options(buckets=("128",), jobs=1, quant=("index=mxfp8",))
    with pytest.raises(UsageError, match="found none"):
        decoders.build(tiny.model(), tmp_path / "plan", options, chunk=32, batch=1)
    assert not (tmp_path / "plan").exists()


def test_bytes_of_a_token(decoder_plans: Plans, decoder: Decoder, tiny: Tiny) -> None:
    """What the report tells is what the pool holds."""
    precision = decoder_plans.report(tiny).precision
    assert precision is not None
    told = sum(one.token_nbytes for one in precision.classes if one.place == "states")
    assert told == decoder.page_bytes / decoder.facts.page
    plain = load(decoder_plans.place(Tiny(tiny.family)), threads=1)
    wide = sum(one.plain_token_nbytes for one in precision.classes if one.place == "states")
    assert wide == plain.page_bytes / plain.facts.page


@pytest.mark.parametrize(
    ("form", "numbers", "most"),
    [
        ("mxfp8_floor:128", 128, 0.52), ("mxfp8_ceil:64@16", 64, 0.52),
        ("fp8_pow2:512+bf16:64", 576, 0.57), ("fp8:512+fp8:64", 576, 0.52),
        ("fp8_pow2:256+bf16:32", 288, 0.57), ("fp8_pow2:128", 128, 0.52),
    ],
)  # fmt: skip
def test_bytes_of_a_record(form: str, numbers: int, most: float) -> None:
    found = record_format(form)
    assert found.width == numbers and found.bytes <= most * 2 * numbers
