"""The embedded default and the example that trains it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from graphc.models import embedded
from graphc.models.hybrid_config import EMBEDDED

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = ROOT / "examples" / "train_tiny_hybrid.py"
    spec = importlib.util.spec_from_file_location("train_tiny_hybrid", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_weights_are_small_and_of_the_preset() -> None:
    assert (embedded.FOLDER / "model.safetensors").stat().st_size <= 16 << 20
    model = embedded.load()
    assert model.config == EMBEDDED and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Rounding to bfloat16 happens once."""
    model = embedded.load()
    embedded.save(model, tmp_path)
    again = embedded.load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_text_is_bytes() -> None:
    tokens = embedded.encode("def f(å):")
    assert tokens.tolist() == [[256, *"def f(å):".encode()]]
    assert embedded.decode(tokens[0].tolist()) == "def f(å):"
    assert embedded.encode("x", begin=False).tolist() == [[120]]


@pytest.mark.heavy
def test_it_has_learned_to_use_its_context(example: ModuleType) -> None:
    """On files it has not seen: later bytes cost less, and the keys that the indexer chooses are
    better than as many others. The card has 1.39 bits per byte, a fall of 0.4 and a difference of
    0.38 over 32 windows; here are fewer."""
    tokens = example.held_out(6, 2048)
    found = example.by_choice(embedded.load(), tokens)
    ours = found["indexer"]
    assert ours.mean() < 1.8
    assert ours[:, 1024:].mean() < ours[:, :128].mean() - 0.1
    assert found["random"].mean() > ours.mean() + 0.2
    assert found["most recent"].mean() > ours.mean() + 0.1
    assert abs(found["all keys"].mean() - ours.mean()) < 0.03


def test_repeated_pieces_and_cycles(example: ModuleType) -> None:
    row = torch.arange(400)
    place, size = example.repeat(row, torch.Generator().manual_seed(3))
    piece = row[place : place + size]
    first = int(piece[0])
    assert first + size <= place and torch.equal(piece, torch.arange(first, first + size))
    assert torch.equal(row[:place], torch.arange(place))
    rows = torch.arange(1000).view(2, 500)
    example.cycle(rows, 0)
    for row in rows:
        period = int((row[1:] == row[0]).nonzero()[0]) + 1
        assert 16 <= period < 160 and torch.equal(row[period:], row[:-period])


def test_held_out_files_are_not_trained_on(example: ModuleType) -> None:
    kept, held, digest = example.corpus()
    assert 0.02 < sum(map(len, held)) / sum(map(len, kept)) < 0.1
    assert not set(kept) & set(held)
    assert len(digest) == 64 and example.corpus()[2] == digest


def test_a_run_that_goes_on_is_the_longer_run(example: ModuleType, tmp_path: Path) -> None:
    """From the checkpoint before the rate falls, across the changes to sparse attention and to
    long training."""
    stages = (
        example.Stage(2, 64),
        example.Stage(4, 256, repeats=1, cycles=True, rate=1e-3),
        example.Stage(6, 128, sparse=True),
        example.Stage(99, 256, long=True, again=1),
    )
    short = example.Recipe(steps=4, tokens=256, stages=stages, warm_up=2, decay=2)
    long = dataclasses.replace(short, steps=8)
    whole = example.Trainer(long, tmp_path / "whole")
    whole.run(every=1e9)
    example.Trainer(short, tmp_path / "parts").run(every=1e9)
    parts = example.Trainer(long, tmp_path / "parts")
    parts.resume("level.pt")
    assert parts.step == 2
    parts.run(every=1e9)
    assert parts.step == whole.step == 8
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
