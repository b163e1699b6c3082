"""The bench harness: workloads, worker processes, what the table makes of the figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import dense, dense_table, long_context_table
from benchmarks.documents import marks
from benchmarks.hybrid_arithmetic import prefill, total
from benchmarks.workloads import load_module, workload
from cli import jobs, race, worker
from cli.jobs import Inputs, Job, Unavailable, save_draws
from graphc.models.hybrid import hybrid
from graphc.models.hybrid_config import K31_MINI, TINY

ROOT = Path(__file__).resolve().parents[1]


def _row(error: float = 1e-3, **milliseconds: float) -> dict[str, Any]:
    return {
        "runtimes": {
            name: {"cpu_s": ms / 1e3, "wall_s": ms / 2e3, "error": error, "build_cpu_s": 10.0}
            for name, ms in milliseconds.items()
        },
        "skipped": {},
    }


def test_rows_are_judged_by_the_best_peer() -> None:
    results = {"rows": {
        "mlp:1 fp32 1": _row(graphc=2.0, eager=5.0, ort=3.0),
        "mlp:1 fp32 2": _row(graphc=4.0, eager=3.0),
        "lnres bf16 1": _row(graphc=2.0, compile=3.0),
    }}  # fmt: skip
    good, slow, short = dense_table.judge(results)
    assert (good.best, good.ratio, good.short) == ("ort", pytest.approx(1.5), [])
    assert slow.milliseconds["graphc"] == pytest.approx(2.0)  # by wall time at two threads
    assert slow.short == ["0.75 < 1"] and short.short == ["1.50 < 1.8"]
    assert "lnres bf16 at 1.50 x of 1.8 x" in "\n".join(dense_table.summaries([good, slow, short]))
    document = f"# B\n{dense_table.BEGIN}\nold\n{dense_table.END}\nrest\n"
    for text in (dense_table.table(results), dense_table.written(document, results)):
        assert "0.75 < 1" in text and "geometric mean" in text
    assert text.startswith("# B\n") and text.endswith("\nrest\n") and "old" not in text


def test_a_decode_step_is_judged_by_careful_peers() -> None:
    results = {"rows": {
        "step:2048 bf16 1": _row(graphc=5.0, eager=40.0),
        "step_cat:2048 bf16 1": _row(graphc=5.0, ort=30.0),
        "step_split:2048 bf16 1": _row(graphc=10.0, openvino=13.0),
        "step:8192 bf16 1": _row(graphc=5.0, eager=25.0),
    }}  # fmt: skip
    step, _, split, other = dense_table.judge(results)
    assert step.best == "openvino (split)" and step.ratio == pytest.approx(2.6) and not step.short
    assert split.short == ["1.30 < 2.4"]
    (missing,) = dense_table.judge({"rows": {"mlp:1 fp32 1": _row(eager=1.0)}})
    assert missing.short == ["graphc did not run"]
    assert other.ratio is None and other.short == ["as written 5.00 < 6"]


def test_a_layer_is_judged_by_every_way_of_writing_it() -> None:
    results = {"rows": {
        "dsa_step:8192 bf16 1": _row(graphc=1.0, eager=200.0),
        "dsa_step:8192 fp32 1": _row(graphc=2.0, eager=300.0),
        "dsa_step_split:8192 bf16 1": _row(aoti=5.0, openvino=9.0),
        "dsa_step_absorbed:8192 fp32 1": _row(eager=4.5),
    }}  # fmt: skip
    low, high, split, _ = dense_table.judge(results)
    assert low.best == "eager (absorbed, fp32)" and low.ratio == pytest.approx(4.5)
    assert low.mark == 4.0 and not low.short
    assert high.best == "eager (absorbed)" and high.mark == 1.0
    assert split.peers and split.ratio is None and not split.short
    assert "2 rows: geometric mean 1.00 x (ok)" in "\n".join(dense_table.summaries([low, high]))


def test_what_draws_share_is_written_once(tmp_path: Path) -> None:
    cache = np.arange(1 << 12, dtype=np.float32)

    def draw(number: int) -> Inputs:
        return Inputs((np.full(2, number, np.float32), [cache]), {"k": cache + number}, list("abc"))

    files = save_draws(tmp_path / "shared", draw)
    first, last = (Path(name).stat().st_size for name in (files[0], files[-1]))
    assert last < first - cache.nbytes / 2
    job = _job(tmp_path, inputs=files, dtype="bfloat16", kept=["b"])
    loaded = jobs.load_inputs(job, 3)
    assert loaded.args[0].dtype.name == "bfloat16" and float(loaded.args[0][0]) == 3
    assert loaded.args[1][0].dtype == np.float32 and np.array_equal(loaded.args[1][0], cache)
    assert float(loaded.kwargs["k"][0]) == 3


def test_errors_of_choices_are_medians_over_rows() -> None:
    true = [np.ones((1, 5, 4))]
    found = true[0].copy()
    found[0, 0] = 9.0  # chosen otherwise
    found[0, 1:] *= 1.01
    assert worker._middle([worker._by_row([found], true)])["error"] == pytest.approx(0.01)
    assert "mismatch" in worker._middle([worker._by_row([found[:, :3]], true)])


def test_wrong_results_and_slow_builds_count() -> None:
    rows = {"mlp:1 bf16 1": _row(graphc=2.0, eager=5.0, compile=4.0, openvino=1.0)}
    runtimes = rows["mlp:1 bf16 1"]["runtimes"]
    runtimes["openvino"]["error"] = 0.5
    runtimes["graphc"] |= {"error": 2e-3, "cold_cpu_s": 6.0}
    (row,) = dense_table.judge({"rows": rows})
    assert row.best == "compile" and row.error == pytest.approx(2.0)
    assert row.short == ["error 2.00 > 1", "build 6.0 s > 5.0 s"]


def test_long_calls_take_few_samples() -> None:
    assert race._samples(25.0, 7, 1.5) == (2, 1)
    rounds, calls = race._samples(1e-3, 7, 1.4)
    assert rounds == 7 and rounds * calls == pytest.approx(1400, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        *("encoder:16", "prefill:16", "step:16", "step_cat:16", "step_split:16", "mlp:2"),
        *("kda_prefill:70", "kda_step", "dsa_prefill:520", "dsa_prefill_blocks:520"),
        *("dsa_step:520", "dsa_step_absorbed:520", "dsa_step_split:520"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_workloads_run(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINILM", raising=False)
    made = workload(name)
    module = load_module(name, dtype)
    kind = getattr(torch, dtype)
    tensors = [torch.from_numpy(value) for value in made.inputs.values()]
    tensors = [t.to(kind) if t.is_floating_point() else t for t in tensors]
    before = [t.clone() for t in tensors]
    results = module(*tensors)
    first = results[0] if isinstance(results, tuple) else results
    assert bool(first.isfinite().all()) and made.flops > 0
    written = [i for i, (a, b) in enumerate(zip(tensors, before, strict=True)) if (a != b).any()]
    in_place = {"step:16": range(2, 10), "dsa_step:520": (2, 3, 4)}
    in_place["dsa_step_absorbed:520"] = in_place["dsa_step:520"]
    assert written == list(in_place.get(name, ()))
    with pytest.raises(KeyError):
        workload("unknown:1")


class Writes(nn.Module):
    """Scales its input in place; sums in float32 whatever its dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).float() + x.to(torch.float32).exp()


