"""Golden cases of the passes: a graph before and after, refusals included, each also executed.

A case is a text file in tests/cases: `pass:` and the names (with options), `says:` and a sentence,
then the sections `before`, `after` and `refused`. `pytest tests/test_passes.py --bless` accepts
what comes out now.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from graphc.errors import NumericsError, UsageError
from graphc.ir.graph import Graph
from graphc.ir.parse import parse_graph
from graphc.ir.text import print_graph
from graphc.report import PassRecord
from graphc.rewrite import Log, Pass, configure, run_passes
from passes import PIPELINE

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))


@dataclass(frozen=True)
class Case:
    passes: list[str]
    says: str
    before: str
    after: str
    refused: str

    @staticmethod
    def read(path: Path) -> Case:
        head, *sections = path.read_text().split("--- ")
        fields = dict(line.split(": ", 1) for line in head.splitlines() if line)
        named = {name: text for name, _, text in (s.partition("\n") for s in sections)}
        names = [n.strip() for n in re.split(r",(?![^{]*})", fields["pass"])]
        parts = [named.get(n, "") for n in ("before", "after", "refused")]
        return Case(names, fields["says"], *parts)

    def text(self) -> str:
        head = f"pass: {', '.join(self.passes)}\nsays: {self.says}\n\n"
        refused = f"--- refused\n{self.refused}" if self.refused else ""
        return f"{head}--- before\n{self.before}--- after\n{self.after}{refused}"


def filled(text: str) -> Graph:
    """The graph with weights between 0.5 and 1.5 (a variance must be positive)."""
    empty = parse_graph(text)
    tensors: dict[str, torch.Tensor] = {}
    for number, (value, zeros) in enumerate((*empty.weights.items(), *empty.states.items())):
        generator = torch.Generator().manual_seed(number)
        if zeros.dtype.is_floating_point:
            tensors[value.name] = (
                torch.rand(zeros.shape, generator=generator).add(0.5).to(zeros.dtype)
            )
        elif zeros.dtype == torch.int32:  # quantized
            tensors[value.name] = torch.randint(
                -100, 100, zeros.shape, generator=generator, dtype=torch.int32
            )
        else:
            tensors[value.name] = torch.zeros_like(zeros)
    return parse_graph(text, tensors)


def by_name(names: list[str]) -> list[Pass]:
    configured = configure(PIPELINE, options=[name for name in names if "{" in name])
    return [next(p for p in configured if p.name == _plain(name)) for name in names]


def _plain(name: str) -> str:
    return name.partition("{")[0]


def refusals(records: list[PassRecord], graph: Graph) -> str:
    operators = {n.name: n.target for n in graph.nodes}
    lines = [
        f"{r.rule}: {operators.get(r.node, r.node)}: {r.reason}"
        for record in records
        for r in record.refusals
    ]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, request: pytest.FixtureRequest) -> None:
    case = Case.read(path)
    graph = filled(case.before)
    assert print_graph(graph, contents=False) == case.before, "the case is not in canonical form"
    after, records = run_passes(graph, by_name(case.passes), verify=True, samples=2)
    text = print_graph(after, contents=False)
    found = Case(case.passes, case.says, case.before, text, refusals(records, graph))
    if request.config.getoption("--bless"):
        path.write_text(found.text())
        return
    if found.text() != path.read_text():
        diff = difflib.unified_diff(path.read_text().splitlines(), found.text().splitlines())
        pytest.fail("\n".join(diff) + f"\naccept with: pytest {__file__} --bless")


def test_every_rule_pass_has_a_case() -> None:
    shown = {_plain(name) for path in CASES for name in Case.read(path).passes}
    assert {p.name for p in PIPELINE} <= shown


def test_a_second_run_changes_nothing() -> None:
    for path in CASES:
        case = Case.read(path)
        after = filled(case.after)
        again, _ = run_passes(after, by_name(case.passes))
        assert print_graph(again, contents=False) == case.after, path.stem


CHAIN = """\
%0: f32[4,8] = input("x")
%1: f32[4,8] = aten.mul.Tensor(%0, 1.0)
%2: f32[4,8] = aten.relu.default(%1)
return (%2,)
"""


class TestDriver:
    def test_records(self, tmp_path: Path) -> None:
        seen: list[str] = []
        graph = parse_graph(CHAIN)
        after, records = run_passes(
            graph,
            by_name(["arithmetic", "dead_code"]),
            verify=True,
            dump=tmp_path,
            phase="prefill",
            progress=lambda name, position, count: seen.append(f"{name} {position}/{count}"),
        )
        first = records[0]
        assert (first.name, first.phase, first.nodes_before, first.nodes_after) == (
            "arithmetic", "prefill", 2, 1,
        )  # fmt: skip
        assert first.launches_removed == 1 and first.bytes_removed == 4 * 8 * 4
        assert first.max_abs == 0 and [m.rule for m in first.matches] == ["neutral_element"]
        assert seen == ["arithmetic 0/2", "dead_code 1/2"]
        names = sorted(p.name for p in tmp_path.iterdir())
        assert names == ["00_captured.txt", "01_arithmetic.txt", "02_dead_code.txt"]
        assert (tmp_path / "02_dead_code.txt").read_text() == print_graph(after, contents=False)

    def test_a_wrong_pass_is_named(self) -> None:
        @dataclass(frozen=True)
        class Wrong:
            name: ClassVar[str] = "wrong"

            def run(self, graph: Graph, log: Log) -> Graph:
                return parse_graph(CHAIN.replace("relu", "abs"))

        with pytest.raises(NumericsError, match="pass wrong within"):
            run_passes(parse_graph(CHAIN), [Wrong()], verify=True)
        after, _ = run_passes(parse_graph(CHAIN), [Wrong()])
        assert "abs" in print_graph(after)

    def test_options(self) -> None:
        (first,) = configure(by_name(["merged_linear"]), options=["merged_linear{enabled=no}"])
        assert getattr(first, "enabled") is False  # noqa: B009
        chosen = configure(PIPELINE, disable=["attention", "merged-linear"])
        assert not {"attention", "merged_linear"} & {p.name for p in chosen}

    @pytest.mark.parametrize(
        ("disable", "options", "error", "hint"),
        [
            (["rmsnorm"], [], "expected a pass, found 'rmsnorm'", "did you mean rms_norm"),
            (["zzz"], [], "expected a pass, found 'zzz'", "passes: view_simplification"),
            ([], ["attention{x=1}"], "expected an option of attention, found 'x'", "has: none"),
            ([], ["constant_folding{growth=much}"], "expected a float", ""),
            ([], ["merged_linear{enabled=perhaps}"], "expected true or false", ""),
            ([], ["{}"], "expected NAME", ""),
        ],
    )
    def test_bad_options(
        self, disable: list[str], options: list[str], error: str, hint: str
    ) -> None:
        with pytest.raises(UsageError) as caught:
            configure(PIPELINE, disable=disable, options=options)
        assert error in caught.value.what and hint in caught.value.hint
