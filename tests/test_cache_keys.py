"""What decides a kernel's key, and what does not: the process, its surroundings, every option.

`tests/option_sweep.py` lists the options of `graphc build`. The pairwise sweeps that build and run
every combination are heavy; a sample of one runs always.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import graphc.target_build
import graphc.tuner
from cache.key import Key
from cache.store import Store
from cli.build import build as build_command
from cli.main import main
from cli.options import BuildOptions
from graphc import api
from graphc.lowering.context import Unit
from graphc.lowering.tuning import Choice
from graphc.runtime import decoder as decoders
from graphc.runtime.session import load
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.flags import compile_flags, include_flags
from graphc.toolchain.isa import Isa
from graphc.toolchain.lookups import Lookups, LookupsOnly, lookups
from graphc.tuner import Winner, kernels_digest, write_table
from tests import option_sweep
from tests.option_sweep import FREE, Option, Row, allowed, fitted, pairwise

ROOT = Path(__file__).resolve().parents[1]
MODEL = f"{ROOT}/tests/option_sweep.py:small"
DECODER = f"{ROOT}/tests/option_sweep.py:decoder"
#: every second of these is made in a folder of its own
SEEDS = ("0", "1", "77", "4242", "random")


@dataclass(frozen=True)
class Made:
    """What is given to the compiler for a kernel, but for the place of files."""

    source: str
    flags: tuple[str, ...]
    isa: Isa
    compiler: str


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[Made]]:
    """What each build that ends with its look-ups would have compiled, in the order of its keys."""
    found: list[list[Made]] = []

    def watched(units: list[Unit], isa: Isa, compiler: Compiler) -> Lookups:
        flags = compile_flags(isa, compiler)
        found.append([Made(unit.source, flags, isa, compiler.identity) for unit in units])
        return lookups(units, isa, compiler)

    monkeypatch.setattr(graphc.target_build, "lookups", watched)
    return found


def digests(found: tuple[Lookups, ...]) -> list[str]:
    return [Key(fields).digest for each in found for _, fields in each.kernels]


def keys(**options: Any) -> list[str]:
    return digests(BuildOptions(**options).lookups(MODEL, quiet=True))


def sweep(options: dict[str, Option]) -> list[Row]:
    """All pairs of the options that decide something."""
    values = {name: o.values for name, o in options.items() if o.decides in ("code", "plan")}
    return [fitted(row) for row in pairwise(values, allowed)]


# -- the process and its surroundings ---------------------------------------------------------


def test_the_same_keys_in_every_process(tmp_path: Path) -> None:
    """Hash seed, TMPDIR, HOME, working folder and the cache's folder are in no key."""
    running = []
    for number, seed in enumerate(SEEDS):
        place = tmp_path / f"place {number}"
        for name in ("tmp", "home", "work"):
            (place / name).mkdir(parents=True)
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "TMPDIR": str(place / "tmp"),
            "HOME": str(place / "home"),
            "GRAPHC_CACHE_DIR": str(place / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "cli.main", "cache", "why", MODEL, "--json"]
        running.append(
            subprocess.Popen(command, env=environment, cwd=place / "work", stdout=subprocess.PIPE)
        )
    answers = [json.loads(process.communicate(timeout=240)[0]) for process in running]
    here = keys()
    assert len(here) >= 6
    for answer in answers:
        assert [item["key"] for item in answer["entries"]] == here
        assert answer["hits"] == 0 and answer["lookups"] == len(here)


def test_no_place_is_given_to_the_compiler_but_for_includes() -> None:
    """What stays out of keys only says where headers lie, and keeps that out of objects."""
    place = Path("/some/where")
    assert include_flags((place,)) == (
        "-iquote", "/some/where", "-ffile-prefix-map=/some/where=graphc/where",
    )  # fmt: skip


# -- options ----------------------------------------------------------------------------------


