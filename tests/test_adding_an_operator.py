"""docs/adding-an-operator.md to the letter: its blocks are executed, its lines counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import passes
from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.parse import parse_graph
from graphc.ir.types import product
from graphc.lowering import pointwise
from graphc.lowering.context import RULES, LoweringContext, Refuse, Unit, rule
from graphc.lowering.lower import Lowering
from graphc.ops.library import define
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules, run_passes
from graphc.rewrite.facts import operand, packet_of
from graphc.shapes import Shapes
from tests import kernel_harness
from tests.built import agree, results
from tests.eager import ISAS, check, refused, sample

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "adding-an-operator.md"
TEXT = DOCUMENT.read_text()


def blocks(recipe: str) -> list[tuple[str, str]]:
    """(language, text) of the code under "## (recipe)"."""
    section = TEXT.split(f"\n## ({recipe}) ")[1].split("\n## ")[0]
    return re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL)


def block(recipe: str, language: str, index: int = 0) -> str:
    return [text for kind, text in blocks(recipe) if kind == language][index]


@pytest.mark.parametrize("recipe", "abcde")
def test_the_table_counts_right(recipe: str) -> None:
    row = re.search(rf"^\| \({recipe}\) [^|]*\| \d+ \| (\d+) \|$", TEXT, re.MULTILINE)
    assert row is not None
    code = [text for kind, text in blocks(recipe) if kind != "sh"]
    lines = [line for text in code for line in text.splitlines() if line.strip()]
    assert int(row[1]) == len(lines)


def test_an_elementwise_operator() -> None:
    name = "aten.deg2rad.default"
    if name in pointwise.ROWS:
        pytest.fail("the document's example is native by now: choose another")
    x = torch.linspace(-400, 400, 37).view(1, 37)
    degrees = torch.arange(0, 90, 7)

    def function(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [torch.deg2rad(x).sin(), torch.deg2rad(x.t() * 2), torch.deg2rad(i)]

    try:
        exec(block("a", "python"), vars(pointwise))
        ours, fallbacks = results(function, x, degrees)
    finally:
        pointwise.ROWS.pop(name, None)
    agree(ours, function(x, degrees), 1e-6, 1e-6)
    assert not fallbacks


LIBRARY = torch.library.Library("demo", "DEF")


def test_an_elementwise_operator_of_ones_own() -> None:
    """The same for an operator that torch does not know."""
    LIBRARY.define("cube(Tensor x) -> Tensor")
    LIBRARY.impl("cube", lambda x: x * x * x, "CompositeExplicitAutograd")
    torch.library.register_fake("demo::cube", torch.empty_like, lib=LIBRARY)
    name = "demo.cube.default"
    x = torch.randn(4, 5)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.demo.cube(x + 1) * 2

    before, fallbacks = results(function, x)
    assert [f[0] for f in fallbacks] == [name]
    pointwise.ROWS[name] = pointwise.Row(lambda node, x: f"({x} * {x} * {x})")
    try:
        after, fallbacks = results(function, x)
    finally:
        del pointwise.ROWS[name]
    agree([before, after], [function(x)] * 2, 1e-6, 1e-6)
    assert not fallbacks


@pytest.fixture
def cross_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipe (b) in place: the kernel's file, and the rule."""
    name, source = "aten.linalg_cross.default", block("b", "cpp")
    for context in (Lowering, kernel_harness.FakeContext):
        header = context.header
        monkeypatch.setattr(
            context,
            "header",
            lambda self, file, h=header: source if file == "cross.cpp" else h(self, file),
        )
    scope: dict[str, Any] = {
        "rule": rule, "Refuse": Refuse, "Unit": Unit, "product": product,
        "LoweringContext": LoweringContext, "Node": Node,
    }  # fmt: skip
    exec(block("b", "python"), scope)
    yield
    del RULES[name]


@pytest.mark.parametrize("isa", ISAS)
def test_the_test_of_a_kernel(isa: str, cross_kernel: None) -> None:
    scope: dict[str, Any] = {
        "pytest": pytest, "torch": torch, "ISAS": ISAS, "sample": sample, "check": check,
        "refused": refused,
    }  # fmt: skip
    exec(block("b", "python", 1), scope)
    scope["test_cross"](isa)


def test_an_operator_with_its_own_kernel(cross_kernel: None) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = torch.linalg.cross(x * 2, y) + 1
        return [z.sum(-1), torch.linalg.cross(z, y[:1].expand(6, 3)), torch.linalg.cross(x[:1], y)]

    x, y = torch.randn(6, 3), torch.randn(6, 3)
    ours, fallbacks = results(function, x, y)
    agree(ours, function(x, y), 1e-5, 1e-5)
    assert fallbacks == [("aten.linalg_cross.default", "the operands are broadcast")]


def test_a_fused_operator_and_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    exec(block("c", "python"), {"torch": torch, "define": define})
    exec(block("c", "python", 1), vars(pointwise))
    scope: dict[str, Any] = {
        "dataclass": dataclass, "ClassVar": ClassVar, "Graph": Graph, "Log": Log, "Rule": Rule,
        "Value": Value, "Node": Node, "Facts": Facts, "Refused": Refused, "Iterator": Iterator,
        "Sequence": Sequence, "Builder": Builder, "operand": operand, "packet_of": packet_of,
        "apply_rules": apply_rules, "torch": torch, "__name__": __name__,
    }  # fmt: skip
    exec(block("d", "python"), scope)
    made = scope["SoftCap"]()
    try:
        case = block("d", "").split("--- before\n")[1]
        after, records = run_passes(parse_graph(case), [made], verify=True)
        targets = [node.target for node in after.nodes]
        assert targets.count("graphc.soft_cap.default") == 1
        assert [r.reason for r in records[0].refusals] == [
            "it is not divided by the number that multiplies it"
        ]
        pipeline = (*passes.PIPELINE[:-1], made, passes.PIPELINE[-1])
        monkeypatch.setattr(passes, "PIPELINE", pipeline)
        x = torch.randn(5, 7) * 20

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x / 30.0) * 30.0 + 1

        ours, fallbacks = results(function, x)
        agree(ours, function(x), 1e-5, 1e-5)
        assert not fallbacks
    finally:
        for table in (pointwise.ROWS, pointwise.OPERANDS):
            table.pop("graphc.soft_cap.default", None)


def test_a_bucket(tmp_path: Path) -> None:
    line = block("e", "yaml").strip()
    text = (DOCUMENT.parents[1] / "shapes.yaml").read_text()
    path = tmp_path / "shapes.yaml"
    path.write_text(text.replace("\nbuckets:\n", f"\nbuckets:\n  {line}\n"))
    found = Shapes.load(path).buckets_for("demo", None, {"T": (1, 131072)}, only=["2K", "8K"])
    assert [(b.name, b.limits["T"]) for b in found] == [("2K", 2048), ("8K", 8192)]
