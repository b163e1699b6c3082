"""Lengths of sequences: nothing is compiled for one, nothing grows with it that need not."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import long_context
from graphc import decoders
from graphc.api import Options
from graphc.errors import InputRejectedError
from graphc.models.hybrid import hybrid
from graphc.runtime.decoder import Decoder, Sequence, load
from tests.allocations import run_counted

ROOT = Path(__file__).resolve().parents[1]
CHUNK, CONTEXT = 256, 1 << 16


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid for two contexts, in pieces of 256 tokens; it chooses 16 keys."""
    place = tmp_path_factory.mktemp("lengths") / "plan"
    options = Options(buckets=("1024", str(CONTEXT)), jobs=1)
    decoders.build(hybrid("tiny"), place, options, chunk=CHUNK, batch=2, sequences=2)
    return place


@pytest.fixture
def decoder(plan: Path) -> Iterator[Decoder]:
    yield load(plan, threads=1)


#: what a process must do to compile: start another, load a library
_LENGTHS = """
import sys, numpy as np
from graphc.runtime.decoder import load
decoder = load({plan!r}, threads=1)
draws = np.random.default_rng(0)
ids = draws.integers(3, 96, 6000)

def run(length, first):
    with decoder.sequence() as sequence:
        sequence.prefill(ids[:first])
        return sequence.prefill(ids[first:length]), sequence.decode(7)

run(40, 20)
seen = []
compiling = ("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "ctypes.dlopen")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(compiling) else None)
lengths = [2, 16, 17, 63, 64, 65, 256, 257, 1024, 1025]
lengths += [int(n) for n in np.exp(draws.uniform(0.7, 8.6, {count} - len(lengths)))]
for length in lengths:
    a = run(length, length - 1)
    b = run(length, int(draws.integers(1, length)))
    for one, other in zip(a, b):
        assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max(), length
assert not seen, seen
bad = {{"graphc.toolchain", "graphc.lowering", "graphc.builder", "torch"}} & set(sys.modules)
assert not bad, bad
import subprocess
subprocess.run(["true"], check=True)
assert seen, "the hook does not see"
"""


def test_100_lengths_compile_nothing(plan: Path) -> None:
    """On both sides of each edge (top-k, page, chunk, bucket) and anywhere, in two pieces cut
    at different places."""
    code = _LENGTHS.format(plan=str(plan), count=100)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300, env=os.environ)


def test_runs_allocate_nothing(plan: Path, tmp_path: Path) -> None:
    """Native runs of all phases and buckets: pieces of a prompt, tokens of one sequence and of
    two, over the ends of pages."""
    code = f"""
import numpy as np
from graphc.runtime import native
from graphc.runtime.decoder import load
counts, run = [], native.NativeProgram.run
def counted(self, frame, first, end):
    hook.counter_start()
    run(self, frame, first, end)
    counts.append((len(counts), self.program.phase, self.program.bucket, hook.counter_stop()))
ids = np.random.default_rng(0).integers(3, 96, 5000)
for threads in (1, 2):
    decoder = load({str(plan)!r}, threads=threads)
    for warm in (True, False):
        native.NativeProgram.run = run if warm else counted
        with decoder.sequence() as a, decoder.sequence() as b:
            b.prefill(ids[:30])
            for more in (10, 1000, 60, 3500):
                a.prefill(ids[:more])
                for token in range(70):
                    a.decode(token + 3)
                    if token % 7 == 0:
                        decoder.decode([a, b], [3, 4])
assert {{entry[1:3] for entry in counts}} == {{
    (phase, bucket) for phase in ("prefill", "decode") for bucket in ("1024", "{CONTEXT}")
}}, counts
assert not any(entry[3] for entry in counts), [entry for entry in counts if entry[3]]
"""
    run_counted(code, tmp_path, timeout=120)