def test_every_option_has_its_place(tmp_path: Path) -> None:
    known = {**option_sweep.model_options(tmp_path), **option_sweep.decoder_options(tmp_path)}
    arguments = {param.name: param for param in build_command.params if param.name != "model"}
    assert arguments.keys() == known.keys(), "list the option in tests/option_sweep.py"
    for name, option in option_sweep.model_options(tmp_path).items():
        assert option.flag in arguments[name].opts
        assert option.decides in ("code", "plan", "work")


def test_pairwise_has_every_pair(tmp_path: Path) -> None:
    rows = sweep(option_sweep.model_options(tmp_path))
    for name, values in (("dtype", 2), ("quant", 3), ("shapes", 2)):
        pairs = {(str(row[name]), row["target"]) for row in rows}
        assert len(pairs) == 3 * values
    assert len(rows) < 25


def _singles(options: dict[str, Option]) -> Iterator[tuple[str, Option, Row, list[Row]]]:
    """Per option that decides something: a build, and the same with each other value."""
    for name, option in options.items():
        if option.decides in ("code", "plan") and name not in ("generate", "tune"):
            base = {"inputs": FREE} if name in ("dynamic", "buckets") else {}
            if name == "phase":
                base = {"shapes": options["shapes"].values[1]}
            yield name, option, base, [{**base, name: value} for value in option.values[1:]]


def test_an_option_changes_keys_if_it_changes_code(tmp_path: Path) -> None:
    plain = {base: keys(inputs=base) for base in ((), FREE)}
    for name, option, base, others in _singles(option_sweep.model_options(tmp_path)):
        before = set(plain[base.get("inputs", ())])
        changed = [set(keys(**other)) != before for other in others]
        assert any(changed) == (option.decides == "code"), name


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_decoders_option_changes_keys_if_it_changes_code(tmp_path: Path) -> None:
    def kernels(options: Row) -> set[str]:
        sizes = {name: options.pop(name, None) for name in ("chunk", "batch", "drafts")}
        build = BuildOptions(**options)
        return set(digests(build.lookups(DECODER, generate=True, quiet=True, **sizes)))

    plain = kernels({})
    for name, option, _, others in _singles(option_sweep.decoder_options(tmp_path)):
        if others:
            changed = [kernels({name: other[name]}) != plain for other in others]
            assert any(changed) == (option.decides == "code"), name


def test_how_a_build_goes_about_it_is_in_no_key(tmp_path: Path) -> None:
    here = keys()
    options = option_sweep.model_options(tmp_path)
    told = {name: o.values[1] for name, o in options.items() if o.decides == "work"}
    del told["as_json"]
    output = told.pop("output")
    with pytest.raises(LookupsOnly) as end:
        api.build(MODEL, output, **told, lookups_only=True)
    assert digests(end.value.lookups) == here
    assert not output.exists()


def test_what_was_measured_is_in_the_keys_of_tuned_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    plain, asked = keys(), dict[str, Choice]()
    lower = graphc.tuner.lower

    def watched(graph: Any, level: str, tuning: Any) -> Any:
        lowered = lower(graph, level, tuning)
        asked.update(tuning.asked)
        return lowered

    monkeypatch.setattr(graphc.tuner, "lower", watched)
    assert keys(tune=True) == plain and asked  # nothing is measured for an answer
    winners = {
        key: Winner(next(c for c in choice.candidates if c != choice.default), {})
        for key, choice in asked.items()
    }
    write_table(Store().root, Isa.detect(), kernels_digest(), winners)
    assert keys() == plain
    assert set(keys(tune=True)) != set(plain)


def test_keys_differ_just_where_code_does(tmp_path: Path, made: list[list[Made]]) -> None:
    """Over all rows of the sweep: no two kernels that are given to the compiler differently share
    a key, and no two that are given to it alike have two."""
    key_of: dict[Made, str] = {}
    made_of: dict[str, Made] = {}
    for row in sweep(option_sweep.model_options(tmp_path)):
        row.pop("generate")
        for key, unit in zip(keys(**row), made.pop(), strict=True):
            assert key_of.setdefault(unit, key) == key, f"two keys: {row}"
            assert made_of.setdefault(key, unit) == unit, f"one key for two: {row}"
    assert len(key_of) > 40 and len({unit.source for unit in key_of}) > 20


