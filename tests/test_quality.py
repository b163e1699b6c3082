"""The quality harness: measures on scores whose answer is known, and the whole command."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from cli.main import cli
from graphc.api import Options
from graphc.decoders import Limits, build_traced, trace
from graphc.errors import NumericsError, UsageError
from graphc.ir.graph import Graph, Value
from graphc.models.functional import index_scores, select
from graphc.models.hybrid import Hybrid
from graphc.models.hybrid_config import TINY
from graphc.ops.lightning_indexer import candidates_for
from graphc.quality.judge import combinations, forms_of, records
from graphc.quality.probes import Probes
from graphc.quality.ranking import (
    PLAIN,
    ROUNDED,
    Asked,
    Form,
    Ranks,
    attention_mass,
    choice,
    measure,
    noise,
    predicted_loss,
    relevant_keys,
    scores,
)
from graphc.quality.runs import Sampled, Stretches, paired, positions, windows
from graphc.quantization import quantization
from graphc.runtime.decoder import load

MODEL = """\
from dataclasses import replace

import torch

from graphc.models.hybrid import Hybrid
from graphc.models.hybrid_config import TINY


def tiny():
    torch.manual_seed(0)
    return Hybrid(replace(TINY, vocab_size=260)).eval()
"""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked(queries: int = 40, keys: int = 300, count: int = 32) -> Asked:
    """Queries that attention and the indexer see alike, so that its choice means something."""
    key = drawn(keys, 32, seed=1)
    query = drawn(queries, 4, 32, seed=2)
    return Asked(
        position=torch.arange(keys - queries, keys), query=query,
        weights=drawn(queries, 4, seed=3).abs(), key=key, attention=query, rows=key, count=count,
        scale=0.2,
    )  # fmt: skip


# Measures


def test_scores_are_those_of_the_indexer() -> None:
    query, weights, key = drawn(1, 9, 3, 8), drawn(1, 9, 3, seed=1), drawn(1, 20, 8, seed=2)
    expected = index_scores(query, weights, key, 5, None)[0]
    found = scores(query[0], weights[0], key[0], torch.arange(5, 14))
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    seen = expected > -torch.inf
    torch.testing.assert_close(found[seen], expected[seen])


def test_attention_mass_is_the_mean_over_heads() -> None:
    query, rows = drawn(3, 2, 8), drawn(6, 8, seed=1)
    position = torch.tensor([1, 3, 5])
    found = attention_mass(query, rows, position, 0.5)
    for q, last in enumerate(position.tolist()):
        dots = 0.5 * query[q] @ rows[: last + 1].T
        torch.testing.assert_close(found[q, : last + 1], torch.softmax(dots, -1).mean(0))
        assert not found[q, last + 1 :].any()


def test_noise_is_that_which_is_added() -> None:
    exact = drawn(8, 4000)
    exact[:, 3000:] = -torch.inf
    noisy = exact + 0.03 * drawn(8, 4000, seed=1)
    torch.testing.assert_close(
        noise(noisy, exact), torch.full((8,), 0.03).double(), rtol=0.1, atol=0
    )
    assert not noise(exact, exact).any()


def test_overlap_is_what_the_formula_predicts() -> None:
    """Normal scores, noise of a known size: the share of keys lost, within a tenth."""
    exact = drawn(64, 8192)
    noisy = exact + 0.05 * drawn(64, 8192, seed=1)
    lost = 1 - (select(noisy, 1024) & select(exact, 1024)).sum(-1) / 1024
    predicted = predicted_loss(noise(noisy, exact), 1024, torch.full((64,), 8192))
    assert 0.02 < float(predicted.mean()) < 0.06
    assert float(lost.double().mean()) == pytest.approx(float(predicted.mean()), rel=0.1)
    assert not predicted_loss(torch.ones(2), 16, torch.tensor([16, 9])).any()


def test_relevant_keys_are_the_heaviest() -> None:
    mass = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert relevant_keys(mass, 2).tolist() == [[False, True, False, True]]


def test_measures_of_choices_made_by_hand() -> None:
    """Two keys of four, of the attention weights 0.1, 0.2, 0.4, 0.3. As they are, the second and
    the last are chosen; rounded to bfloat16 the first two are equal, and the first comes before."""
    given = Asked(
        position=torch.tensor([3]), query=torch.ones(1, 1, 1), weights=torch.ones(1, 1),
        key=torch.tensor([[2.001], [2.002], [1.0], [3.0]]), attention=torch.ones(1, 1, 1),
        rows=torch.tensor([[0.1], [0.2], [0.4], [0.3]]).log(), count=2, scale=1.0,
    )  # fmt: skip
    assert choice(given, PLAIN)[0].tolist() == [[False, True, False, True]]
    assert choice(given, ROUNDED)[0].tolist() == [[True, False, False, True]]
    found: dict[str, Ranks] = {}
    measure(given, [PLAIN, ROUNDED], 2, found)
    plain, rounded = found[PLAIN.name].means(), found[ROUNDED.name].means()
    assert plain["overlap"] == plain["mass"] == 1.0 and plain["rho"] == 0.0
    assert rounded["overlap"] == plain["overlap_bf16"] == 0.5
    assert rounded["mass"] == pytest.approx(0.3 / 0.5)
    assert plain["mass_bf16"] == pytest.approx(0.3 / 0.4)
    assert plain["covered"] == pytest.approx(0.5) and rounded["covered"] == pytest.approx(0.4)
    assert plain["recall"] == rounded["recall"] == 0.5  # of the last two
    layer, other = records("layer", found)
    assert (layer.drop, layer.kept, layer.kept_bf16) == (0, 100, pytest.approx(125))
    assert (other.drop, other.kept, other.kept_bf16) == (0, pytest.approx(80), 100)
    assert other.kept_error == pytest.approx(0, abs=1e-4) and other.drop_error == 0  # one query
    assert (other.queries, other.samples, other.overlap) == (1, 2, 50)


def test_narrowed_keys_lose_what_they_should() -> None:
    """bfloat16 the least, a second term nearly nothing, MXFP8 some percent; all of it counted."""
    forms = [PLAIN, ROUNDED, Form("mx", "mxfp8_floor"), Form("again", "mxfp8_floor", 1.5)]
    found: dict[str, Ranks] = {}
    for part in asked().parts():
        measure(part, forms, 4, found)
    means = {name: ranks.means() for name, ranks in found.items()}
    assert {ranks.queries for ranks in found.values()} == {40}
    assert {ranks.relevant for ranks in found.values()} == {160}
    assert means["plain"]["overlap"] == 1.0
    assert 0.9 < means["mx"]["overlap"] < 0.995 < means["again"]["overlap"]
    assert means["mx"]["rho"] > 4 * means["again"]["rho"]
    assert means["bfloat16"]["overlap"] > means["mx"]["overlap"]
    assert means["mx"]["predicted"] == pytest.approx(means["mx"]["overlap"], abs=0.02)
    assert means["mx"]["mass"] < means["again"]["mass"] <= 1.0
    for values in means.values():
        assert values["covered"] <= 1.0 and values["mass"] > 0.9


def test_second_terms_decide_among_candidates_only() -> None:
    """A key that the first term ranks too low stays out, whatever the second says."""
    given = asked(count=8)
    chosen, _ = choice(given, Form("again", "mxfp8_floor", 1.0))
    first, _ = choice(replace(given, count=8 + 64), Form("mx", "mxfp8_floor"))
    best, _ = choice(given, PLAIN)
    assert not bool((chosen & ~first).any())
    assert (chosen & best).sum() > 0.99 * best.sum()
    assert (candidates_for(8, 1.2), candidates_for(2048, 1.2)) == (72, 2458)


def test_two_terms_are_bfloat16_where_nothing_saturates() -> None:
    """E4M3 twice has its eight bits: the second choice is the plain one among the candidates."""
    keys = drawn(200, 64).bfloat16()
    ceil, floor = (Form("x", f"mxfp8_{rule}", 1.2).terms(keys)[1] for rule in ("ceil", "floor"))
    assert torch.equal(ceil, keys.float())
    assert not torch.equal(floor, keys.float())
    assert quantization(["index=mxfp8+rescore"]).index == "mxfp8_ceil"
    assert quantization(["index=mxfp8_floor+rescore"]).index == "mxfp8_floor"


def test_log_losses_are_paired() -> None:
    """The standard error is that of the differences, of blocks where there are many."""
    change, error = paired(torch.full((100,), 0.25))
    assert (change, error) == (0.25, 0.0)
    independent = drawn(1 << 16)
    _, error = paired(independent)
    assert error == pytest.approx(1 / 256, rel=0.2)
    _, error = paired(independent[: 1 << 8].repeat_interleave(256))  # 256 in a row are alike
    assert error == pytest.approx(1 / 16, rel=0.2)
    assert math.isnan(paired(torch.ones(1))[1])


def test_windows_are_spread_over_the_text() -> None:
    tokens = np.arange(1001)
    found = windows(tokens, 100, 400)
    assert [int(piece[0]) for piece in found] == [0, 300, 600, 900]
    assert all(len(piece) == 101 for piece in found) and int(found[-1][-1]) == 1000
    assert len(windows(tokens, 100, 1)) == 1 and len(windows(tokens, 100, 1 << 20)) == 10
    assert not windows(tokens, 1001, 1 << 20)


def test_sums_by_position() -> None:
    sums = Stretches(1000)
    assert sums.edges == [0, 256, 512, 1000]
    sums.add(200, torch.ones(400), "x")
    assert sums.sums["x",].tolist() == [56, 256, 88]


def test_sampled_positions_see_more_keys_than_are_chosen() -> None:
    found = positions(500, 64, 50, seed=3)
    assert len(found.unique()) == 50 and int(found.min()) >= 64 and int(found.max()) < 500
    assert torch.equal(found, found.sort().values)
    assert len(positions(100, 64, 50, seed=3)) == 36 and not len(positions(64, 64, 50, seed=3))


def test_what_is_judged() -> None:
    assert combinations(("index=mxfp8,kv=fp8",)) == (
        ("index=mxfp8",), ("kv=fp8",), ("index=mxfp8", "kv=fp8"),
    )  # fmt: skip
    assert combinations(("kv=fp8",)) == (("kv=fp8",),)
    assert combinations(("kv=fp8", "kv=fp8+rope")) == (("kv=fp8",), ("kv=fp8+rope",))
    more = combinations(("index=mxfp8", "index=mxfp8+rescore", "kv=fp8"))
    assert more[3:] == (("index=mxfp8+rescore", "kv=fp8"),)
    names = [form.name for form in forms_of(("index=mxfp8_ceil", "kv=fp8"))]
    assert names == ["plain", "bfloat16", "index=mxfp8_ceil"]
    assert [f.rescore for f in forms_of(())] == [0, 0, 0, 0, 1.2]


# The command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    (folder / "net.py").write_text(MODEL)
    letters = np.random.default_rng(0).integers(97, 123, 2000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    return folder


def verify(place: Path, *more: str) -> Result:
    line = ["verify", f"{place / 'net.py'}:tiny", "--quality", "--bucket", "192", "--tokens", "400"]
    return CliRunner().invoke(cli, [*line, *more])


def test_a_tiny_model_is_judged(place: Path) -> None:
    text = str(place / "text.txt")
    quant = ["--quant", "index=mxfp8", "--quant", "kv=fp8"]
    done = verify(place, "--text", text, *quant, "--json", "--min-mass", "50")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["ok"] is True
    report = found["quality"]
    assert (report["count"], report["relevant"], report["dtype"]) == (16, 2, "float32")
    assert report["text"] == text and not report["notes"]
    (bucket,) = report["buckets"]
    assert (bucket["length"], bucket["windows"], bucket["tokens"]) == (192, 2, 384)
    losses = {r["quant"]: r for r in bucket["perplexity"]}
    assert list(losses) == ["none", "index=mxfp8", "kv=fp8", "index=mxfp8,kv=fp8"]
    assert losses["none"]["change"] == 0
    for name, record in losses.items():
        assert 100 < record["perplexity"] < 1000  # random weights know nothing of 26 letters
        assert abs(record["change"]) < 5 and (name == "none") == (record["error"] == 0)
        ends = [(s["first"], s["last"]) for s in record["bits"]]
        assert ends == [(0, 192)]
    ranking = {r["form"]: r for r in bucket["ranking"]}
    assert list(ranking) == ["plain", "bfloat16", "index=mxfp8"]
    assert {r["layer"] for r in bucket["ranking"]} == {"layers.3.self_attn"}
    assert ranking["plain"]["overlap"] == 100 and ranking["plain"]["queries"] == 2 * 176
    assert ranking["index=mxfp8"]["samples"] == 4 * 176
    assert 80 < ranking["index=mxfp8"]["overlap"] < ranking["bfloat16"]["overlap"] < 100
    errors = {(r["quant"], r["part"]): r["error"] for r in bucket["errors"]}
    parts = {part for _, part in errors}
    assert {"layers.0.self_attn", "layers.3.mlp", "logits"} <= parts
    assert [r["error"] for r in bucket["errors"]] == sorted(errors.values(), reverse=True)
    # what comes before the only layer with keys is what it was
    assert errors["index=mxfp8,kv=fp8", "layers.2.mlp"] == 0
    assert errors["kv=fp8", "layers.3.self_attn"] > 0.1
    assert errors["index=mxfp8", "layers.3.self_attn"] > 0


def test_budgets(place: Path) -> None:
    text = str(place / "text.txt")
    done = verify(place, "--text", text, "--quant", "index=mxfp8", "--min-mass", "99.9999")
    assert isinstance(done.exception, NumericsError) and done.exception.exit_code == 5
    assert "keeps 9" in str(done.exception)
    assert "perplexity" in done.output and "layers.3.self_attn" in done.output


def test_what_is_refused(place: Path) -> None:
    text = str(place / "text.txt")
    for more, expected in (
        (["--text", str(place / "none.txt")], "expected a text in UTF-8"),
        ([], "expected a text to judge on"),
        (["--text", text, "--phase", "decode"], "expected none of --input"),
        (["--text", text, "--bisect"], "either --bisect or --quality"),
        (["--text", text, "--quant", "kv=fp9"], "expected what to narrow"),
    ):
        done = verify(place, *more)
        assert isinstance(done.exception, UsageError), done.output
        assert expected in str(done.exception)
    short = place / "short.txt"
    short.write_text("too short")
    done = verify(place, "--text", str(short), "--quant", "kv=fp8")
    assert "expected a text of more than 192 tokens" in str(done.exception)
    done = CliRunner().invoke(cli, ["verify", "demo", "--text", text])
    assert "expected --quality" in str(done.exception)


def test_the_ranking_is_that_of_the_kernels(tmp_path: Path) -> None:
    """What narrowed plans choose is what is measured at the plain plan's queries: nothing before
    the only indexer is narrowed."""
    torch.manual_seed(0)
    model, options = Hybrid(TINY).eval(), Options(buckets=("192",))
    traced = trace(model, options, Limits(192, 1, 0, 1, score=True))
    probes = Probes()

    def watch(graph: Graph) -> dict[str, Value]:
        (node,) = [node for node in graph.nodes if "lightning_indexer" in node.target]
        return {**probes(graph), "chosen": node.outputs[0]}

    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, 190)
    place = torch.arange(16, 190)
    forms = {
        "none": PLAIN, "index=mxfp8": Form("first", "mxfp8_ceil"),
        "index=mxfp8+rescore": Form("again", "mxfp8_ceil", 1.2),
    }  # fmt: skip
    seen: list[torch.Tensor] = []
    for word, form in forms.items():
        build_traced(traced, tmp_path / form.name, replace(options, quant=(word,)), watch)
        with load(tmp_path / form.name).sequence() as text:
            answer = text.score(tokens)
            if form == PLAIN:
                sampled = Sampled(probes.indexers, place)
                sampled.add(0, answer, len(tokens))
                asked = sampled.asked(probes.indexers[0], text)
        found = torch.from_numpy(answer["chosen"][0])[place].long()
        chosen = torch.zeros(len(place), 190, dtype=torch.bool).scatter_(1, found, True)
        same = (chosen & choice(asked, form)[0]).sum(-1)
        assert (same == 16).float().mean() > 0.98  # the order of sums decides near ties
        assert int(same.min()) >= 15
        seen.append(chosen)
    assert (seen[0] != seen[1]).any() and (seen[1] != seen[2]).any()


def made_up() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "ranking.py"
    spec = importlib.util.spec_from_file_location("ranking_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["random", "topics", "needle"])
def test_made_up_sequences(kind: str) -> None:
    """What narrowed keys lose is what the formula predicts, and two terms lose nothing of
    bfloat16."""
    benchmark = made_up()
    found: dict[str, Ranks] = {}
    sequence = benchmark.made(kind, 2048, 256, 0)
    benchmark.measure(sequence, found)
    means = {name: ranks.means() for name, ranks in found.items()}
    lost, predicted = means["mxfp8_floor"]["lost"], means["mxfp8_floor"]["predicted"]
    assert 0.005 < lost < 0.05 and lost == pytest.approx(predicted, rel=0.3)
    assert means["mxfp8_ceil+rescore"]["lost"] < 0.001 < means["mxfp8_ceil"]["lost"]
    assert means["float32"]["lost"] < 0.2 * lost
    if kind == "needle":
        assert sequence.relevant.sum() == 48 * 32
        rows = {row["keys"]: row for row in benchmark.report(kind, found)}
        # an eighth of the keys is chosen
        assert rows["bfloat16"]["recall"] > 3 * 12.5 and abs(rows["mxfp8_floor"]["drop"]) < 1


@pytest.mark.heavy
def test_the_embedded_hybrid_keeps_its_quality(tmp_path: Path) -> None:
    """docs/quality.md at 2K, on a quarter of its text."""
    line = ["verify", "demo", "--quality", "--bucket", "2K", "--tokens", "16384", "--json"]
    line += ["--quant", "index=mxfp8_ceil", "--quant", "kv=fp8"]
    line += ["--max-perplexity-change", "0.3", "--min-mass", "99.8", "--max-recall-drop", "0.3"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0, done.output
    (bucket,) = json.loads(done.output)["quality"]["buckets"]
    assert bucket["perplexity"][0]["perplexity"] < 4
    assert max(r["error"] for r in bucket["errors"]) < 10
    assert {r["layer"] for r in bucket["ranking"]} == {"layers.3.self_attn", "layers.7.self_attn"}
    assert all(r["samples"] >= 20_000 for r in bucket["ranking"])
