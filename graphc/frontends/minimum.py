"""Whether a captured graph holds for the lengths 0 and 1.

torch.export assumes a length of at least 2 while it traces (a length of 1 broadcasts, and
`if T == 1` takes another branch), yet its ranges promise whatever minimum was asked for. So the
traced program is run at those lengths beside the module, and the minimum is lowered only as far as
the two agree.
"""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from graphc.frontends.guards import truth
from graphc.frontends.naming import Asked
from graphc.ir.graph import Graph
from graphc.ir.types import Dim

#: torch assumes at least this length
TRACED = 2
_PATIENCE = 60.0  # seconds for one trial run


def lower_minimum(
    graph: Graph,
    program: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    asked: Mapping[str, Asked],
) -> tuple[Graph, list[str]]:
    """The graph with the minimum of each symbol that is right, and notes on what was refused."""
    wanted: dict[str, int] = {}
    for name, info in graph.symbols.items():
        if info.data or info.minimum > TRACED:
            continue
        wanted[name] = asked[name].minimum if name in asked else 1
    wanted = {name: low for name, low in wanted.items() if low < TRACED}
    if not wanted:
        return graph, []
    probe = _Probe(graph, program, module, args, kwargs)
    minimum: dict[str, int] = {}
    # lengths that belong together (the batch of an input and of a state) go down together
    together = {name: max(low, 1) for name, low in wanted.items()}
    if len(together) > 1 and probe.agrees(together):
        minimum = together
    for name, low in wanted.items():
        if name in minimum:
            continue
        proven = TRACED
        while proven > low and probe.agrees({name: proven - 1}):
            proven -= 1
        minimum[name] = proven
    if len(minimum) > 1 and not probe.agrees({n: m for n, m in minimum.items() if m < TRACED}):
        minimum = dict.fromkeys(minimum, TRACED)
    notes = [
        f"{name} starts at {minimum[name]}: the traced model is not shown to hold for "
        f"{name} = {minimum[name] - 1}"
        for name, low in wanted.items()
        if minimum[name] > low and name in asked and (low == 1 or minimum[name] > 1)
    ]
    symbols = {
        name: replace(info, minimum=minimum.get(name, info.minimum))
        for name, info in graph.symbols.items()
    }
    return replace(graph, symbols=symbols), notes


def _apart(module: Any) -> Any:
    """The module with states of its own; weights, which nothing changes, are not copied."""
    shared: dict[int, Any] = {id(weight): weight for weight in module.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own tree specs warn when they are copied
        return copy.deepcopy(module, shared)


def example_lengths(graph: Graph, tensors: list[torch.Tensor]) -> dict[sympy.Expr, int]:
    """The value of each symbol in the example inputs."""
    found: dict[sympy.Expr, int] = {}
    for value, tensor in zip(graph.inputs, tensors, strict=True):
        for dim, size in zip(value.type.shape, tensor.shape, strict=True):
            if isinstance(dim, int):
                continue
            if isinstance(dim, sympy.Symbol):
                found.setdefault(dim, int(size))
            elif len(dim.free_symbols) == 1:
                (free,) = dim.free_symbols
                solved = [s for s in sympy.solve(dim - int(size), free) if s.is_Integer]
                if solved:
                    found.setdefault(free, int(solved[0]))
    return found


class _Probe:
    def __init__(
        self,
        graph: Graph,
        program: torch.export.ExportedProgram,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.graph = graph
        self.module = module
        self.traced = program.module(check_guards=False)
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [self.leaves[i] for i in self.places]
        self.lengths = example_lengths(graph, tensors)
        self.known: dict[tuple[tuple[str, int], ...], bool] = {}

    def agrees(self, lengths: Mapping[str, int]) -> bool:
        """Whether module and traced program give the same results at these lengths."""
        key = tuple(sorted(lengths.items()))
        if key not in self.known:
            self.known[key] = _in_child(lambda: self._run(lengths))
        return self.known[key]

    def _run(self, lengths: Mapping[str, int]) -> bool:
        at = {self.graph.symbols[name].expr: length for name, length in lengths.items()}
        values = {**self.lengths, **at}
        for guard in self.graph.guards:
            if guard.condition.free_symbols <= values.keys():
                if truth(guard.condition, _integers(values)) in (False, sympy.false):
                    return False
        try:
            calls = [self._inputs(values) for _ in range(2)]
        except ValueError:
            return False
        module: Any = self.module
        traced: Any = self.traced
        if self.graph.states:  # a run would change them
            module, traced = _apart(module), _apart(traced)
        try:
            with torch.no_grad():
                expected = module(*calls[0][0], **calls[0][1])
                found = traced(*calls[1][0], **calls[1][1])
        except Exception:  # the model itself refuses this length, or the traced code does
            return False
        return agree(expected, found)

    def _inputs(self, values: Mapping[sympy.Expr, int]) -> Any:
        leaves = list(self.leaves)
        for place, value in zip(self.places, self.graph.inputs, strict=True):
            tensor = leaves[place]
            for axis, dim in enumerate(value.type.shape):
                size = _evaluate(dim, values)
                if size > tensor.shape[axis]:
                    raise ValueError(f"example too short for {value.name}")
                tensor = tensor.narrow(axis, 0, size)
            leaves[place] = tensor.clone(memory_format=torch.contiguous_format)
        return pytree.tree_unflatten(leaves, self.spec)


def _in_child(check: Callable[[], bool]) -> bool:
    """`check` in a forked child: eager torch itself crashes on some sizes (a recurrent layer over
    nothing), and that must not take the build with it. A crash or a hang is a no."""
    pid = os.fork()
    if pid == 0:
        answer = 1
        try:
            torch.set_num_threads(1)  # the parent's thread pool does not exist here
            answer = 0 if check() else 1
        finally:
            os._exit(answer)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _integers(values: Mapping[sympy.Expr, int]) -> dict[sympy.Expr, sympy.Integer]:
    return {key: sympy.Integer(value) for key, value in values.items()}


def _evaluate(dim: Dim, values: Mapping[sympy.Expr, int]) -> int:
    if isinstance(dim, int):
        return dim
    try:
        return int(dim.xreplace(_integers(values)))
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{dim} is not known") from error


def agree(expected: Any, found: Any) -> bool:
    """Whether two results are the same up to rounding: trees, shapes, dtypes and values."""
    left, right = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            if isinstance(b, torch.Tensor) or a != b:
                return False
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
        if exact:
            if not torch.equal(a, b):
                return False
        elif a.numel():
            wide = torch.complex128 if a.dtype.is_complex else torch.float64
            scale = float(torch.nan_to_num(a.to(wide).abs(), 0, 0, 0).max())
            if not torch.allclose(
                a.to(wide), b.to(wide), rtol=1e-3, atol=1e-3 * max(scale, 1e-6), equal_nan=True
            ):
                return False
    return True
