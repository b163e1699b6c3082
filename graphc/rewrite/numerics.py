"""Sampled inputs, and how far two runs of a graph are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphc.errors import UsageError
from graphc.ir.graph import Graph, Value
from graphc.ir.run import Outcome, evaluate, run
from graphc.ir.types import TensorType, torch_dtype

#: lengths tried for a symbol, after those its range and the guards allow
_LENGTHS = (13, 24, 16, 37, 32, 64, 7, 128, 48, 100, 4, 3, 2, 256, 512, 1)

Samples = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Difference:
    """The largest difference over all outputs. max_rel is relative to the largest value of the
    output in which it was found. NaN where one side is not a number and the other is."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    output: str = ""
    expected: float | None = None
    found: float | None = None

    def within(self, rtol: float, atol: float) -> bool:
        """Passes if absolutely or relatively small enough; NaN does not."""
        return self.max_abs <= atol or self.max_rel <= rtol


def tolerance(graph: Graph) -> tuple[float, float]:
    """(rtol, atol) that a rewrite may cost, by the narrowest float the graph computes in."""
    dtypes = {v.type.dtype for n in graph.nodes for v in n.outputs if _is_tensor(v)}
    if "bfloat16" in dtypes:
        return 3e-2, 1e-2
    if "float16" in dtypes:
        return 5e-3, 2e-3
    return 2e-4, 2e-5


def _is_tensor(value: Value) -> bool:
    return isinstance(value.type, TensorType)


def compare(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> Difference:
    """The worst difference between outputs of the same name."""
    worst = Difference()
    for name, expected in before.items():
        found = difference(expected, after[name], name)
        if _badness(found) > _badness(worst):
            worst = found
    return worst


def _badness(one: Difference) -> tuple[float, float]:
    return (
        math.inf if math.isnan(one.max_rel) else one.max_rel,
        math.inf if math.isnan(one.max_abs) else one.max_abs,
    )


def difference(expected: torch.Tensor, found: torch.Tensor, name: str = "") -> Difference:
    """The difference of two tensors; equal infinities and NaN in the same places count as equal."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return Difference(math.inf, math.inf, name)
    if expected.numel() == 0:
        return Difference(output=name)
    kind = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.to(kind).reshape(-1), found.to(kind).reshape(-1)
    equal = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(equal, 0.0, (one - other).abs())
    position = int(torch.where(gap.isnan(), math.inf, gap).argmax())
    finite = one[one.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    largest = float(gap[position])
    relative = 0.0 if largest == 0 else (largest / scale if scale else math.inf)
    worst = [float(t[position].real) for t in (one, other)]
    return Difference(largest, relative, name, *worst)


def sample_inputs(graph: Graph, seed: int = 0, integers: str = "random") -> list[torch.Tensor]:
    """Inputs for the graph: normal floats, integers 0 and 1 (or all of one value), random truths.

    Raises:
        UsageError: no lengths satisfy the ranges and guards.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = sample_sizes(graph, seed)
    made: list[torch.Tensor] = []
    for value in graph.inputs:
        shape = [int(evaluate(d, sizes)) for d in value.type.shape]
        made.append(_sample(shape, torch_dtype(value.type.dtype), integers, generator))
    return made


def _sample(
    shape: Sequence[int], dtype: torch.dtype, integers: str, generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    if integers == "random":
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    return torch.full(shape, 1 if integers == "ones" else 0).to(dtype)


def sample_sizes(graph: Graph, seed: int = 0) -> dict[sympy.Symbol, int]:
    """A length for each symbol, inside its range, that satisfies the guards; for the first seed
    those at capture, if they are known.

    Raises:
        UsageError: none found.
    """
    symbols = [s for s in graph.symbols.values() if not s.data]
    if seed == 0 and all(0 < s.hint <= 512 for s in symbols):
        return {s.expr: s.hint for s in symbols}
    for shift in range(len(_LENGTHS)):
        for spread in (1, 0):
            sizes: dict[sympy.Symbol, int] = {}
            for position, info in enumerate(symbols):
                index = (seed + shift + spread * position) % len(_LENGTHS)
                sizes[info.expr] = min(max(_LENGTHS[index], info.minimum), info.maximum)
            if all(_holds(g.condition, sizes) for g in graph.guards):
                return sizes
    raise UsageError("expected lengths that satisfy the guards, found none", hint="give inputs")


def _holds(condition: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    try:
        answer = condition.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    except (ZeroDivisionError, ValueError):
        return False  # the condition itself has no meaning at these sizes
    return bool(answer) if answer in (True, False, sympy.true, sympy.false) else True


def runnable(
    graph: Graph, samples: Samples | int
) -> tuple[list[list[torch.Tensor]], list[Outcome]]:
    """Inputs on which the graph runs in eager torch, and what it gives.

    Raises:
        UsageError: eager torch fails on every sample.
    """
    inputs: list[list[torch.Tensor]] = []
    outcomes: list[Outcome] = []
    if not isinstance(samples, int):
        inputs = [list(s) for s in samples]
        return inputs, [run(graph, s) for s in inputs]
    for seed in range(samples):
        found = next(_attempts(graph, seed), None)
        if found is None:
            raise UsageError(
                "expected the graph to run in eager torch on sampled inputs, found it fails on all",
                hint="give example inputs",
            )
        inputs.append(found[0])
        outcomes.append(found[1])
    return inputs, outcomes


def _attempts(graph: Graph, seed: int) -> Iterator[tuple[list[torch.Tensor], Outcome]]:
    for integers in ("random", "zeros", "ones"):
        inputs = sample_inputs(graph, seed, integers)
        try:
            yield inputs, run(graph, inputs)
        except (RuntimeError, IndexError, ValueError):
            continue  # an index out of range, say: other integers may do
