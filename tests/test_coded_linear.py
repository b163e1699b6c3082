"""bf16 weights of 12 bits each: the same bits come back, and the same bits come out of products,
from the format alone up to plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphc.api import Options, build_captured, machine_options
from graphc.ir.parse import parse_graph
from graphc.lowering.templates import coded_linear, linear  # noqa: F401
from graphc.ops.coded_linear import decode, encode
from graphc.rewrite import run_passes
from graphc.runtime.session import load
from graphc.toolchain.isa import Isa
from passes.weights.coded_linear import CodedLinear
from tests.built import Built
from tests.kernel_build import TARGET_OF
from tests.kernel_harness import Constant, available_isas, run_rule

ISAS = available_isas()
KINDS = ("gaussian", "zeros", "any bits", "outliers", "denormal", "infinite")
#: [N, K]: whole panels and records, and neither; a chunk of K, and more
SHAPES = [(32, 64), (70, 33), (33, 2), (1, 1), (64, 260), (40, 2049), (65, 4099)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def weight_of(kind: str, n: int, k: int) -> torch.Tensor:
    """bfloat16 [n, k] whose upper bytes are easy or hard to code."""
    w = (0.02 * torch.randn(n, k)).bfloat16()
    some = torch.rand(n, k)
    if kind == "zeros":
        w[some < 0.5] = 0.0
        w[some < 0.25] = -0.0
    elif kind == "any bits":
        w = torch.randint(-(2**15), 2**15, (n, k)).to(torch.int16).view(torch.bfloat16)
    elif kind == "outliers":  # one in each record of four steps and 32 columns
        w[::32, ::4] = 2.0 ** torch.randint(-120, 120, w[::32, ::4].shape)
    elif kind == "denormal":
        w[some < 0.1] = torch.tensor(3, dtype=torch.int16).view(torch.bfloat16)
    elif kind == "infinite":
        w[some < 0.001] = float("inf")
        w[some > 0.999] = float("nan")
    return w


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; which of several NaNs a sum passes on is left open."""
    numbers = ~expected.isnan()
    return torch.equal(numbers, ~got.isnan()) and torch.equal(
        bits(got)[numbers], bits(expected)[numbers]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_come_back(kind: str) -> None:
    for n, k in SHAPES:
        w = weight_of(kind, n, k)
        assert torch.equal(bits(decode(encode(w), n, k)), bits(w)), (n, k)
    w = weight_of(kind, 48, 100).t()  # not contiguous
    assert torch.equal(bits(decode(encode(w), 100, 48)), bits(w))


def test_a_quarter_less() -> None:
    w = weight_of("gaussian", 256, 512)
    assert 0.75 < encode(w).nbytes / w.nbytes < 0.77
    assert encode(weight_of("any bits", 256, 512)).nbytes > w.nbytes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_plain_weights(isa: str, kind: str) -> None:
    """Bit for bit: every number of rows up to nine (beyond eight a panel is spelled out first),
    more than a block of rows, and each remainder of K."""
    for n, k in [(70, 33), (65, 4099)]:
        w, bias = weight_of(kind, n, k), torch.randn(n).bfloat16()
        coded = Constant(encode(w))
        for m in (*range(1, 10), 85):
            x = torch.randn(m, k).bfloat16()
            (plain,) = run_rule("aten.linear.default", [x, Constant(w), Constant(bias)], isa=isa)
            (got,) = run_rule("graphc.coded_linear.default", [x, coded, n, Constant(bias)], isa=isa)
            assert same(got, plain), (n, k, m)
    for k in range(1, 18):
        w, x = weight_of(kind, 32, k), torch.randn(2, 1, k).bfloat16()
        for rows in (x[:1], x, x.expand(2, 2, k)):
            (plain,) = run_rule("aten.linear.default", [rows, Constant(w)], isa=isa)
            (got,) = run_rule("graphc.coded_linear.default", [rows, Constant(encode(w)), 32],
                              isa=isa)  # fmt: skip
            assert same(got, plain), k


GRAPH = """\
%0: bf16[1,512] = input("x")
%1: bf16[512,512] = weight("w")
%2: bf16[1,512] = aten.linear.default(%0, %1)
return (%2,)
"""


def test_the_pass_says_what_it_saved_and_why_not() -> None:
    graph = parse_graph(GRAPH, {"w": weight_of("gaussian", 512, 512)})
    after, (record,) = run_passes(graph, [CodedLinear()], verify=True)
    assert [node.target for node in after.nodes] == ["graphc.coded_linear.default"]
    assert record.max_abs == 0.0
    assert 0.23 < record.weight_bytes_removed / (512 * 512 * 2) < 0.25
    wild = parse_graph(GRAPH, {"w": weight_of("any bits", 512, 512)})
    after, (record,) = run_passes(wild, [CodedLinear()])
    assert after is wild and record.weight_bytes_removed == 0
    assert [r.reason for r in record.refusals] == ["its exponents lie far apart"]
    for other in (CodedLinear(enabled=False), CodedLinear(rows=0), CodedLinear(least=1 << 20)):
        assert run_passes(graph, [other])[0] is graph


class Gated(torch.nn.Module):
    """Two products with something between that joins their epilogues, [*, 384] -> [*, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(384, 1000)
        self.down = torch.nn.Linear(1000, 384, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.fixture(scope="module", params=ISAS)
def plans(request: Any) -> Iterator[tuple[Built, Built]]:
    """The model with coded and with plain weights, for one to eight rows."""
    torch.manual_seed(5)
    module, x = Gated().bfloat16().eval(), torch.randn(3, 384).bfloat16()
    rows = {0: torch.export.Dim("T", min=1, max=8)}
    options = [
        Options(
            jobs=1, target=TARGET_OF[request.param], pass_options=(f"coded_linear{{enabled={on}}}",)
        )
        for on in ("yes", "no")
    ]
    made = [Built(module, (x,), dynamic=(rows,), options=one) for one in options]
    yield made[0], made[1]
    for one in made:
        one.close()


def test_plans_give_the_same_bits(plans: tuple[Built, Built]) -> None:
    coded, plain = plans
    assert not coded.fallbacks
    assert any(w.layout == "coded_pairs32" for w in coded.session.plan.weights)
    assert not any(w.layout == "coded_pairs32" for w in plain.session.plan.weights)
    assert coded.report.weights_bytes < 0.8 * plain.report.weights_bytes
    several = load(coded.plan, threads=2)
    for rows in range(1, 9):
        x = torch.randn(rows, 384).bfloat16()
        assert torch.equal(coded(x), plain(x)), rows
        assert torch.equal(several.run(x, as_torch=True), plain(x)), rows


def test_coded_where_it_is_faster(plans: tuple[Built, Built]) -> None:
    """By itself only with dot products of bf16, and if the plan has no other graph."""
    captured = plans[0].captured
    level = Isa.detect()
    fast = "avx512_bf16" in level.features
    assert machine_options(level, 1) == ([] if fast else ["coded_linear{enabled=no}"])
    assert machine_options(level, 2) == ["coded_linear{enabled=no}"]
    assert machine_options(Isa.of("portable"), 1) == ["coded_linear{enabled=no}"]
    for isa in ISAS:
        report = build_captured(
            captured, plans[0].folder / isa, Options(jobs=1, target=TARGET_OF[isa])
        )
        (record,) = [r for r in report.passes if r.name == "coded_linear"]
        assert len(record.matches) == (2 if fast and isa == "avx512" else 0)