def test_contexts_are_measured(plan: Path) -> None:
    """The benchmark's own measurement, of a context that is filled to its end."""
    row = long_context.measure(str(plan), 1024, 1)
    assert (row["prompt"], row["bucket"], row["fallbacks"]) == (1024 - 32, "1024", 0)
    assert row["prefill"][1] > row["decode"][1] > 0 and row["planned"] > 0
    below, above = long_context.edges(str(plan), [256], 1)["256"]
    assert min(below) > 0 and min(above) > 0


def _at(decoder: Decoder, length: int) -> Sequence:
    """A sequence that has as many tokens, all of whose rows are zero."""
    sequence = decoder.sequence()
    sequence._reserve(length)
    sequence.length = length
    return sequence


def _step(sequence: Sequence) -> int:
    """Bytes that Python and numpy hold at most during a token, above what they hold anyway."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    sequence.decode(5)
    return tracemalloc.get_traced_memory()[1] - before


def test_a_token_takes_the_same_memory_at_any_length(decoder: Decoder) -> None:
    tracemalloc.start()
    try:
        peaks = {}
        for length in (100, CONTEXT - 100):
            with _at(decoder, length) as sequence:
                for _ in range(5):
                    _step(sequence)
                held = tracemalloc.get_traced_memory()[0]
                peaks[length] = max(_step(sequence) for _ in range(15))
                assert tracemalloc.get_traced_memory()[0] - held < 1024
        assert peaks[CONTEXT - 100] - peaks[100] < 512, peaks
    finally:
        tracemalloc.stop()


def test_a_piece_sees_the_pages_up_to_its_end(decoder: Decoder) -> None:
    with decoder.sequence() as sequence:
        sequence._reserve(5000)
        assert len(sequence.pages) == 79
        assert decoder._table([sequence], CHUNK).tolist() == [sequence.pages[:4]]
        sequence.length = 60
        assert decoder._table([sequence], 5).shape == (1, 2)


def test_a_long_prompt_gets_huge_pages(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its own pages in each state that grows, before anything is written; a token asks for
    none."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(decoder.session._states, "use_huge_pages", lambda *part: asked.append(part))
    with decoder.sequence() as sequence:
        sequence._reserve(100)
        assert not asked
        sequence._reserve(4000)
        states = list(decoder.session.states.values())
        sizes = {i: states[i][0].nbytes for i in decoder.facts.rows}
        assert asked == [(i, 3 * size, 61 * size) for i, size in sizes.items()]


def test_pages_of_a_prompt_that_failed_are_not_written_twice(decoder: Decoder) -> None:
    """A wrong token in its second piece: the pages for the rest are there, and a fork shares
    them."""
    ids = np.random.default_rng(0).integers(3, 96, 700)
    bad = ids[:600].copy()
    bad[300] = 96
    with decoder.sequence() as sequence:
        with pytest.raises(InputRejectedError):
            sequence.prefill(bad)
        assert sequence.length == CHUNK
        with sequence.fork() as other:
            sequence.prefill(ids[CHUNK:500])
            other.prefill(ids[400:700])
            found = [sequence.decode(5), other.decode(5)]
    for rest, logits in zip((ids[CHUNK:500], ids[400:700]), found, strict=True):
        with decoder.sequence() as alone:
            alone.prefill(np.concatenate([ids[:CHUNK], rest]))
            wanted = alone.decode(5)
            assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_one_of_everything(plan: Path, tmp_path: Path) -> None:
    """Limits that leave a length no choice: a token, a sequence, a page at a time."""
    place = tmp_path / "one"
    options = Options(buckets=("64",), jobs=1)
    decoders.build(hybrid("tiny"), place, options, chunk=1, batch=1, sequences=1)
    ids = np.random.default_rng(0).integers(3, 96, 40)
    found = []
    for folder in (place, plan):
        with load(folder, threads=1).sequence() as sequence:
            found.append((sequence.prefill(ids), sequence.decode(5)))
    for one, other in zip(*found, strict=True):
        assert np.abs(one - other).max() < 1e-5 * np.abs(other).max()