# -- built and run ----------------------------------------------------------------------------


def words(options: dict[str, Option], row: Row) -> list[str]:
    told = [options[name].words(value) for name, value in row.items() if value]
    return [word for several in told for word in several]


def check_small(options: dict[str, Option], row: Row, plan: Path) -> None:
    """Builds, runs, compares with eager torch; again with every option that changes no code."""
    assert main(["build", MODEL, "-o", str(plan), *words(options, row)]) == 0, row
    again = ["--require-cached", "--jobs", "1", "--json", "--verify"]
    assert main(["build", MODEL, "-o", f"{plan}-again", *words(options, row), *again]) == 0, row
    module, (x,) = option_sweep.small()
    if "[1,1," in "".join(row["inputs"]):
        x = x[:1, :1]
    results = []
    for place in (plan, Path(f"{plan}-again")):
        session = load(place, threads=1)
        dtype = getattr(torch, session.plan.inputs[0].dtype)
        (result,) = [session.run(x.to(dtype), as_torch=True)]
        results.append(result)
    assert torch.equal(*results), row
    weights = getattr(torch, row["dtype"] or "float32")
    eager = module.to(weights)(x.to(weights)).float()
    error = (results[0].float() - eager).norm() / (eager - x).norm()
    assert error < tolerance(row), (row, float(error))


def tolerance(row: Row) -> float:
    """Of what the model adds to its input, relative."""
    if row["quant"]:
        return 0.25 if "int4" in row["quant"][0] else 0.05
    return 0.05 if row["dtype"] else 1e-4


def test_a_sample_of_the_sweep_is_right(tmp_path: Path) -> None:
    options = option_sweep.model_options(tmp_path)
    rows = [row for row in sweep(options) if not row["tune"]]
    for number, row in enumerate(rows[-3:]):
        check_small(options, row, tmp_path / str(number))


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_every_pair_of_options_is_right(tmp_path: Path) -> None:
    options = option_sweep.model_options(tmp_path)
    for number, row in enumerate(sweep(options)):
        check_small(options, row, tmp_path / str(number))


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_every_pair_of_a_decoders_options_is_right(tmp_path: Path) -> None:
    options = option_sweep.decoder_options(tmp_path)
    ids = np.random.default_rng(0).integers(3, 500, 44)
    for number, row in enumerate(sweep(options)):
        check_decoder(options, row, ids, tmp_path / str(number))


def check_decoder(options: dict[str, Option], row: Row, ids: NDArray[Any], plan: Path) -> None:
    """Builds, reads a prompt, continues it, compares the scores with eager torch."""
    told = ["--generate", *words(options, row)]
    assert main(["build", DECODER, "-o", str(plan), *told]) == 0, row
    again = ["--require-cached", "--jobs", "1"]
    assert main(["build", DECODER, "-o", f"{plan}-again", *told, *again]) == 0, row
    count = 40
    found = []
    for place in (plan, Path(f"{plan}-again")):
        with decoders.load(place, threads=1).sequence() as text:
            scores = [text.prefill(ids[:count])]
            if row["drafts"]:
                scores += list(text.verify(ids[count:]))
            else:
                scores += [text.decode(int(token)) for token in ids[count:]]
        found.append(np.array(scores, np.float64))
    assert np.array_equal(*found), row
    model = option_sweep.decoder().to(getattr(torch, row["dtype"] or "float32"))
    with torch.no_grad():
        eager = model(torch.from_numpy(ids)[None]).logits[0, count - 1 :].double().numpy()
    error = np.linalg.norm(found[0] - eager) / np.linalg.norm(eager)
    assert error < (0.05 if row["dtype"] or row["quant"] else 1e-4), (row, float(error))