def load_writes(model: str, dtype: str | None) -> nn.Module:
    """A loader of `cli.jobs.Job`."""
    module = Writes()
    return module if dtype is None else module.to(getattr(torch, dtype))


def _job(place: Path, **changes: Any) -> Job:
    def draw(number: int) -> Inputs:
        return Inputs((np.full((2, 3), 1 + number % 3, np.float32),), {}, ["x"])

    job = Job(
        peer="eager", folder=str(place / "artefacts"), shared=str(place), model="writes",
        loader="test_bench:load_writes", dtype="float32", threads=1, cpus=race.cores(1),
        inputs=save_draws(place / "inputs", draw), reference=str(place / "reference.npz"),
        path=[str(Path(__file__).parent)],
    )  # fmt: skip
    return msgspec.structs.replace(job, **changes)


@pytest.mark.heavy
def test_a_race_checks_and_times(tmp_path: Path) -> None:
    reference = race.prepare(_job(tmp_path, peer="float64"), "1")
    assert reference["cpu_s"] > 0
    with np.load(tmp_path / "reference.npz") as file:  # in float64 all the way
        for draw in range(jobs._DRAWS):
            doubled = np.full((2, 3), 2.0 + 2 * (draw % 3))
            np.testing.assert_allclose(file[f"{draw}.0"], doubled + np.exp(doubled), rtol=1e-14)
    lines: list[str] = []

    class Hold:
        def __enter__(self) -> None:
            lines.append("held")

        def __exit__(self, *_: object) -> None:
            lines.append("free")

    named = race.Worker(_job(tmp_path, peer="graphc"), environment={"GRAPHC_CACHE_DIR": "here"})
    variables = Path(f"/proc/{named.process.pid}/environ")
    if variables.exists():
        assert b"GRAPHC_CACHE_DIR=here" in variables.read_bytes().split(b"\0")
    named.close()
    entries, skipped = race.race(
        {
            "eager": _job(tmp_path),
            "other": _job(tmp_path, loader="test_bench:missing"),
        },
        rounds=3, seconds=0.01, hold=Hold,
    )  # fmt: skip
    found = entries["eager"].summary()
    assert (
        found["error"] < 1e-6
        and found["draws"] == jobs._DRAWS
        and found["samples"] >= 2  # fewer rounds where a call takes long
        and found["peak_bytes"] > 1 << 20
    )
    assert found["cpu_min_s"] <= found["cpu_s"] and lines == ["held", "free"]
    assert "missing" in skipped["other"]


@pytest.mark.heavy
def test_peers_that_cannot_say_so_once(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with pytest.raises(Unavailable, match="writes into its inputs"):
        race.prepare(_job(tmp_path, peer="ort", folder=str(tmp_path / "ort")), "1")
    kept = msgspec.json.decode((tmp_path / "ort" / "built.json").read_bytes())
    assert "writes into its inputs" in kept["unavailable"]
    with pytest.raises(Unavailable, match="no bfloat16"):
        race.prepare(
            _job(tmp_path, peer="ort", dtype="bfloat16", folder=str(tmp_path / "bf16")), "1"
        )


def test_cores_are_those_of_this_process() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert set(race.cores(1 << 20)) == os.sched_getaffinity(0)
    assert len(race.cores(1)) == 1


def test_draws_are_alike_in_kind(tmp_path: Path) -> None:
    ones = Inputs((np.ones(3, np.int64),), {}, ["ids"])
    assert len(save_draws(tmp_path / "same", lambda number: ones)) == 1
    for name in ("encoder:16", "step_cat:16", "softmax"):
        first, other = (dense._draw(name, number) for number in range(2))
        assert first.names == other.names == list(workload(name).inputs)
        for a, b, timed in zip(first.args, other.args, workload(name).inputs.values(), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(a, timed)
        assert not np.array_equal(first.args[0], other.args[0])


def test_errors_of_draws_are_summarised() -> None:
    true = [np.full(4, 2.0), np.arange(3)]
    one = worker._compare([np.full(4, 2.2), np.arange(3)], true)
    assert not isinstance(one, str) and one[0] == pytest.approx(0.1) and len(one) == 1
    assert worker._summary([one, [0.7]]) == {"error": pytest.approx(0.5), "draws": 2}
    assert "integer" in worker._compare([np.full(4, 2.0), np.ones(3)], true)
    assert worker._summary([one, "other shapes"]) == {"mismatch": "other shapes"}
    assert worker._summary([]) == {}


def test_results_are_compared_in_order() -> None:
    values = jobs.flat({"a": torch.ones(2, dtype=torch.bfloat16), "b": [None, (np.zeros(1), 3)]})
    assert [v.dtype.name for v in values] == ["float32", "float64"]


def test_growth_is_judged_by_operations() -> None:
    def row(prompt: int, seconds: float, mib: float) -> dict[str, Any]:
        return {
            "prompt": prompt, "bucket": "x", "fallbacks": 0, "peak": 1, "pages": 1,
            "prefill": [seconds, 2 * seconds], "decode": [0.01, 0.02],
            "activations": mib * 2**20, "planned": 2**20,
        }  # fmt: skip

    work = {n: total(K31_MINI, n) / total(K31_MINI, 2048) for n in (2048, 32768, 131072)}
    assert 23 < work[32768] < 25 and 180 < work[131072] < 200
    contexts = {
        "2048": row(2048, 1, 40), "32768": row(32768, work[32768], 40),
        "131072": row(131072, 190, 59),
    }  # fmt: skip
    edges = {"512": [[1.0, 1.0], [1.09, 1.0]], "2048": [[1.0, 1.0], [1.11, 1.0]]}
    results = {"threads": 2, "contexts": contexts, "edges": {"512": edges["512"]}}
    assert long_context_table.short(results) == []
    results["edges"] = edges
    assert long_context_table.short(results) == ["2049 tokens: 1.11 x of 2048, operations 1.0005 x"]
    assert long_context_table.short(results | {"threads": 1}) == []  # by CPU time then
    contexts["32768"] = row(32768, 1.01 * work[32768], 30)
    found = "\n".join(long_context_table.short(results))
    assert "32768: time per token 1.513 x, operations 1.498 x" in found
    assert "131072: activations 1.97 x of 32768" in found
    first, last = marks("long context")
    text = long_context_table.written(f"# B\n{first}\nold\n{last}\nrest\n", results)
    assert text.startswith("# B\n") and text.endswith("\nrest\n") and "| 131072 |" in text
    assert "old" not in text and "| 131072 |" not in long_context_table.table(results)


def test_operations_are_those_of_the_formulas() -> None:
    """Of one token the products, twice every weight that is read, and 48 keys of 16 chosen."""
    model = hybrid("tiny")
    read = sum(p.numel() for n, p in model.named_parameters() if "experts" not in n and p.ndim > 1)
    read += sum(p.numel() for n, p in model.named_parameters() if "shared_experts" in n)
    counted = prefill(TINY, 1)
    assert counted["products"] == 2 * read
    assert counted["experts"] == 2 * 3 * 3 * 2 * 64 * 32  # layers, matrices, experts
    assert prefill(TINY, 48)["attention"] == 2 * 2 * (32 + 16 + 32) * (16 * 17 / 2 + 32 * 16)
    assert prefill(TINY, 48)["indexer"] == 2 * 2 * 33 * 48 * 49 / 2
